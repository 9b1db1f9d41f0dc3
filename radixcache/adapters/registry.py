"""The adapter of each mlx-lm cache class, and the leaves of a list of caches. A class without one is an error.

A CacheList holds other caches of any kind, side by side. Its `from_state` (mlx-lm 0.32.2) loses what classes hold
outside `state`, so its leaves are restored in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import CacheList

from radixcache.adapters.contract import Adapter
from radixcache.adapters.point import ArraysAdapter, LayerAdapter, ProbedAdapter
from radixcache.adapters.span import ConcatenateKVAdapter, QuantizedKVAdapter, SpanAdapter
from radixcache.adapters.trial import difference_of
from radixcache.adapters.window import ChunkedKVAdapter, RotatingKVAdapter
from radixcache.errors import UnsupportedCacheError

ADAPTERS: dict[type, Adapter] = {
    mlx_caches.ArraysCache: ArraysAdapter(),
    mlx_caches.ChunkedKVCache: ChunkedKVAdapter(),
    mlx_caches.ConcatenateKVCache: ConcatenateKVAdapter(),
    mlx_caches.KVCache: SpanAdapter(),
    mlx_caches.QuantizedKVCache: QuantizedKVAdapter(),
    mlx_caches.RotatingKVCache: RotatingKVAdapter(),
}
#: The same for classes in files of models, which not every mlx-lm has.
OF_MODELS: dict[str, Adapter] = {"mlx_lm.models.deepseek_v41.LayerCache": LayerAdapter()}
#: These are tried before their first use.
OWN = frozenset([*ADAPTERS.values(), *OF_MODELS.values()])
PROBED = ProbedAdapter()
#: Classes that hold other caches, in `caches`.
LISTS: set[type] = {CacheList}


def register_adapter(cache_class: type, adapter: Adapter | type) -> None:
    """Use `adapter` for caches of exactly this class, not of its subclasses.

    Args:
        adapter: an adapter. For a class that another package has copied from mlx-lm: the class of mlx-lm. Such a copy
            is tried before its first use, as mlx-lm's classes are, and refused if it does something else.

    Raises:
        KeyError: `adapter` is a class without an adapter.
    """
    if not isinstance(adapter, type):
        ADAPTERS[cache_class] = adapter
    elif adapter in LISTS:
        LISTS.add(cache_class)
    else:
        ADAPTERS[cache_class] = ADAPTERS[adapter]


def adapter_for(cache: Any, layer: int = 0) -> Adapter:
    """The adapter of a cache's exact class, or the probed one.

    UnsupportedCacheError: the class has neither, or does not do what its adapter expects of it.
    """
    kind = type(cache)
    adapter = ADAPTERS.get(kind) or OF_MODELS.get(f"{kind.__module__}.{kind.__qualname__}")
    difference = difference_of(kind, adapter) if adapter in OWN else None  # type: ignore[arg-type]  # both are hashable
    if difference is not None:
        raise UnsupportedCacheError(f"layer {layer}: {difference}. Use another mlx-lm, or register_adapter().")
    if adapter is not None or PROBED.accepts(cache):
        return adapter or PROBED
    known = ", ".join(sorted([*(c.__name__ for c in ADAPTERS), "CacheList"]))
    what = f"no adapter for layer {layer} ({type(cache).__name__}). Known: {known}."
    raise UnsupportedCacheError(f"{what} Register one with register_adapter().")


def leaves(caches: Iterable[Any]) -> list[Any]:
    """The cache objects that hold state, in order, without the layers that have no cache (None)."""
    flat = [cache for cache in caches if cache is not None]
    # Called several times per decoded token, nearly always without a CacheList.
    if not any(map(_is_list, set(map(type, flat)))):
        return flat
    return [leaf for cache in flat for leaf in (leaves(cache.caches) if _is_list(type(cache)) else [cache])]


def with_leaves(caches: Iterable[Any], replaced: Callable[[Any], Any]) -> list[Any]:
    """The same caches with every leaf replaced, in order.

    No closure calls itself here: as a cycle it would hold the arrays that `replaced` knows until garbage collection.
    """
    return [None if cache is None else _with_leaves(cache, replaced) for cache in caches]


def _with_leaves(cache: Any, replaced: Callable[[Any], Any]) -> Any:
    return type(cache)(*with_leaves(cache.caches, replaced)) if _is_list(type(cache)) else replaced(cache)


def _is_list(kind: type) -> bool:
    return not LISTS.isdisjoint(kind.__mro__)
