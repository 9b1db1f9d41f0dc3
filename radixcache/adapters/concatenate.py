"""Adapter of mlx_lm.models.cache.ConcatenateKVCache: keys and values exactly as long as the sequence.

Source: mlx-lm 0.32.2. An update joins new keys to *all* of the old ones and takes the offset from the result, so a
rewind has to cut the arrays; a smaller offset alone would bring the cut tokens back. Arrays are never written in place.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import NEVER
from radixcache.adapters.owned import owned
from radixcache.adapters.span import SpanAdapter, SpanSnapshot


class ConcatenateKVAdapter(SpanAdapter):
    """ConcatenateKVCache: no spare room, nothing in place."""

    def capacity(self, cache: Any) -> int:
        return NEVER

    def spare_nbytes(self, cache: Any) -> int:
        return 0

    def reserve(self, cache: Any, capacity_tokens: int, like: SpanSnapshot | None = None, wait: bool = True) -> None:
        """Nothing to reserve: the class allocates at every update."""

    def own(self, cache: Any) -> list[mx.array]:
        self._cut(cache, cache.offset)
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        return cache.keys, cache.values, cache.offset

    def roll_back(self, cache: Any, held: Any) -> bool:
        cache.keys, cache.values, cache.offset = held
        return True

    def _rewind(self, cache: Any, target: int) -> None:
        if target == 0:
            self.free(cache)
        elif target < cache.offset:
            self._cut(cache, target)
            cache.offset = target

    def _cut(self, cache: Any, target: int) -> None:
        if cache.keys is not None:
            self.put(cache, [owned(b[..., :target, :]) for b in self.buffers(cache)])

    def _page_in(self, cache: Any, snapshot: SpanSnapshot, target: int) -> None:
        buffers: list[list[mx.array]] = [[b[..., : cache.offset, :]] for b in self.buffers(cache)]
        buffers = buffers or [[] for _ in snapshot.segments[0]]
        for _, _, arrays in snapshot.parts(cache.offset, target):
            for pieces, array in zip(buffers, arrays, strict=True):
                pieces.append(array)
        self.put(cache, [owned(mx.concatenate(pieces, axis=2)) for pieces in buffers])
        cache.offset = target
