"""Adapter of mlx_lm.models.cache.QuantizedKVCache: three buffers each (packed, scales, biases) for keys and values.

Source: mlx-lm 0.32.2. Packed values are uint32 (1, H, capacity, D * bits / 32), scales and biases
(1, H, capacity, D / group_size). Quantization is per token, so the state can be cut at any token.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from radixcache.adapters.span import SpanAdapter


class QuantizedKVAdapter(SpanAdapter):
    """QuantizedKVCache: six buffers instead of two."""

    def buffers(self, cache: Any) -> list[mx.array]:
        return [] if cache.keys is None else [*cache.keys, *cache.values]

    def put(self, cache: Any, buffers: list[mx.array]) -> None:
        half = len(buffers) // 2
        cache.keys, cache.values = tuple(buffers[:half]), tuple(buffers[half:])
