"""Breaker: after a failure a server is left alone for a while, which grows as long as it goes on failing.

    closed ── failed ──► open ── pause is over: one trial ──► closed    the trial succeeded
                          ▲                             └───► open      it did not: the pause doubles

  O1  While it is open nobody but one trial at a time asks the server.
  O2  A pause is twice the one before it, up to `MAX_PAUSE_S`, unless the server was well for as long as that one was.

Methods may be called from any thread. No hidden clock: it is an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


class Breaker:
    """Whether a server may be asked.

    Attributes:
        pause_s: of the last pause, or the one that is on; 0: there was none.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_open = self._is_tried = False
        self._since_s = clock()
        self.pause_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether nobody is to ask now."""
        return self._is_open

    def failed(self) -> bool:
        """A call or the trial failed; whether that has opened it: of several calls at a time the first one does."""
        with self._lock:
            if self._is_open and not self._is_tried:
                return False
            now_s, was_closed = self._clock(), not self._is_open
            was_well = was_closed and now_s - self._since_s > self.pause_s
            self.pause_s = FIRST_PAUSE_S if was_well else min(max(2 * self.pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
            self._is_open, self._is_tried, self._since_s = True, False, now_s
            return was_closed

    def may_try(self) -> bool:
        """Whether the pause is over, so that whoever asked is to try the server, and tell what came of it."""
        with self._lock:
            if not self._is_open or self._is_tried or self._clock() - self._since_s < self.pause_s:
                return False
            self._is_tried = True
            return True

    def recovered(self) -> None:
        """The trial succeeded."""
        with self._lock:
            self._is_open, self._is_tried, self._since_s = False, False, self._clock()
