"""Leaves of a list of mlx-lm caches: CacheList holds other caches, side by side, of any kind.

Source: mlx_lm.models.cache.CacheList, mlx-lm 0.32.2. Its `from_state` makes a list of its tuple and loses what the
classes keep outside `state`; so the leaves inside are restored in place, one by one, and the list itself never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_lm.models.cache import CacheList


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The cache objects that hold state, in order; layers without a cache (None) are left out."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        elif cache is not None:
            yield cache
