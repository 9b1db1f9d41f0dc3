"""Who waits and who runs, and who there is room for.

    capacity    tokens of the group: those that running requests hold, shared ones once, and those they will hold
    bytes       what that many tokens take of the cache's budget, all that is evictable gone

Where one of them runs out all the same (requests may reserve less than they ask for; pins and open sessions come and
go), the group refuses, and the engine makes room.
"""

from bisect import insort
from collections.abc import Iterable

from radixcache import Group, Row
from runner.parallel.request import ParallelRequest
from runner.parallel.turn_taking import admissible


class Admission:
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
