"""uninterrupted: a stretch of code in the main thread that Ctrl-C does not cut in two.

The interrupt is kept and delivered when the stretch ends, so bookkeeping is either done or not begun. Other threads
never receive signals in Python and need nothing.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

#: Whether the main thread is inside such a stretch.
_is_inside = False


class uninterrupted:  # noqa: N801  used like a function
    """Keep SIGINT until the block ends; then call the handler that was installed before."""

    __slots__ = ("_caught", "_previous")

    def __init__(self) -> None:
        self._caught: list[tuple[Any, ...]] = []
        self._previous: signal._HANDLER = None

    def __enter__(self) -> None:
        global _is_inside
        if _is_inside or threading.current_thread() is not threading.main_thread():
            return  # a block around this one keeps it already, or it cannot come
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):  # else nobody listens in Python
            self._previous = previous
            signal.signal(signal.SIGINT, lambda *caught: self._caught.append(caught))
            _is_inside = True

    def __exit__(self, *_: object) -> None:
        global _is_inside
        previous, self._previous = self._previous, None
        if not callable(previous):
            return
        _is_inside = False
        signal.signal(signal.SIGINT, previous)
        if self._caught:
            previous(*self._caught[0])
