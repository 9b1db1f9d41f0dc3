"""Backlog: the requests that were sent to one replica and have not ended, and the seconds of work they are.

    sent ──► [ first │ second │ third ]  work_s each ──► ended
               └ at work since: what it has had by now is not waited for any more

A replica is taken to serve one after the other, in the order they were sent. Where it serves several together, their
sum is right and only the first one's progress is guessed. One that takes longer than expected counts for nothing.

  BA1  `waiting_s` is 0 or more, and 0 where nothing is open.

All in O(1). Time is an argument, in seconds from any beginning. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Hashable


class Backlog:
    """The open requests of one replica.

    Attributes:
        sent_s: the work of all requests that were ever sent, in seconds.
    """

    def __init__(self) -> None:
        self.sent_s = 0.0
        self._total_s = 0.0
        self._work_s: dict[Hashable, float] = {}
        self._began_s = 0.0

    def send(self, request: Hashable, work_s: float, now_s: float) -> None:
        """Add a request.

        Raises:
            ValueError: it is open already.
        """
        if request in self._work_s:
            raise ValueError(f"request {request!r} was sent here before, and has not ended.")
        if not self._work_s:
            self._began_s = now_s
        self._work_s[request] = work_s
        self._total_s += work_s
        self.sent_s += work_s

    def end(self, request: Hashable, now_s: float) -> None:
        """Take a request out: answered, failed or cancelled. One that is not there is passed over."""
        if self._first == request:
            self._began_s = now_s
        self._total_s -= self._work_s.pop(request, 0.0)
        if not self._work_s:
            self._total_s = 0.0  # whatever rounding has left

    def waiting_s(self, now_s: float) -> float:
        """Seconds of work before a request that comes now is looked at."""
        first_s = self._work_s.get(self._first, 0.0)
        return max(0.0, self._total_s - min(first_s, max(0.0, now_s - self._began_s)))

    def __len__(self) -> int:
        return len(self._work_s)

    @property
    def _first(self) -> Hashable:
        return next(iter(self._work_s), None)
