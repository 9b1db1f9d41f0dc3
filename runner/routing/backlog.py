"""Backlog: the requests that were sent to one replica and have not ended, its work of late, and the seconds of both.

    sent ──► [ first │ second │ third ]  work_s each ──► ended
               └ at work since: what it has had by now is not waited for any more

A replica is taken to serve one after the other, in the order they were sent. Where it serves several together, their
sum is right and only the first one's progress is guessed. One that takes longer than expected counts for nothing.
Work of late is what it was sent, halved with every hour since.

  BA1  `waiting_s` and `recent_s` are 0 or more; `waiting_s` is 0 where nothing is open.

All in O(1). Time is an argument, in seconds from any beginning. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

#: After which work counts for half of late.
HALF_LIFE_S = 3600.0


class Backlog:
    """The open requests of one replica.

    Args:
        recent_s: the work it is taken to have had of late as it comes, at `now_s`.
    """

    def __init__(self, recent_s: float = 0.0, now_s: float = 0.0) -> None:
        self._recent_s, self._recent_at_s = recent_s, now_s
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
        self._add_recent(work_s, now_s)

    def end(self, request: Hashable, now_s: float, work_s: float | None = None) -> None:
        """Take a request out: answered, failed or cancelled.

        Args:
            work_s: what it turned out to be; None: what it was expected to be.

        Raises:
            KeyError: it is not open.
        """
        if self._first == request:
            self._began_s = now_s
        expected_s = self._work_s.pop(request)
        self._total_s = self._total_s - expected_s if self._work_s else 0.0  # whatever rounding has left
        if work_s is not None:
            self._add_recent(work_s - expected_s, now_s)

    def waiting_s(self, now_s: float) -> float:
        """Seconds of work before a request that comes now is looked at."""
        first_s = self._work_s.get(self._first, 0.0)
        return max(0.0, self._total_s - min(first_s, max(0.0, now_s - self._began_s)))

    def recent_s(self, now_s: float) -> float:
        """Seconds of work that it was sent of late."""
        age_s = max(0.0, now_s - self._recent_at_s)
        return self._recent_s * math.exp2(-age_s / HALF_LIFE_S)

    def __len__(self) -> int:
        return len(self._work_s)

    def _add_recent(self, work_s: float, now_s: float) -> None:
        self._recent_s = max(0.0, self.recent_s(now_s) + work_s)
        self._recent_at_s = max(now_s, self._recent_at_s)

    @property
    def _first(self) -> Hashable:
        return next(iter(self._work_s), None)
