"""Replay a script of requests through one cache after another, in one process, and record what each request cost.

Every cache gets the same prompts in the same order (see runner/script/script.py), so that answers can be compared. A
reply is generated greedily, or its first token only with the recorded reply fed after it, so that the cache holds the
conversation as it really went on.

Invariants:

  RR1  A request arrives right before its cache is asked: TTFT holds looking up, copying and paging in.
  RR2  A cache's arrays are gone before the next cache starts.
"""

import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache

from radixcache import TreeView
from runner.models.load import LoadedModel
from runner.replay.backends.backend import Backend
from runner.replay.backends.catalogue import open_backend
from runner.replay.backends.plain_run import PlainRun
from runner.replies.pipeline import DEFAULT_STEP_SIZE, LiveRun, feed, generate
from runner.replies.reply import Completion
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
    # What MLX's allocator says was in use beyond the model, at the end of the reply and after it.
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

    def request_advanced(self, done_tokens: int, prompt_tokens: int) -> None:
        """So many of the running request's prompt tokens were restored or evaluated."""

    def request_done(self, prompt_tokens: int) -> None:
        """The running request has its reply."""


def replay(
    loaded: LoadedModel,
    script: Script,
    caches: Sequence[str],
    options: ReplayOptions,
    observer: Observer,
) -> Iterator[CacheRun]:
    """Run the requests through each cache in turn, and yield each run when it is complete."""
    with wired_limit(loaded.model):
        warm_up(loaded, script[0].prompt)
        for cache in caches:
            yield _replay_cache(cache, loaded, script, options, observer)


def output_hash(tokens: Sequence[int]) -> str:
    """Digest of output tokens: equal outputs, equal digests."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=OUTPUT_HASH_BYTES).hexdigest()


def _replay_cache(
    cache: str,
    loaded: LoadedModel,
    script: Script,
    options: ReplayOptions,
    observer: Observer,
) -> CacheRun:
    release()
    observer.run_started(cache, len(script))
    model_bytes = mx.get_active_memory()
    backend = open_backend(
        cache,
        loaded,
        budget_bytes=options.budget_bytes,
        policy=options.policy,
        exact_step_size=options.step_size if options.exact else None,
    )
    try:
        started_s = time.perf_counter()
        rows = []
        for index in range(len(script)):
            request = script[index]
            row, text = _Replayer(backend, loaded, options, observer, model_bytes).run(request)
            rows.append(row)
            script.record_reply(index, text)
            observer.request_done(row.prompt_tokens)
        wall_s = time.perf_counter() - started_s
        shown = backend.shown
        tree = shown.dump(loaded.tokenizer) if shown is not None and options.dump_tree else None
        view = shown.view(tokenizer=loaded.tokenizer) if shown is not None and options.keep_view else None
        del shown
        return CacheRun(cache, tuple(rows), backend.evictions, wall_s, tree, view)
    finally:
        backend.close()
        del backend
        release()


class _Replayer:
    """One request on one cache: runs it and watches the bytes on the way."""

    def __init__(
        self, backend: Backend, loaded: LoadedModel, options: ReplayOptions, observer: Observer, model_bytes: int
    ) -> None:
        self._backend = backend
        self._loaded = loaded
        self._options = options
        self._observer = observer
        self._model_bytes = model_bytes
        self._peak_bytes = 0
        self._allocated_bytes = 0
        self._text = ""

    def run(self, request: RenderedRequest) -> tuple[RequestRow, str]:
        """Answer the request; returns its row and the text that was generated."""
        arrived_s = time.perf_counter()
        with self._backend.begin(request.prompt) as run:
            begun_s = time.perf_counter()
            completion, decode_ms = self._reply(run, request, arrived_s)
            cached_tokens, matched_tokens, reason = run.cached_tokens, run.matched_tokens, run.reason
            self._watch(settled=True)
            closing_s = time.perf_counter()
        closed_s = time.perf_counter()
        self._watch(settled=True)
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
        return row, self._text

    def _reply(self, run: LiveRun, request: RenderedRequest, arrived_s: float) -> tuple[Completion, float]:
        """Generate the reply, or its first token and feed the recorded one; returns what it came to and decode ms."""

        def prefilled(offset: int, prompt_tokens: int) -> None:
            self._watch()
            self._observer.request_advanced(offset, prompt_tokens)

        pieces = generate(
            run,
            self._loaded.model,
            self._loaded.tokenizer,
            max_tokens=1 if self._options.recorded else self._options.max_tokens,
            step_size=self._options.step_size,
            on_progress=prefilled,
            arrived_at_s=arrived_s,
        )
        completion = None
        for piece in pieces:
            self._text += piece.text
            completion = piece.completion
        assert completion is not None, "the last piece carries it"
        if not self._options.recorded:
            return completion, completion.completion_ms
        feeding_s = time.perf_counter()
        feed(run, self._loaded.model, request.reply, step_size=self._options.step_size)
        return completion, (time.perf_counter() - feeding_s) * 1e3

    def _watch(self, settled: bool = False) -> None:
        """Note what is held now. The allocator's figure is only fair when no forward pass has temporary arrays."""
        self._peak_bytes = max(self._peak_bytes, self._backend.live_bytes + self._backend.paged_bytes)
        if settled:
            self._allocated_bytes = max(self._allocated_bytes, mx.get_active_memory() - self._model_bytes)


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
