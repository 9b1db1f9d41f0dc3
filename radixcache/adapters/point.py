"""PointAdapter: what adapters of point state have in common: a snapshot is whole, and cannot be split or joined.

WindowAdapter adds what classes with one `keys` and one `values` buffer, (1, H, T, D), share beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(slots=True)
class PointSnapshot:
    """The whole state of one layer at offset `end`."""

    end: int

    @property
    def start(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """The owned arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define arrays().")


class PointAdapter:
    """Base of the adapters of point state; most of them can restore a snapshot at its own offset only."""

    is_point = True

    def spare_nbytes(self, cache: Any) -> int:
        return 0

    def reserve(self, cache: Any, capacity_tokens: int, like: Any = None, wait: bool = True) -> None:
        """Nothing to reserve: the class allocates at every update."""

    def can_cut(self, snapshot: Any, target: int) -> bool:
        return snapshot is None or target == snapshot.end

    def split(self, snapshot: Any, at: int) -> tuple[None, Any]:
        return None, snapshot

    def merge(self, upper: Any, lower: Any) -> Any:
        return lower


@dataclass(slots=True)
class WindowSnapshot(PointSnapshot):
    """Keys (1, H, T, Dk) and values (1, H, T, Dv) in temporal order, compact."""

    keys: mx.array
    values: mx.array

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]


class WindowAdapter(PointAdapter):
    """Base of the adapters of classes that keep the keys and values of part of the sequence."""

    def is_empty(self, cache: Any) -> bool:
        return cache.keys is None

    def offset(self, cache: Any) -> int | None:
        return int(cache.offset)

    def buffers(self, cache: Any) -> list[mx.array]:
        return [] if cache.keys is None else [cache.keys, cache.values]

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple((*b.shape[:2], b.shape[3], b.dtype) for b in self.buffers(cache))

    def own(self, cache: Any) -> list[mx.array]:
        raise NotImplementedError(f"{type(self).__name__} must define own(cache).")

    def reserve(self, cache: Any, capacity_tokens: int, like: Any = None, wait: bool = True) -> None:
        """Spare room is at most one growth step of the class; a smaller capacity drops it."""
        if cache.keys is not None and capacity_tokens <= cache.offset and self.spare_nbytes(cache):
            buffers = self.own(cache)
            if wait:
                mx.eval(buffers)
