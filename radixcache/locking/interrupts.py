"""uninterrupted: a stretch of code in the main thread that Ctrl-C does not cut in two.

The interrupt is kept and delivered when the stretch ends, so bookkeeping is either done or not begun. Other threads
never receive signals in Python and need nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Whether the main thread is inside such a stretch.
_is_held = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT back until the block ends; then call the handler that was installed before."""
    global _is_held
    if _is_held or threading.current_thread() is not threading.main_thread():
        # A block around this one holds it back already, or it cannot come.
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):
        yield  # nobody listens in Python
        return
    held = _Held()
    signal.signal(signal.SIGINT, held)
    _is_held = True
    try:
        yield
    finally:
        _is_held = False
        signal.signal(signal.SIGINT, previous)
        if held.caught:
            previous(*held.caught[0])


class _Held:
    """A handler that keeps what it is called with."""

    def __init__(self) -> None:
        self.caught: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.caught.append((number, frame))
