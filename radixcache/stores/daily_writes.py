"""DailyWrites: how much may still be written today, so that a store does not wear a disk out.

Every process that writes into the folder appends what it is about to write to one file a day (UTC), a number a line,
and reads what the others appended. So the budget is the folder's, and a process that is killed cannot spend it twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DailyWrites:
    """The bytes a day of one folder; without a limit nothing is read or written."""

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._day = self._read_to = self._spent_bytes = 0

    def look(self) -> None:
        """See what has been written today. OSError: that cannot be read."""
        if self._limit_bytes is None:
            return
        if _today() != self._day:
            self._day, self._read_to, self._spent_bytes = _today(), 0, 0
            self._forget_other_days()
        with self._opened() as handle:
            while b"\n" in (lines := os.pread(handle, 1 << 16, self._read_to)):
                whole = lines[: lines.rindex(b"\n") + 1]
                self._read_to += len(whole)
                self._spent_bytes += sum(int(line) for line in whole.split() if line.isdigit() and len(line) < 20)

    def left_bytes(self) -> int:
        """What may still be written today, as far as is known."""
        if self._limit_bytes is None:
            return 1 << 63
        return self._limit_bytes - (self._spent_bytes if self._day == _today() else 0)

    def spend(self, nbytes: int) -> None:
        """So much is about to be written; it counts whatever becomes of it, from the next look on."""
        if self._limit_bytes is not None:
            with self._opened() as handle:
                os.write(handle, b"%d\n" % nbytes)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        handle = os.open(self._folder / f"written-{self._day}", _FLAGS, 0o600)
        try:
            yield handle
        finally:
            os.close(handle)

    def _forget_other_days(self) -> None:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("written-")]
        for name in names:
            if name != f"written-{self._day}":
                with suppress(OSError):
                    os.unlink(self._folder / name)


def _today() -> int:
    return int(time.time() // 86400)
