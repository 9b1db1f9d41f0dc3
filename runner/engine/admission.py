"""Who waits and who runs, and who there is room for.

    capacity    tokens of the group: those that running requests hold, shared ones once, and those they will hold
    bytes       what that many tokens take of the cache's budget, all that is evictable gone

Where one of them runs out all the same (requests may reserve less than they ask for; pins and open sessions come and
go), the group refuses, and the engine makes room.

Whose turn it is: which request is admitted next, and whose prompt the next chunk of prefill goes to.

    waiting     in order of arrival; the first that may come in does
    prefilling  one chunk between two decode steps, to one of them
    decoding    all of them in every decode step

Prefill. Chunks go in turn to the request that came first and to the one with the least left to evaluate. First come,
first served alone would let one long document hold up everybody's first token; a chunk for each in turn would bring
those who came together their first tokens together, at the very end. Half of all chunks for the first come, a request
is through after at most twice the chunks of its own prompt and of those before it, however many shorter ones follow.

Admission. Nobody is overtaken for want of room: what does not fit waits, and those behind it too, so a large request
comes in as soon as enough of the running ones are through. One exception: a request that begins like a prompt which is
being prefilled right now, further than anything that it could share already, waits until that part is evaluated, and
then takes no room for it and no time. Those behind it that have nothing to wait for go on meanwhile.

This file never imports MLX, and knows no clock: the same calls give the same order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from radixcache import Group, Row
from runner.engine.sequence import ParallelRequest

# Tokens of a chunk. A second or less of a small model on slow cores, a few hundredths on a GPU: what holds up those
# who are being served.
PARALLEL_STEP_SIZE = 1024


class Prefilling(Protocol):
    """What is asked of a request that is being prefilled."""

    @property
    def number(self) -> int:
        """Order of arrival."""

    @property
    def remaining_tokens(self) -> int:
        """Tokens left to prefill."""


Prefiller = TypeVar("Prefiller", bound=Prefilling)
Candidate = TypeVar("Candidate")


class ChunkTurns:
    """Hands out chunks of prefill."""

    def __init__(self) -> None:
        self._first_comes_next = True

    def choose(self, prefilling: Sequence[Prefiller]) -> Prefiller:
        """Whose chunk is next; there is at least one."""
        first = min(prefilling, key=lambda each: each.number)
        shortest = min(prefilling, key=lambda each: (each.remaining_tokens, each.number))
        chosen = first if self._first_comes_next else shortest
        self._first_comes_next = chosen is not first
        return chosen


def admissible(
    waiting: Iterable[Candidate], fits: Callable[[Candidate], bool], gains: Callable[[Candidate], bool]
) -> Candidate | None:
    """The request that comes in next, of those that wait in order of arrival; None: nobody may.

    Args:
        fits: whether there is room for it.
        gains: whether it would share more if it waited.
    """
    for candidate in waiting:
        if not gains(candidate):
            return candidate if fits(candidate) else None
    return None


class AdmissionQueue:
    """The requests of one generator, in order of arrival.

    Args:
        capacity: tokens.
        max_rows: requests that run at a time at most.
        context: tokens that a request holds at most; None: no such bound.
        step_size: tokens per chunk of prefill.

    Attributes:
        waiting, running: to read; they change through the methods.
    """

    def __init__(self, capacity: int, max_rows: int, context: int | None, step_size: int) -> None:
        self.waiting: list[ParallelRequest] = []
        self.running: list[ParallelRequest] = []
        self._capacity = capacity
        self._max_rows = max_rows
        self._context = context
        self._step_size = step_size
        self._is_refused = False

    @property
    def prefilling(self) -> list[ParallelRequest]:
        """Those whose prompt is not through."""
        return [request for request in self.running if not request.is_decoding]

    @property
    def stepping(self) -> list[ParallelRequest]:
        """Those that the next step takes a token of."""
        return [request for request in self.running if request.is_stepping]

    @property
    def last_come(self) -> ParallelRequest:
        """Of those that run, the one that came last."""
        return max(self.running, key=lambda request: request.number)

    def arrive(self, requests: Iterable[ParallelRequest]) -> None:
        """Requests were handed in: they wait, behind those that do."""
        self.waiting += requests

    def next(self, group: Group) -> ParallelRequest | None:
        """Who comes in next; None: nobody may now."""
        if len(self.running) >= self._max_rows or (self._is_refused and self.running):
            return None
        return admissible(
            self.waiting, lambda request: self._fits(request, group), lambda request: self._gains(request, group)
        )

    def waits(self, request: ParallelRequest, others: Iterable[ParallelRequest], group: Group) -> bool:
        """Whether a row's first chunk is the smaller once these, which are prefilled now, have theirs."""
        return request.row.is_fresh and self._later(request, others, group) > request.row.position

    def refuse(self) -> None:
        """The group had no room after all: nobody comes in before one of those that run is through."""
        self._is_refused = True

    def start(self, request: ParallelRequest, row: Row) -> None:
        """A waiting request got a row."""
        request.held_row = row
        self.waiting.remove(request)
        self.running.append(request)

    def send_back(self, request: ParallelRequest) -> None:
        """A running request waits again, at its old place."""
        self.end(request)
        request.go_back()
        insort(self.waiting, request, key=lambda each: each.number)

    def end(self, request: ParallelRequest) -> None:
        """A request is over."""
        self._is_refused = False
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)

    def _fits(self, request: ParallelRequest, group: Group) -> bool:
        """Whether there are tokens and bytes for it, besides those that the others hold and will still take."""
        if not self.running:
            return True
        ends = {each.row: max(self._needed(each), each.row.position) for each in self.running}
        own = self._needed(request) - group.sharable_tokens(request.keys, request.namespace)
        owed = sum(end - row.position for row, end in ends.items())
        fits = group.used_tokens + owed + own <= self._capacity
        return fits and group.has_bytes_for(ends, request.keys, self._needed(request), request.namespace)

    def _gains(self, request: ParallelRequest, group: Group) -> bool:
        """Whether a prompt that is being prefilled right now is the same further than all that is evaluated yet."""
        later = self._later(request, self.prefilling, group)
        return later > 0 and later > group.sharable_tokens(request.keys, request.namespace)

    def _later(self, request: ParallelRequest, others: Iterable[ParallelRequest], group: Group) -> int:
        """How many tokens of its prompt others will have at some moment of their prefill."""
        rows = [each.row for each in others if each.namespace == request.namespace]
        return max((group.sharable_later(request.keys, row, self._step_size) for row in rows), default=0)

    def _needed(self, request: ParallelRequest) -> int:
        return request.needed_tokens if self._context is None else min(request.needed_tokens, self._context)
