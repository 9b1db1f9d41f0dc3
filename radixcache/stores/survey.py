"""What lies in a store's folder, for people: a list, a check of every byte, and removal.

StoreError: there is no store in the folder. Nothing is changed but by `remove`; processes that use the store go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixcache.stores.block import Head
from radixcache.stores.codec import Damaged
from radixcache.stores.folder import Folder, place_of


class StoredFile(NamedTuple):
    """A file of a store.

    Attributes:
        name: its path below the store's folder.
        head: what it says of itself; no checksum was looked at.
        nbytes, used_s: of the file; when it was last used, in seconds since 1970.
    """

    name: str
    head: Head
    nbytes: int
    used_s: float


def scan(path: str | os.PathLike[str]) -> Iterator[StoredFile]:
    """All stored blocks and checkpoints, by their heads alone; what is none, or cannot be read, is left out."""
    folder = Folder(path)
    for name in folder.changed():
        try:
            head, nbytes, used_ns = folder.read_head(name)
        except (Damaged, OSError):
            continue
        yield StoredFile(name, head, nbytes, used_ns / 1e9)


def verify(path: str | os.PathLike[str], secret: bytes | None = None) -> Iterator[tuple[str, int, str]]:
    """Read every file: its name, its bytes, and what is wrong with it, empty where nothing is.

    StoreError: also where the store was made with another secret.
    """
    folder = Folder(path)
    folder.require(secret)
    for name in folder.changed():
        nbytes, wrong = 0, ""
        try:
            _, nbytes, _ = folder.read_head(name)
            folder.read(name, nbytes, secret)
        except (Damaged, OSError) as error:
            wrong = str(error)
        yield name, nbytes, wrong


def remove(path: str | os.PathLike[str], names: Iterable[str]) -> int:
    """Remove blocks and checkpoints by their names; how many there were. OSError: one cannot be removed."""
    folder = Folder(path)
    return sum(folder.remove(name) for name in names if place_of(name) is not None)
