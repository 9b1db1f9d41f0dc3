"""Files that are whole from the moment they have their name, and reading that waits for nothing but the disk.

  F1  A file is written as `tmp-...`, locked by its writer, synced, then renamed.
  F2  Folders are made 0700 and files 0600. No symlink is followed, and nothing is opened but a regular file.
  F3  What a process that died leaves behind is a `tmp-` file without a lock, which `remove_abandoned` removes.

Functions raise OSError as the system does, and Damaged where something else stands in a file's place.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from radixcache.stores.codec import Damaged

#: Read at a time: it is looked at before it leaves the processor's cache.
PIECE_BYTES = 1 << 20

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A regular file, open to be read."""
    try:
        handle = os.open(path, _OPEN)
    except OSError:
        with suppress(OSError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise Damaged("it is no regular file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Damaged("it is no regular file")
        yield handle
    finally:
        os.close(handle)


def read_first(handle: int, nbytes: int, add: Callable[[memoryview], object] = len) -> memoryview:
    """The first bytes of a file, so many or all that there are; `add` is called for each piece while the next comes."""
    data: memoryview = np.empty(nbytes, dtype=np.uint8).data
    if nbytes > PIECE_BYTES and hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # nothing but a hint
            os.posix_fadvise(handle, 0, nbytes, os.POSIX_FADV_WILLNEED)
    done = 0
    while done < nbytes and (count := os.preadv(handle, [data[done : done + PIECE_BYTES]], done)):
        add(data[done : done + count])
        done += count
    return data[:done]


def write_whole(root: Path, name: str, parts: Iterable[Any]) -> None:
    """Make a file of these parts below `root`, or in one of its folders, in place of one that has the name."""
    temporary, handle = _made(root)
    target = root / name
    try:
        for part in parts:
            rest = memoryview(part)
            while rest.nbytes:
                rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
        if target.parent != root:
            make_folder(target.parent)
        os.rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)
    _sync(target.parent)


def make_folder(folder: Path) -> None:
    """Make a folder where there is none. FileExistsError: something else is there."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise
    else:
        _sync(folder.parent)


def remove_abandoned(root: Path) -> None:
    """Remove what writers that died were about to write."""
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.name.startswith("tmp-")]
    for name in names:
        with suppress(OSError, Damaged), opened(root / name) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: somebody is writing it
            os.unlink(root / name)


def _made(root: Path) -> tuple[Path, int]:
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
        os.close(handle)  # it was removed before it was locked


def _sync(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
