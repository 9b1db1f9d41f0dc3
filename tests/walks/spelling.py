"""A model whose caches spell out what they stand for, so that a test sees which state came back, for rows as well.

Span layers hold each token's id and position as key and value; windows the same of the last tokens; recurrent layers
a digest of the whole prefix beside the last three ids, cut as a view out of a larger array as real layers do. The
classes are mlx-lm's own. `spells` compares a live cache with the tokens that it claims.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    _BaseCache,
)

from benchmarks.architectures.temporal import LayerCache

WINDOW, KEEP, CHUNK = 12, 2, 10
PRIME = 2_147_483_629


class EchoCache(_BaseCache):
    """A class nobody registered: keeps the ids themselves, and proves that its state survives a round trip."""

    def __init__(self) -> None:
        self.ids: mx.array | None = None
        self.offset = 0

    @property
    def state(self) -> Any:
        return self.ids, self.offset

    @state.setter
    def state(self, value: Any) -> None:
        self.ids, self.offset = value


MAKERS: dict[str, Any] = {
    "kv": KVCache,
    "unused": KVCache,
    "none": lambda: None,
    "concatenate": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    "rotating": lambda: RotatingKVCache(max_size=WINDOW, keep=0),
    "rotating_keep": lambda: RotatingKVCache(max_size=WINDOW, keep=KEEP),
    "arrays": lambda: ArraysCache(size=2),
    "chunked": lambda: ChunkedKVCache(CHUNK),
    "list": lambda: CacheList(ArraysCache(size=2), KVCache()),
    "pair": lambda: CacheList(KVCache(), RotatingKVCache(max_size=WINDOW)),
    "layer": lambda: LayerCache(WINDOW),
    "echo": EchoCache,
}


class LayerError(RuntimeError):
    """Raised by a layer on request."""


class SpellingModel:
    """Callable like an mlx-lm model: model(tokens (R, T), cache=caches) -> logits (R, T, 8)."""

    def __init__(self, kinds: Sequence[str], width: int = 2) -> None:
        self.kinds = list(kinds)
        #: Elements of a key and of a value, all equal: with 32 they are a group, which fewer bits do not change.
        self.width = width
        self.fail_in_layer: int | None = None
        self.passes_left: int | None = None  # the pass behind so many raises in its last layer
        self.forward_passes = 0

    def make_cache(self) -> list[Any]:
        return [MAKERS[kind]() for kind in self.kinds]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.forward_passes += 1
        failing = self.fail_in_layer
        if self.passes_left == 0:
            failing = len(self.kinds) - 1
        self.passes_left = self.passes_left - 1 if self.passes_left else None
        ids = np.asarray(tokens).astype(np.int64)
        for layer, (kind, one) in enumerate(zip(self.kinds, cache, strict=True)):
            if failing == layer:
                raise LayerError(f"layer {layer}")
            if kind not in ("unused", "none"):
                _write(one, ids, self.width)
        return mx.zeros((*ids.shape, 8))


def spells(caches: list[Any], tokens: Sequence[int], kinds: Sequence[str]) -> None:
    """Assert that every layer's state is exactly that of `tokens`."""
    for kind, cache in zip(kinds, caches, strict=True):
        if kind == "unused":
            assert cache.keys is None, kind
        elif kind != "none":
            _read(cache, list(tokens))


def _write(cache: Any, ids: np.ndarray, width: int) -> None:
    if isinstance(cache, CacheList):
        for inner in cache.caches:
            _write(inner, ids, width)
    elif isinstance(cache, ArraysCache):
        _write_arrays(cache, ids)
    elif isinstance(cache, LayerCache):
        rows = mx.array(ids[0].astype(np.float32)).reshape(1, -1, 1)
        cache.update_window(rows)
        cache.compress_kv = rows if cache.compress_kv is None else mx.concatenate([cache.compress_kv, rows], axis=1)
    elif isinstance(cache, EchoCache):
        new = mx.array(ids[0].astype(np.int32))
        cache.ids = new if cache.ids is None else mx.concatenate([cache.ids, new])
        cache.offset += len(ids[0])
    else:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        _write_keys(cache, ids, width)


def _write_keys(cache: Any, ids: np.ndarray, width: int) -> None:
    offsets = np.asarray(cache.offset).reshape(-1, 1)  # of one row or of all
    positions = np.broadcast_to(offsets + np.arange(ids.shape[1]), ids.shape)
    width = 32 if isinstance(cache, QuantizedKVCache) else width
    keys, values = (np.repeat(each.astype(np.float32)[:, None, :, None], width, axis=3) for each in (ids, positions))
    # Views of one larger array, as a fused projection makes them.
    fused = mx.array(np.concatenate([keys, values], axis=1))
    cache.update_and_fetch(fused[:, :1], fused[:, 1:])


def _write_arrays(cache: Any, ids: np.ndarray) -> None:
    rows, tokens = ids.shape
    counts = [tokens] * rows if cache.lengths is None else np.asarray(cache.lengths).tolist()  # behind these is padding
    before = [1] * rows if cache[1] is None else np.asarray(cache[1])[:, 0].tolist()
    digests = [_digest(its[:count], start) for its, count, start in zip(ids.tolist(), counts, before, strict=True)]
    tail = mx.zeros((rows, 3, 1), dtype=mx.int32) if cache[0] is None else cache[0]
    joined = mx.concatenate([tail, mx.array(ids.astype(np.int32))[..., None]], axis=1)
    lasts = [joined[row : row + 1, count : count + 3] for row, count in enumerate(counts)]
    cache[0] = joined[:, -3:] if rows == 1 else mx.concatenate(lasts)
    cache[1] = mx.array([[digest, digest] for digest in digests], dtype=mx.int64)


def _digest(ids: Sequence[int], start: int = 1) -> int:
    for token in ids:
        start = (start * 1_000_003 + token + 7) % PRIME
    return start


def _read(cache: Any, tokens: list[int]) -> None:
    if isinstance(cache, CacheList):
        for inner in cache.caches:
            _read(inner, tokens)
        return
    if not tokens:
        assert getattr(cache, "offset", 0) == 0, (type(cache).__name__, cache.offset)
        assert not isinstance(cache, ArraysCache) or cache[0] is None
        return
    name = type(cache).__name__
    if isinstance(cache, ArraysCache):
        wanted = _digest(tokens)
        assert np.asarray(cache[1]).tolist() == [[wanted, wanted]], name
        assert np.asarray(cache[0]).reshape(-1).tolist() == [0, 0, 0, *tokens][-3:], name
        return
    assert cache.offset == len(tokens), (name, cache.offset, len(tokens))
    if isinstance(cache, LayerCache):
        assert np.asarray(cache.window).reshape(-1).tolist() == tokens[-WINDOW:], name
        assert np.asarray(cache.compress_kv).reshape(-1).tolist() == tokens, name
    elif isinstance(cache, EchoCache):
        assert np.asarray(cache.ids).tolist() == tokens, name
    else:
        positions, keys, values = _held(cache, len(tokens))
        assert keys == [tokens[p] for p in positions], (name, keys, positions)
        assert values == positions, (name, values, positions)


def _held(cache: Any, length: int) -> tuple[list[int], list[int], list[int]]:
    """Positions that a key-value cache must hold, and the ids and positions that it does, in temporal order."""
    if isinstance(cache, QuantizedKVCache):
        keys, values = (mx.dequantize(*side, group_size=32, bits=8) for side in (cache.keys, cache.values))
    else:
        keys, values = cache.keys, cache.values
    positions = list(range(length))
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(keys), cache._temporal_order(values)
        if length > cache.max_size:
            # A batch leaves more than the window; the first `keep` and the last of the rest are what counts.
            recent = cache.max_size - cache.keep
            positions = positions[: cache.keep] + positions[-recent:]
            parts = ([a[..., : cache.keep, :], a[..., -recent:, :]] for a in (keys, values))
            keys, values = (mx.concatenate(pair, axis=2) for pair in parts)
        else:
            keys, values = keys[..., :length, :], values[..., :length, :]
    elif isinstance(cache, ChunkedKVCache):
        positions = positions[cache.start_position :]
        keys, values = (a[..., : length - cache.start_position, :] for a in (keys, values))
    else:
        keys, values = keys[..., :length, :], values[..., :length, :]
    flat = [np.rint(np.asarray(a)[0, 0, :, 0]).astype(int).tolist() for a in (keys, values)]
    return positions, flat[0], flat[1]
