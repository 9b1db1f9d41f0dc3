"""WindowAdapter: adapters of classes that keep the keys and values of the last part of a sequence.

The state is [keys, values], each (1, H, T, D), compact and in temporal order. While nothing was lost, T is the offset
and both the live state and a snapshot can be cut back to any smaller one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import mlx.core as mx

from radixcache.adapters.keys_values import KeysAndValues
from radixcache.adapters.owned import owned
from radixcache.adapters.point import PointAdapter, PointSnapshot


class WindowAdapter(KeysAndValues, PointAdapter):
    """Base of these adapters, which say how many tokens the buffers hold, and where the class notes that."""

    @abstractmethod
    def filled(self, cache: Any) -> int:
        """Tokens of the state."""

    @abstractmethod
    def place(self, cache: Any, buffers: Any, offset: int, filled: int) -> None:
        """Give the cache buffers (or None twice) whose first `filled` tokens are the state at `offset`."""

    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        self.place(cache, state, offset or 0, state[0].shape[2])

    def spare_nbytes(self, cache: Any) -> int:
        return sum(b.nbytes // b.shape[2] * (b.shape[2] - self.filled(cache)) for b in self.buffers(cache))

    def restore(self, cache: Any, snapshot: PointSnapshot | None, target: int) -> bool:
        if not (self.can_rewind(cache, target) if snapshot is None else self.can_cut(snapshot, target)):
            return False
        if snapshot is None:
            if target < cache.offset:
                self.place(cache, (cache.keys, cache.values), target, target)
        elif target == 0:
            self.free(cache)
        else:
            length = target if target < snapshot.end else None
            self.put(cache, [owned(a[..., :length, :]) for a in snapshot.state], target)
        return True

    def can_cut(self, snapshot: PointSnapshot | None, target: int) -> bool:
        if snapshot is None:
            return True
        return bool(target == snapshot.end or target < snapshot.end == snapshot.state[0].shape[2])

    def can_rewind(self, cache: Any, target: int) -> bool:
        return bool(target == cache.offset or target < cache.offset == self.filled(cache))

    def free(self, cache: Any) -> None:
        self.place(cache, (None, None), 0, 0)

    def reserve(self, cache: Any, capacity_tokens: int, like: Any = None, wait: bool = True) -> None:
        """Spare room is at most one growth step of the class; a smaller capacity drops it."""
        if cache.keys is not None and capacity_tokens <= cache.offset and self.spare_nbytes(cache):
            buffers: list[mx.array] = self.own(cache)
            if wait:
                mx.eval(buffers)

    def roll_back(self, cache: Any, held: Any) -> bool:
        if held is None:
            return False
        buffers, offset, filled = held
        self.place(cache, buffers or (cache.keys, cache.values), offset, filled)
        return True
