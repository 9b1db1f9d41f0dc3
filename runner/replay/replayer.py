"""Replay a script of requests through several caches, in one process, and record what each request cost.

Every cache gets the same prompts in the same order (see runner/script/script.py), so that answers can be compared. A
reply is generated greedily, or its first token only with the recorded reply fed after it, so that the cache holds the
conversation as it really went on.

Invariants:

  RR1  A request arrives right before its cache is asked: TTFT holds looking up, copying and paging in.
  RR2  The caches take turns, request by request, and another one begins each time: whatever else the machine does slows
       all of them alike. Each has the whole budget to itself.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache

from radixcache import TreeView
from runner.engine.replies import DEFAULT_STEP_SIZE, Completion, LiveRun, feed, generate
from runner.models.load import LoadedModel
from runner.replay.caches import PlainRun, open_backend
from runner.script.script import Prompt, RenderedRequest, Script

# Enough to compile kernels and touch every weight, little enough to take a second on two slow cores.
WARM_UP_TOKENS = 64
OUTPUT_HASH_BYTES = 8


@dataclass(frozen=True)
class ReplayOptions:
    """What holds for all caches of a replay."""

    budget_bytes: int
    policy: str = "lru"
    max_tokens: int = 8
    recorded: bool = False
    step_size: int = DEFAULT_STEP_SIZE
    dump_tree: bool = False
    exact: bool = False
    keep_view: bool = False
    disk: str | None = None
    disk_bytes: int = 0


@dataclass(frozen=True)
class ServedRequest:
    """Which request it was, what was there of its prompt and why not more, and when its first token came."""

    user: str
    conversation_id: str
    turn: int
    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    reason: str | None
    # From the request's arrival to its first token.
    ttft_ms: float


@dataclass(frozen=True)
class RequestRow(ServedRequest):
    """What one request cost with one cache. `live_bytes` and `paged_bytes` are what is held after it."""

    # What of `ttft_ms` went to the cache, before any prefill.
    begin_ms: float
    # From the first token to the last, or what feeding the recorded reply took.
    decode_ms: float
    # Storing what was evaluated, after the last token.
    close_ms: float
    live_bytes: int
    paged_bytes: int
    # The most that was held at the end of any prefill chunk, of the reply, and after it.
    peak_bytes: int
    # What MLX's allocator says was in use beyond the model and other caches, at the end of the reply and after it.
    allocated_bytes: int
    output_tokens: int
    output_hash: str
    done_reason: str


@dataclass(frozen=True)
class CacheRun:
    """One cache over all requests. `tree` is its dump at the end, `view` a description, each when asked for."""

    cache: str
    rows: tuple[RequestRow, ...]
    evictions: int
    wall_s: float
    tree: str | None = None
    view: TreeView | None = None


class Observer(Protocol):
    """Who watches a replay."""

    def run_started(self, cache: str, requests: int) -> None:
        """A cache begins its run."""

    def request_advanced(self, cache: str, done_tokens: int, prompt_tokens: int) -> None:
        """So many of the running request's prompt tokens were restored or evaluated."""

    def request_done(self, cache: str, prompt_tokens: int) -> None:
        """The running request has its reply."""


class Replay:
    """Requests through several caches; `run` may be interrupted, and `result` then has the rounds that ended."""

    def __init__(
        self, loaded: LoadedModel, script: Script, caches: Sequence[str], options: ReplayOptions, observer: Observer
    ) -> None:
        self._loaded, self._script, self._options, self._observer = loaded, script, options, observer
        self._caches = tuple(caches)
        self._runs: list[_Run] = []

    def run(self) -> None:
        """Give each request to every cache before the next one comes.

        Raises:
            UnsupportedCacheError, BudgetFullError: of the radix cache.
            ScriptError: a prompt that waited for generated replies does not fit the model.
        """
        script, options = self._script, self._options
        with wired_limit(self._loaded.model):
            warm_up(self._loaded, script[0].prompt)
            release()
            try:
                self._runs = [_Run(cache, self._loaded, options, self._observer) for cache in self._caches]
                for run in self._runs:
                    self._observer.run_started(run.cache, len(script))
                for index in range(len(script)):
                    request = script[index]
                    first = index % len(self._runs)
                    texts = {run: run.serve(request) for run in [*self._runs[first:], *self._runs[:first]]}
                    script.record_reply(index, texts[self._runs[0]])
            finally:
                for run in self._runs:
                    run.close()
                release()

    def replies(self, cache: str) -> list[list[int]]:
        """The tokens of each reply that a cache has given."""
        return next((run.replies for run in self._runs if run.cache == cache), [])

    def result(self) -> list[CacheRun]:
        """The requests that every cache has answered, a run for each cache."""
        rounds = min((len(run.rows) for run in self._runs), default=0)
        return [run.result(rounds) for run in self._runs] if rounds else []


def replay(
    loaded: LoadedModel, script: Script, caches: Sequence[str], options: ReplayOptions, observer: Observer
) -> list[CacheRun]:
    """All requests through each cache; a run for each. Raises as `Replay.run` does."""
    made = Replay(loaded, script, caches, options, observer)
    made.run()
    return made.result()


def output_hash(tokens: Sequence[int]) -> str:
    """Digest of output tokens: equal outputs, equal digests."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=OUTPUT_HASH_BYTES).hexdigest()


class _Run:
    """One cache: answers requests and watches its bytes on the way."""

    def __init__(self, cache: str, loaded: LoadedModel, options: ReplayOptions, observer: Observer) -> None:
        self.cache = cache
        self.rows: list[RequestRow] = []
        self.replies: list[list[int]] = []
        self._loaded, self._options, self._observer = loaded, options, observer
        self._backend = open_backend(
            cache,
            loaded,
            budget_bytes=options.budget_bytes,
            policy=options.policy,
            exact_step_size=options.step_size if options.exact else None,
            disk=options.disk,
            disk_bytes=options.disk_bytes,
        )
        self._wall_s = 0.0
        self._evictions: list[int] = []
        # What MLX has allocated for it: what was added during its own requests.
        self._held_bytes = self._others_bytes = 0
        self._peak_bytes = self._allocated_bytes = 0
        self._tree: str | None = None
        self._view: TreeView | None = None

    def serve(self, request: RenderedRequest) -> str:
        """Answer a request; returns the text that was generated."""
        self._others_bytes = mx.get_active_memory() - self._held_bytes
        self._peak_bytes = self._allocated_bytes = 0
        arrived_s = time.perf_counter()
        with self._backend.begin(request.prompt) as run:
            begun_s = time.perf_counter()
            completion, decode_ms, text = self._reply(run, request, arrived_s)
            cached_tokens, matched_tokens, reason = run.cached_tokens, run.matched_tokens, run.reason
            self._watch(settled=True)
            closing_s = time.perf_counter()
        closed_s = time.perf_counter()
        self._watch(settled=True)
        del run
        self._held_bytes = mx.get_active_memory() - self._others_bytes
        assert completion.ttft_ms is not None, "nothing cancels a replayed request"
        row = RequestRow(
            user=request.user,
            conversation_id=request.conversation_id,
            turn=request.turn,
            prompt_tokens=len(request.prompt.tokens),
            matched_tokens=matched_tokens,
            cached_tokens=cached_tokens,
            reason=reason,
            ttft_ms=completion.ttft_ms,
            begin_ms=(begun_s - arrived_s) * 1e3,
            decode_ms=decode_ms,
            close_ms=(closed_s - closing_s) * 1e3,
            live_bytes=self._backend.live_bytes,
            paged_bytes=self._backend.paged_bytes,
            peak_bytes=self._peak_bytes,
            allocated_bytes=self._allocated_bytes,
            output_tokens=completion.completion_tokens,
            output_hash=output_hash(completion.tokens),
            done_reason=completion.done_reason,
        )
        self.rows.append(row)
        self.replies.append(list(completion.tokens))
        self._evictions.append(self._backend.evictions)
        self._wall_s += time.perf_counter() - arrived_s
        self._observer.request_done(self.cache, row.prompt_tokens)
        return text

    def close(self) -> None:
        """Let go of every array, and keep what is to be shown."""
        shown, tokenizer = self._backend.shown, self._loaded.tokenizer
        self._tree = shown.dump(tokenizer) if shown is not None and self._options.dump_tree else None
        self._view = shown.view(tokenizer=tokenizer) if shown is not None and self._options.keep_view else None
        self._backend.close()

    def result(self, rounds: int) -> CacheRun:
        """The first so many requests."""
        rows = tuple(self.rows[:rounds])
        return CacheRun(self.cache, rows, self._evictions[rounds - 1], self._wall_s, self._tree, self._view)

    def _reply(self, run: LiveRun, request: RenderedRequest, arrived_s: float) -> tuple[Completion, float, str]:
        """Generate the reply, or its first token and feed the recorded one; what it came to, decode ms, the text."""

        def prefilled(offset: int, prompt_tokens: int) -> None:
            self._watch()
            self._observer.request_advanced(self.cache, offset, prompt_tokens)

        pieces = generate(
            run,
            self._loaded.model,
            self._loaded.tokenizer,
            max_tokens=1 if self._options.recorded else self._options.max_tokens,
            step_size=self._options.step_size,
            on_progress=prefilled,
            arrived_at_s=arrived_s,
        )
        completion, text = None, ""
        for piece in pieces:
            text += piece.text
            completion = piece.completion
        assert completion is not None, "the last piece carries it"
        if not self._options.recorded:
            return completion, completion.completion_ms, text
        feeding_s = time.perf_counter()
        feed(run, self._loaded.model, request.reply, step_size=self._options.step_size)
        return completion, (time.perf_counter() - feeding_s) * 1e3, text

    def _watch(self, settled: bool = False) -> None:
        """Note what is held now. The allocator's figure is only fair when no forward pass has temporary arrays."""
        self._peak_bytes = max(self._peak_bytes, self._backend.live_bytes + self._backend.paged_bytes)
        if settled:
            self._allocated_bytes = max(self._allocated_bytes, mx.get_active_memory() - self._others_bytes)


def release() -> None:
    """Give the buffers that nobody holds any more back to the system."""
    gc.collect()
    mx.clear_cache()


def warm_up(loaded: LoadedModel, prompt: Prompt) -> None:
    """Run one short prompt and one decode step, so that the first cache does not pay for compiling and paging in."""
    tokens = prompt.tokens[:WARM_UP_TOKENS]
    run = PlainRun(tokens, make_prompt_cache(loaded.model))
    for _ in generate(run, loaded.model, loaded.tokenizer, max_tokens=2):
        pass
