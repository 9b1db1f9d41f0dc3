"""Adapter of mlx_lm.models.cache.ChunkedKVCache: the last `chunk_size` tokens and what the present chunk added.

Source: mlx-lm 0.32.2, used by llama4. The model cuts the front before an update; `start_position` is what is gone.
`is_trimmable` stays True after that and `trim` clips silently, so neither is used. While `start_position` is 0 the
state can be cut back to any smaller offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from radixcache.adapters.owned import owned
from radixcache.adapters.point import WindowAdapter, WindowSnapshot


@dataclass(slots=True)
class ChunkSnapshot(WindowSnapshot):
    """The tokens [start_position, end)."""

    start_position: int


class ChunkedKVAdapter(WindowAdapter):
    """ChunkedKVCache: point state that can be cut back until its front was trimmed."""

    def capacity(self, cache: Any) -> int:
        if cache.keys is None:
            return 0
        # Beyond the chunk size the model cuts the front before every update, which makes new arrays.
        return int(max(cache.offset, cache.start_position + min(cache.keys.shape[2], cache.chunk_size)))

    def spare_nbytes(self, cache: Any) -> int:
        filled = cache.offset - cache.start_position
        return sum(b.nbytes * (b.shape[2] - filled) // b.shape[2] for b in self.buffers(cache))

    def snapshot(self, cache: Any, start: int, end: int) -> ChunkSnapshot | None:
        if cache.keys is None:
            return None
        filled = cache.offset - cache.start_position
        keys, values = (owned(b[..., :filled, :]) for b in self.buffers(cache))
        return ChunkSnapshot(int(cache.offset), keys, values, int(cache.start_position))

    def restore(self, cache: Any, snapshot: ChunkSnapshot | None, target: int) -> bool:
        if snapshot is None:
            if not self.can_rewind(cache, target):
                return False
            if cache.keys is not None:
                cache.offset = target
            return True
        if not self.can_cut(snapshot, target):
            return False
        if target == 0:
            self.free(cache)
            return True
        length = target - snapshot.start_position
        cache.keys, cache.values = (owned(a[..., :length, :]) for a in snapshot.arrays())
        cache.offset, cache.start_position = target, snapshot.start_position
        return True

    def can_cut(self, snapshot: ChunkSnapshot | None, target: int) -> bool:
        return snapshot is None or target == snapshot.end or (target < snapshot.end and snapshot.start_position == 0)

    def can_rewind(self, cache: Any, target: int) -> bool:
        return bool(target == cache.offset or (target < cache.offset and cache.start_position == 0))

    def free(self, cache: Any) -> None:
        cache.keys = cache.values = None
        cache.offset = cache.start_position = 0

    def own(self, cache: Any) -> list[mx.array]:
        if cache.keys is None:
            return []
        filled = cache.offset - cache.start_position
        cache.keys, cache.values = (owned(b[..., :filled, :]) for b in self.buffers(cache))
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        # A single-token write goes into the buffer in place, and holding it would copy the whole chunk for each token;
        # unless the front is about to be cut, which makes new arrays.
        cuts = cache.offset - cache.start_position > cache.chunk_size
        arrays = (cache.keys, cache.values) if tokens > 1 or cache.keys is None or cuts else None
        return arrays, cache.offset, cache.start_position

    def roll_back(self, cache: Any, held: Any) -> bool:
        arrays, offset, start_position = held
        if arrays is not None:
            cache.keys, cache.values = arrays
        elif cache.start_position != start_position:
            return False
        cache.offset, cache.start_position = offset, start_position
        return True
