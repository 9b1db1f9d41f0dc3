"""A request among others: the ticket its owner holds, and where it stands.

Which tokens of a conversation go when it is longer than the context. Plain arithmetic on offsets; never imports MLX.

    system | message | message | message | question | opening | reply ...
    stays    go first, whole, the oldest first        stays     stays

The beginning stays: the system prompt, or a few tokens where there is none, since models lean on the first ones
whatever they say (attention sinks; Xiao et al. 2023, Efficient Streaming Language Models). So do the opening of the
reply and the reply. The last message goes, token by token, only where all others are gone, as does what has no marks.

How much goes is a multiple of a share of the context, rounded up to the end of a message. A conversation that grows
turn by turn is therefore cut at one place for several turns, and what is stored of one turn is found by the next.
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
from radixcache.errors import refuse_copy
from radixcache.tokens import TokenIds
from runner.engine.replies import Completion, ProgressCallback, Reply, Sampler, greedy, log_probabilities, sample

# Tokens that stay at the beginning of a prompt without marks.
SINK_TOKENS = 4
# Tokens behind the last mark that stay at most: the opening of the reply.
OPENING_TOKENS = 16
# A quarter: what is left is most of the conversation, and a shift comes once in many replies.
FREE_SHARE = 0.25


class ContextError(ValueError):
    """A conversation cannot be cut to fit the context; the message has the numbers."""


@dataclass(frozen=True)
class Outline:
    """A prompt, as far as it matters what may go. Offsets are those of the whole prompt, before anything went.

    Attributes:
        length: tokens of the prompt.
        keep: so many tokens stay at its beginning.
        ends: where the messages behind them end, rising; the last one is the end of the question.
    """

    length: int
    keep: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, length: int, marks: Sequence[int], keep: int | None = None) -> Outline:
        """Take the first mark for the end of the system prompt, unless `keep` says what stays.

        Raises:
            ValueError: `keep` is not in 0 to `length`.
        """
        inner = sorted(mark for mark in marks if mark > 0)
        if keep is None:
            keep = inner[0] if inner else min(SINK_TOKENS, length)
        elif not 0 <= keep <= length:
            raise ValueError(f"keep is {keep} tokens; wanted 0 to {length}, the length of the prompt.")
        return cls(length, keep, tuple(mark for mark in inner if mark > keep))

    @property
    def limit(self) -> int:
        """From here on nothing goes."""
        opening = min(OPENING_TOKENS, self.length - self.ends[-1]) if self.ends else 0
        return max(self.keep, self.length - max(opening, 1))


@dataclass(frozen=True)
class ContextWindow:
    """At most `tokens` tokens of a conversation at a time; what goes at once is a multiple of `free_share` of them.

    Raises:
        ValueError: fewer than 2 tokens, or a share that is not above 0 and at most 1.
    """

    tokens: int
    free_share: float = FREE_SHARE

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"a context of {self.tokens} tokens; wanted at least 2.")
        if not 0 < self.free_share <= 1:
            raise ValueError(f"free_share is {self.free_share}; wanted more than 0 and at most 1.")

    @property
    def quantum(self) -> int:
        """What goes at once is a multiple of this."""
        return max(1, int(self.tokens * self.free_share))

    def excess(self, outline: Outline, length: int, room: int, dropped: int = 0) -> int:
        """How many tokens behind the first `outline.keep` have to go, so that `room` more find place.

        Args:
            length: tokens there are now, those of the reply among them.
            dropped: how many of the prompt are gone already.

        Raises:
            ContextError: what must stay leaves no such room.
        """
        if length + room <= self.tokens:
            return 0
        # Counted from the beginning of the conversation, so that the next turns are cut at the same place.
        least = dropped + length + room - self.tokens
        aim = -(-least // self.quantum) * self.quantum
        ends = [end - outline.keep for end in outline.ends[:-1] if end - outline.keep >= least]
        most = outline.limit - outline.keep
        if ends:
            return next((end for end in ends if end >= aim), ends[-1]) - dropped
        if most < least:
            raise ContextError(
                f"{length} tokens and {room} more do not fit {self.tokens}: the first {outline.keep} and the last "
                f"{length - (outline.limit - dropped)} stay, and the {most - dropped} between them are too few to go."
            )
        return min(aim, most) - dropped


#: mlx-lm's: what was said so far (T,) and logits (1, V) to logits (1, V).
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Ticket:
    """A request that was handed in. Any thread may read it and cancel it.

    Attributes:
        number: order of arrival, from 0.
        prompt_tokens: length of the prompt as it was handed in.
        matched_tokens, reason: what the cache found of the prompt, as for a Session; 0 and None until it is admitted.
        completion: what came of it, once it is over; the last piece carries the same.
    """

    def __init__(self, number: int, prompt_tokens: int) -> None:
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.matched_tokens = 0
        self.reason: str | None = None
        self.completion: Completion | None = None
        self._cancelled = threading.Event()

    def __repr__(self) -> str:
        state = "waiting or running" if self.completion is None else self.completion.done_reason
        return f"<Ticket {self.number} {state}: prompt of {self.prompt_tokens} tokens>"

    __reduce_ex__ = refuse_copy

    def cancel(self) -> None:
        """End the reply after the token that is being computed; what was evaluated stays in the cache."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        """Whether it was asked to end."""
        return self._cancelled.is_set()


class Predictions:
    """What a forward pass predicts, pending: tokens (N,), log-probabilities (N, V), and what those sum up to (N, 1)."""

    def __init__(self, tokens: mx.array, logprobs: mx.array, totals: mx.array) -> None:
        self.tokens, self.logprobs, self._totals = tokens, logprobs, totals
        self._own = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)  # of a token -1 the last one's
        mx.async_eval(tokens, logprobs, totals, self._own)

    @cached_property
    def read(self) -> tuple[list[int], list[float], list[bool]]:
        """Tokens, their log-probabilities, and whether the model said anything but numbers.

        Waits for them, once for all rows.
        """
        lists: list[Any] = [array.tolist() for array in (self.tokens, self._own, self._totals)]
        tokens, own, totals = lists
        return tokens, [each for (each,) in own], [not math.isfinite(total) for (total,) in totals]


class Sampled(NamedTuple):
    """One row of what a forward pass predicts."""

    of: Predictions
    row: int

    @property
    def logprobs(self) -> mx.array:
        """Log-probabilities (V,)."""
        return self.of.logprobs[self.row]

    @property
    def token(self) -> int:
        """The next token; waits for it."""
        return self.of.read[0][self.row]

    @property
    def is_wrong(self) -> bool:
        """Whether the model said anything but numbers; waits for it."""
        return self.of.read[2][self.row]

    @property
    def logprob(self) -> float:
        """The token's log-probability; waits for it."""
        return self.of.read[1][self.row]


@dataclass(eq=False)
class ParallelRequest:
    """Everything about one request. Its tokens are those that its row holds, or is to hold.

    Attributes:
        tokens, keys: the prompt, less what was left out or shifted out; once it has gone back to waiting the reply too.
        marks: offsets in `tokens`.
        namespace: of the tree; None: the group's.
        processors: of logits, before they are sampled.
        outline: of the whole prompt; `dropped` tokens behind its beginning are not in `tokens` any more.
        held_row: in the cache's group; None: it waits.
        last: what the last forward pass predicts, which the next one goes on with; None: there was none.
        unread: predictions that were dispatched and not read: two while a step is under way.
        failure: what its sampler raised, or the step it was in; said once the tokens before are read.
        in_reply: how many of the reply's tokens are part of `tokens`.
        reserve: tokens of the reply to keep room for.
        note: why the reply cannot go on, though nothing failed.
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
    dropped: int = 0
    held_row: Row | None = None
    failure: Exception | None = None
    in_reply: int = 0
    note: str | None = None

    def __post_init__(self) -> None:
        self.last: Sampled | None = None
        self.unread: deque[Sampled] = deque()
        #: Prompt and reply, as the processors are told of them.
        self._said: TokenBuffer | None = None

    @property
    def number(self) -> int:
        """Order of arrival."""
        return self.ticket.number

    @property
    def row(self) -> Row:
        """Its row, while it runs."""
        assert self.held_row is not None, self.ticket
        return self.held_row

    @property
    def remaining_tokens(self) -> int:
        """Tokens left to prefill."""
        return self.row.prompt_left

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is through."""
        return self.last is not None

    @property
    def is_stepping(self) -> bool:
        """Whether the next step takes a token of it: its prompt is through, or all but a last token is there."""
        return self.is_decoding or (self.row.position > 0 and self.row.prompt_left == 1)

    @property
    def needed_tokens(self) -> int:
        """Cells that the prompt and the reply it keeps room for will hold; the last token is never put into one."""
        left = max(min(self.reserve, self.reply.max_tokens) - self.in_reply, 1)
        return len(self.tokens) + left - 1

    @property
    def proven_tokens(self) -> int:
        """Tokens of its row whose state was good enough for a token that was read; 0 before the first."""
        read = len(self.reply.tokens) - self.in_reply
        return len(self.tokens) + read - 1 if read else 0

    def admitted(self) -> None:
        """It got its row."""
        if not self.reply.tokens:
            self.reply.start()
        self.found()

    def found(self) -> None:
        """Note what the cache had of the prompt; a row's first chunk may find more."""
        if not self.reply.tokens:
            self.reply.cached_tokens = self.row.cached_tokens
            self.ticket.matched_tokens, self.ticket.reason = self.row.matched_tokens, self.row.reason

    @property
    def next_token(self) -> mx.array:
        """The token (1,) that it goes on with."""
        last = self.last
        return mx.array(self.tokens[-1:]) if last is None else last.of.tokens[last.row : last.row + 1]

    def drop(self, length: int) -> None:
        """Leave out so many tokens behind those that stay at the beginning."""
        begin = self.outline.keep
        gone = slice(begin, begin + length)
        self.tokens, self.keys = np.delete(self.tokens, gone), np.delete(self.keys, gone)
        kept = {mark for mark in self.marks if mark <= begin}
        self.marks = tuple(sorted(kept | {mark - length for mark in self.marks if mark > begin + length}))
        self.dropped += length

    def shift(self, length: int) -> None:
        """Note that so many tokens behind those that stay at the beginning were taken out during the reply."""
        self.drop(length)
        self.reply.shifted_tokens += length

    def go_back(self) -> None:
        """Wait again, to go on where the reply stands."""
        fresh = np.array(self.reply.tokens[self.in_reply :], np.int32)
        self.tokens, self.keys = np.append(self.tokens, fresh), np.append(self.keys, fresh)
        self.in_reply = len(self.reply.tokens)
        self.reserve = self.reply.max_tokens
        self.held_row = self._said = self.last = None
        self.unread.clear()

    def processed(self, logits: mx.array) -> mx.array:
        """Run the processors on the logits (1, V) that follow what was said last. Raises whatever they raise."""
        if self._said is None:
            self._said = TokenBuffer(self.tokens[:-1].tolist())
        said = self._said.update_and_fetch(next_tokens([self]))
        for processor in self.processors:
            logits = processor(said, logits)
        return logits


def sample_each(requests: Sequence[ParallelRequest], logits: mx.array) -> None:
    """Dispatch the sampling of each request's next token.

    A processor or a sampler that fails does so for its own request alone.

    Args:
        logits: (N, T, V) of a forward pass, a row for each request.
    """
    last = logits[:, -1].astype(mx.float32)
    processing = {row: request for row, request in enumerate(requests) if request.processors}
    last = _with_own(last, processing, lambda row, request: request.processed(last[row : row + 1]))
    logprobs, totals = log_probabilities(last)
    sampling = {row: each for row, each in enumerate(requests) if each.sampler is not None and each.failure is None}
    tokens = _with_own(
        greedy(logprobs), sampling, lambda row, request: sample(request.sampler, logprobs[row : row + 1])
    )
    predictions = Predictions(tokens, logprobs, totals)
    for row, request in enumerate(requests):
        if request.failure is None:
            request.last = Sampled(predictions, row)
            request.unread.append(request.last)


def _with_own(
    values: mx.array, requests: Mapping[int, ParallelRequest], make: Callable[[int, ParallelRequest], mx.array]
) -> mx.array:
    """Put what is made for some requests in the place of their rows; what is raised is the request's failure."""
    own = {}
    for row, request in requests.items():
        try:
            own[row] = make(row, request)
        except Exception as error:
            request.failure = error
    return mx.concatenate([own.get(row, values[row : row + 1]) for row in range(len(values))]) if own else values


def next_tokens(requests: Sequence[ParallelRequest]) -> mx.array:
    """The tokens (N,) that these requests go on with, unread: predicted ones, or the last of a prompt."""
    last = [request.last for request in requests]
    of = None if last[0] is None else last[0].of
    if of is not None and [each and (each.of, each.row) for each in last] == [(of, at) for at in range(len(of.tokens))]:
        return of.tokens
    return mx.concatenate([request.next_token for request in requests])
