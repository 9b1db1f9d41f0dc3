"""RowStates: the layers beside the cells whose state belongs to one sequence: recurrent and linear attention.

Each sequence has an ArraysCache per such layer. A step of several sequences runs on one that holds a row for each. It
is kept while the same sequences step in the same order, and taken apart when others do.

An array is handed out once: `mx.array(x)` costs nothing and keeps what a model writes into one from reaching another.

Invariants, asserted by `check`:

  CS1  Those that are joined are sequences, none of them twice, and each array of the joined caches has a row for each.
  CS2  What is joined is held once: in their own caches such sequences have None in every slot.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from radixcache.adapters.point import copied

Held = list[tuple[Any, list[mx.array | None]]]


class RowStates:
    """State of all sequences in the layers that have no cells.

    Args:
        slots: number of arrays of each such layer, in the order of the layers; empty: there are none.
    """

    def __init__(self, slots: list[int]) -> None:
        self._slots = slots
        self._own: dict[int, list[Any]] = {}
        self._joined: tuple[int, ...] = ()
        self._batch: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._slots)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids, in order of `add`."""
        return tuple(self._own)

    def add(self, sequence: int) -> None:
        """Make a sequence, which has no state yet."""
        self._own[sequence] = [ArraysCache(size) for size in self._slots]

    def free(self, sequence: int) -> None:
        """Take a sequence out, with its state."""
        self._settle()
        del self._own[sequence]

    def copy(self, source: int, target: int) -> None:
        """Give `target` the state of `source`."""
        self._settle()
        for theirs, mine in zip(self._own[source], self._own[target], strict=True):
            mine.cache = copied(theirs.cache, mx.array)

    def of(self, sequence: int) -> list[Any]:
        """A sequence's caches, an ArraysCache per layer; what is put into them is its state."""
        self._settle()
        return self._own[sequence]

    def take(self, sequences: tuple[int, ...]) -> list[Any]:
        """Caches for a forward pass of these sequences, a row for each: an ArraysCache per layer."""
        if len(sequences) == 1:
            return self.of(sequences[0])
        if sequences != self._joined:
            self._settle()
            owners = [self._own[each] for each in sequences]
            self._batch = [_join(column) for column in zip(*owners, strict=True)]
            self._joined = sequences
            for cache in (cache for own in owners for cache in own):
                cache.cache = [None] * len(cache.cache)  # what is in the batch now is not kept twice
        return self._batch

    def can_join(self, sequences: tuple[int, ...]) -> bool:
        """Whether their arrays have the same shapes; those that remember their last tokens are shorter at first."""
        if len(sequences) == 1 or sequences == self._joined:
            return True
        self._settle()
        return all(_shapes(self._own[each]) == _shapes(self._own[sequences[0]]) for each in sequences)

    def compact(self, sequence: int) -> None:
        """Replace a sequence's arrays by copies of their own: after a pass most are views of what it computed."""
        for cache in self.of(sequence):
            cache.cache = copied(cache.cache)

    def hold(self, sequences: tuple[int, ...]) -> Held:
        """What `roll_back` needs to undo a forward pass of these sequences that has not started yet."""
        return [(cache, copied(cache.cache, mx.array)) for cache in self.take(sequences)]

    def roll_back(self, held: Held) -> None:
        """Give the caches that a forward pass ran on what `hold` found in them."""
        for cache, arrays in held:
            cache.cache = arrays

    def arrays(self) -> list[mx.array]:
        """All that is held, for mx.eval and for counting."""
        joined = set(self._joined)
        caches = [cache for name, own in self._own.items() if name not in joined for cache in own]
        return [array for cache in (*caches, *self._batch) for array in cache.cache if array is not None]

    def check(self) -> None:
        """Assert CS1 and CS2."""
        assert len(set(self._joined)) == len(self._joined), self._joined
        assert set(self._joined) <= set(self._own), (self._joined, self.sequences)
        for joined in self._batch:
            shapes = [array.shape for array in joined.cache if array is not None]
            assert all(shape[0] == len(self._joined) for shape in shapes), (self._joined, shapes)
        for sequence in self._joined:
            assert all(array is None for own in self._own[sequence] for array in own.cache), sequence

    def _settle(self) -> None:
        """Give each sequence of the joined caches its own again."""
        for row, sequence in enumerate(self._joined):
            for joined, own in zip(self._batch, self._own[sequence], strict=True):
                own.cache = copied(joined.cache, lambda array, row=row: mx.contiguous(array[row : row + 1]))
        self._joined, self._batch = (), []


def _shapes(caches: list[Any]) -> list[list[tuple[int, ...] | None]]:
    return [[None if array is None else array.shape for array in cache.cache] for cache in caches]


def _join(caches: tuple[Any, ...]) -> Any:
    joined = ArraysCache(len(caches[0].cache))
    for slot, arrays in enumerate(zip(*(cache.cache for cache in caches), strict=True)):
        if arrays[0] is not None:
            joined.cache[slot] = mx.concatenate(list(arrays))
    return joined
