"""PointAdapter: base of the adapters of point state. A snapshot is whole, and cannot be split or joined.

The state of a cache is arrays in nested lists, tuples and dictionaries.

Source of all classes here: mlx-lm 0.32.2.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from radixcache.adapters.contract import NEVER
from radixcache.adapters.span import owned
from radixcache.errors import UnsupportedCacheError


@dataclass(slots=True)
class PointSnapshot:
    """The whole state of one layer at offset `end`, as `PointAdapter.state` returns it."""

    end: int
    state: Any
    start: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return arrays_in(self.state)


class PointAdapter(ABC):
    """Base of the adapters of point state. Except for windows, a snapshot is restored only at its own offset."""

    is_point, is_window = True, False

    @abstractmethod
    def state(self, cache: Any) -> Any:
        """The state of a cache that is not empty; not a copy."""

    @abstractmethod
    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        """Give the cache a state that `state` returned at this offset."""

    def is_empty(self, cache: Any) -> bool:
        return not self.buffers(cache)

    def offset(self, cache: Any) -> int | None:
        return int(cache.offset)

    def buffers(self, cache: Any) -> list[mx.array]:
        return arrays_in(self.state(cache))

    def capacity(self, cache: Any) -> int:
        return self.offset(cache) or 0

    def spare_nbytes(self, cache: Any) -> int:
        return 0

    def reserve(self, cache: Any, capacity_tokens: int, like: Any = None, wait: bool = True) -> None:  # noqa: B027
        """Do nothing: the cache class allocates at every update."""

    def snapshot(self, cache: Any, start: int, end: int) -> PointSnapshot | None:
        if self.is_empty(cache):
            return None
        state, offset = copied(self.state(cache)), self.offset(cache)
        return PointSnapshot(end if offset is None else offset, state)

    def restore(self, cache: Any, snapshot: PointSnapshot | None, target: int) -> bool:
        if snapshot is None:
            return self.can_rewind(cache, target)
        if target != snapshot.end:
            return False
        self.put(cache, copied(snapshot.state), target)
        return True

    def can_rewind(self, cache: Any, target: int) -> bool:
        return target == (0 if self.is_empty(cache) else self.offset(cache))

    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]:
        return None, snapshot

    def merge(self, upper: Any, lower: Any) -> Any:
        return lower

    def own(self, cache: Any) -> list[mx.array]:
        if self.is_empty(cache):
            return []
        state = copied(self.state(cache))
        self.put(cache, state, self.offset(cache))
        return arrays_in(state)

    def hold(self, cache: Any, tokens: int) -> Any:
        return self.state(cache), self.offset(cache)

    def roll_back(self, cache: Any, held: Any) -> bool:
        self.put(cache, *held)
        return True


class ArraysAdapter(PointAdapter):
    """ArraysCache: the state of recurrent and linear-attention layers, (slots, left_padding, lengths).

    The class has no offset: only the session knows it. A slot that was never written is None. Models assign whole
    slots, and `advance` changes `lengths` and `left_padding` in place. After a batched forward pass a slot is often a
    view of the whole chunk's activations.
    """

    def state(self, cache: Any) -> Any:
        return cache.cache, cache.left_padding, cache.lengths

    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        cache.cache, cache.left_padding, cache.lengths = state

    def is_empty(self, cache: Any) -> bool:
        for slot in cache.cache:  # noqa: SIM110  called some hundred times per request; a generator takes longer
            if slot is not None:
                return False
        return True

    def offset(self, cache: Any) -> int | None:
        return None

    def buffers(self, cache: Any) -> list[mx.array]:
        return [a for a in (*cache.cache, cache.left_padding, cache.lengths) if a is not None]

    def capacity(self, cache: Any) -> int:
        return 0 if self.is_empty(cache) else NEVER

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple((*a.shape, a.dtype) for a in cache.cache if a is not None)

    def free(self, cache: Any) -> None:
        self.put(cache, ([None] * len(cache.cache), None, None), 0)

    def hold(self, cache: Any, tokens: int) -> Any:
        # mx.array(x) is a second handle on the same buffer; an in-place change of x does not reach it. The handle costs
        # nothing. No call of `copied`, because this runs for every such layer and decoded token.
        slots = [None if slot is None else mx.array(slot) for slot in cache.cache]
        padding, lengths = cache.left_padding, cache.lengths
        handles = None if padding is None else mx.array(padding), None if lengths is None else mx.array(lengths)
        return (slots, *handles), None


FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


class LayerAdapter(PointAdapter):
    """deepseek_v41's LayerCache: a sliding window beside compressed groups; it cannot be rewound.

    FIELDS are arrays (1, T, D) or None, replaced and never written in place; `offset` counts tokens.
    LayerCache.state has no setter, so the fields are read and written by name. An object with other fields is refused.
    """

    def state(self, cache: Any) -> list[mx.array | None]:
        unknown = set(vars(cache)) - {*FIELDS, "offset", "window_size"}
        if unknown:
            raise UnsupportedCacheError(f"LayerCache has unknown fields {sorted(unknown)}; known: {', '.join(FIELDS)}.")
        return [getattr(cache, name) for name in FIELDS]

    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        vars(cache).update(zip(FIELDS, state, strict=True), offset=offset)

    def is_empty(self, cache: Any) -> bool:
        return bool(cache.offset == 0)

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(("none",) if a is None else (a.shape[0], *a.shape[2:], a.dtype) for a in self.state(cache))

    def free(self, cache: Any) -> None:
        self.put(cache, [None] * len(FIELDS), 0)


class ProbedAdapter(PointAdapter):
    """Treats a class without an adapter as point state, if that is proven to be safe.

    The class *itself* must define a `state` property with a setter; that of mlx-lm's base class does not count. The
    first state must survive a round trip: copied into an object made without `__init__`, it restores all attributes.
    Otherwise UnsupportedCacheError is raised before any state is stored.
    """

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
        except Exception:  # the class may have no state yet
            return []

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return (("state", len(arrays_in(vars(cache)))),)

    def free(self, cache: Any) -> None:
        """Refuse: only the layout can empty such an object, with the attributes of a fresh object."""
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
        name, fresh = type(cache).__name__, object.__new__(type(cache))
        try:
            fresh.state = copied(cache.state)
        except Exception as error:
            raise UnsupportedCacheError(f"{name}: its state cannot be put into a fresh object: {error}.") from error
        if not is_equal(vars(fresh), vars(cache)):
            lost = [k for k, v in vars(cache).items() if not is_equal(vars(fresh).get(k), v)]
            raise UnsupportedCacheError(
                f"{name}: its state does not keep {', '.join(map(str, lost))} when it is read and set."
            )
        self._proven.add(type(cache))


def arrays_in(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    found = []
    for item in tree:
        if isinstance(item, mx.array):
            found.append(item)
        elif item is not None:
            found += arrays_in(item)
    return found


def copied(tree: Any, leaf: Any = owned) -> Any:
    """A copy of nested state with `leaf` applied to every array."""
    # Called for every recurrent layer of every request: frequent cases come first, and None needs no call.
    if isinstance(tree, (list, tuple)):
        return type(tree)(
            [one if one is None else leaf(one) if isinstance(one, mx.array) else copied(one, leaf) for one in tree]
        )
    if isinstance(tree, mx.array):
        return leaf(tree)
    if isinstance(tree, dict):
        return {key: copied(item, leaf) for key, item in tree.items()}
    return copy.copy(tree)


@contextmanager
def untouched(caches: Sequence[Any]) -> Iterator[None]:
    """Undo what forward passes in this block do to caches of point state.

    A second handle on each array keeps the array from being written in place.
    """
    held = [copied(vars(cache), mx.array) for cache in caches]
    try:
        yield
    finally:
        for cache, before in zip(caches, held, strict=True):
            cache.__dict__.clear()
            cache.__dict__.update(before)


def is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, mx.array) and isinstance(right, mx.array):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return bool(mx.array_equal(left, right, equal_nan=mx.issubdtype(left.dtype, mx.inexact)).item())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)
