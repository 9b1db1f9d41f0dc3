"""Adapter of mlx_lm.models.cache.ArraysCache: a list of arrays, the state of recurrent and linear-attention layers.

Source: mlx-lm 0.32.2. The class has no offset; models assign whole slots, and `advance` changes `lengths` and
`left_padding` in place. After a batched forward a slot is often a view of the whole chunk's activations.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import NEVER
from radixcache.adapters.point import PointAdapter


class ArraysAdapter(PointAdapter):
    """ArraysCache: point state, valid at exactly one offset that only the session knows.

    The state is (slots, left_padding, lengths); None where one was never written.
    """

    def state(self, cache: Any) -> Any:
        return cache.cache, cache.left_padding, cache.lengths

    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        cache.cache, cache.left_padding, cache.lengths = state

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

    def free(self, cache: Any) -> None:
        self.put(cache, ([None] * len(cache.cache), None, None), 0)

    def hold(self, cache: Any, tokens: int) -> Any:
        # mx.array(x) is a second handle on the same buffer: free, and not moved by an in-place change of the first.
        # Spelled out: this runs for every such layer and decoded token.
        slots = [None if slot is None else mx.array(slot) for slot in cache.cache]
        padding, lengths = cache.left_padding, cache.lengths
        handles = None if padding is None else mx.array(padding), None if lengths is None else mx.array(lengths)
        return (slots, *handles), None
