"""Generation: one reply, from its prompt to its last token. `generate` makes a reply without an engine.

`ParallelGenerator.submit` returns a Generation, which any thread may read and cancel. The engine runs the Generation
in a row of the cache's group. `add` turns each sampled token into a Token with text.

A conversation longer than the context (`ContextWindow`) loses tokens:

    system | message | message | message | question | opening | reply ...
    stays    dropped first, whole, the oldest first   stays     stays

The system prompt stays; without one, the first few tokens stay. Models need them (attention sinks; Xiao et al. 2023,
Efficient Streaming Language Models). The last message loses tokens only when all others are gone. A prompt without
marks loses any tokens but the first. The number of dropped tokens is a multiple of a share of the context, rounded up
to the end of a message. So the cut stays at one place for several turns, and a turn finds the state of the last turn.

Invariants, each with a test:

  Y1  The joined texts of all tokens are a prefix of the decoded reply. No text ends inside a UTF-8 character, unless
      the caller asks for that.
  Y2  Only the last token has the completion.
  Y3  The text ends before its first stop word, however tokens divide this word, and no token has a part of the word.
  PL1  The forward pass that follows a token is dispatched before that token is read, except after the last token.
  PL2  The run records every token that was given to `step`. So the run always knows what its caches hold.
  PL3  MLX's compiled mode is what it was before, also if the generator is closed early or the model raises.

Compiled mode is a setting of the whole process: one generator at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from radixcache.decode import Decoding, LogitsProcessor
from radixcache.errors import refuse_copy
from radixcache.generate import LateEnd, decode
from radixcache.sessions.solo import Embed
from radixcache.settings import require_count
from radixcache.speculate.drafting import Drafted, Drafting
from runner.engine.token import Completion, DoneReason, Token

DEFAULT_STEP_SIZE = 2048
REPLACEMENT_CHARACTER = "\ufffd"  # the text of an unfinished character
SINK_TOKENS = 4  # tokens that stay at the beginning of a prompt without marks
OPENING_TOKENS = 16  # most tokens that stay after the last mark: the opening of the reply
FREE_SHARE = 0.25  # of the context: most of a conversation stays, and cuts are rare

ProgressCallback = Callable[[int, int], None]  # called with the offset reached and the length of the prompt


class ContextError(ValueError):
    """A conversation cannot be cut to fit the context."""


@dataclass(frozen=True)
class ContextWindow:
    """At most `tokens` tokens of a conversation. A cut drops a multiple of the share `free_share` of `tokens`.

    Of a prompt of `length` tokens, the first `head` stay. The later messages end at the offsets `ends`, ascending.
    """

    tokens: int
    free_share: float = FREE_SHARE
    length: int = 0
    head: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"a context of {self.tokens} tokens; wanted at least 2.")
        if not 0 < self.free_share <= 1:
            raise ValueError(f"free_share is {self.free_share}; wanted more than 0 and at most 1.")

    def over(self, length: int, marks: Sequence[int], head: int | None = None) -> ContextWindow:
        """The same window for one prompt. Without `head`, the first mark is the end of the system prompt."""
        inner = sorted(mark for mark in marks if mark > 0)
        if head is None:
            head = inner[0] if inner else min(SINK_TOKENS, length)
        return ContextWindow(self.tokens, self.free_share, length, head, tuple(mark for mark in inner if mark > head))

    @property
    def limit(self) -> int:
        """The end of the part of the prompt that may be dropped."""
        opening = min(OPENING_TOKENS, self.length - self.ends[-1]) if self.ends else 0
        return max(self.head, self.length - max(opening, 1))

    @property
    def quantum(self) -> int:
        return max(1, int(self.tokens * self.free_share))

    def excess(self, length: int, room: int, dropped: int = 0) -> int:
        """Return how many tokens after the head to drop, so that `room` more fit. ContextError: too many must stay.

        `length`: tokens of prompt and reply now. `dropped`: tokens of the prompt that were dropped before.
        """
        if length + room <= self.tokens:
            return 0
        # Count from the beginning of the conversation, so that the next turns are cut at the same place.
        least = dropped + length + room - self.tokens
        aim = -(-least // self.quantum) * self.quantum
        ends = [end - self.head for end in self.ends[:-1] if end - self.head >= least]
        if ends:
            return next((end for end in ends if end >= aim), ends[-1]) - dropped
        most = self.limit - self.head
        if most < least:
            raise ContextError(
                f"{length} tokens and {room} more do not fit a context of {self.tokens}: the first {self.head} and "
                f"the last {length - (self.limit - dropped)} must stay, and dropping the {most - dropped} between "
                "them is not enough."
            )
        return min(aim, most) - dropped


class StopWords:
    """Finds stop words in the text of one reply. Holds back text that may be the beginning of a stop word."""

    def __init__(self, words: Collection[str]) -> None:
        self._words, self._held = words, ""
        self._longest = max(map(len, words), default=0)

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str | None]:
        """Return the text to show, and the stop word after this text: the first one to end; of several, the longest."""
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


@dataclass(eq=False, kw_only=True)
class Generation(Decoding):
    """One request: its options, its prompt and its reply. ValueError: an option is out of its range.

    Options of `submit` and `generate`:
        max_tokens: most tokens to sample, at least 1.
        min_tokens: no stop token and no stop word ends the reply before this many tokens.
        sampler: a sampler as in mlx-lm; None: the most likely token.
        logits_processors: as in mlx-lm, called with prompt and reply so far (T,) and logits (1, V), float32.
        guidance: from the previous token (None: the reply begins) to a mask (V,) of the tokens that may be next.
        has_logprobs: whether the tokens have log-probabilities, which take time on a CPU.
        stop_tokens: ids that end the reply. Default: the tokenizer's.
        stop_words: texts that end the reply.
        cuts_characters: leave out an unfinished character at the end; else it becomes U+FFFD, as in mlx-lm.
        reserve: reply tokens to reserve room for. Default: max_tokens. A smaller number admits more requests, but a
            request may have to wait again in the middle of its reply.
        prediction: the expected token ids of the reply, used as drafts; at most twice `max_tokens` of them.
        num_draft_tokens: most tokens that the draft model proposes at a time, if there is a draft model.
        arrived_at_s: when the request arrived, by time.perf_counter(); TTFT counts from then. Default: now.
        embed: only with `is_alone`: from an offset to the embeddings (T, D) of the prompt from this offset on, as in
            stream_generate.
        on_progress: called with tokens evaluated and prompt tokens, after each chunk of prefill.
        facts: what is known of the request so far; any thread may read it.

    Attributes:
        number: the place in the order of arrival, from 0.
        tokens, keys: the prompt without dropped tokens; after the request had to wait again, also the reply so far.
        marks, namespace: as given to the group.
        window: the context; None: only the capacity limits it. `dropped` tokens after its head are not in `tokens`.
        said: the tokens of the reply; `in_reply` of them are part of `tokens`.
        note: why the reply cannot continue, though nothing failed.
    """

    tokenizer: Any
    max_tokens: int
    min_tokens: int = 0
    logits_processors: InitVar[Sequence[LogitsProcessor]] = ()
    stop_tokens: Collection[int] | None = None
    stop_words: Collection[str] = ()
    cuts_characters: bool = True
    reserve: int | None = None
    prediction: Any = None
    num_draft_tokens: int = 3
    arrived_at_s: float | None = None
    embed: Embed | None = None
    on_progress: ProgressCallback | None = None
    facts: Completion = field(default_factory=Completion)
    keys: Any = None
    marks: tuple[int, ...] = ()
    namespace: str = ""
    window: ContextWindow | None = None
    number: int = field(default=-1, init=False)
    dropped: int = field(default=0, init=False)
    in_reply: int = field(default=0, init=False)
    note: str | None = field(default=None, init=False)

    def __post_init__(self, logits_processors: Sequence[LogitsProcessor]) -> None:
        super().__post_init__()
        require_count("max_tokens", self.max_tokens, "tokens")
        require_count("min_tokens", self.min_tokens, "tokens", least=0)
        require_count("num_draft_tokens", self.num_draft_tokens, "tokens", least=0)
        if self.reserve is not None:
            require_count("reserve", self.reserve, "tokens")
        if self.sampler is not None and not callable(self.sampler):
            raise ValueError(f"sampler is a {type(self.sampler).__name__}; wanted a function of log-probabilities.")
        self.facts.prompt_tokens = len(self.tokens)
        self.said: list[int] = []
        self._room = self.max_tokens if self.reserve is None else self.reserve
        self._ends = frozenset(self.tokenizer.eos_token_ids if self.stop_tokens is None else self.stop_tokens)
        late = [LateEnd(self._ends, self.min_tokens)] if self.min_tokens else []
        self.processors = [*logits_processors, *late]
        self._words, self._detokenizer = StopWords(self.stop_words), self.tokenizer.detokenizer
        self._arrived_s = time.perf_counter() if self.arrived_at_s is None else self.arrived_at_s
        self._last_s = 0.0
        self._gaps_ms: list[float] = []
        self._cancelled = threading.Event()

    def __repr__(self) -> str:
        state = self.facts.done_reason or "waiting or running"
        return f"<Generation {self.number} {state}: prompt of {self.facts.prompt_tokens} tokens>"

    __reduce_ex__ = refuse_copy

    # Any thread.

    def cancel(self) -> None:
        """End the reply after the token that is being computed; computed state stays in the cache."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def completion(self) -> Completion | None:
        """The result; None until the reply is over. The last token has it too."""
        return None if self.facts.done_reason is None else self.facts

    @property
    def matched_tokens(self) -> int:
        """As in `facts`."""
        return self.facts.matched_tokens

    @property
    def reason(self) -> str | None:
        """As in `facts`."""
        return self.facts.reason

    @property
    def drafted(self) -> Mapping[str, Drafted]:
        """As in `facts`."""
        return self.facts.drafted

    # The reply.

    @property
    def left(self) -> int:
        return self.max_tokens - len(self.said)

    def start(self) -> None:
        """Note that prefill begins now, and how long the request has waited."""
        self.facts.queue_ms = (time.perf_counter() - self._arrived_s) * 1e3

    def add(
        self,
        token: int,
        logprobs: mx.array | None = None,
        logprob: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Token:
        """Take the next token of the reply. `cancelled` is called unless this token is the last one.

        ValueError: the token is below 0.
        """
        if token < 0:
            raise ValueError("the sampler returned an id outside the vocabulary.")
        self.said.append(token)
        now_s, facts = time.perf_counter(), self.facts
        if facts.ttft_ms is None:
            facts.ttft_ms = (now_s - self._arrived_s) * 1e3
        else:
            self._gaps_ms.append((now_s - self._last_s) * 1e3)
        self._last_s = now_s
        reason: DoneReason | None = "stop"
        text, stop_word = "", None
        if token not in self._ends:
            self._detokenizer.add_token(token)
            text = str(self._detokenizer.last_segment)
            if len(self.said) >= self.min_tokens:
                text, stop_word = self._words.add(text)
            if stop_word is None:
                reason = "length" if self.left == 0 else "cancelled" if (cancelled or self.cancelled)() else None
        if reason is not None and stop_word is None:
            last, stop_word = self._last_text()
            text, reason = text + last, reason if stop_word is None else "stop"
        finish: Any = reason if reason in ("stop", "length") else None
        done = None if reason is None else self._complete(reason)
        return Token(text, token, logprob, (), finish, stop_word, logprobs=logprobs, completion=done)

    def end(self, reason: DoneReason, *, note: str | None = None, error: Exception | None = None) -> Token:
        """End the reply without another token."""
        try:
            text, stop_word = self._last_text() if self.said else ("", None)
        except Exception:
            # Perhaps the reply ends because its text cannot be decoded.
            if reason != "error":
                raise
            text, stop_word = "", None
        return Token(text, stop_word=stop_word, completion=self._complete(reason, note, error))

    def _last_text(self) -> tuple[str, str | None]:
        """The text that the detokenizer and the stop words held back, and the stop word after this text."""
        self._detokenizer.finalize()
        text = str(self._detokenizer.last_segment)
        text = text.rstrip(REPLACEMENT_CHARACTER) if self.cuts_characters else text
        return self._words.add(text, is_last=True)

    def _complete(self, reason: DoneReason, note: str | None = None, error: Exception | None = None) -> Completion:
        facts = self.facts
        facts.tokens, facts.completion_tokens, facts.gaps_ms = tuple(self.said), len(self.said), tuple(self._gaps_ms)
        facts.note, facts.error, facts.done_reason = note, error, reason
        return facts

    # In the engine.

    @property
    def is_stepping(self) -> bool:
        """Whether the reply takes part in the next step: at most the last token of the prompt is left to evaluate."""
        return self.is_decoding or (self.row.position > 0 and self.row.prompt_left == 1)

    @property
    def needed_tokens(self) -> int:
        """Tokens of capacity for the prompt and the reserved reply; the last token of the reply needs none."""
        left = max(min(self._room, self.max_tokens) - self.in_reply, 1)
        return len(self.tokens) + left - 1

    @property
    def proven_tokens(self) -> int:
        """How many tokens of the row have proven state, which gave a token that was read; 0 before the first."""
        read = len(self.said) - self.in_reply
        return len(self.tokens) + read - 1 if read else 0

    def most_drafted(self) -> int:
        most = super().most_drafted()
        return most if self.window is None else max(0, min(most, self.window.tokens - self.row.position - 1))

    def note_match(self) -> None:
        """Note what the cache has of the prompt. A first chunk may find more than admission did."""
        if not self.said:
            facts, row = self.facts, self.row
            facts.cached_tokens, facts.matched_tokens, facts.reason = row.cached_tokens, row.matched_tokens, row.reason

    def drop(self, length: int) -> None:
        assert self.window is not None, self
        begin = self.window.head
        gone = slice(begin, begin + length)
        self.tokens, self.keys = np.delete(self.tokens, gone), np.delete(self.keys, gone)
        left = {mark for mark in self.marks if mark <= begin}
        self.marks = tuple(sorted(left | {mark - length for mark in self.marks if mark > begin + length}))
        self.dropped += length

    def shift(self, length: int) -> None:
        self.drop(length)
        self.facts.shifted_tokens += length

    def go_back(self) -> None:
        """Wait again. From now on, the prompt includes the reply so far."""
        fresh = np.array(self.said[self.in_reply :], np.int32)
        self.tokens, self.keys = np.append(self.tokens, fresh), np.append(self.keys, fresh)
        self.in_reply = len(self.said)
        # Each return doubles the reserve, so a long reply returns only a few times and still leaves room to others.
        self._room += 2 * self.in_reply
        self.wait_again()

    def let_go(self) -> None:
        """Close the row and drop all arrays of the engine, because a caller may keep this object for long."""
        if self.held_row is not None:
            self.held_row.close()
        self.held_row = self.last = self._said = self.embed = None
        self.unread.clear()


class LiveRun(Protocol):
    """The live caches of one request: a part of `radixcache.Session`. `remaining` is never empty."""

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
        """Evaluate `remaining[:-1]` in chunks. Call `on_progress` at the start and after each chunk."""

    def step(self, model: Any, tokens: Any) -> mx.array:
        """Dispatch the forward pass of the next tokens without waiting for it. Return logits (1, T, V)."""


class _CancelledError(Exception):
    pass


def generate(
    run: LiveRun,
    model: Any,
    tokenizer: Any,
    *,
    step_size: int = DEFAULT_STEP_SIZE,
    cancelled: Callable[[], bool] = lambda: False,
    on_progress: ProgressCallback | None = None,
    drafting: Drafting | None = None,
    **options: Any,
) -> Iterator[Token]:
    """Prefill the run's remaining prompt, then yield the reply token by token.

    The caller closes `run`. `cancelled` is called between chunks and tokens. `drafting` comes from
    PrefixCache.drafting() for this prompt, and then `run` is a session of the same cache. `options` are options of
    a Generation, except min_tokens, processors, guidance and predictions, which only ParallelGenerator uses.

    Raises:
        ValueError: max_tokens or step_size is below 1, or the sampler returned an id outside the vocabulary.
        TypeError: the sampler returned anything but one integer.
    """
    require_count("step_size", step_size, "tokens")
    remaining = run.remaining
    length = run.cached_tokens + len(remaining)
    reply = Generation(tokenizer=tokenizer, tokens=np.empty(length, np.int32), **options)
    reply.start()

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
            reply.facts.cached_tokens = run.cached_tokens
            yield reply.end("cancelled")
            return
        more: dict[str, Any] = {"sampler": reply.sampler, "drafting": drafting, "dtype": mx.float32}
        said = decode(run, model, remaining, reply.max_tokens, **more)
        for token, logprobs, _ in said:
            reply.facts.cached_tokens = run.cached_tokens
            piece = reply.add(token, logprobs, None, cancelled)
            if len(reply.said) == 1 and on_progress is not None:
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
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """Evaluate a known reply, so that the run's caches hold it. Return how many tokens were evaluated."""
    done = 0
    with compile_mode(model):
        while done < len(tokens) and not cancelled():
            chunk = tokens[done : done + step_size]
            # The logits are not needed, but the wait for them limits the pending work to one chunk.
            mx.eval(run.step(model, mx.array(chunk))[:, -1, :1])
            mx.clear_cache()
            done += len(chunk)
    return done


@contextmanager
def compile_mode(model: Any) -> Iterator[None]:
    """Disable MLX's compiled mode in the block if the model's `enable_compile` is false."""
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
