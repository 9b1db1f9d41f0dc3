"""Generate one reply: prefill in chunks, then decode one step ahead of what is yielded.

What is driven is a `LiveRun`: the live caches of one request, wherever they come from. A radixcache Session is one, and
so is the plain list of mlx-lm caches that other caches of a replay wrap: all are measured on the loop of
`radixcache.stream_generate` (`radixcache.generate.decode`).

Invariants, each with a test:

  PL1  The forward pass that follows a token is dispatched before that token is read, except after the last one that
      `max_tokens` allows: there is nothing to predict from it.
  PL2  The run itself records every token that it was stepped with. Stopping early, for whatever reason, therefore
      leaves the run knowing exactly what its caches hold.
  PL3  MLX's compiled mode is what it was before, also when the generator is closed early or the model raises.

Not thread-safe, and compiled mode is a setting of the whole process: one generator at a time.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from radixcache.generate import decode
from radixcache.settings import require_count
from runner.replies.reply import Piece, Reply, Sampler, log_probabilities, sample

DEFAULT_STEP_SIZE = 2048

ProgressCallback = Callable[[int, int], None]


class LiveRun(Protocol):
    """The live caches of one request, and the only way to move them forward. `radixcache.Session` is one."""

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens were restored instead of evaluated."""

    @property
    def matched_tokens(self) -> int:
        """How many of the prompt's first tokens the cache has seen before."""

    @property
    def reason(self) -> str | None:
        """Why fewer tokens were restored than matched; None when none were lost."""

    @property
    def remaining(self) -> NDArray[np.int32]:
        """The prompt's tokens past `cached_tokens`. Never empty."""

    def prefill(
        self, model: Any, *, step_size: int = DEFAULT_STEP_SIZE, on_progress: ProgressCallback | None = None
    ) -> None:
        """Evaluate `remaining[:-1]` in chunks; `on_progress(offset, prompt tokens)` at the start and after each."""

    def step(self, model: Any, tokens: Any) -> mx.array:
        """Dispatch the forward pass of the next tokens without waiting for it; logits (1, T, V)."""


class _CancelledError(Exception):
    """Raised out of a progress callback to leave a prefill between two chunks."""


def generate(
    run: LiveRun,
    model: Any,
    tokenizer: Any,
    *,
    max_tokens: int,
    sampler: Sampler | None = None,
    stop_tokens: Collection[int] | None = None,
    step_size: int = DEFAULT_STEP_SIZE,
    cancelled: Callable[[], bool] | None = None,
    on_progress: ProgressCallback | None = None,
    arrived_at_s: float | None = None,
) -> Iterator[Piece]:
    """Prefill the run's remaining prompt, then yield the reply token by token.

    Args:
        run: live caches standing at `run.cached_tokens`. Closing it is the caller's business (`with`).
        model: an mlx-lm model. When it defines `enable_compile` and that says no, MLX's compiled mode is off meanwhile.
        tokenizer: mlx-lm's TokenizerWrapper, for its streaming detokenizer and its stop tokens.
        max_tokens: tokens to sample at most, at least 1.
        sampler: log-probabilities (1, V) to token (1,); mlx_lm.sample_utils.make_sampler makes them. Default: greedy.
        stop_tokens: ids that end the reply. Default: the tokenizer's.
        step_size: tokens per prefill chunk.
        cancelled: asked between chunks and between tokens; `threading.Event().is_set` fits.
        on_progress: told (offset reached, prompt tokens) at the start and after each chunk.
        arrived_at_s: `time.perf_counter()` when the request arrived. Default: now.

    Raises:
        ValueError: max_tokens or step_size is below 1, or the sampler returned an id outside the vocabulary.
        TypeError: the sampler returned anything but one integer.
    """
    require_count("step_size", step_size, "tokens")
    reply = Reply(
        tokenizer,
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        prompt_tokens=run.cached_tokens + len(run.remaining),
        arrived_at_s=arrived_at_s,
    )
    with compile_mode(model):
        yield from _generate(run, model, reply, sampler, step_size, cancelled or _never, on_progress)


def feed(
    run: LiveRun,
    model: Any,
    tokens: NDArray[np.int32],
    *,
    step_size: int = DEFAULT_STEP_SIZE,
    cancelled: Callable[[], bool] | None = None,
) -> int:
    """Evaluate a reply that is known already, so that the run's caches hold it. Returns how many tokens went in."""
    done = 0
    with compile_mode(model):
        while done < len(tokens) and not (cancelled or _never)():
            chunk = tokens[done : done + step_size]
            # Nobody wants the logits, but waiting for them keeps one chunk at a time in flight.
            mx.eval(run.step(model, mx.array(chunk))[:, -1, :1])
            mx.clear_cache()
            done += len(chunk)
    return done


@contextmanager
def compile_mode(model: Any) -> Iterator[None]:
    """Switch MLX's compiled mode off while the block runs, when the model's `enable_compile` says no."""
    wanted = getattr(model, "enable_compile", True)
    if callable(wanted):
        wanted = wanted()
    # Whoever disabled compiling for the whole process must not find it enabled afterwards.
    if wanted or "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _generate(
    run: LiveRun,
    model: Any,
    reply: Reply,
    sampler: Sampler | None,
    step_size: int,
    cancelled: Callable[[], bool],
    on_progress: ProgressCallback | None,
) -> Iterator[Piece]:
    remaining = run.remaining
    prompt_tokens = run.cached_tokens + len(remaining)
    try:
        _prefill(run, model, step_size, cancelled, on_progress)
    except _CancelledError:
        reply.cached_tokens = run.cached_tokens
        yield reply.end("cancelled")
        return

    def choose(_: Any, logits: mx.array) -> tuple[mx.array, mx.array]:
        logprobs, _ = log_probabilities(logits[:, -1])
        return sample(sampler, logprobs), logprobs

    for token, logprobs in decode(run, model, mx.array(remaining[-1:]), choose, max_tokens=reply.max_tokens):
        reply.cached_tokens = run.cached_tokens
        piece = reply.add(token, logprobs, cancelled)
        if len(reply.tokens) == 1 and on_progress is not None:
            on_progress(prompt_tokens, prompt_tokens)
        yield piece
        if piece.completion is not None:
            return


def _prefill(
    run: LiveRun, model: Any, step_size: int, cancelled: Callable[[], bool], on_progress: ProgressCallback | None
) -> None:
    """Prefill with the checks between chunks that every cache gets alike; `_CancelledError` when asked to stop."""

    def chunk_done(offset: int, prompt_tokens: int) -> None:
        mx.clear_cache()
        if on_progress is not None:
            on_progress(offset, prompt_tokens)
        if cancelled():
            raise _CancelledError

    run.prefill(model, step_size=step_size, on_progress=chunk_done)


def _never() -> bool:
    return False
