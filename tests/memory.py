"""What MLX has allocated, and what a cache says it holds."""

from __future__ import annotations

import gc

import mlx.core as mx

from radixcache import CacheStats


def held_bytes(stats: CacheStats) -> int:
    return stats.live_bytes + stats.paged_bytes


def active_bytes(collects: bool = True) -> int:
    """Bytes of all arrays; without `collects` also of those that only Python's collector would free."""
    if collects:
        gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())
