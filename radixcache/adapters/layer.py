"""Adapter of the LayerCache of mlx_lm.models.deepseek_v41: a sliding window beside compressed groups.

Source: mlx-lm 0.32.2. `window`, `compress_kv`, `index_k`, `pending_kv` and `pending_gate` are arrays (1, T, D) or
None, replaced and never written in place; `offset` counts tokens. Its `state` has no setter, so the fields are read
and written by name; an object with other fields is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from radixcache.adapters.owned import owned
from radixcache.adapters.point import PointAdapter, PointSnapshot
from radixcache.errors import UnsupportedCacheError

FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


@dataclass(slots=True)
class LayerSnapshot(PointSnapshot):
    """The five fields at offset `end`; None where a field was never written."""

    fields: list[mx.array | None]

    def arrays(self) -> list[mx.array]:
        return [a for a in self.fields if a is not None]


class LayerAdapter(PointAdapter):
    """deepseek_v41's LayerCache: point state; evicted window rows and closed groups cannot be brought back."""

    def is_empty(self, cache: Any) -> bool:
        return bool(cache.offset == 0)

    def offset(self, cache: Any) -> int | None:
        return int(cache.offset)

    def buffers(self, cache: Any) -> list[mx.array]:
        return [a for a in _fields(cache) if a is not None]

    def capacity(self, cache: Any) -> int:
        return int(cache.offset)

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(("none",) if a is None else (a.shape[0], *a.shape[2:], a.dtype) for a in _fields(cache))

    def snapshot(self, cache: Any, start: int, end: int) -> LayerSnapshot | None:
        if self.is_empty(cache):
            return None
        return LayerSnapshot(int(cache.offset), [None if a is None else owned(a) for a in _fields(cache)])

    def restore(self, cache: Any, snapshot: LayerSnapshot | None, target: int) -> bool:
        if snapshot is None:
            return self.can_rewind(cache, target)
        if target != snapshot.end:
            return False
        _put(cache, [None if a is None else owned(a) for a in snapshot.fields], target)
        return True

    def can_rewind(self, cache: Any, target: int) -> bool:
        return bool(target == cache.offset)

    def free(self, cache: Any) -> None:
        _put(cache, [None] * len(FIELDS), 0)

    def own(self, cache: Any) -> list[mx.array]:
        _put(cache, [None if a is None else owned(a) for a in _fields(cache)], cache.offset)
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        return _fields(cache), cache.offset

    def roll_back(self, cache: Any, held: Any) -> bool:
        _put(cache, *held)
        return True


def _fields(cache: Any) -> list[mx.array | None]:
    unknown = set(vars(cache)) - {*FIELDS, "offset", "window_size"}
    if unknown:
        raise UnsupportedCacheError(f"LayerCache has unknown fields {sorted(unknown)}; known: {', '.join(FIELDS)}.")
    return [getattr(cache, name) for name in FIELDS]


def _put(cache: Any, fields: list[mx.array | None], offset: int) -> None:
    for name, array in zip(FIELDS, fields, strict=True):
        setattr(cache, name, array)
    cache.offset = offset
