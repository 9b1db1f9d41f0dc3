"""Replay a script of requests for several users at a time, straight from the tree, and in mlx-lm's batches beside it.

The requests are those of a serial replay, in its order, but for one thing: a request is handed in as soon as its user
has the reply to the one before, and no more than so many users have one under way. Then the same requests are served
one after the other, on the radix cache and without one, whose answers all others are held against.

Invariants:

  PR1  A user's requests are handed in one after the other, in the order of the script.
  PR2  Where several may come next, the first of the script does.
  PR3  Prompts are those that a serial replay renders from the same replies: those of the first way that serves them.

Server: who serves the requests of a replay several at a time.

The same requests in mlx-lm's own batches: its BatchGenerator on its LRUPromptCache, put together as its server does.

A request comes in on a copy of the nearest stored prefix. Its prompt goes in segments, and at the end of each the row's
caches are copied into the store; what is stored keeps to what the running rows leave of the budget.

Source: mlx_lm/server.py, mlx-lm 0.32.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache, TreeView
from runner.engine.generator import ParallelGenerator
from runner.engine.replies import Completion, Reply
from runner.engine.sequence import Ticket
from runner.models.load import LoadedModel
from runner.replay.caches import LRUPrompts
from runner.replay.replayer import (
    CacheRun,
    Observer,
    Replay,
    ReplayOptions,
    ServedRequest,
    output_hash,
    release,
    warm_up,
)
from runner.script.script import RenderedRequest, Script, ScriptError


class Answer(NamedTuple):
    """What came of a request; `waited_ms` went by before its prefill began."""

    completion: Completion
    text: str
    cached_tokens: int
    matched_tokens: int
    reason: str | None
    waited_ms: float


class Server(Protocol):
    """Takes requests in and serves them together.

    Attributes:
        name: of the cache.
        peak_bytes, peak_tokens: the most that caches and running rows held so far; tokens where they are counted.
        evictions: entries given up so far.
    """

    @property
    def name(self) -> str: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def peak_tokens(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    def submit(self, index: int, request: RenderedRequest) -> None: ...

    def answers(self) -> Iterator[tuple[int, Answer]]: ...

    def close(self) -> None: ...


class Tree:
    """A ParallelGenerator on a PrefixCache."""

    name = "radix"

    def __init__(
        self,
        loaded: LoadedModel,
        policy: str,
        budget_bytes: int,
        *,
        capacity: int,
        users: int,
        step_size: int,
        max_tokens: int,
    ) -> None:
        self.cache = PrefixCache(loaded.model, budget_bytes=budget_bytes, policy=policy)
        self.peak_tokens = 0
        self._max_tokens = max_tokens
        self._generator = ParallelGenerator(
            self.cache, loaded.model, loaded.tokenizer, capacity=capacity, max_rows=users, step_size=step_size
        )
        self._indices: dict[Ticket, int] = {}
        self._texts: dict[Ticket, str] = {}

    @property
    def evictions(self) -> int:
        """Entries that were given up."""
        return self.cache.stats.evictions

    @property
    def peak_bytes(self) -> int:
        """The most that tree and rows held."""
        return self.cache.stats.peak_bytes

    def submit(self, index: int, request: RenderedRequest) -> None:
        """Hand a request in."""
        ticket = self._generator.submit(
            request.prompt.tokens,
            marks=request.prompt.marks,
            max_tokens=self._max_tokens,
            arrived_at_s=time.perf_counter(),
        )
        self._indices[ticket], self._texts[ticket] = index, ""

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Serve until all that was handed in is done."""
        for ticket, piece in self._generator:
            self._texts[ticket] += piece.text
            self.peak_tokens = max(self.peak_tokens, self._generator.group.used_tokens)
            done = piece.completion
            if done is not None:
                if done.error is not None:
                    raise done.error
                assert done.ttft_ms is not None, "nothing cancels a replayed request"
                assert done.prompt_ms is not None, done
                about = done.cached_tokens, ticket.matched_tokens, ticket.reason, done.ttft_ms - done.prompt_ms
                yield self._indices.pop(ticket), Answer(done, self._texts.pop(ticket), *about)

    def shown(self, tokenizer: Any, *, dump: bool, view: bool) -> tuple[str | None, TreeView | None]:
        """The tree as text and as a description, where they are asked for."""
        text = self.cache.dump(tokenizer) if dump else None
        return text, self.cache.view(tokenizer=tokenizer) if view else None

    def close(self) -> None:
        """Let go of every array."""
        self._generator.close()
        self.cache.close()


@dataclass
class _Running:
    """A request in the generator."""

    index: int
    reply: Reply
    kinds: list[str]
    cached_tokens: int
    arrived_s: float
    began_s: float | None = None
    text: str = ""


class Batches:
    """mlx-lm's generator and its store; see runner.replay.together.Server."""

    name = "mlx-lm"

    def __init__(self, loaded: LoadedModel, budget_bytes: int, *, users: int, step_size: int, max_tokens: int) -> None:
        self._loaded, self._budget_bytes, self._max_tokens = loaded, budget_bytes, max_tokens
        self._stored = LRUPrompts(loaded.model, loaded.tokenizer, budget_bytes=budget_bytes)
        self._generator = BatchGenerator(loaded.model, prefill_step_size=step_size, completion_batch_size=users)
        self._running: dict[int, _Running] = {}
        self.peak_bytes = 0
        self.peak_tokens = 0

    @property
    def evictions(self) -> int:
        """Entries that were given up."""
        return self._stored.evictions

    def submit(self, index: int, request: RenderedRequest) -> None:
        """Hand a request in."""
        arrived_s = time.perf_counter()
        tokens = request.prompt.tokens.tolist()
        caches, cached_tokens = self._stored.fetch(tokens)
        kinds = [(end, kind) for end, kind in self._stored.segments(request.prompt) if end > cached_tokens]
        ends = [cached_tokens, *(end for end, _ in kinds), len(tokens)]
        segments = [tokens[start:end] for start, end in pairwise(ends) if start < end]
        (user,) = self._generator.insert_segments(
            [segments], [self._max_tokens], caches=[caches], all_tokens=[tokens[:cached_tokens]]
        )
        reply = Reply(
            self._loaded.tokenizer,
            max_tokens=self._max_tokens,
            stop_tokens=None,
            prompt_tokens=len(tokens),
            arrived_at_s=arrived_s,
        )
        reply.cached_tokens = cached_tokens
        self._running[user] = _Running(index, reply, [kind for _, kind in kinds], cached_tokens, arrived_s)

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Serve until all that was handed in is done."""
        while self._running:
            self._stored.trim_to(self._budget_bytes - int(self._generator.prompt_cache_nbytes))
            prompts, tokens = self._generator.next()
            for response in prompts:
                running = self._running[response.uid]
                if running.began_s is None:
                    running.began_s = time.perf_counter()
                    running.reply.start()
            ended = [each.uid for each in prompts if each.end_of_segment and not each.end_of_prompt]
            ended = [user for user in ended if self._running[user].kinds]
            for user, (caches, key) in self._generator.extract_cache(ended).items():
                self._stored.insert(list(key), list(caches), self._running[user].kinds.pop(0))
            held = int(self._generator.prompt_cache_nbytes) + self._stored.paged_bytes
            self.peak_bytes = max(self.peak_bytes, held)
            for response in tokens:
                yield from self._answered(response)

    def close(self) -> None:
        """Let go of every array."""
        self._generator.close()
        self._stored.close()

    def _answered(self, response: Any) -> Iterator[tuple[int, Answer]]:
        running = self._running[response.uid]
        piece = running.reply.add(response.token, response.logprobs, lambda: False)
        running.text += piece.text
        completion = piece.completion
        if completion is None:
            return
        del self._running[response.uid]
        if response.finish_reason is not None:
            self._stored.insert(list(response.all_tokens), list(response.prompt_cache), "assistant")
        else:  # a stop token, which the generator knows nothing of
            found = self._generator.remove([response.uid], return_prompt_caches=True)
            for caches, key in found.values():
                self._stored.insert(list(key), list(caches), "assistant")
        waited_s = (running.began_s or running.arrived_s) - running.arrived_s
        yield (
            running.index,
            Answer(completion, running.text, running.cached_tokens, running.cached_tokens, None, waited_s * 1e3),
        )


#: What may serve several users at a time.
TOGETHER = ("radix", "mlx-lm")


@dataclass(frozen=True)
class ParallelRow(ServedRequest):
    """What one request cost among others. `peak_bytes` is the most that was held up to its end."""

    # What of `ttft_ms` went by before prefill began.
    waited_ms: float
    # From the first token to the last.
    decode_ms: float
    peak_bytes: int
    output_tokens: int
    output_hash: str
    done_reason: str


@dataclass(frozen=True)
class ParallelRun:
    """All requests that had their reply, in the order of the script. `wall_s` is from the first to the last of them."""

    cache: str
    users_at_a_time: int
    rows: tuple[ParallelRow, ...]
    wall_s: float
    peak_bytes: int
    peak_tokens: int
    capacity_tokens: int
    evictions: int
    tree: str | None = None
    view: TreeView | None = None


@dataclass(frozen=True)
class AnswerDifference:
    """A reply that parts from the one without a cache; `gap` is how far apart the two likeliest logits are there."""

    cache: str
    index: int
    gap: float


class ParallelReplay:
    """Several runs; `run` may be interrupted, and `result` then has what was finished."""

    def __init__(
        self,
        loaded: LoadedModel,
        script: Script,
        options: ReplayOptions,
        users_at_a_time: int,
        observer: Observer,
        caches: Sequence[str] = ("radix",),
    ) -> None:
        self._loaded = loaded
        self._script = script
        self._options = options
        self._users_at_a_time = min(users_at_a_time, len({request.user for request in script.requests}))
        self._observer = observer
        self._caches = tuple(caches)
        # So many that requests wait for their users and never for tokens.
        self._capacity = self._users_at_a_time * script.longest_tokens
        self._runs: list[_Run] = []
        self._alone: Replay | None = None

    def run(self) -> None:
        """Serve all requests each way, and then once more one after the other, for comparison.

        Raises:
            UnsupportedCacheError: the model's layers cannot be shared by several sequences.
            BudgetFullError: a request does not fit the byte budget, even alone.
            ScriptError: a prompt that waited for generated replies does not fit the model or the capacity.
        """
        with wired_limit(self._loaded.model):
            warm_up(self._loaded, self._script[0].prompt)
            for cache in self._caches:
                release()
                self._observer.run_started(f"{cache} together", len(self._script))
                self._serve(cache)
                release()
        self._alone = Replay(self._loaded, self._script, ["radix", "none"], self._options, self._observer)
        self._alone.run()

    def alone(self) -> list[CacheRun]:
        """The same requests one after the other, on the radix cache and without one, as far as that came."""
        return [] if self._alone is None else self._alone.result()

    def result(self) -> list[ParallelRun]:
        """What was finished together, one of each way."""
        return [run.result(self._users_at_a_time, self._capacity) for run in self._runs]

    def partings(self) -> list[AnswerDifference]:
        """Every reply that is not the one without a cache, where there is one to hold it against."""
        if self._alone is None:
            return []
        found = []
        wanted = self._alone.replies("none")
        others = [(run.server.name, run.replies) for run in self._runs]
        others.append(("radix alone", dict(enumerate(self._alone.replies("radix")))))
        for name, replies in others:
            for index, tokens in enumerate(wanted):
                if index in replies and replies[index] != tokens:
                    found.append(AnswerDifference(name, index, self._gap(index, tokens, replies[index])))
        return found

    def _gap(self, index: int, one: Sequence[int], other: Sequence[int]) -> float:
        """How far apart the two likeliest logits are where two replies part."""
        same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            return float("inf")
        tokens = [*self._script[index].prompt.tokens.tolist(), *one[:same]]
        caches = make_prompt_cache(self._loaded.model)
        logits = self._loaded.model(mx.array([tokens]), cache=caches)[0, -1].astype(mx.float32)
        likeliest = mx.sort(logits)[-2:]
        return float(np.asarray(likeliest[1] - likeliest[0]))

    def _serve(self, cache: str) -> None:
        """All requests, on one cache."""
        options = self._options
        sizes = {"step_size": options.step_size, "max_tokens": options.max_tokens, "users": self._users_at_a_time}
        server: Server
        if cache == "radix":
            server = Tree(self._loaded, options.policy, options.budget_bytes, capacity=self._capacity, **sizes)
        else:
            server = Batches(self._loaded, options.budget_bytes, **sizes)
        run = _Run(server)
        self._runs.append(run)
        turn = _Turn(self._script, self._users_at_a_time, self._require_tokens)
        try:
            started_s = time.perf_counter()
            while turn.hand_in(server):
                for index, answer in server.answers():
                    run.rows[index] = _row(self._script[index], answer, server.peak_bytes)
                    run.replies[index] = list(answer.completion.tokens)
                    self._script.record_reply(index, answer.text)
                    turn.done(index)
                    run.wall_s = time.perf_counter() - started_s
                    self._observer.request_done(f"{cache} together", answer.completion.prompt_tokens)
                    turn.hand_in(server)
            if isinstance(server, Tree):
                run.shown = server.shown(self._loaded.tokenizer, dump=options.dump_tree, view=options.keep_view)
        finally:
            run.ended()
            server.close()

    def _require_tokens(self, request: RenderedRequest) -> None:
        needed = len(request.prompt.tokens) + self._options.max_tokens
        if needed > self._capacity:
            raise ScriptError(
                f"user {request.user}, {request.conversation_id}, turn {request.turn}: generated replies come to far "
                f"more tokens in a prompt than they had; with its own reply it takes {needed:,} tokens of "
                f"{self._capacity:,}. Ask for shorter ones with --max-tokens."
            )


class _Turn:
    """Whose request is handed in when."""

    def __init__(self, script: Script, users_at_a_time: int, require: Callable[[RenderedRequest], None]) -> None:
        self._script = script
        self._users_at_a_time = users_at_a_time
        self._require = require
        self._left = list(range(len(script)))
        self._busy: set[str] = set()

    def hand_in(self, server: Server) -> bool:
        """Hand in what may come next; whether there was anything."""
        chosen = list(self._next())
        for index in chosen:
            request = self._script[index]
            self._require(request)
            server.submit(index, request)
        return bool(chosen)

    def done(self, index: int) -> None:
        """A request has its reply."""
        self._busy.remove(self._script.requests[index].user)

    def _next(self) -> Iterator[int]:
        for index in list(self._left):
            if len(self._busy) == self._users_at_a_time:
                return
            user = self._script.requests[index].user
            if user not in self._busy:
                self._busy.add(user)
                self._left.remove(index)
                yield index


class _Run:
    """One way to serve the requests, as far as it has come."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rows: dict[int, ParallelRow] = {}
        self.replies: dict[int, list[int]] = {}
        self.shown: tuple[str | None, TreeView | None] = (None, None)
        self.wall_s = 0.0
        self._held = 0, 0, 0

    def ended(self) -> None:
        """The server is about to be closed: keep its figures."""
        self._held = self.server.peak_bytes, self.server.peak_tokens, self.server.evictions

    def result(self, users_at_a_time: int, capacity: int) -> ParallelRun:
        """What was finished."""
        peak_bytes, peak_tokens, evictions = self._held
        return ParallelRun(
            cache=self.server.name,
            users_at_a_time=users_at_a_time,
            rows=tuple(self.rows[index] for index in sorted(self.rows)),
            wall_s=self.wall_s,
            peak_bytes=peak_bytes,
            peak_tokens=peak_tokens,
            capacity_tokens=capacity,
            evictions=evictions,
            tree=self.shown[0],
            view=self.shown[1],
        )


def _row(request: RenderedRequest, answer: Answer, peak_bytes: int) -> ParallelRow:
    completion = answer.completion
    assert completion.ttft_ms is not None, "nothing cancels a replayed request"
    return ParallelRow(
        user=request.user,
        conversation_id=request.conversation_id,
        turn=request.turn,
        prompt_tokens=completion.prompt_tokens,
        matched_tokens=answer.matched_tokens,
        cached_tokens=answer.cached_tokens,
        reason=answer.reason,
        ttft_ms=completion.ttft_ms,
        waited_ms=answer.waited_ms,
        decode_ms=completion.completion_ms,
        peak_bytes=peak_bytes,
        output_tokens=completion.completion_tokens,
        output_hash=output_hash(completion.tokens),
        done_reason=completion.done_reason,
    )
