"""WindowAdapter: base of the adapters of classes that hold the last part of a sequence.

Live buffers are compact or a ring, and lose tokens that leave the window. The tree stores ranges of tokens, which are
copied while the buffers have them. Between these ranges are gaps that no resume point needs:

    tree    [0, 512)      [1200, 2000)           resumes at any offset up to 512, and from 1,712 to 2,000, with a
    live              [1500, 2012)               window of 512

The state at an offset is [keys, values], each (1, H, T, D), of the tokens that `Window.needs` names, in that order.

Source of the classes: mlx-lm 0.32.2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeGuard

import mlx.core as mx

from radixcache.adapters.contract import NEVER, Adapter, Range, Window, WindowSnapshot, common, tokens_in
from radixcache.adapters.point import PointAdapter
from radixcache.adapters.span import ALL, KeysAndValues, SpanSnapshot, owned, segment_bounds


class WindowAdapter(KeysAndValues, PointAdapter):
    """Subclasses define which tokens the buffers hold, and where."""

    is_window = True

    @abstractmethod
    def window(self, cache: Any) -> Window: ...

    @abstractmethod
    def held(self, cache: Any) -> list[Range]: ...

    @abstractmethod
    def places(self, cache: Any, start: int, end: int) -> list[Range]:
        """Where in the buffers the tokens [start, end) of one held range are."""

    @abstractmethod
    def place(self, cache: Any, buffers: Any, offset: int, filled: int) -> None:
        """Set the two buffers, or two None. Their first `filled` tokens are the state at `offset`."""

    @abstractmethod
    def is_whole(self, cache: Any) -> bool:
        """Whether no token is lost yet, so that the state can be rewound."""

    def filled(self, cache: Any) -> int:
        return self.window(cache).count(cache.offset)

    def state(self, cache: Any) -> list[mx.array]:
        return _cut(self.buffers(cache), self._places_in_use(cache))

    def put(self, cache: Any, state: Any, offset: int | None) -> None:
        self.place(cache, state, offset or 0, state[0].shape[2])

    def spare_nbytes(self, cache: Any) -> int:
        return sum(b.nbytes // b.shape[2] * (b.shape[2] - self.filled(cache)) for b in self.buffers(cache))

    def snapshot(self, cache: Any, start: int, end: int) -> WindowSnapshot | None:  # type: ignore[override]
        return None if cache.keys is None else self.snapshot_stack([cache], start, end, [(start, end)])

    def snapshot_stack(self, caches: Sequence[Any], start: int, end: int, wanted: Sequence[Range]) -> WindowSnapshot:
        """One snapshot, arrays (S, H, T, D), of the wanted tokens of S layers at one offset."""
        found = common(wanted, self.held(caches[0]))
        return WindowSnapshot(start, end, [self._piece(caches, low, high) for low, high in found])

    def restore(self, cache: Any, snapshot: WindowSnapshot | None, target: int) -> bool:  # type: ignore[override]
        if snapshot is not None:
            return self.restore_stack([cache], snapshot, target)
        if not self.can_rewind(cache, target):
            return False
        if target < cache.offset:
            self.place(cache, (cache.keys, cache.values), target, target)
        return True

    def restore_stack(self, caches: Sequence[Any], snapshot: WindowSnapshot, target: int) -> bool:
        """As `restore`, for several layers, from a snapshot of `snapshot_stack`."""
        parts = []
        for start, end in self.window(caches[0]).needs(target):
            for piece in snapshot.pieces:
                if piece.start <= start < min(piece.end, end):
                    parts += [arrays for _, _, arrays in piece.parts(start, end)]
                    start = min(piece.end, end)
            if start < end:
                return False
        # Nested: keys and values, then parts, then layers.
        columns = [[mx.split(array, len(caches)) for array in arrays] for arrays in zip(*parts, strict=True)]
        for layer, cache in enumerate(caches):
            if target == 0:
                self.free(cache)
            else:
                self.put(cache, [_owned([part[layer] for part in column]) for column in columns], target)
        return True

    def can_rewind(self, cache: Any, target: int) -> bool:
        return bool(target == cache.offset or (target < cache.offset and self.is_whole(cache)))

    def own(self, cache: Any) -> list[mx.array]:
        if not self.is_empty(cache) and tokens_in(self.held(cache)) == cache.offset:
            return self._compact(cache)  # the buffers may be those of the first forward pass
        return self.shrink(cache)

    def shrink(self, cache: Any) -> list[mx.array]:
        """As `own`, for buffers that the class allocated: copy them if more than a growth step is spare."""
        if self.is_empty(cache) or cache.keys.shape[2] - self.filled(cache) <= cache.step:
            return []
        return self._compact(cache)

    def free(self, cache: Any) -> None:
        self.place(cache, (None, None), 0, 0)

    def reserve(self, cache: Any, capacity_tokens: int, like: Any = None, wait: bool = True) -> None:
        """Drop spare room, at most one growth step of the class, if no more capacity than `offset` is wanted."""
        if cache.keys is not None and capacity_tokens <= cache.offset and self.spare_nbytes(cache):
            buffers = self._compact(cache)
            if wait:
                mx.eval(buffers)

    def roll_back(self, cache: Any, held: Any) -> bool:
        if held is None:
            return False
        buffers, offset, filled = held
        self.place(cache, buffers or (cache.keys, cache.values), offset, filled)
        return True

    def _places_in_use(self, cache: Any) -> list[Range]:
        """Where in the buffers the state is."""
        needs = self.window(cache).needs(cache.offset)
        return [at for low, high in needs for at in self.places(cache, low, high)]

    def _compact(self, cache: Any) -> list[mx.array]:
        """Replace the buffers by copies without spare room, and return the copies."""
        places = self._places_in_use(cache)
        found = _cut(self.buffers(cache), places)
        self.put(cache, found if len(places) > 1 else [owned(array) for array in found], cache.offset)
        return self.buffers(cache)

    def _piece(self, caches: Sequence[Any], start: int, end: int) -> SpanSnapshot:
        buffers = list(zip(*map(self.buffers, caches), strict=True))
        cuts = [self.places(caches[0], low, high) for low, high in segment_bounds(start, end)]
        return SpanSnapshot(start, end, [tuple([_owned(_cut(its, at), axis=0) for its in buffers]) for at in cuts])


def is_windowed(adapter: Adapter) -> TypeGuard[WindowAdapter]:
    """Whether an adapter is of a window. A user's adapter may lack `is_window`."""
    return getattr(adapter, "is_window", False)


class RotatingKVAdapter(WindowAdapter):
    """RotatingKVCache: the last `max_size` tokens and the first `keep`; can be rewound until it has wrapped.

    The buffer is in temporal order until single-token writes go round:

        [ keep | oldest .. newest ]            `_idx` at the end: temporal order
        [ keep | newer .. newest | oldest .. ] `_idx` inside: the ring has gone round

    After one write of T tokens, the buffer has up to max_size + T - 1 tokens. The next write cuts it back.
    """

    def window(self, cache: Any) -> Window:
        return Window(cache.max_size, cache.keep)

    def held(self, cache: Any) -> list[Range]:
        if cache.keys is None:
            return []
        count = self._count(cache)
        if count == cache.offset:
            return [(0, count)]
        keep = cache.keep
        tail = (cache.offset - count + keep, cache.offset)
        return [(0, keep), tail] if keep else [tail]

    def places(self, cache: Any, start: int, end: int) -> list[Range]:
        index, keep, held = cache._idx, cache.keep, cache.keys.shape[2]
        if start >= keep:
            # In temporal order the buffer has the first `keep` tokens, then the last ones.
            first, last = (at - cache.offset + self._count(cache) for at in (start, end))
        else:
            first, last = start, end
        if not self._has_gone_round(cache) or last <= keep:
            return [(first, last)]
        seam = keep + held - index
        ranges = [(first, min(last, keep)), (max(first, keep), min(last, seam)), (max(first, seam), last)]
        moves = (0, index - keep, keep - seam)
        return [(low + by, high + by) for (low, high), by in zip(ranges, moves, strict=True) if low < high]

    def is_whole(self, cache: Any) -> bool:
        return bool(cache.offset <= cache.max_size)

    def place(self, cache: Any, buffers: Any, offset: int, filled: int) -> None:
        cache.keys, cache.values = buffers
        cache.offset, cache._idx = offset, filled

    def capacity(self, cache: Any) -> int:
        if cache.keys is None:
            return 0
        held = int(cache.keys.shape[2])
        if held == cache.max_size:
            return NEVER
        return held if held < cache.max_size else int(cache.offset)

    def hold(self, cache: Any, tokens: int) -> Any:
        if tokens > 1 or cache.keys is None or cache.keys.shape[2] > cache.max_size:
            # The next write makes new arrays, so these need no copy.
            return (cache.keys, cache.values), cache.offset, cache._idx
        return (None, cache.offset, cache.offset) if cache.offset < cache.max_size else None

    def _has_gone_round(self, cache: Any) -> bool:
        return bool(cache._idx < cache.offset and cache._idx < cache.keys.shape[2])

    def _count(self, cache: Any) -> int:
        """Tokens that the buffers hold."""
        held = int(cache.keys.shape[2])
        return held if self._has_gone_round(cache) else min(int(cache._idx), held)


class ChunkedKVAdapter(WindowAdapter):
    """ChunkedKVCache of llama4: the last `chunk_size` tokens and those that the present chunk added.

    The model cuts the front before an update. Then `start_position` tokens are gone, and the cache cannot be rewound.
    `is_trimmable` stays True after that and `trim` clips silently, so neither is used.
    """

    def window(self, cache: Any) -> Window:
        return Window(cache.chunk_size)

    def held(self, cache: Any) -> list[Range]:
        return [] if cache.keys is None else [(cache.start_position, cache.offset)]

    def places(self, cache: Any, start: int, end: int) -> list[Range]:
        return [(start - cache.start_position, end - cache.start_position)]

    def is_whole(self, cache: Any) -> bool:
        return bool(cache.start_position == 0)

    def place(self, cache: Any, buffers: Any, offset: int, filled: int) -> None:
        cache.keys, cache.values = buffers
        cache.offset, cache.start_position = offset, offset - filled

    def capacity(self, cache: Any) -> int:
        if cache.keys is None:
            return 0
        # Beyond the chunk size the model cuts the front before each update, which makes new arrays.
        return int(max(cache.offset, cache.start_position + min(cache.keys.shape[2], cache.chunk_size)))

    def hold(self, cache: Any, tokens: int) -> Any:
        # A single token is written in place: holding the buffer would cause a copy. A cut makes a new buffer anyway.
        filled = cache.offset - cache.start_position
        is_replaced = tokens > 1 or cache.keys is None or filled > cache.chunk_size
        return (cache.keys, cache.values) if is_replaced else None, cache.offset, filled

    def roll_back(self, cache: Any, held: Any) -> bool:
        buffers, offset, filled = held
        is_cut = buffers is None and cache.start_position != offset - filled
        return not is_cut and super().roll_back(cache, held)


def _cut(buffers: Sequence[mx.array], places: Sequence[Range]) -> list[mx.array]:
    """The tokens of each buffer at these places, in this order. With one place, they are views."""
    indices = [(ALL, ALL, slice(low, high)) for low, high in places]
    if len(indices) == 1:
        return [buffer[indices[0]] for buffer in buffers]
    return [mx.concatenate([buffer[index] for index in indices], axis=2) for buffer in buffers]


def _owned(parts: list[mx.array], axis: int = 2) -> mx.array:
    """Join these parts into one array that shares no buffer."""
    return owned(parts[0]) if len(parts) == 1 else mx.concatenate(parts, axis=axis)
