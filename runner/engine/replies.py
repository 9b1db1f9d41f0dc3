"""One reply as it grows, and `generate`, which makes one reply by itself. Many at once: runner/engine/generator.py.

`Reply` turns sampled tokens of one request into pieces of text and a completion. `generate` drives a `LiveRun`, such as
a Session of radixcache, by the one loop that decodes: radixcache/decode.py.

Invariants, each with a test:

  Y1  The joined texts of all pieces are a prefix of the decoded reply. No piece ends inside a UTF-8 character, unless
      the caller asks for that.
  Y2  The last piece, and no other, carries the completion.
  Y3  The text ends before the first stop word in it, however that was cut into tokens, and no piece has a part of it.
  PL1  The forward pass that follows a token is dispatched before that token is read, except after the last token.
  PL2  The run records every token that it was stepped with. So it always knows what its caches hold.
  PL3  MLX's compiled mode is what it was before, also if the generator is closed early or the model raises.

Not thread-safe. Compiled mode is a setting of the whole process: one generator at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from radixcache.decode import Guidance, LogitsProcessor, Sampler
from radixcache.generate import decode
from radixcache.settings import require_count
from radixcache.speculate.drafting import Drafting

DEFAULT_STEP_SIZE = 2048
REPLACEMENT_CHARACTER = "\ufffd"  # what an unfinished character decodes to

DoneReason = Literal["stop", "length", "cancelled", "error"]
ProgressCallback = Callable[[int, int], None]  # called with the offset reached and the length of the prompt


@dataclass(frozen=True)
class Completion:
    """The result of a whole request.

    Attributes:
        tokens: all sampled tokens, with a stop token.
        prompt_ms: from the start of prefill to the first token; None without one.
        ttft_ms: from the request's arrival to the first token: lookup, page-in and `prompt_ms`.
        completion_ms: from the first token to the last.
        shifted_tokens: taken out of the full context during the reply.
        omitted_tokens: of the prompt, left out before prefill because the conversation exceeds the context.
        note: why the reply is shorter than requested, if `done_reason` does not say it.
        error: the exception, if `done_reason` is "error".
    """

    done_reason: DoneReason
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    prompt_ms: float | None
    ttft_ms: float | None
    completion_ms: float
    shifted_tokens: int = 0
    omitted_tokens: int = 0
    note: str | None = None
    error: Exception | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)


class Piece(NamedTuple):
    """One token of the reply, with the text it completes; the last piece carries the completion.

    An unfinished character, and text that may be the beginning of a stop word, come with a later piece. A stop token
    has no text. The last piece of a cancelled or failed request may have no token. `logprobs`, if wanted, are (V,),
    float32; `logprob` is the token's own, if known. `stop_word`: the one that ended the reply.
    """

    text: str
    token: int | None = None
    logprobs: mx.array | None = None
    logprob: float | None = None
    completion: Completion | None = None
    stop_word: str | None = None


class StopWords:
    """Finds stop words in the text of one reply. Holds text back that may be the beginning of one."""

    def __init__(self, words: Collection[str]) -> None:
        self._words, self._held = words, ""
        self._longest = max(map(len, words), default=0)

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str | None]:
        """Return the text to show, and the stop word before which it ends: the first to end, the longest of these."""
        text = self._held + text
        ends = [(at + len(word), -len(word), word) for word in self._words if (at := text.find(word)) >= 0]
        if ends:
            end, length, word = min(ends)
            self._held = ""
            return text[: end + length], word
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        tails = (text[start:] for start in starts) if not is_last else ()
        self._held = next((tail for tail in tails if any(word.startswith(tail) for word in self._words)), "")
        return text.removesuffix(self._held), None


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """How a reply is made, and where it ends. ValueError: a value is out of its range.

    Attributes:
        max_tokens: most tokens to sample, at least 1.
        sampler: mlx-lm's, or None for the most likely token.
        logits_processors: mlx-lm's, called with prompt and reply so far (T,) and logits (1, V), float32.
        guidance: from the token before, None at the beginning of a reply, to the tokens (V,) that may be next.
        has_logprobs: whether the pieces have log-probabilities, which take time on a CPU.
        stop_tokens: ids that end the reply. Default: the tokenizer's.
        stop_words: texts that end the reply.
        cuts_characters: leave out an unfinished character at the end; else it comes as U+FFFD, as in mlx-lm.
        reserve: tokens of the reply to reserve room for. Default: max_tokens. With less, more requests come in, and one
            may have to wait again in the middle of its reply.
        prediction: token ids that the reply is expected to have; they are proposed to it. At most twice `max_tokens` of
            them are used.
        num_draft_tokens: most tokens that the draft model proposes at a time, if there is one.
        arrived_at_s: when the request arrived, by time.perf_counter(); TTFT counts from then. Default: now.
    """

    max_tokens: int
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    guidance: Guidance | None = None
    has_logprobs: bool = False
    stop_tokens: Collection[int] | None = None
    stop_words: Collection[str] = ()
    cuts_characters: bool = True
    reserve: int | None = None
    prediction: Any = None
    num_draft_tokens: int = 3
    arrived_at_s: float | None = None

    def __post_init__(self) -> None:
        require_count("max_tokens", self.max_tokens, "tokens")
        require_count("num_draft_tokens", self.num_draft_tokens, "tokens", least=0)
        if self.reserve is not None:
            require_count("reserve", self.reserve, "tokens")
        if self.sampler is not None and not callable(self.sampler):
            raise ValueError(f"sampler is a {type(self.sampler).__name__}; wanted a function of log-probabilities.")


class Reply:
    """Turns the sampled tokens of one request into pieces."""

    def __init__(self, tokenizer: Any, options: ReplyOptions, prompt_tokens: int) -> None:
        self.max_tokens = options.max_tokens
        self.cached_tokens = self.shifted_tokens = self.omitted_tokens = 0
        self.tokens: list[int] = []
        self._stop_tokens = frozenset(tokenizer.eos_token_ids if options.stop_tokens is None else options.stop_tokens)
        self._stop_words = StopWords(options.stop_words)
        self._prompt_tokens = prompt_tokens
        self._detokenizer, self._cuts_characters = tokenizer.detokenizer, options.cuts_characters
        self._started_s = time.perf_counter()
        self._arrived_s = self._started_s if options.arrived_at_s is None else options.arrived_at_s
        self._first_s: float | None = None
        self._last_s = 0.0

    @property
    def left(self) -> int:
        return self.max_tokens - len(self.tokens)

    def start(self) -> None:
        """Note that prefill begins now; by default it began with the reply."""
        self._started_s = time.perf_counter()

    def add(
        self, token: int, logprobs: mx.array | None, cancelled: Callable[[], bool], logprob: float | None = None
    ) -> Piece:
        """Take the next token; `cancelled` is called unless it is the last one. ValueError: the token is below 0."""
        if token < 0:
            raise ValueError("the sampler returned an id outside the vocabulary.")
        self.tokens.append(token)
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = self._last_s
        reason: DoneReason | None = "stop"
        text, stop_word = "", None
        if token not in self._stop_tokens:
            self._detokenizer.add_token(token)
            text, stop_word = self._stop_words.add(str(self._detokenizer.last_segment))
            if stop_word is None:
                reason = "length" if self.left == 0 else "cancelled" if cancelled() else None
        if reason is not None and stop_word is None:
            last, stop_word = self._last_text()
            text, reason = text + last, reason if stop_word is None else "stop"
        return Piece(text, token, logprobs, logprob, None if reason is None else self._complete(reason), stop_word)

    def end(self, reason: DoneReason, *, note: str | None = None, error: Exception | None = None) -> Piece:
        try:
            text, stop_word = self._last_text() if self.tokens else ("", None)
        except Exception:
            # The error that ends the reply may be that its text cannot be decoded.
            if reason != "error":
                raise
            text, stop_word = "", None
        return Piece(text, completion=self._complete(reason, note, error), stop_word=stop_word)

    def _last_text(self) -> tuple[str, str | None]:
        """The text that detokenizer and stop words held back, and the stop word that it ends before."""
        self._detokenizer.finalize()
        text = str(self._detokenizer.last_segment)
        text = text.rstrip(REPLACEMENT_CHARACTER) if self._cuts_characters else text
        return self._stop_words.add(text, is_last=True)

    def _complete(self, reason: DoneReason, note: str | None = None, error: Exception | None = None) -> Completion:
        first_s = self._first_s
        return Completion(
            done_reason=reason,
            tokens=tuple(self.tokens),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            prompt_ms=None if first_s is None else (first_s - self._started_s) * 1e3,
            ttft_ms=None if first_s is None else (first_s - self._arrived_s) * 1e3,
            completion_ms=0.0 if first_s is None else (self._last_s - first_s) * 1e3,
            shifted_tokens=self.shifted_tokens,
            omitted_tokens=self.omitted_tokens,
            note=note,
            error=error,
        )


class LiveRun(Protocol):
    """The live caches of one request; the members are those of `radixcache.Session`, and `remaining` is never empty."""

    @property
    def cached_tokens(self) -> int: ...

    @property
    def matched_tokens(self) -> int: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def remaining(self) -> NDArray[np.int32]: ...

    @property
    def owed_tokens(self) -> int: ...

    def prefill(
        self, model: Any, *, step_size: int = DEFAULT_STEP_SIZE, on_progress: ProgressCallback | None = None
    ) -> None:
        """Evaluate `remaining[:-1]` in chunks; call `on_progress` at the start and after each."""

    def step(self, model: Any, tokens: Any) -> mx.array:
        """Dispatch the forward pass of the next tokens without waiting for it; logits (1, T, V)."""


class _CancelledError(Exception):
    pass


def _never() -> bool:
    return False


def generate(
    run: LiveRun,
    model: Any,
    tokenizer: Any,
    *,
    step_size: int = DEFAULT_STEP_SIZE,
    cancelled: Callable[[], bool] = _never,
    on_progress: ProgressCallback | None = None,
    drafting: Drafting | None = None,
    **options: Any,
) -> Iterator[Piece]:
    """Prefill the run's remaining prompt, then yield the reply token by token.

    The caller closes `run`. `cancelled` is called between chunks and tokens. With `drafting`, what
    PrefixCache.drafting() gave for this prompt, the run is a session of that cache. `options` are fields of
    ReplyOptions; processors, guidance and predictions are for ParallelGenerator.

    Raises:
        ValueError: max_tokens or step_size is below 1, or the sampler returned an id outside the vocabulary.
        TypeError: the sampler returned anything but one integer.
    """
    require_count("step_size", step_size, "tokens")
    remaining = run.remaining
    length = run.cached_tokens + len(remaining)
    asked = ReplyOptions(**options)
    reply = Reply(tokenizer, asked, length)

    def chunk_done(offset: int, length: int) -> None:
        mx.clear_cache()
        if on_progress is not None:
            on_progress(offset, length)
        if cancelled():
            raise _CancelledError

    with compile_mode(model):
        try:
            run.prefill(model, step_size=step_size, on_progress=chunk_done)
        except _CancelledError:
            reply.cached_tokens = run.cached_tokens
            yield reply.end("cancelled")
            return
        more: dict[str, Any] = {"sampler": asked.sampler, "drafting": drafting, "dtype": mx.float32}
        said = decode(run, model, remaining, asked.max_tokens, **more)
        for token, logprobs, _ in said:
            reply.cached_tokens = run.cached_tokens
            piece = reply.add(token, logprobs, cancelled)
            if len(reply.tokens) == 1 and on_progress is not None:
                on_progress(length, length)
            yield piece
            if piece.completion is not None:
                return


def feed(
    run: LiveRun,
    model: Any,
    tokens: NDArray[np.int32],
    *,
    step_size: int = DEFAULT_STEP_SIZE,
    cancelled: Callable[[], bool] = _never,
) -> int:
    """Evaluate a known reply, so that the run's caches hold it. Returns how many tokens went in."""
    done = 0
    with compile_mode(model):
        while done < len(tokens) and not cancelled():
            chunk = tokens[done : done + step_size]
            # Waiting for the logits, which are not needed, limits the work in flight to one chunk.
            mx.eval(run.step(model, mx.array(chunk))[:, -1, :1])
            mx.clear_cache()
            done += len(chunk)
    return done


@contextmanager
def compile_mode(model: Any) -> Iterator[None]:
    """Switch MLX's compiled mode off in the block if the model's `enable_compile` is false."""
    wanted = getattr(model, "enable_compile", True)
    if callable(wanted):
        wanted = wanted()
    # A user who disabled compiling for the whole process must not find it enabled afterwards.
    if wanted or "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
