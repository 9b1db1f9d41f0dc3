"""uninterrupted: a stretch of code in the main thread that Ctrl-C does not cut in two, nor another signal to stop.

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
