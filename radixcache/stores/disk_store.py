"""DiskStore: blocks of state in a folder, under a byte budget. No damaged file makes an answer wrong.

    put ──► queue ──► one thread: encode, make room, write         match ──► index ──► read ──► check ──► block

  S1  `codec.decode` checks the checksum of each file. It also checks that the key is the digest of identity, namespace
      and all tokens up to the end of the block. A file that fails is a miss: it is removed and logged.
  S2  The files take at most `budget_bytes`, plus one block for each process that writes. The block that no process has
      used for the longest time is evicted first, but never before the blocks that follow it.
  S3  Two methods wait for the disk: `read`, and `match` for the heads of files that other processes have added.
  S4  After a disk error in a write, the store stops writing, logs this once, and still reads. No method raises for it.

Several processes may use one folder. Each looks for files of the others before a match or a write. It notices that
a file was evicted when it reads or evicts that file. Methods may be called from any thread. Never imports MLX.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from radixcache.stores.block import Block, Head, Identity, Kind, Place
from radixcache.stores.block_store import BudgetedStore, WriteOn, read_ahead
from radixcache.stores.codec import Damaged
from radixcache.stores.files import Folder, file_name
from radixcache.tokens import Keys

logger = logging.getLogger(__name__)

#: Errors if something else has the name of the file; the disk has not failed.
_NAME_TAKEN = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY}


class DiskStore(BudgetedStore):
    """Blocks in a folder."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        budget_bytes: int,
        write_on: WriteOn = "eviction",
        secret: bytes | None = None,
        min_free_bytes: int = 1 << 30,
        queue_bytes: int = 256 << 20,
    ) -> None:
        """Open a folder, or make it, and list its blocks without reading their state.

        Args:
            budget_bytes: the most that all files of blocks may take.
            write_on: what a cache writes.
            secret: 16 to 64 bytes. With a secret, only files written with it are read. Without one, the checksum finds
                accidents only. The files are never encrypted.
            min_free_bytes: left free on the disk.
            queue_bytes: the most state in memory that waits to be written.

        Raises:
            ValueError: an argument is out of range.
            StoreError: the folder cannot be made or read, holds something else, or was made with another secret.
        """
        if min(budget_bytes, min_free_bytes + 1, queue_bytes) < 1:
            raise ValueError("budgets of a DiskStore are in bytes, and 1 or more.")
        super().__init__(write_on, secret, budget_bytes=budget_bytes, queue_bytes=queue_bytes)
        self._folder = Folder(path, secret, make=True)
        if secret is None and (who := self._folder.other_writers()):
            logger.warning(
                "%s: %s may write to it, and wrong state there makes wrong answers. Make it yours and chmod 700, or "
                "give a secret: then only files that were made with it are read.",
                self._folder.path,
                who,
            )
        self._min_free_bytes = min_free_bytes
        self._error = ""
        self._refresh()
        try:
            self._make_room(0, b"")
        except OSError as error:
            self._stop(error)

    def read(self, wanted: Sequence[Place]) -> Iterator[Block | None]:
        self.touch(dict.fromkeys(key for key, _ in wanted))
        yield from read_ahead(self._read_one, wanted)

    def accepts(self, nbytes: int) -> bool:
        return nbytes <= self.budget_bytes and not self._error and self._queue.has_room(nbytes)

    @property
    def _stopped(self) -> str:
        return self._error

    def _look_up(self, identity: Identity, namespace: str, tokens: Keys, grid: int) -> bool:
        self._refresh()
        return True

    def _refresh(self) -> None:
        try:
            self._list_new_files()
        except OSError:
            self._tally.add(read_errors=1)

    def _list_new_files(self) -> None:
        """Index the files of other processes. OSError: the folder cannot be read."""
        found: list[tuple[Head, int, int]] = []
        for place in self._folder.changed_places():
            if self.file_bytes(*place):
                continue
            try:
                found.append(self._folder.read_head(place))
            except Damaged as wrong:
                self._discard(place, wrong)
            except FileNotFoundError:
                pass  # another process has just evicted it
            except OSError:
                self._tally.add(read_errors=1)
        with self._lock:
            for head, nbytes, used_ns in sorted(found, key=lambda each: each[2]):
                self._index.add(head, nbytes, used_ns)

    def _read_one(self, place: Place) -> Block | None:
        """The block in a file; None: the file is gone or wrong, and is dropped from the index."""
        if not (nbytes := self.file_bytes(*place)):
            return None
        began = time.perf_counter()
        try:
            block = self._folder.read(place, nbytes, self._secret)
        except Damaged as wrong:
            self._discard(place, wrong)
        except FileNotFoundError:
            self._tally.add(vanished_files=1)
        except OSError:
            self._tally.add(read_errors=1)
        else:
            self._tally.add(read_files=1, read_bytes=nbytes, read_seconds=time.perf_counter() - began)
            return block
        self._drop(*place)
        return None

    def _discard(self, place: Place, wrong: Damaged) -> None:
        self._tally.add(damaged_files=1)
        logger.warning("%s: %s. Its tokens are prefilled.", self._folder.path / file_name(*place), wrong)
        with suppress(OSError):  # the file stays, without an entry in the index
            self._folder.remove(place)

    def _write(self, head: Head, parts: Sequence[Any], nbytes: int) -> str:
        if self._error:
            return self.stopped_words
        try:
            self._list_new_files()
            return self._lack_of_space(nbytes) or super()._write(head, parts, nbytes)
        except OSError as error:
            return "another file has its name" if error.errno in _NAME_TAKEN else self._stop(error)

    def _stop(self, error: OSError) -> str:
        self._error = str(error)
        logger.warning("%s: %s. Nothing more is written; stored blocks are still read.", self._folder.path, error)
        return self.stopped_words

    def _lack_of_space(self, nbytes: int) -> str:
        """Why the disk has no room for so many bytes, or ""."""
        about = os.statvfs(self._folder.path)
        if about.f_flag & os.ST_RDONLY:
            return "the disk is mounted read-only"
        is_full = about.f_bavail * about.f_frsize < self._min_free_bytes + nbytes
        return "the disk is nearly full" if is_full else ""

    def _write_file(self, head: Head, parts: Sequence[Any], nbytes: int) -> None:
        self._folder.write(file_name(*head.place), parts)

    def _delete_file(self, key: bytes, kind: Kind) -> bool:
        return self._folder.remove((key, kind))

    def _mark_used(self, key: bytes, now_ns: int) -> None:
        with suppress(OSError):  # the index of this process has the use anyway
            os.utime(self._folder.path / file_name(key, "block"), ns=(now_ns, now_ns), follow_symlinks=False)

    def _last_use_ns(self, key: bytes) -> int:
        with suppress(FileNotFoundError):
            return os.stat(self._folder.path / file_name(key, "block"), follow_symlinks=False).st_mtime_ns
        return 0
