"""Adapter of mlx_lm.models.cache.RotatingKVCache: a window of the last `max_size` tokens plus the first `keep`.

Source: mlx-lm 0.32.2. The buffer is in temporal order until single-token writes go round:

    [ keep | oldest .. newest ]            `_idx` at the end: temporal order
    [ keep | newer .. newest | oldest .. ] `_idx` inside: the ring has gone round

After a batched write of T tokens it holds up to max_size + T - 1 of them; the next write would cut it back to
`keep` plus the last `max_size - keep`, and so does a snapshot. While `offset <= max_size` nothing was lost, and both
the live state and a snapshot can be cut back to any smaller offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import NEVER
from radixcache.adapters.owned import owned
from radixcache.adapters.point import WindowAdapter, WindowSnapshot


@dataclass(slots=True)
class RotatingSnapshot(WindowSnapshot):
    """The window at offset `end`, in temporal order."""

    max_size: int


class RotatingKVAdapter(WindowAdapter):
    """RotatingKVCache: point state that can be cut back until it has wrapped."""

    def capacity(self, cache: Any) -> int:
        if cache.keys is None:
            return 0
        held = int(cache.keys.shape[2])
        if held == cache.max_size:
            return NEVER
        return held if held < cache.max_size else int(cache.offset)

    def spare_nbytes(self, cache: Any) -> int:
        if cache.keys is None:
            return 0
        held = cache.keys.shape[2]
        spare = held - min(held, cache.offset, cache.max_size)
        return int(sum(b.nbytes for b in self.buffers(cache)) * spare // held)

    def snapshot(self, cache: Any, start: int, end: int) -> RotatingSnapshot | None:
        if cache.keys is None:
            return None
        keys, values = (owned(_window(cache, b)) for b in self.buffers(cache))
        return RotatingSnapshot(int(cache.offset), keys, values, cache.max_size)

    def restore(self, cache: Any, snapshot: RotatingSnapshot | None, target: int) -> bool:
        if snapshot is None:
            if not self.can_rewind(cache, target):
                return False
            if target < cache.offset:
                cache.offset = cache._idx = target
            return True
        if not self.can_cut(snapshot, target):
            return False
        if target == 0:
            self.free(cache)
            return True
        length = target if target < snapshot.end else snapshot.keys.shape[2]
        cache.keys, cache.values = (owned(a[..., :length, :]) for a in snapshot.arrays())
        cache.offset, cache._idx = target, length
        return True

    def can_cut(self, snapshot: RotatingSnapshot | None, target: int) -> bool:
        return snapshot is None or target == snapshot.end or target < snapshot.end <= snapshot.max_size

    def can_rewind(self, cache: Any, target: int) -> bool:
        return bool(target == cache.offset or target < cache.offset <= cache.max_size)

    def free(self, cache: Any) -> None:
        cache.keys = cache.values = None
        cache.offset = cache._idx = 0

    def own(self, cache: Any) -> list[mx.array]:
        if cache.keys is None:
            return []
        cache.keys, cache.values = (owned(_window(cache, b)) for b in self.buffers(cache))
        cache._idx = cache.keys.shape[2]
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        replaced = tokens > 1 or cache.keys is None or cache.keys.shape[2] > cache.max_size
        if replaced:
            # The next write makes new arrays, so holding the old ones costs no copy.
            return cache.keys, cache.values, cache.offset, cache._idx
        if cache.offset < cache.max_size:
            return cache.offset
        return None

    def roll_back(self, cache: Any, held: Any) -> bool:
        if held is None:
            return False
        if isinstance(held, tuple):
            cache.keys, cache.values, cache.offset, cache._idx = held
        else:
            cache.offset = cache._idx = held
        return True


def _window(cache: Any, buffer: mx.array) -> mx.array:
    """The live part of a buffer in temporal order: `keep` plus the last `max_size - keep` tokens at most."""
    index, keep, held = cache._idx, cache.keep, buffer.shape[2]
    if index < cache.offset and index < held:
        buffer = mx.concatenate([buffer[..., :keep, :], buffer[..., index:, :], buffer[..., keep:index, :]], axis=2)
    elif index < held:
        buffer = buffer[..., :index, :]
    drop = buffer.shape[2] - cache.max_size
    if drop > 0:
        buffer = mx.concatenate([buffer[..., :keep, :], buffer[..., keep + drop :, :]], axis=2)
    return buffer
