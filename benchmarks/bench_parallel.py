"""Compare ways to serve many users at the same time: the radix tree, mlx-lm's batches, and one request after the other.

The same requests arrive at the same time. They are served three ways in one process, each with its own cache:

    tree         runner.engine on a PrefixCache: stores, evaluates and reads a common prefix once
    mlx-lm       BatchGenerator: a batch of caches, padded to the longest
    one by one   a PrefixCache with one live path, one request after the other

Each way runs with a system prompt that all users share, and without. Without it, prompts have the same length and
nothing in common.

    tokens/s          generated tokens by the seconds from the arrival of the first request to the last token
    decode tokens/s   generated tokens by the seconds from the moment when every user has a first token
    held MB           cache memory while all users decode: the tree and its live state
    peak MB           peak MLX memory beyond the model, including activations

bench_decode measures decoding alone, with one or more levels of sharing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.record import Spread, arguments, publish, rotated, say
from radixcache import PrefixCache
from runner.engine.generation import generate
from runner.engine.generator import ParallelGenerator
from runner.models.load import load_model

BUDGET_BYTES = 8 << 30
CHUNK_TOKENS = 512
#: The aims: tokens/s divided by mlx-lm's tokens/s, with a common prefix and without.
AIMS = {"shared": 1.5, "own": 1.0}
AIM_USERS = 8


@dataclass(frozen=True)
class Load:
    """Requests of one model: `shared` tokens of a common prefix, then `own` tokens; `reply` tokens are generated."""

    model: str
    shared: int
    own: int
    reply: int
    users: tuple[int, ...]
    repeats: int


FULL = (Load("tiny", 2000, 100, 32, (1, 8, 16), 3), Load("demo", 300, 30, 16, (8,), 1))
QUICK = (Load("tiny", 500, 10, 4, (1, 3), 1),)


@dataclass(frozen=True)
class Served:
    """The result of serving all requests of a load."""

    total_s: float
    decode_s: float
    decoded: int
    held_bytes: int
    peak_bytes: int


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    loads = QUICK if options.quick else FULL
    rows = [row for load in loads for row in measure(load)]
    title = "Many users at a time: radixcache, mlx-lm's batches, one by one"
    # None: the rows have a column for the repeats.
    publish("parallel", title, rows, folder=options.results, repeats=None, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    loads = dict.fromkeys((row["model"], row["prompt"]) for row in rows)
    parts = [_compared(*load, [row for row in rows if (row["model"], row["prompt"]) == load]) for load in loads]
    return f"{'; '.join(parts)}."


def _compared(model: str, prompt: str, rows: Sequence[dict[str, Any]]) -> str:
    """Compare the tree with mlx-lm's batches at the number of users of the aims, or the next lower number."""
    users = max(row["users"] for row in rows if row["users"] <= AIM_USERS)
    speed, held = (_of_mlx_lm(rows, users, figure) for figure in ("tokens/s", "held MB"))
    aim = AIMS[prompt]
    return (
        f"{model}, {prompt} beginning: {users} users get {speed:.2f} times the tokens/s of mlx-lm "
        f"(aim {aim:g}{'' if speed >= aim else ', MISSED'}) and hold {held:.2f} of its bytes"
    )


def _of_mlx_lm(rows: Sequence[dict[str, Any]], users: int, figure: str) -> float:
    found = {row["way"]: float(row[figure]) for row in rows if row["users"] == users}
    return found["tree"] / found["mlx-lm"]


def measure(load: Load) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and number of users, with a shared prefix and without."""
    loaded = load_model(load.model)
    for prompt in ("shared", "own"):
        for users in load.users:
            say(f"{load.model}, {prompt} beginning, {users} users")
            prompts = _prompts(load, users, shared=prompt == "shared")
            served: dict[str, list[Served]] = {name: [] for name in WAYS}
            for index in range(load.repeats):
                for name in rotated(list(WAYS), index):
                    served[name].append(WAYS[name](loaded, prompts, load.reply))
            for name, runs in served.items():
                yield {
                    "model": load.model,
                    "prompt": prompt,
                    "users": users,
                    "way": name,
                    **_figures(load, users, runs),
                }


def _figures(load: Load, users: int, runs: Sequence[Served]) -> dict[str, Any]:
    total = Spread.of(run.total_s for run in runs)
    decode = [run.decoded / run.decode_s for run in runs if run.decoded]
    return {
        "prompt tokens": load.shared + load.own,
        "repeats": len(runs),
        "total s": total.median,
        "min to max": total.range,
        "tokens/s": users * load.reply / total.median,
        "decode tokens/s": statistics.median(decode) if decode else 0.0,
        "held MB": statistics.median(run.held_bytes for run in runs) / 1e6,
        "peak MB": statistics.median(run.peak_bytes for run in runs) / 1e6,
    }


def from_the_tree(loaded: Any, prompts: Sequence[list[int]], reply: int) -> Served:
    cache = PrefixCache(loaded.model, budget_bytes=BUDGET_BYTES)
    capacity = sum(map(len, prompts)) + len(prompts) * (reply + 1)
    watch = _Watch(len(prompts), lambda: cache.stats.live_bytes + cache.stats.paged_bytes)
    with ParallelGenerator(
        cache, loaded.model, loaded.tokenizer, capacity=capacity, max_rows=len(prompts), step_size=CHUNK_TOKENS
    ) as generator:
        for prompt in prompts:
            generator.submit(prompt, max_tokens=reply, stop_tokens=())
        for ticket, piece in generator:
            if piece.token is not None:
                watch.token(ticket)
        return watch.served()


def in_batches(loaded: Any, prompts: Sequence[list[int]], reply: int) -> Served:
    generator = BatchGenerator(
        loaded.model, max_tokens=reply, prefill_step_size=CHUNK_TOKENS, completion_batch_size=len(prompts)
    )
    watch = _Watch(len(prompts), lambda: generator.prompt_cache_nbytes)
    try:
        generator.insert([list(prompt) for prompt in prompts])
        done = 0
        while done < len(prompts):
            for response in generator.next_generated():
                watch.token(response.uid)
                done += response.finish_reason is not None
        return watch.served()
    finally:
        generator.close()


def one_by_one(loaded: Any, prompts: Sequence[list[int]], reply: int) -> Served:
    cache = PrefixCache(loaded.model, budget_bytes=BUDGET_BYTES)
    watch = _Watch(len(prompts), lambda: cache.stats.live_bytes + cache.stats.paged_bytes)
    for user, prompt in enumerate(prompts):
        with cache.begin(prompt, reserve=reply) as session:
            for piece in generate(
                session,
                loaded.model,
                loaded.tokenizer,
                max_tokens=reply,
                stop_tokens=(),
                step_size=CHUNK_TOKENS,
            ):
                assert piece.token is not None
                watch.token(user)
    return watch.served()


WAYS: dict[str, Callable[[Any, Sequence[list[int]], int], Served]] = {
    "tree": from_the_tree,
    "mlx-lm": in_batches,
    "one by one": one_by_one,
}


class _Watch:
    """Records the time of each token, and the memory in use."""

    def __init__(self, users: int, held_bytes: Callable[[], int]) -> None:
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        self._before_bytes = mx.get_active_memory()
        self._users = users
        self._held_bytes = held_bytes
        self._firsts: dict[Any, float] = {}
        self._tokens = 0
        self._tokens_at_last_first = 0
        self._held_bytes_most = 0
        self._began_s = self._now_s = time.perf_counter()

    def token(self, user: Any) -> None:
        self._now_s = time.perf_counter()
        self._tokens += 1
        if user not in self._firsts:
            self._firsts[user] = self._now_s
            self._tokens_at_last_first = self._tokens
        if self._tokens % self._users == 0:
            self._held_bytes_most = max(self._held_bytes_most, self._held_bytes())

    def served(self) -> Served:
        assert len(self._firsts) == self._users, (len(self._firsts), self._users)
        return Served(
            total_s=self._now_s - self._began_s,
            decode_s=self._now_s - max(self._firsts.values()),
            decoded=self._tokens - self._tokens_at_last_first,
            held_bytes=self._held_bytes_most,
            peak_bytes=int(mx.get_peak_memory() - self._before_bytes),
        )


def _prompts(load: Load, users: int, *, shared: bool) -> list[list[int]]:
    random = np.random.default_rng(users)
    length = load.shared + load.own
    beginning = random.integers(16, 250, load.shared if shared else 0).tolist()
    return [beginning + random.integers(16, 250, length - len(beginning)).tolist() for _ in range(users)]


if __name__ == "__main__":
    main()
