"""PointAdapter: what adapters of point state have in common: a snapshot is whole, and cannot be split or joined.

The state of a cache is a nest of lists, tuples and dictionaries with arrays in it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from radixcache.adapters.owned import owned


@dataclass(slots=True)
class PointSnapshot:
    """The whole state of one layer at offset `end`, as its adapter's `state` has it."""

    end: int
    state: Any

    @property
    def start(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return arrays_in(self.state)


class PointAdapter(ABC):
    """Base of the adapters of point state; most of them can restore a snapshot at its own offset only."""

    is_point = True
    is_window = False

    @abstractmethod
    def state(self, cache: Any) -> Any:
        """The state of a cache that is not empty; not a copy."""

    @abstractmethod
    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        """Give the cache the state that `state` gave at this offset."""

    def is_empty(self, cache: Any) -> bool:
        return not self.buffers(cache)

    def offset(self, cache: Any) -> int | None:
        return int(cache.offset)

    def buffers(self, cache: Any) -> list[mx.array]:
        return arrays_in(self.state(cache))

    def capacity(self, cache: Any) -> int:
        return self.offset(cache) or 0

    def spare_nbytes(self, cache: Any) -> int:
        return 0

    def reserve(self, cache: Any, capacity_tokens: int, like: Any = None, wait: bool = True) -> None:  # noqa: B027
        """Nothing to reserve: the class allocates at every update."""

    def snapshot(self, cache: Any, start: int, end: int) -> PointSnapshot | None:
        if self.is_empty(cache):
            return None
        state, offset = copied(self.state(cache)), self.offset(cache)
        return PointSnapshot(end if offset is None else offset, state)

    def restore(self, cache: Any, snapshot: PointSnapshot | None, target: int) -> bool:
        if snapshot is None:
            return self.can_rewind(cache, target)
        if target != snapshot.end:
            return False
        self.put(cache, copied(snapshot.state), target)
        return True

    def can_rewind(self, cache: Any, target: int) -> bool:
        return target == (0 if self.is_empty(cache) else self.offset(cache))

    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]:
        return None, snapshot

    def merge(self, upper: Any, lower: Any) -> Any:
        return lower

    def own(self, cache: Any) -> list[mx.array]:
        if self.is_empty(cache):
            return []
        self.put(cache, copied(self.state(cache)), self.offset(cache))
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        return self.state(cache), self.offset(cache)

    def roll_back(self, cache: Any, held: Any) -> bool:
        self.put(cache, *held)
        return True


def arrays_in(tree: Any) -> list[mx.array]:
    """All arrays in a nest, in order."""
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [array for item in tree if item is not None for array in arrays_in(item)]


def copied(tree: Any, leaf: Any = owned) -> Any:
    """The same nest with every array passed through `leaf`."""
    # Every recurrent layer of every request comes through here: what is frequent is asked first.
    if tree is None:
        return None
    if isinstance(tree, mx.array):
        return leaf(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([copied(item, leaf) for item in tree])
    if isinstance(tree, dict):
        return {key: copied(item, leaf) for key, item in tree.items()}
    return copy.copy(tree)
