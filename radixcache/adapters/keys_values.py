"""KeysAndValues: what adapters of classes with `keys`, `values` and `offset` share; buffers are (1, H, T, D)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class KeysAndValues:
    """Base of such adapters, of spans and of windows."""

    def is_empty(self, cache: Any) -> bool:
        return cache.keys is None

    def offset(self, cache: Any) -> int | None:
        return int(cache.offset)

    def buffers(self, cache: Any) -> list[mx.array]:
        return [] if cache.keys is None else [cache.keys, cache.values]

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple((*b.shape[:2], b.shape[3], b.dtype) for b in self.buffers(cache))
