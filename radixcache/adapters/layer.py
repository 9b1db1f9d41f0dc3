"""Adapter of the LayerCache of mlx_lm.models.deepseek_v41: a sliding window beside compressed groups.

Source: mlx-lm 0.32.2. `window`, `compress_kv`, `index_k`, `pending_kv` and `pending_gate` are arrays (1, T, D) or
None, replaced and never written in place; `offset` counts tokens. Its `state` has no setter, so the fields are read
and written by name; an object with other fields is refused.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from radixcache.adapters.point import PointAdapter
from radixcache.errors import UnsupportedCacheError

FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


class LayerAdapter(PointAdapter):
    """deepseek_v41's LayerCache: point state; evicted window rows and closed groups cannot be brought back."""

    def state(self, cache: Any) -> list[mx.array | None]:
        unknown = set(vars(cache)) - {*FIELDS, "offset", "window_size"}
        if unknown:
            raise UnsupportedCacheError(f"LayerCache has unknown fields {sorted(unknown)}; known: {', '.join(FIELDS)}.")
        return [getattr(cache, name) for name in FIELDS]

    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        vars(cache).update(zip(FIELDS, state, strict=True), offset=offset)

    def is_empty(self, cache: Any) -> bool:
        return bool(cache.offset == 0)

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(("none",) if a is None else (a.shape[0], *a.shape[2:], a.dtype) for a in self.state(cache))

    def free(self, cache: Any) -> None:
        self.put(cache, [None] * len(FIELDS), 0)
