"""Folder: the files of a store by name.

    PATH/store.json                       format, version, and what tells one secret from another
    PATH/ab/abcd...ef.block               a file per block, and per checkpoint, by the first byte of its key
    PATH/tmp-...                          being written
    PATH/quarantine/                      what was set aside
    PATH/written-DAY                      bytes that were written on a day (`daily_writes.py`)

A folder of files, not a log: opening 20,000 of them takes a second or two, any of them can be evicted alone, and beyond
a MiB a block appending to a log is no faster. Methods raise OSError as the system does.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from radixcache.errors import StoreError
from radixcache.stores.block import KINDS, Block, Head, Kind
from radixcache.stores.codec import CHECKSUM_BYTES, Checksum, Damaged, decoded, decoded_head, head_bytes
from radixcache.stores.files import make_folder, opened, read_first, remove_abandoned, write_whole

MARK = {"format": "radixcache-store", "version": 1}
#: What is set aside goes, the longest there first, beyond so many files and bytes.
QUARANTINE_FILES, QUARANTINE_BYTES = 16, 256 << 20
#: Read first of a file: the head of a block with a few hundred buffers.
FIRST_BYTES = 32 << 10
#: A folder that changed so recently may change again and show the same time.
RECENT_NS = 100_000_000

_NAME = re.compile(rf"([0-9a-f]{{2}})/(\1[0-9a-f]{{30}})\.({'|'.join(KINDS)})")


def file_name(key: bytes, kind: Kind) -> str:
    """Where a block lies, from the store's folder on."""
    return f"{key[:1].hex()}/{key.hex()}.{kind}"


def place_of(name: str) -> tuple[bytes, Kind] | None:
    """Key and kind of the block that lies there; None: no block does."""
    found = _NAME.fullmatch(name)
    return None if found is None else (bytes.fromhex(found[2]), cast(Kind, found[3]))


class Folder:
    """A store's folder. With `make` it is made, marked as a store and tidied.

    Raises:
        StoreError: it cannot be, it holds something else, or another format; with `make`, what `require` says.
    """

    def __init__(self, path: str | os.PathLike[str], secret: bytes | None = None, make: bool = False) -> None:
        self.path = Path(path)
        #: When each folder had changed last, as far as its files are known.
        self._seen: dict[str, int] = {}
        try:
            if make:
                self._make(secret)
            with opened(self.path / "store.json") as handle:
                mark = json.loads(bytes(read_first(handle, 1 << 12)))
        except (OSError, ValueError, RecursionError, Damaged) as error:
            raise StoreError(f"{self.path}: cannot be used as a store: {error}.") from error
        if not isinstance(mark, dict) or {name: mark.get(name) for name in MARK} != MARK:
            raise StoreError(f"{self.path}: store.json says {mark}; wanted {MARK}. Name another folder.")
        self._secret_id = mark.get("secret")
        if make:
            self.require(secret)

    def require(self, secret: bytes | None) -> None:
        """Raise StoreError unless the store was made with this secret; None: without one."""
        if self._secret_id != _secret_id(secret):
            used = "no secret" if self._secret_id is None else "a secret that is not this one"
            raise StoreError(f"{self.path}: the store was made with {used}. Give the same, or name another folder.")

    def changed(self) -> Iterator[str]:
        """Names of all files in those shards that may have changed since this was last asked."""
        try:
            for shard in self._changed_shards():
                with os.scandir(self.path / shard) as entries:
                    names = [f"{shard}/{entry.name}" for entry in entries if not entry.is_dir(follow_symlinks=False)]
                yield from names
        except OSError:
            self._seen.clear()  # all of it is looked at again
            raise

    def read_head(self, name: str) -> tuple[Head, int, int]:
        """Head of a file, its bytes, and when it was last used, in ns since 1970. Damaged: it is no block's."""
        with opened(self.path / name) as handle:
            about = os.fstat(handle)
            data = read_first(handle, FIRST_BYTES)
            if (wanted := head_bytes(data)) > len(data) == FIRST_BYTES:
                data = read_first(handle, wanted)
        head, _ = decoded_head(data, about.st_size)
        if name != file_name(head.key, head.kind):
            raise Damaged("it has not the name of its block")
        return head, about.st_size, about.st_mtime_ns

    def read(self, name: str, nbytes: int, secret: bytes | None) -> Block:
        """The block in a file. Damaged: it is none, or has not this many bytes; no more are ever made room for."""
        checksum = Checksum(secret, nbytes - CHECKSUM_BYTES)
        with opened(self.path / name) as handle:
            if (found := os.fstat(handle).st_size) != nbytes:
                raise Damaged(f"it has {found} bytes, and should have {nbytes}")
            data = read_first(handle, nbytes, checksum.add)
        return decoded(data, secret, checksum.value)

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Make a file of these parts, in place of one that has the name."""
        write_whole(self.path, name, parts)

    def remove(self, name: str) -> bool:
        """Remove a file; False: somebody else has."""
        try:
            os.unlink(self.path / name)
        except FileNotFoundError:
            return False
        return True

    def used_ns(self, name: str) -> int:
        """When a file was used last, by any process."""
        return os.stat(self.path / name, follow_symlinks=False).st_mtime_ns

    def use(self, name: str, now_ns: int) -> None:
        """Note when a file was used, where other processes and later ones see it."""
        os.utime(self.path / name, ns=(now_ns, now_ns), follow_symlinks=False)

    def free_bytes(self) -> int:
        about = os.statvfs(self.path)
        return about.f_bavail * about.f_frsize

    def set_aside(self, name: str) -> None:
        """Move a file into the quarantine; the ones that were moved first go where they are too many."""
        quarantine = self.path / "quarantine"
        make_folder(quarantine)
        os.rename(self.path / name, quarantine / os.path.basename(name))
        with os.scandir(quarantine) as entries:
            files = [(entry.stat(follow_symlinks=False), entry.path) for entry in entries]
        kept_bytes = 0
        for count, (about, path) in enumerate(sorted(files, key=lambda file: -file[0].st_ctime_ns), start=1):
            kept_bytes += about.st_size
            if (count > QUARANTINE_FILES or kept_bytes > QUARANTINE_BYTES) and not stat.S_ISDIR(about.st_mode):
                os.unlink(path)

    def _make(self, secret: bytes | None) -> None:
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        remove_abandoned(self.path)
        with os.scandir(self.path) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(("tmp-", ".")))
        if names and "store.json" not in names:
            raise StoreError(f"{self.path}: holds {names[0]}, and is no store. Name a folder that is new or empty.")
        if not names:
            self.write("store.json", [json.dumps({**MARK, "secret": _secret_id(secret)}).encode()])

    def _changed_shards(self) -> list[str]:
        # Every file of a block passes through PATH on its way, so nothing is new where PATH has not changed.
        if not self._is_changed("", os.stat(self.path)):
            return []
        with os.scandir(self.path) as entries:
            shards = [entry for entry in entries if re.fullmatch("[0-9a-f]{2}", entry.name)]
        return [
            entry.name
            for entry in shards
            if entry.is_dir(follow_symlinks=False) and self._is_changed(entry.name, entry.stat(follow_symlinks=False))
        ]

    def _is_changed(self, name: str, about: os.stat_result) -> bool:
        changed_ns = about.st_mtime_ns
        if self._seen.get(name) == changed_ns:
            return False
        if time.time_ns() - changed_ns > RECENT_NS:
            self._seen[name] = changed_ns
        return True


def _secret_id(secret: bytes | None) -> str | None:
    return None if secret is None else blake2b(key=secret, digest_size=8, person=b"rc secret id").hexdigest()
