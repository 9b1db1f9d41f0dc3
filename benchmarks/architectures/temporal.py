"""The state of live caches in temporal order, so that two ways to the same prompt can be compared array by array.

A rotating buffer and a buffer with spare capacity hold the same state in other places: here every array stands by name,
time in order, without what the class itself would drop next.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from numpy.typing import NDArray

try:
    from mlx_lm.models.deepseek_v41 import LayerCache
except ImportError:  # an mlx-lm before 0.32

    class LayerCache:  # type: ignore[no-redef]
        """What no cache is."""

        def __init__(self, window_size: int) -> None:
            self.window_size = window_size


Arrays = dict[str, NDArray[Any]]
#: Where a single cache stands: the index in the list, and the index in a CacheList there.
Place = tuple[int, int | None]


def temporal_state(caches: list[Any]) -> Arrays:
    """Every array of every cache by name, time in order, without what the class itself would drop next."""
    state: Arrays = {}
    for place in places(caches):
        leaf = leaf_at(caches, place)
        for name, array in _leaf_state(leaf).items():
            state[f"{place} {type(leaf).__name__} {name}"] = np.array(array)
    return state


def largest_error(found: Arrays, wanted: Arrays) -> float:
    """Largest difference between two states; infinite where they do not have the same arrays of the same shapes."""
    if found.keys() != wanted.keys() or any(found[name].shape != array.shape for name, array in wanted.items()):
        return float("inf")
    return max((largest_difference(found[name], array) for name, array in wanted.items()), default=float("inf"))


def largest_difference(left: NDArray[Any], right: NDArray[Any]) -> float:
    """Largest difference between two arrays; infinite where one has a NaN."""
    if not left.size:
        return 0.0
    difference = np.abs(np.asarray(left, np.float64) - right).max()
    return float("inf") if np.isnan(difference) else float(difference)


def places(caches: list[Any]) -> list[Place]:
    return [
        (index, inner)
        for index, layer in enumerate(caches)
        for inner in (range(len(layer.caches)) if isinstance(layer, CacheList) else [None])
    ]


def leaf_at(caches: list[Any], place: Place) -> Any:
    index, inner = place
    return caches[index] if inner is None else caches[index].caches[inner]


def stand_in(caches: list[Any], others: list[Any], place: Place) -> None:
    """Give the cache at one place the state of the same place in other caches."""
    leaf, other = leaf_at(caches, place), leaf_at(others, place)
    vars(leaf).update(vars(other))


def _leaf_state(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, ArraysCache):
        return {str(index): slot for index, slot in enumerate(leaf.cache) if slot is not None}
    if isinstance(leaf, LayerCache):
        names = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
        return {"offset": leaf.offset} | {name: array for name in names if (array := getattr(leaf, name)) is not None}
    if leaf.keys is None:
        return {}
    keys, values = _keys_and_values(leaf)
    return {"offset": leaf.offset, "keys": keys, "values": values}


def _keys_and_values(leaf: Any) -> tuple[Any, Any]:
    if isinstance(leaf, RotatingKVCache):
        return _window(leaf, leaf.keys), _window(leaf, leaf.values)
    if isinstance(leaf, ChunkedKVCache):
        filled = leaf.offset - leaf.start_position
        # The class drops what is older than a chunk at the start of the next forward pass.
        first = max(0, filled - leaf.chunk_size)
        return leaf.keys[..., first:filled, :], leaf.values[..., first:filled, :]
    if isinstance(leaf, QuantizedKVCache):
        return _dequantized(leaf, leaf.keys), _dequantized(leaf, leaf.values)
    assert isinstance(leaf, (KVCache, ConcatenateKVCache)), type(leaf)
    return leaf.keys[..., : leaf.offset, :], leaf.values[..., : leaf.offset, :]


def _dequantized(cache: Any, parts: tuple[mx.array, mx.array, mx.array]) -> mx.array:
    packed, scales, biases = (part[..., : cache.offset, :] for part in parts)
    return mx.dequantize(packed, scales, biases, cache.group_size, cache.bits)


def _window(cache: Any, buffer: mx.array) -> NDArray[Any]:
    """The first `keep` tokens and the last ones up to `max_size`, oldest first."""
    ordered = np.array(cache._temporal_order(buffer))
    length = min(cache.offset, cache.max_size)
    return np.concatenate(
        [ordered[..., : cache.keep, :], ordered[..., cache.keep :, :][..., -(length - cache.keep) :, :]], axis=2
    )
