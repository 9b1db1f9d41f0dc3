"""TokenSequence: one request in the engine, from its prompt to its last token. ContextWindow: what a full one drops.

A user holds the Ticket; the engine moves the TokenSequence. While it runs, it has a row of the cache's group.

A conversation longer than the context (`ContextWindow`) loses tokens:

    system | message | message | message | question | opening | reply ...
    stays    dropped first, whole, the oldest first   stays     stays

The system prompt stays, or a few tokens without one: models need the first tokens (attention sinks; Xiao et al. 2023,
Efficient Streaming Language Models). The last message loses tokens only when all others are gone, and so does a prompt
without marks. The number of dropped tokens is a multiple of a share of the context, rounded up to the end of a message:
so a growing conversation is cut at one place for several turns, and a turn finds what the turn before has stored.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import TokenBuffer
from numpy.typing import NDArray

from radixcache import Row
from radixcache.errors import refuse_copy, without_frames
from radixcache.speculate.drafting import Drafted, Drafting
from radixcache.speculate.pace import MOST_PROPOSED
from radixcache.tokens import TokenIds
from runner.engine.replies import Completion, Piece, ProgressCallback, Reply, Sampler, greedy, log_probabilities, sample

SINK_TOKENS = 4  # tokens that stay at the beginning of a prompt without marks
OPENING_TOKENS = 16  # most tokens that stay behind the last mark: the opening of the reply
FREE_SHARE = 0.25  # of the context: most of a conversation stays, and cuts are rare

#: mlx-lm's: the tokens so far (T,) and logits (1, V) to logits (1, V).
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
#: From the token before, None at the beginning of a reply, to the tokens (V,) that may be next; None: all may.
Guidance = Callable[[int | None], NDArray[np.bool_] | None]


class ContextError(ValueError):
    """A conversation cannot be cut to fit the context."""


@dataclass(frozen=True)
class Outline:
    """Which parts of a prompt may be dropped: `head` tokens stay; behind it messages end at `ends`, rising."""

    length: int
    head: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, length: int, marks: Sequence[int], head: int | None = None) -> Outline:
        """Without `head`, the first mark is the end of the system prompt. ValueError: head is not in 0 to `length`."""
        inner = sorted(mark for mark in marks if mark > 0)
        if head is None:
            head = inner[0] if inner else min(SINK_TOKENS, length)
        elif not 0 <= head <= length:
            raise ValueError(f"keep is {head} tokens; wanted 0 to {length}, the length of the prompt.")
        return cls(length, head, tuple(mark for mark in inner if mark > head))

    @property
    def limit(self) -> int:
        opening = min(OPENING_TOKENS, self.length - self.ends[-1]) if self.ends else 0
        return max(self.head, self.length - max(opening, 1))


@dataclass(frozen=True)
class ContextWindow:
    """At most `tokens` tokens of a conversation; a cut drops a multiple of `free_share` of them."""

    tokens: int
    free_share: float = FREE_SHARE

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"a context of {self.tokens} tokens; wanted at least 2.")
        if not 0 < self.free_share <= 1:
            raise ValueError(f"free_share is {self.free_share}; wanted more than 0 and at most 1.")

    @property
    def quantum(self) -> int:
        return max(1, int(self.tokens * self.free_share))

    def excess(self, outline: Outline, length: int, room: int, dropped: int = 0) -> int:
        """Return how many tokens behind the head to drop, so that `room` more fit. ContextError: too many must stay.

        There are `length` tokens now, with those of the reply; `dropped` of the prompt were dropped before.
        """
        if length + room <= self.tokens:
            return 0
        # Counted from the beginning of the conversation, so that the next turns are cut at the same place.
        least = dropped + length + room - self.tokens
        aim = -(-least // self.quantum) * self.quantum
        ends = [end - outline.head for end in outline.ends[:-1] if end - outline.head >= least]
        if ends:
            return next((end for end in ends if end >= aim), ends[-1]) - dropped
        most = outline.limit - outline.head
        if most < least:
            raise ContextError(
                f"{length} tokens and {room} more do not fit a context of {self.tokens}: the first {outline.head} and "
                f"the last {length - (outline.limit - dropped)} must stay, and dropping the {most - dropped} between "
                "them is not enough."
            )
        return min(aim, most) - dropped


class Ticket:
    """A submitted request, `number` in order of arrival. Any thread may read and cancel it.

    Attributes:
        matched_tokens, reason: what the cache found of the prompt, as for a Session; 0 and None before admission.
        completion: the result, once the request is over; the last piece carries the same.
        drafted: by source, how many tokens were proposed and accepted so far.
    """

    def __init__(self, number: int, prompt_tokens: int) -> None:
        self.number, self.prompt_tokens = number, prompt_tokens
        self.matched_tokens = 0
        self.reason: str | None = None
        self.completion: Completion | None = None
        self.drafted: dict[str, Drafted] = {}
        self._cancelled = threading.Event()

    def __repr__(self) -> str:
        state = "waiting or running" if self.completion is None else self.completion.done_reason
        return f"<Ticket {self.number} {state}: prompt of {self.prompt_tokens} tokens>"

    __reduce_ex__ = refuse_copy

    def cancel(self) -> None:
        """End the reply after the token that is being computed; computed state stays in the cache."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()


class Predictions:
    """Pending results of a forward pass with logits (N, V): tokens (N,) and, if wanted, log-probabilities (N, V)."""

    def __init__(self, tokens: mx.array, logits: mx.array, logprobs: mx.array | None) -> None:
        self.tokens, self.logprobs = tokens, logprobs
        self._pending = [tokens, mx.max(logits, axis=-1)]  # the largest is finite if all are numbers
        if logprobs is not None:  # a token -1 reads the last one's
            self._pending.append(mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0])
        mx.async_eval(*self._pending, *([] if logprobs is None else [logprobs]))

    @cached_property
    def read(self) -> list[tuple[int, bool, float | None]]:
        """Wait; return for each row the token, whether logits were not numbers, and the log-probability if known."""
        lists: list[Any] = [array.tolist() for array in self._pending]
        columns = [*lists, [None] * len(lists[0])][:3]
        return [(token, not math.isfinite(most), own) for token, most, own in zip(*columns, strict=True)]


class Sampled(NamedTuple):
    of: Predictions
    row: int

    def read(self) -> tuple[int, bool, float | None]:
        return self.of.read[self.row]

    @property
    def logprobs(self) -> mx.array | None:
        """Log-probabilities (V,); None: no row of the pass wanted them."""
        return None if self.of.logprobs is None else self.of.logprobs[self.row]


@dataclass(eq=False)
class TokenSequence:
    """The tokens of one request that its row holds, or will hold.

    Attributes:
        tokens, keys: the prompt without dropped tokens; after a return to waiting also the reply so far.
        outline: of the whole prompt; `dropped` tokens behind its head are no longer in `tokens`.
        held_row: in the cache's group; None while it waits.
        last: the latest prediction, which the next forward pass continues; None before the first.
        unread: predictions that nobody has read: two while a step runs.
        failure: what its sampler or its step raised; reported when the tokens before it are read.
        in_reply, reserve: tokens of the reply that are part of `tokens`; for which room is reserved.
        note: why the reply cannot go on, though nothing failed.
        drafting: what is proposed to it; None: nothing.
        draft_tokens: how many tokens a draft model proposes to it at a time; 0: there is none.
        has_logprobs: whether its pieces have log-probabilities.
    """

    ticket: Ticket
    tokens: TokenIds
    keys: NDArray[np.int64]
    marks: tuple[int, ...]
    outline: Outline
    reply: Reply
    sampler: Sampler | None
    reserve: int
    on_progress: ProgressCallback | None
    namespace: str | None = None
    processors: Sequence[LogitsProcessor] = ()
    guidance: Guidance | None = None
    dropped: int = 0
    held_row: Row | None = None
    failure: Exception | None = None
    in_reply: int = 0
    note: str | None = None
    drafting: Drafting | None = None
    draft_tokens: int = 0
    has_logprobs: bool = False

    def __post_init__(self) -> None:
        self.last: Sampled | None = None
        self.unread: deque[Sampled] = deque()
        self._said: TokenBuffer | None = None  # prompt and reply, for the processors
        if self.drafting is not None:
            self.ticket.drafted = self.drafting.drafted

    @property
    def row(self) -> Row:
        assert self.held_row is not None, self.ticket
        return self.held_row

    @property
    def is_decoding(self) -> bool:
        return self.last is not None

    @property
    def is_stepping(self) -> bool:
        """Whether it takes part in the next step: at most the last token of its prompt is left."""
        return self.is_decoding or (self.row.position > 0 and self.row.prompt_left == 1)

    @property
    def needed_tokens(self) -> int:
        """Cells for the prompt and the reserved reply; the last token takes none."""
        left = max(min(self.reserve, self.reply.max_tokens) - self.in_reply, 1)
        return len(self.tokens) + left - 1

    @property
    def proven_tokens(self) -> int:
        """Tokens of its row whose state has given a token that was read; 0 before the first."""
        read = len(self.reply.tokens) - self.in_reply
        return len(self.tokens) + read - 1 if read else 0

    @property
    def next_token(self) -> int:
        """The token that its next forward pass evaluates; waits for it."""
        return int(self.tokens[-1]) if self.last is None else self.last.read()[0]

    def most_drafted(self, window: ContextWindow | None) -> int:
        """How many tokens may be proposed to it now: a pass says one more than are accepted."""
        if self.drafting is None or not self.is_decoding or self.row.owed_tokens:
            return 0
        left = self.reply.left - len(self.unread) - 1
        if window is not None:
            left = min(left, window.tokens - self.row.position - 1)
        return max(0, min(left, MOST_PROPOSED))

    def note_match(self) -> None:
        """Note what the cache has of the prompt. A first chunk may find more than admission did."""
        if not self.reply.tokens:
            self.reply.cached_tokens = self.row.cached_tokens
            self.ticket.matched_tokens, self.ticket.reason = self.row.matched_tokens, self.row.reason

    def drop(self, length: int) -> None:
        begin = self.outline.head
        gone = slice(begin, begin + length)
        self.tokens, self.keys = np.delete(self.tokens, gone), np.delete(self.keys, gone)
        left = {mark for mark in self.marks if mark <= begin}
        self.marks = tuple(sorted(left | {mark - length for mark in self.marks if mark > begin + length}))
        self.dropped += length

    def shift(self, length: int) -> None:
        self.drop(length)
        self.reply.shifted_tokens += length

    def go_back(self) -> None:
        """Wait again; the prompt now ends with the reply so far."""
        fresh = np.array(self.reply.tokens[self.in_reply :], np.int32)
        self.tokens, self.keys = np.append(self.tokens, fresh), np.append(self.keys, fresh)
        self.in_reply = len(self.reply.tokens)
        # Each return doubles the room, so a long reply returns a few times only, and still leaves room to others.
        self.reserve += 2 * self.in_reply
        self.held_row = self._said = self.last = None
        self.unread.clear()

    def mask(self, logits: mx.array) -> mx.array:
        """Leave logits (1, V) the tokens that may be next. Waits for the token before, but for no pass behind that."""
        assert self.guidance is not None, self.ticket
        said = self.reply.tokens[-1:] if self.last is None else [self.last.read()[0]]
        allowed = self.guidance(said[0] if said else None)
        return logits if allowed is None else mx.where(mx.array(allowed[: logits.shape[-1]]), logits, -mx.inf)

    def process(self, logits: mx.array) -> mx.array:
        if self._said is None:
            self._said = TokenBuffer(self.tokens[:-1].tolist())
        said = self._said.update_and_fetch(next_tokens([self]))
        for processor in self.processors:
            logits = processor(said, logits)
        return logits


def sample_each(sequences: Sequence[TokenSequence], logits: mx.array) -> None:
    """Dispatch each sequence's next token from logits (N, T, V). An exception fails that sequence alone."""
    last = logits[:, -1].astype(mx.float32)
    processing = {row: each for row, each in enumerate(sequences) if each.processors}
    last = _replace_rows(last, processing, lambda row, each: each.process(last[row : row + 1]))
    if guided := {row: each for row, each in enumerate(sequences) if each.guidance and each.failure is None}:
        mx.async_eval(last)  # the forward pass runs while masks are made
        last = _replace_rows(last, guided, lambda row, each: each.mask(last[row : row + 1]))
    # The normalizer takes an exponential of each logit, and the likeliest token needs none.
    is_scored = any(each.sampler is not None or each.has_logprobs for each in sequences)
    logprobs: Any = log_probabilities(last) if is_scored else None
    sampling = {row: each for row, each in enumerate(sequences) if each.sampler is not None and each.failure is None}
    tokens = _replace_rows(greedy(last), sampling, lambda row, each: sample(each.sampler, logprobs[row : row + 1]))
    predictions = Predictions(tokens, last, logprobs)
    for row, sequence in enumerate(sequences):
        if sequence.failure is None:
            sequence.last = Sampled(predictions, row)
            sequence.unread.append(sequence.last)


def sample_drafts(
    sequences: Sequence[TokenSequence],
    drafts: Sequence[Sequence[int]],
    logits: mx.array,
    take: Callable[[TokenSequence], Piece | None],
) -> list[int]:
    """Sample what each sequence says behind its next token and behind each drafted one, as far as its drafts are right.

    One position after the other, so samplers, processors and guidance find what they find without drafts.

    Args:
        logits: (N, T, V), behind the next token and the drafted ones.
        take: adds a sampled token to its reply; None: that failed.

    Returns:
        For each sequence how many of its tokens in the pass are part of its text.
    """
    counts, going = [1] * len(sequences), [*range(len(sequences))]
    for at in range(logits.shape[1]):
        if not going:
            break
        sample_each([sequences[row] for row in going], logits[mx.array(going), at : at + 1])
        pieces = {row: take(sequences[row]) for row in going}
        right = [row for row, piece in pieces.items() if piece and piece.token in drafts[row][at : at + 1]]
        for row in right:
            counts[row] += 1
        going = [row for row in right if pieces[row].completion is None]  # type: ignore[union-attr]
    return counts


def _replace_rows(
    values: mx.array, sequences: Mapping[int, TokenSequence], make: Callable[[int, TokenSequence], mx.array]
) -> mx.array:
    """Replace the rows of these sequences by what `make` returns. An exception becomes the sequence's failure."""
    own = {}
    for row, sequence in sequences.items():
        try:
            own[row] = make(row, sequence)
        except Exception as error:
            sequence.failure = without_frames(error)
    return mx.concatenate([own.get(row, values[row : row + 1]) for row in range(len(values))]) if own else values


def next_tokens(sequences: Sequence[TokenSequence]) -> mx.array:
    """The tokens (N,) that continue these sequences, unread: predicted ones, or the last of a prompt."""
    last = [each.last for each in sequences]
    of = None if last[0] is None else last[0].of
    if of is not None and [each and (each.of, each.row) for each in last] == [(of, at) for at in range(len(of.tokens))]:
        return of.tokens
    return mx.concatenate(
        [
            mx.array(sequence.tokens[-1:]) if each is None else each.of.tokens[each.row : each.row + 1]
            for sequence, each in zip(sequences, last, strict=True)
        ]
    )
