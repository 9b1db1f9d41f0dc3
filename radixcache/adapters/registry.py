"""Adapters: one per mlx-lm cache class. The registry fails closed: a class without one is an error by name."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from radixcache.adapters.arrays import ArraysAdapter
from radixcache.adapters.chunked import ChunkedKVAdapter
from radixcache.adapters.concatenate import ConcatenateKVAdapter
from radixcache.adapters.contract import Adapter
from radixcache.adapters.layer import LayerAdapter
from radixcache.adapters.probed import ProbedAdapter
from radixcache.adapters.quantized import QuantizedKVAdapter
from radixcache.adapters.rotating import RotatingKVAdapter
from radixcache.adapters.span import SpanAdapter
from radixcache.errors import UnsupportedCacheError

ADAPTERS: dict[type, Adapter] = {
    ArraysCache: ArraysAdapter(),
    ChunkedKVCache: ChunkedKVAdapter(),
    ConcatenateKVCache: ConcatenateKVAdapter(),
    KVCache: SpanAdapter(),
    LayerCache: LayerAdapter(),
    QuantizedKVCache: QuantizedKVAdapter(),
    RotatingKVCache: RotatingKVAdapter(),
}
PROBED = ProbedAdapter()


def register_adapter(cache_class: type, adapter: Adapter) -> None:
    """Use `adapter` for caches of exactly this class, not of its subclasses."""
    ADAPTERS[cache_class] = adapter


def adapter_for(cache: Any, layer: int = 0) -> Adapter:
    """The adapter of a cache's exact class. UnsupportedCacheError: none, and it does not qualify for the probed one."""
    adapter = ADAPTERS.get(type(cache)) or (PROBED if PROBED.accepts(cache) else None)
    if adapter is not None:
        return adapter
    known = ", ".join(sorted([*(c.__name__ for c in ADAPTERS), "CacheList"]))
    found = f"no adapter for layer {layer} ({type(cache).__name__})"
    raise UnsupportedCacheError(f"{found}. Known: {known}. Register one with register_adapter().")
