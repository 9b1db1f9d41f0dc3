"""Adapter of mlx_lm.models.cache.ArraysCache: a list of arrays, the state of recurrent and linear-attention layers.

Source: mlx-lm 0.32.2. The class has no offset; models assign whole slots, and `advance` changes `lengths` and
`left_padding` in place. After a batched forward a slot is often a view of the whole chunk's activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import NEVER
from radixcache.adapters.owned import owned
from radixcache.adapters.point import PointAdapter, PointSnapshot


@dataclass(slots=True)
class ArraysSnapshot(PointSnapshot):
    """All slots at offset `end`; None where a slot was never written."""

    slots: list[mx.array | None]
    left_padding: mx.array | None
    lengths: mx.array | None

    def arrays(self) -> list[mx.array]:
        return [a for a in (*self.slots, self.left_padding, self.lengths) if a is not None]


class ArraysAdapter(PointAdapter):
    """ArraysCache: point state, valid at exactly one offset that only the session knows."""

    def is_empty(self, cache: Any) -> bool:
        return all(slot is None for slot in cache.cache)

    def offset(self, cache: Any) -> int | None:
        return None

    def buffers(self, cache: Any) -> list[mx.array]:
        return [a for a in (*cache.cache, cache.left_padding, cache.lengths) if a is not None]

    def capacity(self, cache: Any) -> int:
        return 0 if self.is_empty(cache) else NEVER

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple((*a.shape, a.dtype) for a in cache.cache if a is not None)

    def snapshot(self, cache: Any, start: int, end: int) -> ArraysSnapshot | None:
        if self.is_empty(cache):
            return None
        slots = [_copy(slot) for slot in cache.cache]
        return ArraysSnapshot(end, slots, _copy(cache.left_padding), _copy(cache.lengths))

    def restore(self, cache: Any, snapshot: ArraysSnapshot | None, target: int) -> bool:
        if snapshot is None:
            return self.can_rewind(cache, target)
        if target != snapshot.end:
            return False
        cache.cache = [_copy(slot) for slot in snapshot.slots]
        cache.left_padding, cache.lengths = _copy(snapshot.left_padding), _copy(snapshot.lengths)
        return True

    def can_rewind(self, cache: Any, target: int) -> bool:
        return target == 0 and self.is_empty(cache)

    def free(self, cache: Any) -> None:
        cache.cache = [None] * len(cache.cache)
        cache.left_padding = cache.lengths = None

    def own(self, cache: Any) -> list[mx.array]:
        cache.cache = [_copy(slot) for slot in cache.cache]
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        # mx.array(x) is a second handle on the same buffer: free, and not moved by an in-place change of the first.
        # Spelled out: this runs for every such layer and decoded token.
        slots = [None if slot is None else mx.array(slot) for slot in cache.cache]
        padding, lengths = cache.left_padding, cache.lengths
        return slots, None if padding is None else mx.array(padding), None if lengths is None else mx.array(lengths)

    def roll_back(self, cache: Any, held: Any) -> bool:
        cache.cache, cache.left_padding, cache.lengths = held
        return True


def _copy(array: mx.array | None) -> mx.array | None:
    return None if array is None else owned(array)
