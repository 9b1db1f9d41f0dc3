"""The adapter of each mlx-lm cache class, and the leaves of a list of caches. A class without one is an error.

mlx-lm's classes change between releases. So `adapter_for` tries each class once per process: two tiny instances are fed
numbered tokens, and the class and its adapter must agree about these.

    grow      the class returns the tokens that the adapter says it holds, and both count alike
    cut       a snapshot holds the tokens of the cache; `split` parts them, and `merge` joins them again
    restore   an instance with a snapshot goes on as the one that it was taken of
    trim      after a rewind, or an update that is rolled back, an instance goes on as if nothing had happened
    state     the same for point state: what was set comes back out of a snapshot, and is gone when freed

A class that fails is refused by name, with what differs. Everything else goes on.

A CacheList holds other caches of any kind, side by side. Its `from_state` (mlx-lm 0.32.2) loses what classes hold
outside `state`, so its leaves are restored in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache as cached
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import CacheList

from radixcache.adapters.contract import Adapter
from radixcache.adapters.point import ArraysAdapter, LayerAdapter, ProbedAdapter, arrays_in, is_equal
from radixcache.adapters.span import ConcatenateKVAdapter, QuantizedKVAdapter, SpanAdapter
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


# Trials of classes ----------------------------------------------------------------------------------------------------

#: Tokens of a window, and elements of a token: the smallest group that can be quantized.
WINDOW_TOKENS, ELEMENTS = 8, 32
#: Where updates end: the window fills, is exceeded by a long one, and goes round by single tokens.
ENDS = (5, 6, 8, 14, 15, 16)
#: Arguments of the classes that need some.
ARGUMENTS = {
    "ArraysCache": (2,),
    "ChunkedKVCache": (WINDOW_TOKENS,),
    "LayerCache": (WINDOW_TOKENS,),
    "QuantizedKVCache": (ELEMENTS, 8),
    "RotatingKVCache": (WINDOW_TOKENS,),
}


class DifferenceError(Exception):
    """What a class does that its adapter does not expect."""


@cached
def difference_of(cache_class: type, adapter: Adapter) -> str | None:
    """Try a class of mlx-lm with its adapter. None: they fit; else the first check that fails, and how."""
    holds_tokens = hasattr(cache_class, "update_and_fetch")
    for check in (_grow, _cut, _restore, _trim) if holds_tokens else (_state,):
        try:
            check(adapter, *(cache_class(*ARGUMENTS.get(cache_class.__name__, ())) for _ in range(2)))
        except Exception as error:  # a class that has changed may raise anything
            what = f"{error}" if isinstance(error, DifferenceError) else f"{type(error).__name__}: {error}"
            is_own = cache_class.__module__.startswith("mlx_lm.")
            name = f"{cache_class.__name__} of {'mlx-lm ' + version('mlx-lm') if is_own else cache_class.__module__}"
            return f"{name} differs from the class that radixcache knows ({check.__name__[1:]}: {what:.200})"
    return None


def _grow(adapter: Any, live: Any, other: Any) -> None:
    _require(adapter.is_empty(live), "a new cache is not empty")
    for start, end in pairwise((0, *ENDS)):
        found = _fed(live, start, end)[0]
        _require(adapter.offset(live) == end, f"it counts {adapter.offset(live)} tokens after {end}")
        held = [at for low, high in _held(adapter, live) for at in range(low, high)]
        is_plain = found.shape[3] == ELEMENTS
        returned = found[0, 0, :, 0].tolist() if is_plain else [*range(found.shape[2])]
        _require(returned == held, f"it returns {len(returned)} tokens after {end}, and holds {len(held)}")


def _cut(adapter: Any, live: Any, other: Any) -> None:
    whole = _fed(live, 0, WINDOW_TOKENS)
    upper, lower = adapter.split(adapter.snapshot(live, 0, WINDOW_TOKENS), 3)
    parts = [_columns(each, len(whole)) for each in (upper, lower)]
    _require_equal(
        [np.concatenate(each, axis=2) for each in zip(*parts, strict=True)], whole, "a snapshot and its parts"
    )
    _require_equal(_columns(adapter.merge(upper, lower), len(whole)), whole, "parts that are joined")


def _restore(adapter: Any, live: Any, other: Any) -> None:
    _fed(live, 0, ENDS[0])
    for start, end in pairwise(ENDS):
        adapter.free(other)
        _require(
            adapter.restore(other, adapter.snapshot(live, 0, start), start), f"no snapshot restores {start} tokens"
        )
        _require_equal(_fed(other, start, end), _fed(live, start, end), f"a cache restored at {start}")


def _trim(adapter: Any, live: Any, other: Any) -> None:
    _fed(other, 0, 5)
    _fed(live, 0, 6)
    for tokens in (2, 1):
        held = adapter.hold(live, tokens)
        _fed(live, 6, 6 + tokens)
        _require(adapter.roll_back(live, held) and adapter.offset(live) == 6, f"{tokens} tokens cannot be rolled back")
    _require(adapter.restore(live, None, 5) and adapter.offset(live) == 5, "a token cannot be taken back")
    _require_equal(_fed(live, 5, 7), _fed(other, 5, 7), "a cache that was rewound")


def _state(adapter: Any, live: Any, other: Any) -> None:
    _require(adapter.is_empty(live), "a new cache is not empty")
    array = mx.arange(ELEMENTS).reshape(1, 1, -1)
    if hasattr(live, "__setitem__"):
        live[0] = array
    else:
        vars(live).update({name: array + 0 for name, value in vars(live).items() if value is None}, offset=3)
    _require(adapter.restore(other, adapter.snapshot(live, 0, 3), 3), "a snapshot does not restore it")
    _require(is_equal(vars(other), vars(live)), "a restored cache has other attributes")
    held = adapter.hold(live, 1)
    adapter.free(live)
    _require(adapter.is_empty(live), "a freed cache is not empty")
    _require(adapter.roll_back(live, held) and is_equal(vars(other), vars(live)), "an update cannot be rolled back")


def _held(adapter: Any, live: Any) -> list[tuple[int, int]]:
    return adapter.held(live) if adapter.is_window else [(0, adapter.offset(live))]


def _fed(live: Any, start: int, end: int) -> list[np.ndarray[Any, Any]]:
    """Update a cache with the tokens [start, end), as a model would; what it returns, sorted along time."""
    getattr(live, "maybe_trim_front", list)()
    keys = mx.zeros((1, 1, end - start, ELEMENTS)) + mx.arange(start, end).reshape(1, 1, -1, 1)
    return [np.sort(np.array(each), axis=2) for each in arrays_in(live.update_and_fetch(keys, keys + 100))]


def _columns(snapshot: Any, count: int) -> list[np.ndarray[Any, Any]]:
    arrays = snapshot.arrays()
    return [np.concatenate([np.array(each) for each in arrays[at::count]], axis=2) for at in range(count)]


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise DifferenceError(otherwise)


def _require_equal(found: list[Any], wanted: list[Any], what: str) -> None:
    is_same = len(found) == len(wanted) and all(map(np.array_equal, found, wanted))
    _require(is_same, f"{what}: not the tokens of the cache")
