"""Adapter of mlx_lm.models.cache.RotatingKVCache: a window of the last `max_size` tokens plus the first `keep`.

Source: mlx-lm 0.32.2. The buffer is in temporal order until single-token writes go round:

    [ keep | oldest .. newest ]            `_idx` at the end: temporal order
    [ keep | newer .. newest | oldest .. ] `_idx` inside: the ring has gone round

After a batched write of T tokens it holds up to max_size + T - 1 of them; the next write would cut it back to
`keep` plus the last `max_size - keep`, and so does a snapshot. Nothing was lost while `offset <= max_size`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import NEVER
from radixcache.adapters.window import WindowAdapter


class RotatingKVAdapter(WindowAdapter):
    """RotatingKVCache: point state that can be cut back until it has wrapped."""

    def filled(self, cache: Any) -> int:
        return int(min(cache.offset, cache.max_size))

    def place(self, cache: Any, buffers: Any, offset: int, filled: int) -> None:
        cache.keys, cache.values = buffers
        cache.offset, cache._idx = offset, filled

    def state(self, cache: Any) -> list[mx.array]:
        """At most `keep` plus the last `max_size - keep` tokens."""
        return [_window(cache, b) for b in self.buffers(cache)]

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


def _window(cache: Any, buffer: mx.array) -> mx.array:
    index, keep, held = cache._idx, cache.keep, buffer.shape[2]
    if index < cache.offset and index < held:
        buffer = mx.concatenate([buffer[..., :keep, :], buffer[..., index:, :], buffer[..., keep:index, :]], axis=2)
    elif index < held:
        buffer = buffer[..., :index, :]
    drop = buffer.shape[2] - cache.max_size
    if drop > 0:
        buffer = mx.concatenate([buffer[..., :keep, :], buffer[..., keep + drop :, :]], axis=2)
    return buffer
