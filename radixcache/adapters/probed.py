"""Adapter of last resort: a class nobody registered, kept as point state if it proves that this is safe.

A class qualifies when it *itself* defines a `state` property with a setter (mlx-lm's base class gives every subclass
an empty one: that does not count), and when its first state survives a round trip: taken out, copied, put into a
fresh object made without `__init__`, everything that the object holds is there again. Anything else raises
UnsupportedCacheError by name, before any state of it was stored.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from radixcache.adapters.point import PointAdapter, arrays_in, copied
from radixcache.errors import UnsupportedCacheError


class ProbedAdapter(PointAdapter):
    """Any class with a `state` of its own: point state, valid at exactly one offset."""

    def __init__(self) -> None:
        self._proven: set[type] = set()

    @staticmethod
    def accepts(cache: Any) -> bool:
        """Whether the object's own class defines a `state` property with a setter."""
        state = vars(type(cache)).get("state")
        return isinstance(state, property) and state.fset is not None

    def state(self, cache: Any) -> Any:
        self._prove(cache)
        return cache.state

    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        cache.state = state

    def offset(self, cache: Any) -> int | None:
        offset = getattr(cache, "offset", None)
        return offset if isinstance(offset, int) and not isinstance(offset, bool) else None

    def buffers(self, cache: Any) -> list[mx.array]:
        found = arrays_in(vars(cache))
        if found:
            return found
        try:
            return arrays_in(cache.state)
        except Exception:  # a class may well fail to state what it does not have yet
            return []

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return (("state", len(arrays_in(vars(cache)))),)

    def free(self, cache: Any) -> None:
        """Nothing is known of how to empty the class: the layout replaces the object by a fresh one."""
        raise UnsupportedCacheError(f"{type(cache).__name__} cannot be emptied in place.")

    def hold(self, cache: Any, tokens: int) -> Any:
        if self.is_empty(cache):
            return None
        return {name: copied(value, mx.array) for name, value in vars(cache).items()}

    def roll_back(self, cache: Any, held: Any) -> bool:
        if held is None:
            return self.is_empty(cache)
        vars(cache).clear()
        vars(cache).update(held)
        return True

    def _prove(self, cache: Any) -> None:
        if type(cache) in self._proven:
            return
        name = type(cache).__name__
        fresh = object.__new__(type(cache))
        try:
            fresh.state = copied(cache.state)
        except Exception as error:
            raise UnsupportedCacheError(f"{name}: its state cannot be put into a fresh object: {error}.") from error
        if not _equal(vars(fresh), vars(cache)):
            lost = [k for k, v in vars(cache).items() if not _equal(vars(fresh).get(k), v)]
            raise UnsupportedCacheError(f"{name}: its state loses {', '.join(map(str, lost))} on a round trip.")
        self._proven.add(type(cache))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, mx.array) and isinstance(right, mx.array):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return bool(mx.array_equal(left, right, equal_nan=mx.issubdtype(left.dtype, mx.inexact)).item())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)
