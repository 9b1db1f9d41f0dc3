"""KeyTable: block ids of one file become keys that no other file shares, and equal keys are held to equal prefixes.

Ids are numbered in the order they appear, so the same file gives the same keys whatever its ids look like:

    key = salt of the file << 40 | number

The salt is 22 bits of a digest of the file's name. `join_traces` numbers anew, so there nothing can collide at all.
"""

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from runner.traces.request import Keys

NUMBER_BITS = 40
_SALT_BITS = 22
_NO_PARENT = -1


class KeyTable:
    """The ids of a file with the number of each and of the block before it. O(1) per id."""

    def __init__(self, file_name: str) -> None:
        digest = hashlib.blake2b(file_name.encode("utf-8", "surrogateescape"), digest_size=4).digest()
        self._salt = int.from_bytes(digest, "big") >> (32 - _SALT_BITS) << NUMBER_BITS
        self._numbers: dict[Hashable, int] = {}
        self._parents: list[int] = []

    def conflict(self, ids: Sequence[Hashable]) -> int | None:
        """Index of the first id that stands behind another prefix than before; None where all agree."""
        numbers, parents = self._numbers, self._parents
        previous: int | None = _NO_PARENT
        for index, block_id in enumerate(ids):
            number = numbers.get(block_id)
            if number is not None and parents[number] != previous:
                return index
            previous = number
        if len(set(ids)) < len(ids):
            return next(index for index, block_id in enumerate(ids) if block_id in ids[:index])
        return None

    def keys(self, ids: Sequence[Hashable], *, unhashed_tail: bool = False) -> Keys:
        """Keys of a prompt without conflict; an unhashed tail is a last block of its own that nobody shares."""
        keys = np.empty(len(ids) + unhashed_tail, np.int64)
        previous = _NO_PARENT
        for index, block_id in enumerate(ids):
            number = self._numbers.get(block_id)
            if number is None:
                number = self._numbers[block_id] = self._append(previous)
            keys[index] = previous = number
        if unhashed_tail:
            keys[-1] = self._append(previous)
        keys |= self._salt
        return keys

    def _append(self, parent: int) -> int:
        self._parents.append(parent)
        return len(self._parents) - 1
