"""KeyTable: block ids of one file become keys, and equal ids are held to equal prefixes.

Ids are numbered from 0 in the order they appear, so the same file gives the same keys whatever its ids look like. Keys
of different files mean different blocks: `join_traces` numbers them anew.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from runner.traces.request import Keys

_NO_PARENT = -1


class KeyTable:
    """The ids of a file with the number of each and of the block before it. O(1) per id."""

    def __init__(self) -> None:
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
        return keys

    def _append(self, parent: int) -> int:
        self._parents.append(parent)
        return len(self._parents) - 1
