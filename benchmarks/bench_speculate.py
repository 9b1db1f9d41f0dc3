"""Measure drafting: tokens per forward pass, and decode speed beside plain decoding.

A model of the size that fits here would not say what an agent said. So the replies are the recorded ones: a sampler
computes its own token and then says the recorded one. The tree has the conversations in front of the one that is
measured, and each reply is drafted from them and from its own prompt, as far as the measured times say that it pays.

    tau-bench      recorded agents of tau-bench's airline task (--conversations FILE, default: shared/data beside the
                   repository; without it, this text is left out)
    SWE-agent      recorded runs of SWE-agent (--swe-agent PATH, default: as above), with the end of a longer prompt
    built-in       the built-in conversations
    nothing twice  random tokens, none twice: nothing can be drafted; also with `tiny`, whose passes take a few
                   milliseconds, so that looks for drafts take the largest share

Both sides restore the prompts from their own caches. Replies of several users are decoded together, by a
ParallelGenerator on each side; the time is that of the rounds in which nobody's prompt is evaluated. A ratio is that of
the seconds of all repeats behind the first; `min to max` has those of single repeats. Three tables:

    counted   no model runs: all recorded replies, each drafted from those before, as `simulate --speculate` does;
              a proposed token is taken to cost 0.15 of a pass
    drafted   the sides decode the replies in turns
    nothing   text that repeats nothing: the sides decode the same reply step by step in turns, so that what else the
              machine does slows both. Drafting takes the other side's steps for its own, and so looks for drafts for
              longer than it would alone
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.bench_replay import AIRLINE
from benchmarks.harness.random_models import random_model
from benchmarks.harness.record import Spread, arguments, publish, say
from radixcache import PrefixCache
from radixcache.generate import decode
from radixcache.settings import SUFFIX_INDEX_BYTES
from radixcache.speculate.drafting import Drafting, PromptSource, TreeSource
from radixcache.speculate.pace import DraftPace
from radixcache.speculate.suffix_index import SuffixIndex
from runner.engine.generator import ParallelGenerator
from runner.models.load import LoadedModel, load_model
from runner.models.tiny import tiny_model
from runner.script.conversation import Conversation
from runner.script.conversation_reader import builtin_conversations, read_conversations
from runner.simulate.drafts import DraftCount, recorded_turns
from runner.text import plural

BUDGET_BYTES = 8 << 30
#: Replies of each text that are measured, tokens of each at most, tokens of a prompt at most, and repeats.
REPLIES, REPLY_TOKENS, PROMPT_TOKENS, REPEATS = 8, 48, 2048, 2
PARTS = ("counted", "drafted", "nothing")
#: Users at a time, with the demo model alone; tokens that they may have together.
USERS, CAPACITY = (4, 8), 1 << 20
#: Users at a time with `tiny`, and repeats: its passes are short and noisy.
TINY_USERS, TINY_REPEATS = (1, 8, 32), 60
#: Tokens of a prompt of the text that repeats nothing.
RANDOM_TOKENS = 200
SWE_AGENT = AIRLINE.parents[2] / "swe-agent"
#: Conversations that were served before.
SERVED = 150


@dataclass(frozen=True)
class Reply:
    """A reply to decode: the prompt, and what is said."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]


@dataclass(frozen=True)
class Text:
    """Replies, and the runs of tokens that were served before."""

    name: str
    served: list[NDArray[np.int32]]
    replies: list[Reply]


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=_add)
    is_quick, users = options.quick, (2,) if options.quick else USERS
    demo = load_model("tiny" if is_quick else "demo")
    vocabulary = 1 + max(demo.tokenizer.vocab.values())
    agents = {} if is_quick else {"tau-bench": options.conversations, "SWE-agent": options.swe_agent}
    models = {demo.name: demo.model}
    if not is_quick:
        models |= {kind: random_model(kind, vocabulary=vocabulary) for kind in ("kv", "sliding", "hybrid")}
    else:
        models |= {kind: tiny_model(kind) for kind in ("llama_sliding", "nemotron_h")}
    if "counted" in options.parts:
        rows = [_counted(name, demo, path) for name, path in agents.items() if path is not None]
        rows.append(_counted("built-in", demo, None))
        title = "Recorded replies, drafted without a model"
        publish("speculate-counted", title, rows, folder=options.results, repeats=1)
    if "drafted" in options.parts:
        texts = list(_texts(demo, agents, is_quick))
        rows = [_measure(name, Side, model, text) for name, model in models.items() for text in texts]
        of_agents = [text for text in texts if text.name != "built-in"]
        rows += [_measure(demo.name, _rows(demo, each), demo.model, text, each) for each in users for text in of_agents]
        title = "Replies with drafts from the tree and the prompt, and plain decoding"
        publish("speculate", title, rows, folder=options.results, repeats=REPEATS, conclusion=conclusion(rows))
    if "nothing" in options.parts:
        rows = [_measure(name, Side, model, _nothing_twice(vocabulary, 4)) for name, model in models.items()]
        rows += [
            _measure(demo.name, _rows(demo, each), demo.model, _nothing_twice(vocabulary, each), each) for each in users
        ]
        tiny, repeats = load_model("tiny"), REPEATS if is_quick else TINY_REPEATS
        for each in users if is_quick else TINY_USERS:
            text = _nothing_twice(1 + max(tiny.tokenizer.vocab.values()), max(each, 4))
            rows.append(_measure("tiny", _rows(tiny, each), tiny.model, text, each, repeats=repeats))
        title = "Text that repeats nothing, with drafting and without"
        publish("speculate-nothing", title, rows, folder=options.results, repeats=None, conclusion=conclusion(rows))


def _add(parser: argparse.ArgumentParser) -> None:
    beside = AIRLINE if AIRLINE.exists() else None
    parser.add_argument("--conversations", type=Path, default=beside, metavar="FILE", help="recorded agents")
    beside = SWE_AGENT if SWE_AGENT.exists() else None
    parser.add_argument("--swe-agent", type=Path, default=beside, metavar="PATH", help="recorded runs of SWE-agent")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    return "Drafted over plain: " + ", ".join(
        f"{row['model']} on {row['text']} for {plural(row['users'], 'user')} {row['drafted / plain']:.2f}"
        for row in rows
    )


# What is said --------------------------------------------------------------------------------------------------------


def _texts(loaded: LoadedModel, agents: dict[str, Path | None], is_quick: bool) -> Iterator[Text]:
    replies = 3 if is_quick else REPLIES
    for name, path in agents.items():
        if path is not None:
            its = read_conversations(path).conversations
            yield _recorded(name, loaded, its, replies, cuts=name == "SWE-agent")
    yield _recorded("built-in", loaded, builtin_conversations(), replies)


def _nothing_twice(vocabulary: int, replies: int) -> Text:
    random = np.random.default_rng(0)
    draws = [random.permutation(vocabulary)[: RANDOM_TOKENS + REPLY_TOKENS].astype(np.int32) for _ in range(replies)]
    return Text("nothing twice", [], [Reply(each[:RANDOM_TOKENS], each[RANDOM_TOKENS:]) for each in draws])


def _recorded(
    name: str, loaded: LoadedModel, conversations: Sequence[Conversation], replies: int, *, cuts: bool = False
) -> Text:
    """The first conversations were served; the replies are those of the next ones, in order, with their tool calls.

    A reply to a longer prompt than PROMPT_TOKENS is left out, or with `cuts` has the end of the prompt.
    """
    first = min(SERVED, len(conversations) // 2)
    turns = recorded_turns(conversations[:first], loaded.tokenizer)
    # A conversation's last prompt has all its earlier replies.
    served = {
        each.conversation_id: np.concatenate([prompt, np.array(reply, np.int32)]) for each, prompt, reply in turns
    }
    chosen = (
        Reply(prompt[-PROMPT_TOKENS:], np.array(reply[:REPLY_TOKENS], np.int32))
        for _, prompt, reply in recorded_turns(conversations[first:], loaded.tokenizer)
        if (cuts or len(prompt) <= PROMPT_TOKENS) and len(reply) > 1
    )
    return Text(name, list(served.values()), list(islice(chosen, replies)))


def _counted(name: str, loaded: LoadedModel, path: Path | None) -> dict[str, Any]:
    say(f"{name}, counted")
    count = DraftCount("tree")
    for _, prompt, reply in recorded_turns(
        builtin_conversations() if path is None else read_conversations(path).conversations, loaded.tokenizer
    ):
        count.add(prompt, reply)
    row = count.row
    return {
        "text": name,
        "replies": row.replies,
        "tokens": row.tokens,
        "tokens per pass": row.tokens_per_pass,
        "proposed per pass": row.proposed_per_pass,
        "accepted %": 100 * row.accepted_share,
    }


# Measured ------------------------------------------------------------------------------------------------------------


class Side:
    """Decodes replies on a cache of its own; with an index, several tokens at a time."""

    def __init__(self, model: Any, index: SuffixIndex | None) -> None:
        self._model, self._index = model, index
        self._cache = PrefixCache(model, budget_bytes=BUDGET_BYTES)
        self._pace = DraftPace()
        self.passes = self.proposed = self.accepted = self.tokens = 0

    def steps(self, replies: Sequence[Reply]) -> Iterator[bool]:
        """Decode replies, one after the other. Yields behind each step whether it decoded, and nothing else."""
        for reply in replies:
            yield from self._steps(reply)

    def _steps(self, reply: Reply) -> Iterator[bool]:
        drafts = None
        if self._index is not None:
            drafts = Drafting([TreeSource(self._index), PromptSource(reply.prompt)], self._pace, reply.prompt.tolist())
        with self._cache.begin(reply.prompt) as session:
            session.prefill(self._model)
            yield False
            count = len(reply.tokens)
            sampler = _speaker(reply.tokens)
            for *_, is_drafted in decode(session, self._model, reply.prompt, count, sampler=sampler, drafting=drafts):
                self.tokens += 1
                self.passes += not is_drafted
                yield True
        for each in drafts.drafted.values() if drafts is not None else ():
            self.proposed += each.proposed
            self.accepted += each.accepted


class Rows:
    """As Side, for replies that are decoded together."""

    def __init__(self, model: Any, index: SuffixIndex | None, *, loaded: LoadedModel, users: int) -> None:
        cache = PrefixCache(model, budget_bytes=BUDGET_BYTES)
        self._generator = ParallelGenerator(cache, model, loaded.tokenizer, capacity=CAPACITY, max_rows=users)
        self._index, self._pace = index, cache.drafting([0], speculate=None).pace
        if index is not None:
            # Not the cache's own index: it would have the replies themselves after the first repeat.
            self._generator._drafting = self._drafts  # type: ignore[assignment]
        self.passes = self.proposed = self.accepted = self.tokens = 0

    def _drafts(self, prompt: Any, _: str, **_more: Any) -> Drafting:
        assert self._index is not None
        return Drafting([TreeSource(self._index), PromptSource(prompt)], self._pace, prompt.tolist())

    def steps(self, replies: Sequence[Reply]) -> Iterator[bool]:
        """Decode replies together. Yields behind each round whether it decoded all, and nothing else."""
        generator = self._generator
        tickets = [
            generator.submit(reply.prompt, max_tokens=len(reply.tokens), sampler=_speaker(reply.tokens), stop_tokens=())
            for reply in replies
        ]
        first: set[int] = set()
        while not all(ticket.completion for ticket in tickets):
            is_decoding = len(first) == len(tickets)
            first |= {ticket.number for ticket, _ in generator.round()}
            yield is_decoding
        for ticket in tickets:
            drafted = ticket.facts.drafted.values()
            accepted = sum(each.accepted for each in drafted)
            self.proposed += sum(each.proposed for each in drafted)
            self.accepted += accepted
            self.tokens += len(ticket.completion.tokens) if ticket.completion else 0
            self.passes += len(ticket.completion.tokens) - accepted if ticket.completion else 0


def _rows(loaded: LoadedModel, users: int) -> Callable[[Any, SuffixIndex | None], Side | Rows]:
    return Side if users == 1 else partial(Rows, loaded=loaded, users=users)


def _speaker(tokens: NDArray[np.int32]) -> Callable[[mx.array], mx.array]:
    """A sampler that computes its own token and says the recorded one."""
    said = iter(tokens.tolist())
    return lambda logprobs: mx.argmax(logprobs, axis=-1) * 0 + next(said)


def _in_turns(
    sides: Sequence[Side | Rows], replies: Sequence[Reply], first: int, *, by_step: bool
) -> NDArray[np.float64]:
    """The seconds that each side takes to decode the replies; this one begins.

    What is drafted depends on the time between steps: there, a turn is all of them.
    """
    took_s, steps = np.zeros(len(sides)), {at: sides[at].steps(replies) for at in (first, 1 - first)}
    while steps:
        for at in list(steps) if by_step else [next(iter(steps))]:
            began_s = time.perf_counter()
            is_decoding = next(steps[at], None)
            mx.synchronize()
            if is_decoding is None:
                del steps[at]
            elif is_decoding:
                took_s[at] += time.perf_counter() - began_s
    return took_s


def _measure(
    name: str,
    side: Callable[[Any, SuffixIndex | None], Side | Rows],
    model: Any,
    text: Text,
    users: int = 1,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    say(f"{name}, {text.name}, {plural(users, 'user')}")
    index = SuffixIndex(SUFFIX_INDEX_BYTES)
    for run in text.served:
        index.add(run)
    sides = _, drafted = side(model, None), side(model, index)
    asked = [text.replies[at : at + users] for at in range(0, len(text.replies), users)]
    took_s = np.array(
        [
            sum(
                _in_turns(sides, replies, (number + repeat) % 2, by_step=not text.served)
                for number, replies in enumerate(asked)
            )
            for repeat in range(repeats + 1)
        ]
    )[1:]  # the first repeat fills the caches
    plain_s, drafted_s = took_s.sum(axis=0)
    ratios = took_s[:, 0] / took_s[:, 1]
    return {
        "text": text.name,
        "model": name,
        "users": users,
        "replies": len(text.replies),
        "tokens": sum(len(each.tokens) for each in text.replies),
        "tokens per pass": drafted.tokens / drafted.passes,
        "proposed per pass": drafted.proposed / drafted.passes,
        "accepted %": 100 * drafted.accepted / drafted.proposed if drafted.proposed else None,
        "drafted tokens/s": repeats * sum(len(each.tokens) for each in text.replies) / drafted_s,
        "drafted / plain": plain_s / drafted_s,
        "standard error": ratios.std(ddof=1) / repeats**0.5 if repeats > 2 else None,
        "min to max": Spread.of(ratios).range,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
