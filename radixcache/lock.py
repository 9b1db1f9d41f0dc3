"""Lock: one thread at a time works on a cache, reentrantly, and Ctrl-C does not interrupt it halfway.

A finalizer may run in the middle of an operation of the thread that has the lock, and the reentrant lock would let it
in: `when_free` defers it. A user's callback may wait for another thread, so it runs in `afterwards`, without the lock.
Every decode step has `uninterrupted` blocks. They use `_signal`: `signal` makes enumerations, which takes several times
as long as the rest.

Invariants:

  U1  Deferred work runs under the lock, and never while an operation that was begun before it is under way.
  U2  Work in `afterwards` runs in the thread that had the lock, once that thread has released it.
  U3  A signal that comes while the main thread waits for the lock or has it is delivered after all of that.
  U4  A lock that was used is not entered in a forked process: RuntimeError, as it may be held for ever there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Signals that ask a process to stop, as far as the system has them.
STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

#: Whether the main thread is inside of such a block.
_is_inside = False
#: How often the process was forked on the way to this one.
_forks = 0
FORKED = (
    "this process was forked after the cache was used, and neither MLX nor threads survive a fork. Make a PrefixCache "
    "in each process, or start processes with spawn."
)


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class uninterrupted:  # noqa: N801  used like a function
    """In the main thread, hold signals back until the block ends; then call the handler of the first one."""

    __slots__ = ("_caught", "_previous")

    def __init__(self) -> None:
        self._caught: list[tuple[Any, ...]] = []
        self._previous: dict[int, Callable[..., object]] = {}

    def __enter__(self) -> None:
        global _is_inside
        if _is_inside or threading.current_thread() is not threading.main_thread():
            return  # A block around this one holds them back already, or they cannot come.
        try:
            for number in STOPS:
                previous = _signal.getsignal(number)
                if callable(previous):  # Else no Python handler is installed.
                    self._previous[number], _is_inside = previous, True
                    _signal.signal(number, lambda *caught: self._caught.append(caught))
        except BaseException:  # A signal that is not held back yet.
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
            if self._previous:  # A signal came whose handler is installed again.
                self._restore()


class Lock:
    """A reentrant lock, used as a context manager.

    Attributes:
        afterwards: what to do once the lock is released; only the thread that has the lock adds to it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = self._owner = 0
        self._forks: int | None = None  # None: it was never entered
        self._block = uninterrupted()
        self._waiting: list[Callable[[], object]] = []
        self.afterwards: list[Callable[[], object]] = []

    @property
    def is_foreign(self) -> bool:
        """Whether it was used before this process was forked off."""
        return self._forks is not None and self._forks != _forks

    def __enter__(self) -> Lock:
        if self._forks != _forks:
            if self._forks is not None:
                raise RuntimeError(FORKED)
            self._forks = _forks
        if self._owner == threading.get_ident():
            self._depth += 1
            return self
        block = uninterrupted()
        block.__enter__()
        try:
            self._lock.acquire()
        except BaseException:
            block.__exit__()
            raise
        self._block, self._depth, self._owner = block, 1, threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        block = self._block
        try:
            try:
                while self._waiting:
                    self._waiting.pop(0)()
            finally:
                after, self.afterwards = self.afterwards, []
                self._depth = self._owner = 0
                self._lock.release()
                if after:
                    _run_all(after)
        finally:
            block.__exit__()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the lock up in this block, for work that takes long, unless an operation around this one needs it too.

        Other threads change what the lock guards meanwhile. Signals, deferred work and `afterwards` wait as if the lock
        were held.
        """
        assert self._owner == threading.get_ident(), "only the thread that has the lock can give it up"
        if self._depth > 1:
            yield
            return
        block, waiting, after = self._block, self._waiting, self.afterwards
        self._waiting, self.afterwards = [], []
        self._depth = self._owner = 0
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._block, self._depth, self._owner = block, 1, threading.get_ident()
            self._waiting, self.afterwards = waiting, after

    def when_free(self, action: Callable[[], object]) -> None:
        """Do this now, or if this thread has the lock, when it releases it."""
        if self._owner == threading.get_ident():
            self._waiting.append(action)
        else:
            action()


def _run_all(actions: list[Callable[[], object]]) -> None:
    """Run each of these, also after one that fails, but not after an interrupt; raises the first error."""
    for number, action in enumerate(actions, start=1):
        try:
            action()
        except Exception:
            _run_all(actions[number:])
            raise
