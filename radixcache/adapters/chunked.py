"""Adapter of mlx_lm.models.cache.ChunkedKVCache: the last `chunk_size` tokens and what the present chunk added.

Source: mlx-lm 0.32.2, used by llama4. The model cuts the front before an update; `start_position` is what is gone.
`is_trimmable` stays True after that and `trim` clips silently, so neither is used.
"""

from __future__ import annotations

from typing import Any

from radixcache.adapters.snapshots import Range, Window
from radixcache.adapters.window import WindowAdapter


class ChunkedKVAdapter(WindowAdapter):
    """ChunkedKVCache: a window that can be rewound until its front was trimmed."""

    def window(self, cache: Any) -> Window:
        return Window(cache.chunk_size)

    def held(self, cache: Any) -> list[Range]:
        return [] if cache.keys is None else [(cache.start_position, cache.offset)]

    def places(self, cache: Any, start: int, end: int) -> list[Range]:
        return [(start - cache.start_position, end - cache.start_position)]

    def is_whole(self, cache: Any) -> bool:
        return bool(cache.start_position == 0)

    def place(self, cache: Any, buffers: Any, offset: int, filled: int) -> None:
        cache.keys, cache.values = buffers
        cache.offset, cache.start_position = offset, offset - filled

    def capacity(self, cache: Any) -> int:
        if cache.keys is None:
            return 0
        # Beyond the chunk size the model cuts the front before every update, which makes new arrays.
        return int(max(cache.offset, cache.start_position + min(cache.keys.shape[2], cache.chunk_size)))

    def hold(self, cache: Any, tokens: int) -> Any:
        # A single-token write goes into the buffer in place, and holding it would copy the whole chunk for each token;
        # unless the front is about to be cut, which makes new arrays.
        filled = cache.offset - cache.start_position
        is_replaced = tokens > 1 or cache.keys is None or filled > cache.chunk_size
        return (cache.keys, cache.values) if is_replaced else None, cache.offset, filled

    def roll_back(self, cache: Any, held: Any) -> bool:
        buffers, offset, filled = held
        is_cut = buffers is None and cache.start_position != offset - filled
        return not is_cut and super().roll_back(cache, held)
