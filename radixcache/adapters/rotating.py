"""Adapter of mlx_lm.models.cache.RotatingKVCache: a window of the last `max_size` tokens plus the first `keep`.

Source: mlx-lm 0.32.2. The buffer is in temporal order until single-token writes go round:

    [ keep | oldest .. newest ]            `_idx` at the end: temporal order
    [ keep | newer .. newest | oldest .. ] `_idx` inside: the ring has gone round

After a batched write of T tokens it holds up to max_size + T - 1 of them; the next write cuts it back. Nothing was lost
while `offset <= max_size`.
"""

from __future__ import annotations

from typing import Any

from radixcache.adapters.contract import NEVER
from radixcache.adapters.snapshots import Range, Window
from radixcache.adapters.window import WindowAdapter


class RotatingKVAdapter(WindowAdapter):
    """RotatingKVCache: a window that can be rewound until it has wrapped."""

    def window(self, cache: Any) -> Window:
        return Window(cache.max_size, cache.keep)

    def held(self, cache: Any) -> list[Range]:
        if cache.keys is None:
            return []
        count = self._count(cache)
        if count == cache.offset:
            return [(0, count)]
        keep = cache.keep
        tail = (cache.offset - count + keep, cache.offset)
        return [(0, keep), tail] if keep else [tail]

    def places(self, cache: Any, start: int, end: int) -> list[Range]:
        index, keep, held = cache._idx, cache.keep, cache.keys.shape[2]
        if start >= keep:
            # In temporal order the buffer begins with the kept tokens, and ends with the last.
            first, last = (at - cache.offset + self._count(cache) for at in (start, end))
        else:
            first, last = start, end
        if not self._has_gone_round(cache) or last <= keep:
            return [(first, last)]
        seam = keep + held - index
        ranges = [(first, min(last, keep)), (max(first, keep), min(last, seam)), (max(first, seam), last)]
        moves = (0, index - keep, keep - seam)
        return [(low + by, high + by) for (low, high), by in zip(ranges, moves, strict=True) if low < high]

    def is_whole(self, cache: Any) -> bool:
        return bool(cache.offset <= cache.max_size)

    def place(self, cache: Any, buffers: Any, offset: int, filled: int) -> None:
        cache.keys, cache.values = buffers
        cache.offset, cache._idx = offset, filled

    def capacity(self, cache: Any) -> int:
        if cache.keys is None:
            return 0
        held = int(cache.keys.shape[2])
        if held == cache.max_size:
            return NEVER
        return held if held < cache.max_size else int(cache.offset)

    def hold(self, cache: Any, tokens: int) -> Any:
        if tokens > 1 or cache.keys is None or cache.keys.shape[2] > cache.max_size:
            # The next write makes new arrays, so holding the old ones costs no copy.
            return (cache.keys, cache.values), cache.offset, cache._idx
        return (None, cache.offset, cache.offset) if cache.offset < cache.max_size else None

    def _has_gone_round(self, cache: Any) -> bool:
        return bool(cache._idx < cache.offset and cache._idx < cache.keys.shape[2])

    def _count(self, cache: Any) -> int:
        """Tokens that the buffers hold."""
        held = int(cache.keys.shape[2])
        return held if self._has_gone_round(cache) else min(int(cache._idx), held)
