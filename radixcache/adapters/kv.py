"""Adapter of mlx_lm.models.cache.KVCache: keys (1, H, capacity, Dk), values (1, H, capacity, Dv), offset.

Source: mlx-lm 0.32.2. The class grows its buffers when `offset + T` exceeds the capacity and never looks beyond
`offset`, so any capacity is fine and a rewind is a smaller offset.
"""

from __future__ import annotations

from radixcache.adapters.span import SpanAdapter


class KVAdapter(SpanAdapter):
    """KVCache: everything as SpanAdapter has it."""
