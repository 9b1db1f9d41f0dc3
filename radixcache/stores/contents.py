"""Contents: what of a folder this process knows, kept in step with the files of its own and of other processes.

  C1  A file that is no block, or not the one that it should be, is set aside, counted, and logged once by its name.
  C2  A file is evicted only if no other process has used it later than this one knows.
  C3  The lock is held for look-ups in memory alone.

What other processes evict is noticed when it is read or to be evicted, what they add before a match or a write.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from radixcache.stores.block import KINDS, Block, Head, Kind
from radixcache.stores.codec import Damaged
from radixcache.stores.folder import Folder, file_name, place_of
from radixcache.stores.index import Index, Link
from radixcache.stores.stats import Tally
from radixcache.tokens.keys import Keys

logger = logging.getLogger(__name__)


class Contents:
    """The files of blocks in a folder. Methods may be called from any thread."""

    def __init__(self, folder: Folder, tally: Tally, secret: bytes | None) -> None:
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
