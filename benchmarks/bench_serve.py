"""Compare radixcache serve with mlx_lm.server: the same requests to both, in separate processes, by turns.

Both servers have the same budget (--prompt-cache-bytes); mlx_lm.server has no limit on sequences. Every run starts a
new server and sends one short request first. Users send requests at the same time, each user one after the other:

    shared    one question per user, after a system prompt that all users share
    growing   four turns per user, after a short system prompt
    tight     three turns per user, after the system prompt of `shared`. The budget holds about a quarter of the
              conversations, if each is stored separately
    own       one prompt per user, nothing in common
    agent     eight steps per user, each with the result of a tool, after tools and a system prompt that all users
              share: a session of a coding agent
    stall     the steps of `agent` again, all in the cache, beside the stream of another user: `gap ms max` is the
              longest time that this stream stands still

    model             kv, sliding, conv: random and mid-size; llama: tiny, a character is a token; words: llama with the
                      tokenizer of the demo model; demo
    prefilled tokens  prompt tokens minus cached tokens, as the servers report them
    TTFT ms           from the request to the first piece of the reply, at the client
    gap ms max        from one piece of a reply to the next, over all replies
    tokens/s          generated tokens by the seconds from the first request to the end of the last reply
    tokens/s ratio    tokens/s divided by mlx_lm.server's tokens/s in the same turn: median and range of the turns
    peak MB           growth of the server's resident memory since the first request, at the peak
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from benchmarks.harness.chat_stream import Answer, ask_stream
from benchmarks.harness.model_folder import write_model, write_word_model
from benchmarks.harness.random_models import random_kind
from benchmarks.harness.record import Spread, arguments, publish, rotated, say
from benchmarks.harness.server_process import ServerProcess, mlx_lm_server, radixcache_serve
from runner.models.demo import demo_model_folder
from runner.models.tiny import TINY_KINDS, VOCABULARY_LENGTH

SERVERS: dict[str, Callable[..., ServerProcess]] = {
    "radixcache serve": radixcache_serve,
    "mlx_lm.server": mlx_lm_server,
}
OURS, THEIRS = SERVERS
BUDGET_BYTES = 4 << 30
SAMPLE_S = 0.02
TOOL_CHARACTERS = 2000
WORDS = ["a", "and", "at", "before", "city", "for", "from", "is", "long", "of", "the", "to", "train", "when", "year"]
#: The aims, divided by mlx_lm.server's values: tokens/s, tokens/s of `shared`, prefilled tokens of `tight`.
LEAST_SPEED, SHARED_SPEED, TIGHT_PREFILLED = 1.0, 2.0, 0.5


@dataclass(frozen=True)
class Load:
    """Requests of one model.

    Attributes:
        model: a kind of random mid-size or tiny model, for which a character is a token; words; or demo.
        system, own: characters of the shared system prompt, and of each message of a user.
        turns, reply: messages of each user, and tokens of each reply.
        tools: characters of the shared tools; each message after a user's first one is then the result of a call.
        beside: tokens of a stream that runs while the users send requests that they have sent before; 0: none.
    """

    model: str
    name: str
    users: int
    system: int
    own: int
    turns: int = 1
    reply: int = 32
    tools: int = 0
    beside: int = 0
    budget_bytes: int = BUDGET_BYTES
    repeats: int = 5


def _loads() -> Iterator[Load]:
    # Large differences need fewer repeats than small ones.
    for users in (1, 8, 16):
        yield Load("kv", "shared", users, system=2000, own=60, repeats=2)
        yield Load("kv", "growing", users, system=200, own=150, turns=4)
        yield Load("kv", "own", users, system=0, own=600)
    for model in ("sliding", "conv"):
        yield Load(model, "shared", 16, system=2000, own=60, repeats=2)
        yield Load(model, "growing", 8, system=200, own=150, turns=4)
    # The forward pass takes little time here; the runs measure Python and last a second or less.
    yield Load("llama", "shared", 16, system=2000, own=60)
    yield Load("llama", "growing", 8, system=200, own=150, turns=4, repeats=9)
    yield Load("llama", "own", 8, system=0, own=600, repeats=9)
    # A conversation has about 2,700 tokens of 3 kB each.
    yield Load("llama", "tight", 8, system=2000, own=150, turns=3, budget_bytes=16 << 20)
    yield Load("demo", "shared", 8, system=1500, own=100, reply=16, repeats=1)
    # The first prompt has about 20,000 tokens, and the last one 24,000.
    session: dict[str, Any] = {"system": 40_000, "tools": 40_000, "own": 2000, "turns": 8, "repeats": 2}
    for users in (1, 4):
        yield Load("words", "agent", users, **session)
    yield Load("words", "stall", 1, **session, reply=8, beside=1500)


FULL = tuple(_loads())
QUICK = (
    Load("llama", "shared", 2, system=200, own=20, reply=4, repeats=1),
    Load("llama", "agent", 2, system=200, tools=200, own=20, turns=2, reply=4, repeats=1),
    Load("llama", "stall", 1, system=200, tools=200, own=20, turns=2, reply=4, beside=50, repeats=1),
)


@dataclass(frozen=True)
class Run:
    """The result of all requests to one server."""

    replies: Sequence[Answer]
    total_s: float
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.sum_of("completion_tokens") / self.total_s

    @property
    def prefilled_tokens(self) -> int:
        return self.sum_of("prompt_tokens") - self.sum_of("cached_tokens")

    def sum_of(self, count: str) -> int:
        return sum(getattr(reply, count) for reply in self.replies)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=_add_only)
    wanted = QUICK if options.quick else [load for load in FULL if options.only in (None, load.model, load.name)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for load in wanted for row in measure(load, Path(folder))]
    # None: the rows have a column for the repeats.
    publish(
        "serve",
        "radixcache serve and mlx_lm.server",
        rows,
        folder=options.results,
        repeats=None,
        conclusion=conclusion(rows),
    )


def _add_only(parser: argparse.ArgumentParser) -> None:
    choices = sorted({word for load in FULL for word in (load.model, load.name)})
    parser.add_argument("--only", choices=choices, help="run only the loads of this model or name")


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    pairs = [
        (f"{o['model']}, {o['load']}, {o['users']} users", o, t) for o, t in zip(rows[::2], rows[1::2], strict=True)
    ]
    slow = [(name, ours) for name, ours, _ in pairs if ours["tokens/s ratio"] < LEAST_SPEED]
    beyond = [f"{name} ({ours['tokens/s ratio']:.2f})" for name, ours in slow if ours["ratio max"] < LEAST_SPEED]
    within = [
        f"{name} ({ours['tokens/s ratio']:.2f}; {ours['ratio min']:.2f} to {ours['ratio max']:.2f})"
        for name, ours in slow
        if ours["ratio max"] >= LEAST_SPEED
    ]
    said = [f"Slower than mlx_lm.server: {', '.join(beyond)}"] if beyond else []
    if within:
        said.append(f"Slower in the median, faster in some turns: {', '.join(within)}")
    if not slow:
        said.append("Never slower than mlx_lm.server")
    for name, ours, theirs in pairs:
        if ours["load"] == "shared":
            said.append(f"{name}: {ours['tokens/s ratio']:.2f} times the tokens/s of mlx_lm.server")
        elif ours["load"] == "tight":
            share = ours["prefilled tokens"] / theirs["prefilled tokens"]
            said.append(f"{name}: {share:.2f} of the prefilled tokens of mlx_lm.server")
        elif ours["load"] == "agent":
            said.append(f"{name}: TTFT {ours['TTFT ms p50']:,.0f} ms (mlx_lm.server {theirs['TTFT ms p50']:,.0f})")
        elif ours["load"] == "stall":
            gaps = f"{ours['gap ms max']:,.0f} ms (mlx_lm.server {theirs['gap ms max']:,.0f})"
            said.append(f"{name}: another stream stands still for {gaps}")
    return (
        f"{'. '.join(said)}. Aims: {LEAST_SPEED:g} times its tokens/s, {SHARED_SPEED:g} with 16 users who share a "
        f"prefix; {TIGHT_PREFILLED:g} of its prefilled tokens under a tight budget."
    )


def measure(load: Load, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each server."""
    say(f"{load.model}, {load.name}, {load.users} users")
    model = folder / load.model
    if load.model == "demo":
        model = demo_model_folder()
    elif load.model == "words":
        model = model if model.exists() else write_word_model(model, TINY_KINDS["llama"])
    elif not model.exists():
        is_tiny = load.model in TINY_KINDS
        write_model(model, load.model if is_tiny else random_kind(load.model, vocabulary=VOCABULARY_LENGTH))
    runs: dict[str, list[Run]] = {name: [] for name in SERVERS}
    for repeat in range(load.repeats):
        for name in rotated(list(SERVERS), repeat):
            runs[name].append(serve(SERVERS[name], load, model, folder / "log"))
    for name, its in runs.items():
        yield {
            "model": load.model,
            "load": load.name,
            "users": load.users,
            "server": name,
            "repeats": load.repeats,
            **_figures(its, runs[THEIRS]),
        }


def _figures(runs: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    ratio = Spread.of(run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, theirs, strict=True))
    ttft_ms = [[1e3 * reply.pieces_s[0] for reply in run.replies] for run in runs]
    gap_ms = [[1e3 * gap_s for reply in run.replies for gap_s in reply.gaps_s] for run in runs]
    return {
        "prompt tokens": runs[0].sum_of("prompt_tokens"),
        "prefilled tokens": statistics.median(run.prefilled_tokens for run in runs),
        "TTFT ms p50": statistics.median(np.percentile(each, 50) for each in ttft_ms),
        "TTFT ms p95": statistics.median(np.percentile(each, 95) for each in ttft_ms),
        "gap ms max": statistics.median(max(each) for each in gap_ms),
        "tokens/s": statistics.median(run.tokens_per_s for run in runs),
        "tokens/s ratio": ratio.median,
        "ratio min": ratio.least,
        "ratio max": ratio.most,
        "peak MB": statistics.median(run.peak_bytes for run in runs) / 1e6,
    }


def serve(server: Callable[..., ServerProcess], load: Load, model: Path, log: Path) -> Run:
    """Send all requests of a load to a new server."""
    budget = ("--prompt-cache-bytes", str(load.budget_bytes), "--prompt-cache-size", "1000")
    with server(model, log, *budget) as process, ThreadPoolExecutor(load.users + 1) as pool:
        _ask(process.url, [{"role": "user", "content": "Are you there?"}], 2)
        before_bytes = peak_bytes = process.resident_bytes
        stream = []
        if load.beside:
            list(pool.map(lambda user: _talk(process.url, load, user), range(load.users)))
            has_begun = Event()
            stream.append(pool.submit(_stream, process.url, load.beside, has_begun.set))
            has_begun.wait()
        began_s = time.perf_counter()
        waiting = {*stream, *(pool.submit(_talk, process.url, load, user) for user in range(load.users))}
        futures = set(waiting)
        while waiting:
            waiting = wait(waiting, SAMPLE_S).not_done
            peak_bytes = max(peak_bytes, process.resident_bytes)
        total_s = time.perf_counter() - began_s
        return Run([reply for future in futures for reply in future.result()], total_s, peak_bytes - before_bytes)


def _talk(url: str, load: Load, user: int) -> list[Answer]:
    """Send the requests of a user, one after the other.

    The assistant's turns are fixed texts or calls, not the replies, so both servers get the same requests.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(0, load.system)}] if load.system else []
    tools = _tools(load.tools)
    replies = []
    for turn in range(load.turns):
        content = _text(1 + user * load.turns + turn, load.own)
        if tools and turn:
            messages.append({"role": "tool", "tool_call_id": f"call_{turn - 1}", "content": content})
        else:
            messages.append({"role": "user", "content": content})
        replies.append(_ask(url, messages, load.reply, tools=tools))
        said: dict[str, Any] = {"role": "assistant", "content": _text(-1, load.reply)}
        if tools:
            call = {"name": "tool_0", "arguments": json.dumps({"path": f"file_{turn}"})}
            said["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": call}]
        messages.append(said)
    return replies


def _stream(url: str, length: int, on_piece: Callable[[], object]) -> list[Answer]:
    return [_ask(url, [{"role": "user", "content": "Go on."}], length, on_piece=on_piece)]


def _ask(url: str, messages: Sequence[dict[str, Any]], max_tokens: int, **more: Any) -> Answer:
    answer = ask_stream(url, None, messages, max_tokens, **more)
    assert answer.error is None, answer.error
    return answer


def _tools(length: int) -> list[dict[str, Any]]:
    """Return tools whose descriptions have `length` characters in all."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return [
        {"type": "function", "function": {"name": f"tool_{index}", "description": text, "parameters": parameters}}
        for index, text in enumerate(textwrap.wrap(_text(len(WORDS), length), TOOL_CHARACTERS))
    ]


def _text(seed: int, length: int) -> str:
    """Return `length` characters of words in random order."""
    return " ".join(np.random.default_rng(seed + 1).choice(WORDS, length))[:length]


if __name__ == "__main__":
    main()
