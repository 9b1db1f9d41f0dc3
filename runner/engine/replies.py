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

One reply as it grows: what is sampled becomes text, pieces, and at its end a completion.

Whoever runs the model, one request at a time or many together, hands the tokens in; what is said of them is said here.

Invariants, each with a test:

  Y1  The texts of all pieces, joined, are a prefix of the decoded reply, and no piece ends inside a UTF-8 character,
      unless it was asked to.
  Y2  The last piece, and no other, carries the completion.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from radixcache.generate import decode
from radixcache.settings import require_count

# What an unfinished character decodes to.
REPLACEMENT_CHARACTER = "\ufffd"

DoneReason = Literal["stop", "length", "cancelled", "error"]
Sampler = Callable[[mx.array], mx.array]
StopTokens = Collection[int] | Callable[[int], bool]


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
    # Tokens of the conversation that were taken out of the context while the reply was generated: it was shifted.
    shifted_tokens: int = 0
    # Prompt tokens that were left out before prefill, since the conversation is longer than the context.
    omitted_tokens: int = 0
    # Why a reply ended short of what was asked, in a sentence, where done_reason does not say it all.
    note: str | None = None
    # What was raised, when done_reason is "error".
    error: Exception | None = None

    @property
    def completion_tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens)


class Piece(NamedTuple):
    """One token of the reply, with the text it completes; the last piece carries the completion.

    `logprobs` has shape (V,), float32. Text that is held back until a character is whole comes with a later piece. A
    stop token brings no text. The last piece of a cancelled or failed request may have no token. `logprob` is the
    token's own, where it was read together with it.
    """

    text: str
    token: int | None = None
    logprobs: mx.array | None = None
    logprob: float | None = None
    completion: Completion | None = None


class Reply:
    """Takes the sampled tokens of one request in order, and makes pieces of them.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper, for its streaming detokenizer and its stop tokens.
        max_tokens: tokens at most, at least 1.
        stop_tokens: ids that end the reply, or a function that is asked once about each token, in order, whether it
            does. Default: the tokenizer's.
        cuts_characters: leave out, at the end, a character that is not whole; else it comes as U+FFFD, as in mlx-lm.
        prompt_tokens: length of the prompt, for the completion.
        arrived_at_s: `time.perf_counter()` when the request arrived. Default: now.

    Attributes:
        cached_tokens, shifted_tokens, omitted_tokens: for the completion; as in `Completion`.

    Raises:
        ValueError: max_tokens is below 1.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_tokens: int,
        stop_tokens: StopTokens | None,
        prompt_tokens: int,
        arrived_at_s: float | None = None,
        cuts_characters: bool = True,
    ) -> None:
        self.max_tokens = require_count("max_tokens", max_tokens, "tokens")
        self.cached_tokens = 0
        self.shifted_tokens = 0
        self.omitted_tokens = 0
        self.tokens: list[int] = []
        stop_tokens = tokenizer.eos_token_ids if stop_tokens is None else stop_tokens
        self._is_stop = stop_tokens if callable(stop_tokens) else frozenset(stop_tokens).__contains__
        self._prompt_tokens = prompt_tokens
        self._text = _TextStream(tokenizer.detokenizer, cuts_characters)
        self._clock = _Clock(arrived_at_s)

    @property
    def left(self) -> int:
        """How many more tokens may be sampled."""
        return self.max_tokens - len(self.tokens)

    def start(self) -> None:
        """Prefill begins now. Without it: when the reply was made."""
        self._clock.start()

    def add(self, token: int, logprobs: mx.array, cancelled: Callable[[], bool], logprob: float | None = None) -> Piece:
        """Take the next token; `cancelled` is asked when it is not the last one anyway.

        Raises:
            ValueError: the token is below 0: the sampler went outside the vocabulary.
        """
        if token < 0:
            raise ValueError(f"the sampler returned an id outside the vocabulary of {logprobs.size} tokens.")
        self.tokens.append(token)
        self._clock.token_arrived()
        if self._is_stop(token):
            return Piece(self._text.finish(), token, logprobs, logprob, self._complete("stop"))
        segment = self._text.add(token)
        reason: DoneReason | None = "length" if self.left == 0 else "cancelled" if cancelled() else None
        if reason is None:
            return Piece(segment, token, logprobs, logprob)
        return Piece(segment + self._text.finish(), token, logprobs, logprob, self._complete(reason))

    def end(self, reason: DoneReason, *, note: str | None = None, error: Exception | None = None) -> Piece:
        """End the reply without another token."""
        try:
            text = self._text.finish() if self.tokens else ""
        except Exception:
            # A text that cannot be made is what brought this about, most likely.
            if reason != "error":
                raise
            text = ""
        return Piece(text, completion=self._complete(reason, note, error))

    def _complete(self, reason: DoneReason, note: str | None = None, error: Exception | None = None) -> Completion:
        prompt_ms, ttft_ms, completion_ms = self._clock.durations_ms()
        return Completion(
            done_reason=reason,
            tokens=tuple(self.tokens),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            prompt_ms=prompt_ms,
            ttft_ms=ttft_ms,
            completion_ms=completion_ms,
            shifted_tokens=self.shifted_tokens,
            omitted_tokens=self.omitted_tokens,
            note=note,
            error=error,
        )


def log_probabilities(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Of logits (N, V): log-probabilities (N, V), float32, and what they sum up to (N, 1).

    Both are pending. One logit that is no number, or infinite, is enough for a sum that is none.
    """
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    return logits - total, total


def greedy(logprobs: mx.array) -> mx.array:
    """The sampler that takes the likeliest token: (N, V) to (N,)."""
    return mx.argmax(logprobs, axis=-1)


def sample(sampler: Sampler | None, logprobs: mx.array) -> mx.array:
    """Let a sampler choose a token (1,) from log-probabilities (1, V), pending. None: the likeliest.

    An id outside the vocabulary becomes -1, which a forward pass survives and `Reply.add` refuses.

    Raises:
        TypeError: it returned anything but one integer.
    """
    if sampler is None:
        return greedy(logprobs)
    chosen = sampler(logprobs)
    try:
        token = mx.array(chosen)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the sampler returned a {type(chosen).__name__}; wanted one token id.") from error
    if token.size != 1 or not mx.issubdtype(token.dtype, mx.integer):
        raise TypeError(f"the sampler returned {token.dtype} of shape {token.shape}; wanted one token id.")
    token = token.reshape(1).astype(mx.int32)
    return mx.where((token >= 0) & (token < logprobs.shape[-1]), token, -1)


class _Clock:
    """Marks the moments of one request and turns them into durations."""

    def __init__(self, arrived_at_s: float | None) -> None:
        self._started_s = time.perf_counter()
        self._arrived_s = self._started_s if arrived_at_s is None else arrived_at_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    def start(self) -> None:
        self._started_s = time.perf_counter()

    def token_arrived(self) -> None:
        self._last_token_s = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def durations_ms(self) -> tuple[float | None, float | None, float]:
        """`prompt_ms`, `ttft_ms` and `completion_ms` of a `Completion`."""
        first, last = self._first_token_s, self._last_token_s
        if first is None or last is None:
            return None, None, 0.0
        return (first - self._started_s) * 1e3, (first - self._arrived_s) * 1e3, (last - first) * 1e3


class _TextStream:
    """Hands out the text of a growing reply in segments that end between characters."""

    def __init__(self, detokenizer: Any, cuts_characters: bool) -> None:
        self._detokenizer = detokenizer
        self._cuts_characters = cuts_characters

    def add(self, token: int) -> str:
        """Return the text that this token completes, which may be none."""
        self._detokenizer.add_token(token)
        return str(self._detokenizer.last_segment)

    def finish(self) -> str:
        """Return what was held back, as a rule less the character that the reply's end cut in two."""
        self._detokenizer.finalize()
        segment = str(self._detokenizer.last_segment)
        return segment.rstrip(REPLACEMENT_CHARACTER) if self._cuts_characters else segment


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
