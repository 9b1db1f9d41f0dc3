"""Generate one reply: prefill in chunks, then decode one step ahead of what is yielded.

The pipeline drives a `Run`: the live caches of one request, wherever they come from. A radixcache Session is one, and
so is the plain list of mlx-lm caches that the other backends wrap: every cache is measured on the same code.

Invariants, each with a test:

  P1  The forward pass that follows a token is dispatched before that token is read, except after the last one that
      `max_tokens` allows: there is nothing to predict from it.
  P2  Every token the run was stepped with is recorded by the run itself. Stopping early, for whatever reason, therefore
      leaves the run knowing exactly what its caches hold.
  P3  The texts of all pieces, joined, are a prefix of the decoded reply, and no piece ends inside a UTF-8 character.
  P4  MLX's compiled mode is what it was before, also when the generator is closed early or the model raises.

Not thread-safe, and compiled mode is a setting of the whole process: one generator at a time.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

DEFAULT_STEP_SIZE = 2048
# How many decoded tokens pass between two releases of MLX's free buffers.
RELEASE_INTERVAL_TOKENS = 256

# What an unfinished character decodes to.
REPLACEMENT_CHARACTER = "\ufffd"

DoneReason = Literal["stop", "length", "cancelled"]
Sampler = Callable[[mx.array], mx.array]
ProgressCallback = Callable[[int, int], None]


class Run(Protocol):
    """The live caches of one request, and the only way to move them forward. `radixcache.Session` is one."""

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens were restored instead of evaluated."""

    @property
    def remaining(self) -> NDArray[np.int32]:
        """The prompt's tokens past `cached_tokens`. Never empty."""

    def prefill(
        self, model: Any, *, step_size: int = DEFAULT_STEP_SIZE, on_progress: ProgressCallback | None = None
    ) -> None:
        """Evaluate `remaining[:-1]` in chunks; `on_progress(offset, prompt tokens)` at the start and after each."""

    def step(self, model: Any, tokens: Any) -> mx.array:
        """Dispatch the forward pass of the next tokens without waiting for it; logits (1, T, V)."""


@dataclass(frozen=True)
class Completion:
    """What a whole request came to. `tokens` holds all that was sampled, a stop token included."""

    done_reason: DoneReason
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    # From the start of prefill to the first token. None when the request was cancelled before it.
    prompt_ms: float | None
    # From the request's arrival to the first token: `prompt_ms` and what came before, looking up and paging in.
    ttft_ms: float | None
    # From the first token to the last.
    completion_ms: float

    @property
    def completion_tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens)


@dataclass(frozen=True)
class Piece:
    """One token of the reply, with the text it completes; the last piece carries the completion.

    `logprobs` has shape (V,), float32. Text that is held back until a character is whole comes with a later piece. A
    stop token brings no text. The last piece of a cancelled request may have no token.
    """

    text: str
    token: int | None = None
    logprobs: mx.array | None = None
    completion: Completion | None = None


class _CancelledError(Exception):
    """Raised out of a progress callback to leave a prefill between two chunks."""


def generate(
    run: Run,
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
        ValueError: max_tokens or step_size is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; wanted at least 1.")
    if step_size < 1:
        raise ValueError(f"step_size is {step_size} tokens; wanted at least 1.")
    clock = _Clock(arrived_at_s)
    with compile_mode(model):
        yield from _generate(
            run,
            model,
            tokenizer,
            max_tokens=max_tokens,
            sampler=sampler or _greedy,
            stop_tokens=frozenset(tokenizer.eos_token_ids if stop_tokens is None else stop_tokens),
            step_size=step_size,
            cancelled=cancelled or _never,
            on_progress=on_progress,
            clock=clock,
        )


def feed(
    run: Run,
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
    run: Run,
    model: Any,
    tokenizer: Any,
    *,
    max_tokens: int,
    sampler: Sampler,
    stop_tokens: frozenset[int],
    step_size: int,
    cancelled: Callable[[], bool],
    on_progress: ProgressCallback | None,
    clock: "_Clock",
) -> Iterator[Piece]:
    remaining = run.remaining
    prompt_tokens = run.cached_tokens + len(remaining)
    text = _TextStream(tokenizer.detokenizer)
    tokens: list[int] = []

    def complete(reason: DoneReason) -> Completion:
        return clock.completion(reason, tuple(tokens), prompt_tokens, run.cached_tokens)

    try:
        _prefill(run, model, step_size, cancelled, on_progress)
    except _CancelledError:
        yield Piece("", completion=complete("cancelled"))
        return

    following = _dispatch(run, model, mx.array(remaining[-1:]), sampler)
    while True:
        sampled, logprobs = following
        # P1: dispatched on a token nobody has read yet. When that token turns out to be a stop token the pass was for
        # nothing; knowing that first would cost every other token a wait.
        if len(tokens) + 1 < max_tokens:
            following = _dispatch(run, model, sampled, sampler)
        token = cast(int, sampled.item())
        tokens.append(token)
        clock.token_arrived()
        if len(tokens) == 1 and on_progress is not None:
            on_progress(prompt_tokens, prompt_tokens)

        if token in stop_tokens:
            yield Piece(text.finish(), token, logprobs, complete("stop"))
            return
        segment = text.add(token)
        if len(tokens) == max_tokens:
            yield Piece(segment + text.finish(), token, logprobs, complete("length"))
            return
        if cancelled():
            yield Piece(segment + text.finish(), token, logprobs, complete("cancelled"))
            return
        yield Piece(segment, token, logprobs)
        if len(tokens) % RELEASE_INTERVAL_TOKENS == 0:
            mx.clear_cache()


def _prefill(
    run: Run, model: Any, step_size: int, cancelled: Callable[[], bool], on_progress: ProgressCallback | None
) -> None:
    """Prefill with the checks between chunks that every cache gets alike; `_CancelledError` when asked to stop."""

    def chunk_done(offset: int, prompt_tokens: int) -> None:
        mx.clear_cache()
        if on_progress is not None:
            on_progress(offset, prompt_tokens)
        if cancelled():
            raise _CancelledError

    run.prefill(model, step_size=step_size, on_progress=chunk_done)


def _dispatch(run: Run, model: Any, tokens: mx.array, sampler: Sampler) -> tuple[mx.array, mx.array]:
    """Start the forward pass and the sampling behind it. Returns (token (1,), log-probabilities (V,)), both pending."""
    logits = run.step(model, tokens)[:, -1, :].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sampled = sampler(logprobs)
    mx.async_eval(sampled, logprobs)
    return sampled, logprobs.squeeze(0)


def _greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _never() -> bool:
    return False


class _Clock:
    """Marks the moments of one request and turns them into durations."""

    def __init__(self, arrived_at_s: float | None) -> None:
        self._started_s = time.perf_counter()
        self._arrived_s = self._started_s if arrived_at_s is None else arrived_at_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    def token_arrived(self) -> None:
        self._last_token_s = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def completion(
        self, reason: DoneReason, tokens: tuple[int, ...], prompt_tokens: int, cached_tokens: int
    ) -> Completion:
        first, last = self._first_token_s, self._last_token_s
        if first is None or last is None:
            return Completion(reason, tokens, prompt_tokens, cached_tokens, None, None, 0.0)
        return Completion(
            done_reason=reason,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            prompt_ms=(first - self._started_s) * 1e3,
            ttft_ms=(first - self._arrived_s) * 1e3,
            completion_ms=(last - first) * 1e3,
        )


class _TextStream:
    """Hands out the text of a growing reply in segments that end between characters."""

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer

    def add(self, token: int) -> str:
        """Return the text that this token completes, which may be none."""
        self._detokenizer.add_token(token)
        return str(self._detokenizer.last_segment)

    def finish(self) -> str:
        """Return what was held back, less the character that the reply's end cut in two."""
        self._detokenizer.finalize()
        return str(self._detokenizer.last_segment).rstrip(REPLACEMENT_CHARACTER)
