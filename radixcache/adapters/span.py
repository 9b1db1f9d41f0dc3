"""SpanAdapter: span state in buffers (1, H, capacity, D) with time on axis 2. It is the adapter of KVCache.

A snapshot is a list of segments. A new snapshot has segments on a grid of SEGMENT_TOKENS, so that a cut, a join or a
trim copies only one segment:

    [700, 1600)  ->  [700, 1024) [1024, 1536) [1536, 1600)

Attention that reads in place is faster on one long segment than on many short ones: `join` joins all segments.

A snapshot may be quantized. An array (1, H, T, D) then becomes three: packed codes (1, H, T, D * bits / 32), scales and
biases (1, H, T, D / group). Groups lie inside a token, so cuts and joins lose nothing.

    insert, page out    snapshot.quantized(bits)
    page in             snapshot.parts(start, end) gives plain arrays of these tokens
    read in place       snapshot.with_plain() has both forms, until the last reader leaves

Values that are dequantized and quantized again do not change, so state may be paged in and out any number of times.
With 8 bits, a scale is a power of two, which the values give back exactly. With 4 bits, the ends of a group are codes.
MLX's own `quantize` changes both: in bfloat16 with 8 bits, its error grew fivefold in 30 rounds.

Source: mlx_lm.models.cache, mlx-lm 0.32.2; the format of mx.dequantize, mode "affine", mlx 0.32.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from radixcache.adapters.contract import NEVER, SEGMENT_TOKENS
from radixcache.errors import SnapshotError

#: Arrays (1, H, T, D) of the same tokens.
Segment = tuple[mx.array, ...]
#: How many values share a scale and a bias: the largest of these that divides D.
GROUP_SIZES = (64, 32)
ALL = slice(None)


class StoredForm(NamedTuple):
    """How an array is quantized."""

    group_size: int
    bits: int


#: The form of each array of a layer. None: the array is plain, as no group size divides D. Empty: all are plain.
Forms = tuple[StoredForm | None, ...]


@dataclass(slots=True)
class SpanSnapshot:
    """The state of tokens [start, end) of one layer, in consecutive segments that share no buffer.

    `forms` says which arrays of the layer are quantized. `plain` has the same tokens unquantized, for rows that read
    them in place; None: rows read `segments`.
    """

    start: int
    end: int
    segments: list[Segment]
    forms: Forms = ()
    plain: SpanSnapshot | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        own = [array for segment in self.segments for array in segment]
        return own if self.plain is None else own + self.plain.arrays()

    @property
    def readable(self) -> list[Segment]:
        """The segments that attention reads in place: plain arrays."""
        return self.segments if self.plain is None else self.plain.segments

    def quantized(self, bits: int | None) -> SpanSnapshot:
        """The same tokens with `bits` bits per value (None: plain), unevaluated; `self` if nothing changes."""
        if bits is None and not self.forms:
            return self
        if self.forms and bits not in {form.bits for form in self.forms if form is not None}:
            parts = [arrays for _, _, arrays in self.parts(self.start, self.end)]
            return SpanSnapshot(self.start, self.end, parts).quantized(bits)
        forms = () if self.forms else forms_of([(a.shape[-1], a.dtype) for a in self.segments[0]], bits)
        if not forms:
            return self
        segments = [tuple(_quantized(segment, forms)) for segment in self.segments]
        return SpanSnapshot(self.start, self.end, segments, forms)

    def with_plain(self) -> SpanSnapshot:
        """The same with a plain copy if it is quantized, unevaluated; `self` if nothing changes."""
        if not self.forms or self.plain is not None:
            return self
        return SpanSnapshot(self.start, self.end, self.segments, self.forms, self.quantized(None))

    def without_plain(self) -> SpanSnapshot:
        """The snapshot without its plain copy; `self` if it has none."""
        return self if self.plain is None else SpanSnapshot(self.start, self.end, self.segments, self.forms)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        if len(self.segments) == 1:
            return [(self.start, self.end)]
        return list(pairwise(accumulate((segment[0].shape[2] for segment in self.segments), initial=self.start)))

    def join(self) -> None:
        """Join all segments that are read in place into one, evaluated."""
        if self.plain is not None:
            self.plain.join()
        elif len(self.segments) > 1:
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
                upper.append(tuple(own_span(a, 0, at - low) for a in segment))
                lower.append(tuple(own_span(a, at - low, high - low) for a in segment))
            else:
                (upper if high <= at else lower).append(segment)
        plain = (None, None) if self.plain is None else self.plain.split(at)
        above = SpanSnapshot(self.start, at, upper, self.forms, plain[0])
        return above, SpanSnapshot(at, self.end, lower, self.forms, plain[1])

    def merged(self, lower: SpanSnapshot) -> SpanSnapshot:
        """Join with a snapshot that begins at `end`. Consumes both. Plain and quantized give quantized.

        SnapshotError: the snapshots do not touch, or are of different layers.
        """
        if self.end != lower.start:
            raise SnapshotError(f"spans [{self.start}, {self.end}) and [{lower.start}, {lower.end}) do not touch.")
        if self.forms != lower.forms:
            bits = next(form.bits for form in self.forms or lower.forms if form is not None)
            return self.quantized(bits).merged(lower.quantized(bits))
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
        return SpanSnapshot(self.start, lower.end, segments, self.forms)

    def parts(self, start: int, end: int) -> list[tuple[int, int, Segment]]:
        """The tokens in [start, end), a segment at a time: offsets [first, last) and plain arrays of these tokens."""
        if self.plain is not None:
            return self.plain.parts(start, end)
        cuts = self.cuts(start, end)
        return [(first, last, _plain(segment, self.forms)) for first, last, segment in cuts] if self.forms else cuts

    def cuts(self, start: int, end: int) -> list[tuple[int, int, Segment]]:
        """As `parts`, with the arrays as they are stored."""
        found, low = [], self.start
        for segment in self.segments:  # runs for each layer and node: call only MLX
            high = low + segment[0].shape[2]
            if start <= low and high <= end:
                found.append((low, high, segment))
            elif start < high and low < end:
                first, last = max(low, start), min(high, end)
                found.append((first, last, tuple([array[:, :, first - low : last - low] for array in segment])))
            low = high
        return found


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
        return 0 if cache.keys is None else int(cache.keys.shape[2])

    def spare_nbytes(self, cache: Any) -> int:
        return sum(b.nbytes * (b.shape[2] - cache.offset) // b.shape[2] for b in self.buffers(cache))

    def snapshot(self, cache: Any, start: int, end: int) -> SpanSnapshot | None:
        if cache.keys is None:
            return None
        if not 0 <= start < end <= cache.offset:
            raise SnapshotError(f"span [{start}, {end}) is not inside the live state [0, {cache.offset}).")
        cuts, buffers = segment_bounds(start, end), self.buffers(cache)
        return SpanSnapshot(start, end, [tuple([own_span(b, low, high) for b in buffers]) for low, high in cuts])

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
            first = () if like is None else like.parts(like.start, like.end)[0][2]
            buffers = [_zeros_like(a, capacity) for a in first]
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
        buffers = self.buffers(cache)
        if not buffers or buffers[0].shape[2] <= target:
            self.reserve(cache, target + 1, snapshot)
            buffers = self.buffers(cache)
        for first, last, arrays in snapshot.parts(cache.offset, target):
            place = (ALL, ALL, slice(first, last))  # twice as fast as an index with an ellipsis
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer[place] = array
        cache.offset = target


class QuantizedKVAdapter(SpanAdapter):
    """QuantizedKVCache: keys and values have three buffers each.

    Packed values are uint32 (1, H, capacity, D * bits / 32), scales and biases (1, H, capacity, D / group_size).
    Quantization is per token, so the state can be cut at any token.
    """

    def buffers(self, cache: Any) -> list[mx.array]:
        return [] if cache.keys is None else [*cache.keys, *cache.values]

    def capacity(self, cache: Any) -> int:
        return 0 if cache.keys is None else int(cache.keys[0].shape[2])

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


def forms_of(arrays: Sequence[tuple[int, mx.Dtype]], bits: int | None) -> Forms:
    """How the arrays of a layer are quantized, given the last dimension and the dtype of each.

    Empty: no array is quantized, as with `bits=None`, and in layers that hold codes already.
    """
    if bits is None or not all(mx.issubdtype(dtype, mx.floating) for _, dtype in arrays):
        return ()
    sizes = (next((size for size in GROUP_SIZES if width and width % size == 0), None) for width, _ in arrays)
    forms = tuple(None if size is None else StoredForm(size, bits) for size in sizes)
    return forms if any(forms) else ()


def stored_nbytes(shapes: Sequence[tuple[Any, ...]], bits: int | None) -> int:
    """Bytes of a token of one layer, whose arrays are of these shapes (1, H, D, dtype), in a snapshot with `bits`."""
    forms = forms_of([(width, dtype) for *_, width, dtype in shapes], bits) or (None,) * len(shapes)
    nbytes = 0
    for (*outer, width, dtype), form in zip(shapes, forms, strict=True):
        row = width * dtype.size
        if form is not None:
            row = width * form.bits // 8 + 2 * (width // form.group_size) * dtype.size
        nbytes += math.prod(outer) * row
    return nbytes


def _quantized(segment: Segment, forms: Forms) -> Iterator[mx.array]:
    """The arrays in the format of mx.dequantize; see the top of the file for the scales."""
    for array, form in zip(segment, forms, strict=True):
        if form is None:
            yield array
            continue
        top = 2**form.bits - 1
        groups = array.astype(mx.float32).reshape(*array.shape[:-1], -1, form.group_size)
        least = groups.min(axis=-1, keepdims=True)
        spread = mx.maximum(groups.max(axis=-1, keepdims=True) - least, 1e-30)
        if form.bits == 4:
            scales = spread / top  # a power of two would lose up to one bit of the four
        else:
            powers = (spread.view(mx.int32) & 0x7F800000).view(mx.float32)  # round down to powers of two
            scales = powers * 2.0 ** (1 - form.bits)
        scales = scales.astype(array.dtype)
        steps = (groups - least) / mx.maximum(scales.astype(mx.float32), 1e-30)
        codes = mx.clip(mx.round(steps), 0, top).astype(mx.uint8).reshape(array.shape)
        if form.bits == 4:
            codes = codes[..., ::2] | (codes[..., 1::2] << 4)
        yield codes.view(mx.uint32)
        yield scales.squeeze(-1)
        yield least.squeeze(-1).astype(array.dtype)


def _plain(segment: Segment, forms: Forms) -> Segment:
    arrays = iter(segment)
    return tuple(
        next(arrays) if form is None else mx.dequantize(next(arrays), next(arrays), next(arrays), *form)
        for form in forms
    )


def segment_bounds(start: int, end: int, step: int | None = None) -> list[tuple[int, int]]:
    """The grid segments of `step` tokens, or of SEGMENT_TOKENS, that cover [start, end)."""
    bounds, step = [], step or SEGMENT_TOKENS
    while start < end:
        stop = min(end, (start // step + 1) * step)
        bounds.append((start, stop))
        start = stop
    return bounds


def own_span(buffer: mx.array, start: int, end: int) -> mx.array:
    """Return a copy of the tokens [start, end) of a buffer (1, H, T, D) in a buffer of its own, unevaluated."""
    batch, heads, tokens, _ = buffer.shape
    if batch * heads > 1 and end - start < tokens:
        return mx.contiguous(buffer[:, :, start:end])  # Rows of several heads are not contiguous, so this copies.
    if end - start < 2:
        return owned(buffer[:, :, start:end])
    # As in `owned`, with the cut and its halves in one call.
    _, first, second, _ = mx.split(buffer, [start, (start + end) // 2, end], 2)
    return mx.concatenate([first, second], 2)


def owned(array: mx.array) -> mx.array:
    """Return a copy of `array` (any shape and dtype) in a buffer of its own, unevaluated.

    A slice keeps its parent's buffer alive, and `mx.contiguous` returns a slice of nearly all of its input as it is.
    Joining two pieces always writes a new buffer of the result's size.
    """
    if array.size == 0:
        return mx.zeros(array.shape, dtype=array.dtype)
    shape = array.shape
    for axis in range(len(shape) - 2, -2, -1):  # the last axis comes last
        if shape[axis] > 1:
            return mx.concatenate([*mx.split(array, [shape[axis] // 2], axis)], axis)
    # One element: a view of two is the smallest buffer that is not the parent's.
    flat = array.reshape(1)
    return mx.concatenate([flat, flat])[:1].reshape(array.shape)


def _zeros_like(array: mx.array, tokens: int) -> mx.array:
    return mx.zeros((*array.shape[:2], tokens, array.shape[3]), dtype=array.dtype)


def _without_time(array: mx.array) -> tuple[int, ...]:
    return (*array.shape[:2], array.shape[3])
