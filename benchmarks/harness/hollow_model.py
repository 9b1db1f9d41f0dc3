"""HollowModel: a language model without weights. The forward pass only writes the caches.

Benchmarks with it measure the Python time of a cache layer. The caches fill and move as with a real model of the same
layers; keys, values and logits are zeros.

    kv        every layer is a KVCache
    sliding   every second layer is a RotatingKVCache, as in models with sliding windows
    hybrid    three of four layers are an ArraysCache, as in models with linear attention
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

WINDOW_TOKENS = 64
LOGITS = 8

KINDS: dict[str, Sequence[Callable[[], Any]]] = {
    "kv": (KVCache,),
    "sliding": (lambda: RotatingKVCache(max_size=WINDOW_TOKENS), KVCache),
    "hybrid": (lambda: ArraysCache(2), lambda: ArraysCache(2), lambda: ArraysCache(2), KVCache),
}


class HollowModel:
    """Callable as an mlx-lm model: tokens (1, T) and caches in, logits (1, T, LOGITS) out."""

    def __init__(self, kind: str, layers: int) -> None:
        self._makers = KINDS[kind]
        self.layers = [None] * layers
        self._rows: dict[int, mx.array] = {}
        self._state = mx.zeros((1, 4))

    def make_cache(self) -> list[Any]:
        return [self._makers[index % len(self._makers)]() for index in range(len(self.layers))]

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        length = tokens.shape[1]
        rows = self._zeros(length)
        for layer in cache:
            if isinstance(layer, ArraysCache):
                layer[0], layer[1] = self._state + 0.0, self._state + 0.0
            else:
                layer.update_and_fetch(rows, rows)
        return mx.zeros((1, length, LOGITS))

    def parameters(self) -> dict[str, Any]:
        return {}

    def _zeros(self, length: int) -> mx.array:
        """Return keys or values (1, 1, length, 1), made once so that this time is not measured."""
        if length not in self._rows:
            self._rows[length] = mx.zeros((1, 1, length, 1))
            mx.eval(self._rows[length])
        return self._rows[length]
