"""Contents: what of a folder this process knows, kept in step with the files of its own and of other processes.

  C1  A file that is no block, or not the one that it should be, is set aside, counted, and logged once by its name.
  C2  A file is evicted only if no other process has used it later than this one knows.
  C3  The lock is held for look-ups in memory alone.

What other processes evict is noticed when it is read or to be evicted, what they add before a match or a write.

Storing: what becomes of a block that is to be written. Only the writing thread runs it.

W1  A block is written only if it is not there, and only behind a block that is: all that is stored can be reached.
W2  Nothing is evicted for a block that is then not written, unless the disk fails.
W3  After an error of the disk nothing is written any more; that is logged once, and `stopped` says why.

DailyWrites: how much may still be written today, so that a store does not wear a disk out.

Every process that writes into the folder appends what it is about to write to one file a day (UTC), a number a line,
and reads what the others appended. So the budget is the folder's, and a process that is killed cannot spend it twice.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from radixcache.stores.block import KINDS, Block, Head, Kind, root_key
from radixcache.stores.codec import Damaged, encoded
from radixcache.stores.files import Folder, file_name, place_of
from radixcache.stores.index import Index, Link
from radixcache.stores.store import StoreTally
from radixcache.tokens import Keys

logger = logging.getLogger(__name__)


class Contents:
    """The files of blocks in a folder. Methods may be called from any thread."""

    def __init__(self, folder: Folder, tally: StoreTally, secret: bytes | None) -> None:
        self._folder, self._tally, self._secret = folder, tally, secret
        self._lock = threading.Lock()
        self._index = Index()
        self._logged: set[str] = set()

    def refresh(self) -> None:
        """Look for files that other processes have added. OSError: the folder cannot be read."""
        found: list[tuple[Head, int, int]] = []
        for name in self._folder.changed():
            place = place_of(name)
            if place is not None and self.file_bytes(*place):
                continue
            try:
                found.append(self._folder.read_head(name))
            except Damaged as wrong:
                self._set_aside(name, wrong)
            except FileNotFoundError:
                pass  # evicted meanwhile
            except OSError:
                self._tally.add(read_errors=1)
        with self._lock:
            for head, nbytes, used_ns in sorted(found, key=lambda each: each[2]):
                self._index.add(head, nbytes, used_ns)

    def file_bytes(self, key: bytes, kind: Kind) -> int:
        """Bytes of a file; 0: it is not there."""
        with self._lock:
            return self._index.file_bytes(key, kind)

    def match(self, root: bytes, tokens: Keys, grid: int, at_checkpoints: bool) -> list[Link]:
        with self._lock:
            return self._index.match(root, tokens, grid, at_checkpoints)

    def add(self, head: Head, nbytes: int) -> None:
        """A file was written."""
        now_ns = time.time_ns()
        with self._lock:
            self._index.add(head, nbytes, now_ns)
        self._use(head.key, now_ns)  # the system's own time of a file may lag behind those that we give

    def touch(self, keys: Iterable[bytes]) -> None:
        """These blocks were used."""
        now_ns = time.time_ns()
        for key in keys:
            with self._lock:
                self._index.touch(key, now_ns)
            self._use(key, now_ns)

    def read(self, key: bytes, kind: Kind) -> Block | None:
        """The state in a file; None: it is not there, or not right, and then it is not known any more."""
        if not (nbytes := self.file_bytes(key, kind)):
            return None
        name = file_name(key, kind)
        began = time.perf_counter()
        try:
            block = self._folder.read(name, nbytes, self._secret)
            if (block.head.key, block.head.kind) != (key, kind):
                raise Damaged("it has another block's name")
        except Damaged as wrong:
            self._set_aside(name, wrong)
        except FileNotFoundError:
            self._tally.add(vanished_files=1)
        except OSError:
            self._tally.add(read_errors=1)
        else:
            self._tally.add(read_files=1, read_bytes=nbytes, read_seconds=time.perf_counter() - began)
            return block
        with self._lock:
            self._index.drop(key, kind)
        return None

    def make_room(self, nbytes: int, budget_bytes: int, kept: bytes) -> bool:
        """Evict until so many bytes more fit; False: only `kept` and what is before it is left. OSError: as it says."""
        while True:
            with self._lock:
                if self._index.nbytes + nbytes <= budget_bytes:
                    return True
                victim = self._index.oldest()
                if victim is None or self._index.is_on_path(victim.key, kept):
                    return False
                files = list(victim.file_bytes.items())
            used_ns = 0
            with suppress(FileNotFoundError):
                used_ns = self._folder.used_ns(file_name(victim.key, "block"))
            if used_ns > victim.used_ns:
                with self._lock:
                    self._index.touch(victim.key, used_ns)
                continue
            for kind, freed_bytes in files:
                is_ours = self._folder.remove(file_name(victim.key, kind))
                self._tally.add(evicted_files=is_ours, evicted_bytes=is_ours * freed_bytes)
                with self._lock:
                    self._index.drop(victim.key, kind)

    def remove(self, key: bytes) -> None:
        """Give a block up. OSError: it may still be there, and is not known any more."""
        with self._lock:
            for kind in KINDS:
                self._index.drop(key, kind)
        for kind in KINDS:
            self._folder.remove(file_name(key, kind))

    def now(self) -> dict[str, int]:
        """Numbers and bytes of the files, by their names in StoreStats."""
        with self._lock:
            blocks, checkpoints = self._index.count("block"), self._index.count("checkpoint")
            return {"blocks": blocks, "checkpoints": checkpoints, "stored_bytes": self._index.nbytes}

    def check(self) -> None:
        with self._lock:
            self._index.check()

    def _use(self, key: bytes, now_ns: int) -> None:
        with suppress(OSError):  # it counts in this process all the same
            self._folder.use(file_name(key, "block"), now_ns)

    def _set_aside(self, name: str, wrong: Damaged) -> None:
        self._tally.add(damaged_files=1)
        if name not in self._logged:
            self._logged.add(name)
            logger.warning("%s: %s. It is set aside, and its tokens are prefilled.", self._folder.path / name, wrong)
        with suppress(OSError):  # then it stays where it is, and is not known
            self._folder.set_aside(name)


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


logger = logging.getLogger(__name__)

#: Why blocks are dropped after an error of the disk.
STOPPED = "writing has stopped"
#: What is wrong with a name and not with the disk: something else has it.
_TAKEN = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY}


class FileStoring:
    """Writes blocks into a folder, within what budgets allow.

    Attributes:
        stopped: the error after which nothing is written; empty: there was none.
    """

    def __init__(
        self,
        folder: Folder,
        contents: Contents,
        daily: DailyWrites,
        tally: StoreTally,
        *,
        budget_bytes: int,
        min_free_bytes: int,
        secret: bytes | None,
    ) -> None:
        self._folder, self._contents, self._daily, self._tally = folder, contents, daily, tally
        self._budget_bytes, self._min_free_bytes, self._secret = budget_bytes, min_free_bytes, secret
        self.stopped = ""

    def keep_budget(self) -> None:
        """Evict what a folder has beyond the budget."""
        try:
            self._contents.make_room(0, self._budget_bytes, b"")
        except OSError as error:
            self._stop(error)

    def store(self, block: Block) -> None:
        """Write a block, or count why not."""
        try:
            why_not = STOPPED if self.stopped else self._written_or_why_not(block)
        except OSError as error:
            why_not = "something else has its place" if error.errno in _TAKEN else self._stop(error)
        if why_not:
            self._tally.drop(why_not)

    def _written_or_why_not(self, block: Block) -> str:
        try:
            parts = encoded(block, self._secret)
        except ValueError:
            return "its head is too long"
        return self.place(block.head, parts, sum(memoryview(part).nbytes for part in parts))

    def place(self, head: Head, parts: Sequence[Any], nbytes: int) -> str:
        """Make a file of so many bytes of these parts, if it is to be and there is room; else say why not."""
        contents = self._contents
        contents.refresh()
        if contents.file_bytes(head.key, head.kind):
            return "it is there"
        before = head.parent if head.kind == "block" else head.key
        if before != root_key(head.identity, head.namespace) and not contents.file_bytes(before, "block"):
            return "what comes before it is not stored"
        if self._folder.free_bytes() < self._min_free_bytes + nbytes:
            return "the disk is nearly full"
        self._daily.look()
        if self._daily.left_bytes() < nbytes:
            return "the budget of the day is spent"
        if nbytes > self._budget_bytes:
            return "it is larger than the budget"
        contents.touch([before])
        if not contents.make_room(nbytes, self._budget_bytes, before):
            return "the budget is full of what comes before it"
        self._daily.spend(nbytes)
        self._folder.write(file_name(head.key, head.kind), parts)
        contents.add(head, nbytes)
        self._tally.add(written_files=1, written_bytes=nbytes)
        return ""

    def _stop(self, error: OSError) -> str:
        self.stopped = str(error)
        logger.warning("%s: %s. Nothing more is written; what is stored is used.", self._folder.path, error)
        return STOPPED
