"""Lock: one thread at a time works on a cache, as deep as it likes, and Ctrl-C does not cut its work in two.

A finalizer runs wherever garbage is collected, also half way through an operation of the thread that has the lock. The
lock would let it in; `when_free` keeps it until that thread is through. Work that is not ours, and may wait for another
thread, must not run under the lock: it comes `afterwards`.

Invariants:

  U1  Deferred work runs under the lock, and never while an operation that was begun before it is under way.
  U2  Work that comes afterwards runs in the thread that had the lock, when it has let go of it.
  U3  An interrupt that comes while the main thread waits for the lock or has it is delivered after all of that.

uninterrupted: a stretch of code in the main thread that Ctrl-C does not cut in two, nor another signal to stop.

The signal is kept and delivered when the stretch ends, so bookkeeping is either done or not begun. Other threads never
receive signals in Python and need nothing.

There are such stretches in every step of a decode. `signal` would make enumerations of all numbers and handlers, which
takes several times as long as the rest; the module beneath it does not.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from typing import Any

#: What asks a process to stop, where there is such a signal.
STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

#: Whether the main thread is inside such a stretch.
_is_inside = False


class uninterrupted:  # noqa: N801  used like a function
    """Keep these signals until the block ends; then call the handler that was installed for the first that came."""

    __slots__ = ("_caught", "_previous")

    def __init__(self) -> None:
        self._caught: list[tuple[Any, ...]] = []
        self._previous: dict[int, Callable[..., object]] = {}

    def __enter__(self) -> None:
        global _is_inside
        if _is_inside or threading.current_thread() is not threading.main_thread():
            return  # a block around this one keeps them already, or they cannot come
        try:
            for number in STOPS:
                previous = _signal.getsignal(number)
                if callable(previous):  # else nobody listens in Python
                    self._previous[number], _is_inside = previous, True
                    _signal.signal(number, lambda *caught: self._caught.append(caught))
        except BaseException:  # one that is not kept yet
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _is_inside
        if not self._previous:
            return
        caught = [(self._previous[each[0]], each) for each in self._caught[:1]]
        _is_inside = False
        self._restore()
        for handler, arguments in caught:
            handler(*arguments)

    def _restore(self) -> None:
        try:
            while self._previous:
                _signal.signal(*self._previous.popitem())
        finally:
            if self._previous:  # one came that is listened to again
                self._restore()


class Lock:
    """A reentrant lock, used as a context manager.

    Attributes:
        afterwards: what to do when the thread that has the lock has let go of it; only that thread adds to it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = self._owner = 0
        self._stretch = uninterrupted()
        self._waiting: list[Callable[[], object]] = []
        self.afterwards: list[Callable[[], object]] = []

    def __enter__(self) -> Lock:
        if self._owner == threading.get_ident():
            self._depth += 1
            return self
        stretch = uninterrupted()
        stretch.__enter__()
        try:
            self._lock.acquire()
        except BaseException:
            stretch.__exit__()
            raise
        self._stretch, self._depth, self._owner = stretch, 1, threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        stretch = self._stretch
        try:
            try:
                while self._waiting:
                    self._waiting.pop(0)()
            finally:
                after, self.afterwards = self.afterwards, []
                self._depth = self._owner = 0
                self._lock.release()
                _run_all(after)
        finally:
            stretch.__exit__()

    def when_free(self, action: Callable[[], object]) -> None:
        """Do this now, or when this thread lets go of the lock if it has it."""
        if self._owner == threading.get_ident():
            self._waiting.append(action)
        else:
            action()


def _run_all(actions: list[Callable[[], object]]) -> None:
    """Run each of these, also behind one that fails, but not behind an interrupt; the first error comes out."""
    for number, action in enumerate(actions, start=1):
        try:
            action()
        except Exception:
            _run_all(actions[number:])
            raise
