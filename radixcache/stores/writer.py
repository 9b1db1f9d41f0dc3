"""Writer: a bounded queue of blocks and the one thread that writes them. It drops rather than have anybody wait.

B1  Blocks are written in the order in which they were offered, so a block comes after those before it in its chain.
B2  At most `limit_bytes` wait, or a single block that is larger.
B3  Of a block that waits a second one is not taken.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from radixcache.stores.block import Block, Kind

logger = logging.getLogger(__name__)


class Writer:
    """Calls `write` for each block, in a thread that is there from the first one on.

    Attributes:
        waiting_bytes: of the state of blocks that wait or are being written, which are held in memory until then.
    """

    def __init__(self, write: Callable[[Block], None], limit_bytes: int) -> None:
        self._write, self._limit_bytes = write, limit_bytes
        self._changed = threading.Condition()
        self._waiting: dict[tuple[bytes, Kind], Block] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.waiting_bytes = 0

    def __contains__(self, place: tuple[bytes, Kind]) -> bool:
        return place in self._waiting

    def has_room(self, nbytes: int) -> bool:
        """Whether a block of so many bytes would be taken now."""
        fits = not self._waiting or self.waiting_bytes + nbytes <= self._limit_bytes
        return fits and not self._is_closed

    def offer(self, block: Block) -> bool:
        """Take a block to be written; False: there is no room for it, it waits already, or the writer is closed."""
        place = (block.head.key, block.head.kind)
        with self._changed:
            if place in self._waiting or not self.has_room(block.nbytes):
                return False
            if self._thread is None:
                # A daemon: a process that ends without closing loses what is not written, and nothing else.
                self._thread = threading.Thread(target=self._run, name="radixcache-store", daemon=True)
                self._thread.start()
            self._waiting[place] = block
            self.waiting_bytes += block.nbytes
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all is written; False: it was not within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float | None) -> bool:
        """Flush, drop what is left, and end the thread; False: it is still writing a block, the last one."""
        with self._changed:
            self._is_closed = True
            is_written = self._changed.wait_for(lambda: not self._waiting, timeout_s)
            for place in list(self._waiting)[1:]:
                self.waiting_bytes -= self._waiting.pop(place).nbytes
            self._changed.notify_all()
        if self._thread is not None and is_written:
            self._thread.join()
        return is_written

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                place, block = next(iter(self._waiting.items()))
            try:
                self._write(block)
            except Exception:  # a bug of ours: the blocks behind this one are none the worse
                logger.exception("a block could not be written")
            with self._changed:
                self.waiting_bytes -= self._waiting.pop(place).nbytes
                del block
                self._changed.notify_all()
