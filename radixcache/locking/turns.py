"""Turns: a lock that one thread at a time holds, as often as it likes, with work that waits for the end of its turn.

A finalizer runs wherever the garbage collector happens to be called, also half way through an operation of the thread
that holds the lock. The lock would let it in; `when_free` keeps it until that thread is through. Work that must not
run under the lock, since it is not ours and may wait for another thread, comes `afterwards`.

Invariants:

  U1  Deferred work runs under the lock, and never while an operation that was begun before it is under way.
  U2  Work that comes afterwards runs in the thread whose turn it was, when it has let go of the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Turns:
    """A reentrant lock, used as a context manager.

    Attributes:
        afterwards: what to do when the thread whose turn it is has let go of the lock; only that one adds to it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._owner = 0
        self._waiting: list[Callable[[], object]] = []
        self.afterwards: list[Callable[[], object]] = []

    def __enter__(self) -> Turns:
        self._lock.acquire()
        self._depth += 1
        self._owner = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self._depth == 1 and self._waiting:
                self._waiting.pop(0)()
        finally:
            self._depth -= 1
            after: Sequence[Callable[[], object]] = ()
            if self._depth == 0:
                self._owner = 0
                if self.afterwards:
                    after, self.afterwards = self.afterwards, []
            self._lock.release()
            for action in after:
                action()

    def when_free(self, action: Callable[[], object]) -> None:
        """Do this now, or at the end of this thread's turn if it is in the middle of one."""
        if self._owner == threading.get_ident():
            self._waiting.append(action)
        else:
            action()
