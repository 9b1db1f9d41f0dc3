"""SpanAdapter: span state in buffers (1, H, capacity, D) with time on axis 2; the adapter of KVCache as it is.

A snapshot is a row of segments, at first on a grid of SEGMENT_TOKENS, so that a cut, a join or a trim copies one
segment:

    [700, 1600)  ->  [700, 1024) [1024, 1536) [1536, 1600)

Attention that reads a snapshot in place is faster on a long segment than on many short ones: `join` makes one of them.

Source: mlx_lm.models.cache, mlx-lm 0.32.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import NEVER, SEGMENT_TOKENS
from radixcache.errors import SnapshotError

#: Arrays (1, H, T, D) of the same tokens.
Segment = tuple[mx.array, ...]


@dataclass(slots=True)
class SpanSnapshot:
    """The state of tokens [start, end) of one layer, in owned segments one behind the other."""

    start: int
    end: int
    segments: list[Segment]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for segment in self.segments for array in segment]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate((segment[0].shape[2] for segment in self.segments), initial=self.start)))

    def join(self) -> None:
        """Make one evaluated segment of all."""
        if len(self.segments) > 1:
            segment = tuple(mx.concatenate(list(arrays), axis=2) for arrays in zip(*self.segments, strict=True))
            mx.eval(segment)
            self.segments = [segment]

    def split(self, at: int) -> tuple[SpanSnapshot | None, SpanSnapshot | None]:
        """Cut at an offset. Consumes the snapshot."""
        if at <= self.start:
            return None, self
        if at >= self.end:
            return self, None
        upper: list[Segment] = []
        lower: list[Segment] = []
        for (low, high), segment in zip(self.bounds, self.segments, strict=True):
            if low < at < high:
                upper.append(tuple(owned_span(a, 0, at - low) for a in segment))
                lower.append(tuple(owned_span(a, at - low, high - low) for a in segment))
            else:
                (upper if high <= at else lower).append(segment)
        return SpanSnapshot(self.start, at, upper), SpanSnapshot(at, self.end, lower)

    def merged(self, lower: SpanSnapshot) -> SpanSnapshot:
        """Join with a snapshot that begins at `end`. Consumes both.

        SnapshotError: they do not touch, or are of different layers.
        """
        if self.end != lower.start:
            raise SnapshotError(f"spans [{self.start}, {self.end}) and [{lower.start}, {lower.end}) do not touch.")
        for left, right in zip(self.segments[-1], lower.segments[0], strict=True):
            if left.dtype != right.dtype or _without_time(left) != _without_time(right):
                raise SnapshotError(f"spans differ: {left.shape} {left.dtype} and {right.shape} {right.dtype}.")
        segments = self.segments + lower.segments
        width = self.segments[-1][0].shape[2] + lower.segments[0][0].shape[2]
        if self.end % SEGMENT_TOKENS and width <= SEGMENT_TOKENS:
            # The seam lies inside a grid segment: its two parts become one again.
            seam = len(self.segments)
            pairs = zip(segments[seam - 1], segments[seam], strict=True)
            segments[seam - 1 : seam + 1] = [tuple(mx.concatenate(list(pair), axis=2) for pair in pairs)]
        return SpanSnapshot(self.start, lower.end, segments)

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int, Segment]]:
        """The tokens in [start, end), a segment at a time: offsets [first, last) and the arrays of these tokens."""
        for (low, high), segment in zip(self.bounds, self.segments, strict=True):
            first, last = max(low, start), min(high, end)
            if (first, last) == (low, high):
                yield first, last, segment
            elif first < last:
                yield first, last, tuple(array[..., first - low : last - low, :] for array in segment)


class KeysAndValues:
    """Base for adapters, of spans and of windows, of classes with `keys`, `values` (1, H, T, D) and `offset`."""

    def is_empty(self, cache: Any) -> bool:
        return cache.keys is None

    def offset(self, cache: Any) -> int | None:
        return int(cache.offset)

    def buffers(self, cache: Any) -> list[mx.array]:
        return [] if cache.keys is None else [cache.keys, cache.values]

    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple((*_without_time(b), b.dtype) for b in self.buffers(cache))

    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]:
        return (None, None) if snapshot is None else snapshot.split(at)

    def merge(self, upper: Any, lower: Any) -> Any:
        return None if upper is None or lower is None else upper.merged(lower)


class SpanAdapter(KeysAndValues):
    """KVCache: it grows when `offset + T` exceeds the capacity, and never reads beyond `offset`.

    So any capacity is valid, and a rewind is a smaller offset.
    """

    is_point, is_window = False, False

    def put(self, cache: Any, buffers: list[mx.array]) -> None:
        """Store new buffers, in the order of `buffers`."""
        cache.keys, cache.values = buffers

    def capacity(self, cache: Any) -> int:
        return 0 if cache.keys is None else int(self.buffers(cache)[0].shape[2])

    def spare_nbytes(self, cache: Any) -> int:
        return sum(b.nbytes * (b.shape[2] - cache.offset) // b.shape[2] for b in self.buffers(cache))

    def snapshot(self, cache: Any, start: int, end: int) -> SpanSnapshot | None:
        if cache.keys is None:
            return None
        if not 0 <= start < end <= cache.offset:
            raise SnapshotError(f"span [{start}, {end}) is not inside the live state [0, {cache.offset}).")
        cuts, buffers = segment_bounds(start, end), self.buffers(cache)
        return SpanSnapshot(start, end, [tuple(owned_span(b, low, high) for b in buffers) for low, high in cuts])

    def restore(self, cache: Any, snapshot: SpanSnapshot | None, target: int) -> bool:
        reached = cache.offset if snapshot is None else snapshot.end
        if target > reached or (snapshot is not None and cache.offset < snapshot.start):
            return False
        if snapshot is None or target <= cache.offset:
            self._rewind(cache, target)
        else:
            self._page_in(cache, snapshot, target)
        return True

    def can_rewind(self, cache: Any, target: int) -> bool:
        return target <= int(cache.offset)

    def free(self, cache: Any) -> None:
        cache.keys = cache.values = None
        cache.offset = 0

    def reserve(self, cache: Any, capacity_tokens: int, like: SpanSnapshot | None = None, wait: bool = True) -> None:
        # Never at or below the offset: a buffer that is exactly full may be an alias of what was written to it.
        capacity = max(capacity_tokens, cache.offset + 1)
        if cache.keys is None:
            buffers = [] if like is None else [_zeros_like(a, capacity) for a in like.segments[0]]
        elif capacity != self.capacity(cache):
            filled, more = cache.offset, capacity - cache.offset
            buffers = [mx.concatenate([b[..., :filled, :], _zeros_like(b, more)], axis=2) for b in self.buffers(cache)]
        else:
            return
        if wait:
            mx.eval(buffers)
        if buffers:
            self.put(cache, buffers)

    def own(self, cache: Any) -> list[mx.array]:
        if cache.keys is None or cache.offset < self.capacity(cache):
            return []
        self.reserve(cache, cache.offset + 1, wait=False)
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        return -1 if cache.keys is None else cache.offset

    def roll_back(self, cache: Any, held: Any) -> bool:
        if held < 0:
            self.free(cache)
        else:
            cache.offset = held
        return True

    def _rewind(self, cache: Any, target: int) -> None:
        cache.offset = target

    def _page_in(self, cache: Any, snapshot: SpanSnapshot, target: int) -> None:
        if self.capacity(cache) <= target:
            self.reserve(cache, target + 1, snapshot)
        buffers = self.buffers(cache)
        for first, last, arrays in snapshot.parts(cache.offset, target):
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer[..., first:last, :] = array
        cache.offset = target


class QuantizedKVAdapter(SpanAdapter):
    """QuantizedKVCache: keys and values have three buffers each.

    Packed values are uint32 (1, H, capacity, D * bits / 32), scales and biases (1, H, capacity, D / group_size).
    Quantization is per token, so the state can be cut at any token.
    """

    def buffers(self, cache: Any) -> list[mx.array]:
        return [] if cache.keys is None else [*cache.keys, *cache.values]

    def put(self, cache: Any, buffers: list[mx.array]) -> None:
        half = len(buffers) // 2
        cache.keys, cache.values = tuple(buffers[:half]), tuple(buffers[half:])


class ConcatenateKVAdapter(SpanAdapter):
    """ConcatenateKVCache: keys and values are exactly as long as the sequence, and never written in place.

    An update joins new keys to *all* of the old ones and takes the offset from the result. So a rewind has to cut the
    arrays: a smaller offset alone would bring the cut tokens back.
    """

    def capacity(self, cache: Any) -> int:
        return NEVER

    def spare_nbytes(self, cache: Any) -> int:
        return 0

    def reserve(self, cache: Any, capacity_tokens: int, like: SpanSnapshot | None = None, wait: bool = True) -> None:
        """The class allocates at every update."""

    def own(self, cache: Any) -> list[mx.array]:
        self._cut(cache, cache.offset)
        return self.buffers(cache)

    def hold(self, cache: Any, tokens: int) -> Any:
        return cache.keys, cache.values, cache.offset

    def roll_back(self, cache: Any, held: Any) -> bool:
        cache.keys, cache.values, cache.offset = held
        return True

    def _rewind(self, cache: Any, target: int) -> None:
        if target == 0:
            self.free(cache)
        elif target < cache.offset:
            self._cut(cache, target)
            cache.offset = target

    def _cut(self, cache: Any, target: int) -> None:
        if cache.keys is not None:
            self.put(cache, [owned(b[..., :target, :]) for b in self.buffers(cache)])

    def _page_in(self, cache: Any, snapshot: SpanSnapshot, target: int) -> None:
        live = [b[..., : cache.offset, :] for b in self.buffers(cache)]
        segments = [*([live] if live else []), *(arrays for _, _, arrays in snapshot.parts(cache.offset, target))]
        self.put(cache, [owned(mx.concatenate(list(pieces), axis=2)) for pieces in zip(*segments, strict=True)])
        cache.offset = target


def segment_bounds(start: int, end: int, step: int | None = None) -> list[tuple[int, int]]:
    """The grid segments of `step` tokens, or of SEGMENT_TOKENS, that cover [start, end)."""
    bounds, step = [], step or SEGMENT_TOKENS
    while start < end:
        stop = min(end, (start // step + 1) * step)
        bounds.append((start, stop))
        start = stop
    return bounds


def owned_span(buffer: mx.array, start: int, end: int) -> mx.array:
    """Return a copy of `buffer[..., start:end, :]` in a buffer of its own, unevaluated."""
    part = buffer[..., start:end, :]
    # Rows of several heads are not contiguous, so `mx.contiguous` copies: two operations instead of four.
    if math.prod(buffer.shape[:-2]) > 1 and end - start < buffer.shape[-2]:
        return mx.contiguous(part)
    return owned(part)


def owned(array: mx.array) -> mx.array:
    """Return a copy of `array` (any shape and dtype) in a buffer of its own, unevaluated.

    A slice keeps its parent's buffer alive, and `mx.contiguous` returns a slice of nearly all of its input as it is.
    Joining two pieces always writes a new buffer of the result's size.
    """
    if array.size == 0:
        return mx.zeros(array.shape, dtype=array.dtype)
    axes = [*range(array.ndim - 2, -1, -1), array.ndim - 1] if array.ndim > 1 else [*range(array.ndim)]
    for axis in axes:
        if array.shape[axis] > 1:
            return mx.concatenate(list(mx.split(array, [array.shape[axis] // 2], axis=axis)), axis=axis)
    # One element: a view of two is the smallest buffer that is not the parent's.
    flat = array.reshape(1)
    return mx.concatenate([flat, flat])[:1].reshape(array.shape)


def _zeros_like(array: mx.array, tokens: int) -> mx.array:
    return mx.zeros((*array.shape[:2], tokens, array.shape[3]), dtype=array.dtype)


def _without_time(array: mx.array) -> tuple[int, ...]:
    return (*array.shape[:2], array.shape[3])
