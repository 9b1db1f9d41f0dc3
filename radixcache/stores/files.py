"""Folder: the files of a DiskStore. A file gets its name only when it is complete.

    PATH/store.json                       format, version, and an id of the secret
    PATH/ab/abcd...ef.block               a file for each block and checkpoint, by the first byte of its key
    PATH/tmp-...                          a file that is being written

  F1  A file is written as `tmp-...`, locked by its writer, synced, then renamed.
  F2  Folders are made 0700 and files 0600. No symlink is followed, and only regular files are opened.
  F3  A process that died leaves a `tmp-` file without a lock; `_remove_abandoned` removes it.
  F4  Files with other names are neither read nor removed.

Why files, not a log or SQLite: a file can be evicted alone, and 20,000 files open in 1 to 2 s. A log is not faster for
blocks of 1 MiB. For blocks of 16 MiB, SQLite has half the write speed and 0.7 of the read speed. Methods raise OSError
as the system does, and Damaged for a wrong file. `scan`, `verify` and `remove` are for the command `radixcache store`;
they raise StoreError if the folder holds no store.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from radixcache.errors import StoreError
from radixcache.stores.block import KINDS, Block, Head, Kind, Place
from radixcache.stores.codec import CHECKSUM_BYTES, Checksum, Damaged, decode, decode_head, head_bytes

MARK = {"format": "radixcache-store", "version": 1}
#: Bytes read at a time. The checksum reads them while they are in the processor's cache.
PIECE_BYTES = 1 << 20
#: Bytes read first: enough for the head of a block with a few hundred buffers.
FIRST_BYTES = 32 << 10
#: For so long after a change, a folder may change again without a new time stamp.
RECENT_NS = 100_000_000

_NAME = re.compile(rf"([0-9a-f]{{2}})/(\1[0-9a-f]{{30}})\.({'|'.join(KINDS)})")

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def file_name(key: bytes, kind: Kind) -> str:
    """The path of a file inside the folder of the store."""
    return f"{key[:1].hex()}/{key.hex()}.{kind}"


class Folder:
    """The folder of a store. `make`: create it if needed, write store.json and remove unfinished files.

    Raises:
        StoreError: the folder cannot be used or holds something else. With `make` also: its store has another secret.
    """

    def __init__(self, path: str | os.PathLike[str], secret: bytes | None = None, make: bool = False) -> None:
        self.path = Path(path)
        #: For each folder whose files were listed, the time of its last change before that.
        self._seen: dict[str, int] = {}
        try:
            if make:
                self._make(secret)
            with _open(self.path / "store.json") as handle:
                mark = json.loads(bytes(_read_first(handle, 1 << 12)))
        except (OSError, ValueError, RecursionError, Damaged) as error:
            raise StoreError(f"{self.path}: cannot be used as a store: {error}.") from error
        if not isinstance(mark, dict) or {name: mark.get(name) for name in MARK} != MARK:
            raise StoreError(f"{self.path}: store.json says {mark}; wanted {MARK}. Name another folder.")
        self._secret_id = mark.get("secret")
        if make:
            self.require(secret)

    def require(self, secret: bytes | None) -> None:
        """Raise StoreError unless the store was made with this secret; None: without a secret."""
        if self._secret_id != _secret_id(secret):
            used = "no secret" if self._secret_id is None else "another secret"
            raise StoreError(f"{self.path}: the store was made with {used}. Give that secret, or name another folder.")

    def other_writers(self) -> str:
        """Who else may write to the folder; "": nobody but root, or the folder cannot be read."""
        try:
            about = os.stat(self.path)
        except OSError:
            return ""
        who = {"its owner": about.st_uid not in (0, os.geteuid()), "its group": about.st_mode & stat.S_IWGRP}
        who["everybody"] = about.st_mode & stat.S_IWOTH
        return ", ".join(name for name, may_write in who.items() if may_write)

    def changed_places(self) -> Iterator[Place]:
        """All blocks and checkpoints in the subfolders that may have changed since the last call."""
        try:
            for shard in self._changed_shards():
                for name in os.listdir(self.path / shard):
                    if found := _NAME.fullmatch(f"{shard}/{name}"):
                        yield bytes.fromhex(found[2]), cast(Kind, found[3])
        except OSError:
            self._seen.clear()  # list everything the next time
            raise

    def read_head(self, place: Place) -> tuple[Head, int, int]:
        """Head, bytes and last use (ns since 1970) of a file. Damaged: the file is not a stored block."""
        with _open(self.path / file_name(*place)) as handle:
            about = os.fstat(handle)
            data = _read_first(handle, FIRST_BYTES)
            if (wanted := head_bytes(data)) > len(data) == FIRST_BYTES:
                data = _read_first(handle, wanted)
        head, _ = decode_head(data, about.st_size)
        if head.place != place:
            raise Damaged("its name is not that of its block")
        return head, about.st_size, about.st_mtime_ns

    def read(self, place: Place, nbytes: int, secret: bytes | None) -> Block:
        """The block in a file of `nbytes`. Damaged: the file has another size, or `decode` raises it."""
        checksum = Checksum(secret, nbytes - CHECKSUM_BYTES)
        with _open(self.path / file_name(*place)) as handle:
            if (found := os.fstat(handle).st_size) != nbytes:
                raise Damaged(f"it has {found} bytes, and should have {nbytes}")
            data = _read_first(handle, nbytes, checksum.add)
        return decode(data, secret, checksum.value, place)

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Write a file of these parts; it replaces any file of that name."""
        temporary, handle = _new_temporary(self.path)
        target = self.path / name
        try:
            for part in parts:
                rest = memoryview(part)
                while rest.nbytes:
                    rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
            if target.parent != self.path:
                _make_folder(target.parent)
            os.rename(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(handle)
        _sync(target.parent)

    def remove(self, place: Place) -> bool:
        """False: another process has removed it."""
        try:
            os.unlink(self.path / file_name(*place))
        except FileNotFoundError:
            return False
        return True

    def _make(self, secret: bytes | None) -> None:
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        _remove_abandoned(self.path)
        with os.scandir(self.path) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(("tmp-", ".")))
        if names and "store.json" not in names:
            raise StoreError(f"{self.path}: holds {names[0]}, and is no store. Name a folder that is new or empty.")
        if not names:
            self.write("store.json", [json.dumps({**MARK, "secret": _secret_id(secret)}).encode()])

    def _changed_shards(self) -> list[str]:
        # Every file is made in PATH first: if PATH has not changed, nothing is new.
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


class StoredFile(NamedTuple):
    """A file of which only the head was read. `used_s`: its last use in seconds since 1970."""

    head: Head
    nbytes: int
    used_s: float

    @property
    def name(self) -> str:
        return file_name(*self.head.place)


def scan(path: str | os.PathLike[str]) -> Iterator[StoredFile]:
    """All blocks and checkpoints with a readable head."""
    folder = Folder(path)
    for place in folder.changed_places():
        with suppress(Damaged, OSError):
            head, nbytes, used_ns = folder.read_head(place)
            yield StoredFile(head, nbytes, used_ns / 1e9)


def verify(path: str | os.PathLike[str], secret: bytes | None = None) -> Iterator[tuple[str, str]]:
    """Check every file; yield its name, and what is wrong with it or "". StoreError: also if the secret is another."""
    folder = Folder(path)
    folder.require(secret)
    for place in folder.changed_places():
        wrong = ""
        try:
            folder.read(place, folder.read_head(place)[1], secret)
        except (Damaged, OSError) as error:
            wrong = str(error)
        yield file_name(*place), wrong


def remove(path: str | os.PathLike[str], places: Iterable[Place]) -> int:
    """Remove files; returns how many existed. OSError: a file cannot be removed."""
    return sum(map(Folder(path).remove, places))


@contextmanager
def _open(path: Path) -> Iterator[int]:
    """Open a regular file for reading. Damaged: it is something else."""
    try:
        handle = os.open(path, _OPEN)
    except OSError:
        with suppress(OSError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise Damaged("it is not a regular file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Damaged("it is not a regular file")
        yield handle
    finally:
        os.close(handle)


def _read_first(handle: int, nbytes: int, add: Callable[[memoryview], object] = len) -> memoryview:
    """The first `nbytes` of a file, or all if it has fewer. `add` is called with each piece."""
    data: memoryview = np.empty(nbytes, dtype=np.uint8).data
    if nbytes > PIECE_BYTES and hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only a hint
            os.posix_fadvise(handle, 0, nbytes, os.POSIX_FADV_WILLNEED)
    done = 0
    while done < nbytes and (count := os.preadv(handle, [data[done : done + PIECE_BYTES]], done)):
        add(data[done : done + count])
        done += count
    return data[:done]


def _make_folder(folder: Path) -> None:
    """Make a folder unless it exists. FileExistsError: something else has the name."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise
    else:
        _sync(folder.parent)


def _remove_abandoned(root: Path) -> None:
    """Remove the unfinished files of writers that died."""
    for path in root.glob("tmp-*"):
        with suppress(OSError, Damaged), _open(path) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: another process is writing it
            path.unlink()


def _new_temporary(root: Path) -> tuple[Path, int]:
    while True:
        path = root / f"tmp-{os.urandom(8).hex()}"
        handle = os.open(path, _MAKE, 0o600)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return path, handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # another process removed the file before it was locked


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
