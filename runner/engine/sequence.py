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

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixcache.decode import Decoding
from radixcache.errors import refuse_copy
from radixcache.sessions.solo import Embed
from radixcache.speculate.drafting import Drafted
from runner.engine.replies import Completion, ProgressCallback, Reply

SINK_TOKENS = 4  # tokens that stay at the beginning of a prompt without marks
OPENING_TOKENS = 16  # most tokens that stay behind the last mark: the opening of the reply
FREE_SHARE = 0.25  # of the context: most of a conversation stays, and cuts are rare


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


@dataclass(eq=False, kw_only=True)
class TokenSequence(Decoding):
    """One request of the engine.

    Attributes:
        ticket: what its user holds.
        tokens, keys: the prompt without dropped tokens; after a return to waiting also the reply so far.
        marks, namespace: as given to the group.
        outline: of the whole prompt; `dropped` tokens behind its head are no longer in `tokens`.
        reply: its text and tokens.
        window: the context; None: only the capacity bounds it.
        in_reply, reserve: tokens of the reply that are part of `tokens`; for which room is reserved.
        note: why the reply cannot go on, though nothing failed.
        on_progress: told of each chunk of prefill.
        embed: as in Solo.admit().
    """

    ticket: Ticket
    keys: NDArray[np.int64]
    marks: tuple[int, ...]
    outline: Outline
    reply: Reply
    reserve: int
    on_progress: ProgressCallback | None
    window: ContextWindow | None = None
    namespace: str | None = None
    dropped: int = 0
    in_reply: int = 0
    note: str | None = None
    embed: Embed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafting is not None:
            self.ticket.drafted = self.drafting.drafted

    @property
    def left(self) -> int:
        return self.reply.left

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

    def most_drafted(self) -> int:
        most = super().most_drafted()
        return most if self.window is None else max(0, min(most, self.window.tokens - self.row.position - 1))

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
        self.wait_again()
