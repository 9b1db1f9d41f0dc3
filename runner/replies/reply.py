"""One reply as it grows: what is sampled becomes text, pieces, and at its end a completion.

Whoever runs the model, one request at a time or many together, hands the tokens in; what is said of them is said here.

Invariants, each with a test:

  Y1  The texts of all pieces, joined, are a prefix of the decoded reply, and no piece ends inside a UTF-8 character,
      unless it was asked to.
  Y2  The last piece, and no other, carries the completion.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx

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
