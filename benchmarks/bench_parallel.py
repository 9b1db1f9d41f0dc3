"""Many users at a time: what do they cost on shared cells, in mlx-lm's batches, and one after the other?

The same requests, which all come at once, are served three ways in one process, each with a cache of its own:

    cells        runner.parallel on a PrefixCache: one buffer of cells, a common beginning in it once
    mlx-lm       BatchGenerator: a batch of caches, padded to the longest
    one by one   a PrefixCache and its one live path, each request after the one before

with a system prompt that all users share, and without: then every prompt is as long, and all of it is the user's own.

    tokens/s     generated tokens, by the seconds from the first request's arrival to the last token
    decode       generated tokens, by the seconds from the moment when every user has a first token
    live MB      what the live caches hold, at most; what the first and the last store for later is not in there
    peak MB      the most that MLX held at a time beyond the model: that, and activations, too

Where there is no common beginning every row of a step reads the cells of all others, only to mask them: there mlx-lm's
batches win, and more so the more users there are.
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
from benchmarks.record import arguments, publish, say
from radixcache import PrefixCache
from runner.models import load_model
from runner.parallel import ParallelGenerator
from runner.pipeline import generate

BUDGET_BYTES = 8 << 30
CHUNK_TOKENS = 512
WAYS = ("cells", "mlx-lm", "one by one")
AIM_USERS = 8
AIM_BYTES_USERS = 16
AIM_BYTES_SHARE = 0.25


@dataclass(frozen=True)
class Load:
    """Requests of one model: `shared` tokens that all prompts may begin with, `own` behind it, `reply` generated."""

    model: str
    shared: int
    own: int
    reply: int
    users: tuple[int, ...]
    repeats: int


FULL = (Load("tiny", 2000, 100, 32, (1, 4, 8, 16), 3), Load("demo", 300, 30, 16, (1, 8, 16), 1))
QUICK = (Load("tiny", 200, 10, 4, (1, 3), 1),)


@dataclass(frozen=True)
class Served:
    """What serving all requests of a load came to."""

    total_s: float
    decode_s: float
    decoded: int
    live_bytes: int
    peak_bytes: int


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    loads = QUICK if options.quick else FULL
    rows = [row for load in loads for row in measure(load)]
    title = "Users at a time: shared cells, mlx-lm's batches, one by one"
    repeats = max(load.repeats for load in loads)
    publish("parallel", title, rows, folder=options.results, repeats=repeats, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Say what the figures mean for the aims, from the figures."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for prompt in ("shared", "own"):
            of = [row for row in rows if (row["model"], row["prompt"]) == (model, prompt)]
            users = max(row["users"] for row in of if row["users"] <= AIM_USERS)
            ours, theirs = (next(row for row in of if (row["users"], row["way"]) == (users, way)) for way in WAYS[:2])
            many = max(row["users"] for row in of)
            held, batch = (next(row for row in of if (row["users"], row["way"]) == (many, way)) for way in WAYS[:2])
            parts.append(
                f"{model}, {prompt} beginning: {users} users get {ours['tokens/s'] / theirs['tokens/s']:.2f} times the "
                f"tokens per second of mlx-lm ({ours['decode'] / theirs['decode']:.2f} while decoding), {many} take "
                f"{held['live MB'] / batch['live MB']:.2f} of its bytes"
            )
    return f"{'; '.join(parts)}. Aims, with a shared beginning: 1 and {AIM_BYTES_SHARE:g} at {AIM_BYTES_USERS}."


def measure(load: Load) -> Iterator[dict[str, Any]]:
    loaded = load_model(load.model)
    for prompt in ("shared", "own"):
        for users in load.users:
            say(f"{load.model}, {prompt} beginning, {users} users")
            prompts = _prompts(load, users, shared=prompt == "shared")
            ways: dict[str, Callable[[], Served]] = {
                "cells": lambda prompts=prompts: on_cells(loaded, prompts, load.reply),  # type: ignore[misc]
                "mlx-lm": lambda prompts=prompts: in_batches(loaded, prompts, load.reply),  # type: ignore[misc]
                "one by one": lambda prompts=prompts: one_by_one(loaded, prompts, load.reply),  # type: ignore[misc]
            }
            served: dict[str, list[Served]] = {name: [] for name in ways}
            for index in range(load.repeats):
                turn = [*ways.items()][index % 3 :] + [*ways.items()][: index % 3]
                for name, way in turn:
                    served[name].append(way())
            for name, runs in served.items():
                seconds = sorted(run.total_s for run in runs)
                tokens = users * load.reply
                decode = [run.decoded / run.decode_s for run in runs if run.decoded]
                yield {
                    "model": load.model,
                    "prompt": prompt,
                    "users": users,
                    "way": name,
                    "prompt tokens": len(prompts[0]),
                    "total s": statistics.median(seconds),
                    "least to most": f"{seconds[0]:.3g} to {seconds[-1]:.3g}",
                    "tokens/s": tokens / statistics.median(seconds),
                    "decode": statistics.median(decode) if decode else 0.0,
                    "live MB": statistics.median(run.live_bytes for run in runs) / 1e6,
                    "peak MB": statistics.median(run.peak_bytes for run in runs) / 1e6,
                }


def on_cells(loaded: Any, prompts: Sequence[list[int]], reply: int) -> Served:
    cache = PrefixCache(loaded.model, budget_bytes=BUDGET_BYTES)
    capacity = sum(map(len, prompts)) + len(prompts) * (reply + 1)
    watch = _Watch(len(prompts), lambda: cache.stats.live_bytes)
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
    watch = _Watch(len(prompts), lambda: cache.stats.live_bytes)
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


class _Watch:
    """Notes when each token comes, and what is held meanwhile."""

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
        self._live_bytes = 0
        self._began_s = self._now_s = time.perf_counter()

    def token(self, user: Any) -> None:
        self._now_s = time.perf_counter()
        self._tokens += 1
        if user not in self._firsts:
            self._firsts[user] = self._now_s
            self._tokens_at_last_first = self._tokens
        if self._tokens % self._users == 0:
            self._live_bytes = max(self._live_bytes, self._held_bytes())

    def served(self) -> Served:
        assert len(self._firsts) == self._users, (len(self._firsts), self._users)
        return Served(
            total_s=self._now_s - self._began_s,
            decode_s=self._now_s - max(self._firsts.values()),
            decoded=self._tokens - self._tokens_at_last_first,
            live_bytes=self._live_bytes,
            peak_bytes=int(mx.get_peak_memory() - self._before_bytes),
        )


def _prompts(load: Load, users: int, *, shared: bool) -> list[list[int]]:
    """A prompt for each user, of ids that every vocabulary has."""
    random = np.random.default_rng(users)
    length = load.shared + load.own
    beginning = random.integers(16, 250, load.shared if shared else 0).tolist()
    return [beginning + random.integers(16, 250, length - len(beginning)).tolist() for _ in range(users)]


if __name__ == "__main__":
    main()
