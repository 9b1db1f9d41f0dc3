"""compare_states: how far restored state is from the state that a cold prefill gives, layer by layer.

Span layers are compared row by row over [0, end), windows over what they read, in the order of time, since two ways to
the same offset may have laid them out differently; other point layers as a whole. An error is relative: the largest
difference over the largest magnitude in the same array of the cold state. Offsets and shapes have to be equal, else the
error is infinite.

Restored and cold state come from forward passes of other lengths and differ by rounding. What may differ beyond that is
not compared: integer arrays of classes that are not known here, and leaves that the given model does not write.

Everything is reduced on the device, some rows at a time; no handle on a live buffer is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache

from radixcache.adapters.contract import Adapter
from radixcache.adapters.window import WindowAdapter
from radixcache.layers.arrays import TOGETHER_BYTES, ArrayLayout

#: Rows of a span layer that are compared at a time.
ROWS = 1024
#: Below this share of the largest magnitude in its leaf an array counts as that large: it may be nothing but rounding.
LEAST_SHARE = 1e-4


class Part(StrEnum):
    """What of a state was compared."""

    OFFSET = "offset"
    SHAPE = "shape"
    ROWS = "rows"
    WINDOW = "window"
    POINT = "point"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one array, or a leaf's offset, is from what it should be.

    Attributes:
        part: what was compared.
        layer, cache_class: index and class of the leaf, layers without a cache not counted; -1 for the logits.
        array: index of the array in the leaf; -1 for an offset or a shape.
        error: largest difference over the largest magnitude of the cold array.
        row_errors: the same for each row of a span layer or a window.
    """

    part: Part
    layer: int
    cache_class: str
    array: int = -1
    error: float = float("inf")
    row_errors: np.ndarray[Any, np.dtype[np.float64]] | None = None

    def first_wrong_row(self, tolerance: float) -> int | None:
        """The first row whose error is beyond the tolerance."""
        wrong = np.zeros(0) if self.row_errors is None else self.row_errors > tolerance
        return int(wrong.argmax()) if wrong.any() else None


def compare_states(
    layout: ArrayLayout, restored: Sequence[Any], cold: Sequence[Any], end: int, offsets: Sequence[int | None]
) -> list[Difference]:
    """Compare all leaves of a restored live cache with those of a cold one; both stand at offset `end`.

    `offsets`: where the restored leaves stood when they were restored, in order.
    """
    differences: list[Difference] = []
    pairs = zip(layout.leaves(restored), layout.leaves(cold), offsets, strict=True)
    for index, ((ours, adapter), (theirs, _), offset) in enumerate(pairs):
        name = type(ours).__name__
        if adapter.is_empty(theirs) or (adapter.is_empty(ours) and not layout.is_in_use(index)):
            continue  # the model given does not use this one, or did not when the state was made
        if adapter.is_empty(ours):
            differences.append(Difference(Part.SHAPE, index, name))
        elif offset != adapter.offset(theirs):
            differences.append(Difference(Part.OFFSET, index, name))
        elif isinstance(adapter, WindowAdapter):
            differences += _window(index, name, ours, theirs, adapter, end)
        elif adapter.is_point:
            differences += _points(index, name, _point_arrays(ours, adapter, end), _point_arrays(theirs, adapter, end))
        else:
            differences += _spans(index, name, ours, theirs, adapter, end)
    return differences


def compare_logits(restored: mx.array, cold: mx.array) -> Difference:
    """Compare the logits (V,) that follow from a restored state with those that follow from the cold one."""
    if restored.shape != cold.shape:
        return Difference(Part.LOGITS, -1, "", 0)
    errors, magnitude = _reduced(restored[None, None], cold[None, None], axes=(0, 1, 2))
    return Difference(Part.LOGITS, -1, "", 0, _number(errors) / _scale(_number(magnitude), 0.0))


def _spans(index: int, name: str, ours: Any, theirs: Any, adapter: Adapter, end: int) -> Iterable[Difference]:
    parts: list[list[tuple[mx.array, mx.array]]] = []
    pending_bytes, done = 0, 0
    for start in range(0, end, ROWS):
        stop = min(end, start + ROWS)
        left, right = (_rows(cache, adapter, start, stop) for cache in (ours, theirs))
        if [a.shape for a in left] != [a.shape for a in right]:
            return [Difference(Part.SHAPE, index, name)]
        parts.append([_reduced(a, b, axes=(0, 1, 3)) for a, b in zip(left, right, strict=True)])
        pending_bytes += sum(a.size for a in left) * 4
        if pending_bytes > TOGETHER_BYTES or stop == end:
            mx.eval(parts[done:])
            pending_bytes, done = 0, len(parts)
    return _row_differences(index, name, parts)


def _window(index: int, name: str, ours: Any, theirs: Any, adapter: WindowAdapter, end: int) -> Iterable[Difference]:
    """Rows are those of the sequence; what the window does not read any more counts as equal."""
    left, right = adapter.state(ours), adapter.state(theirs)
    if [a.shape for a in left] != [a.shape for a in right]:
        return [Difference(Part.SHAPE, index, name)]
    part = [_reduced(a, b, axes=(0, 1, 3)) for a, b in zip(left, right, strict=True)]
    mx.eval(part)
    rows = [row for low, high in adapter.window(ours).needs(end) for row in range(low, high)]
    differences = []
    for each in _row_differences(index, name, [part]):
        row_errors = np.zeros(end)
        row_errors[rows] = each.row_errors
        differences.append(replace(each, part=Part.WINDOW, row_errors=row_errors))
    return differences


def _row_differences(index: int, name: str, parts: Sequence[list[tuple[mx.array, mx.array]]]) -> list[Difference]:
    """For each array the errors by row, from what was reduced of some rows at a time."""
    magnitudes = [max(_number(part[i][1]) for part in parts) for i in range(len(parts[0]))]
    differences = []
    for i, magnitude in enumerate(magnitudes):
        errors = np.concatenate([np.asarray(part[i][0], np.float64) for part in parts])
        scale = _scale(magnitude, max(magnitudes))
        differences.append(Difference(Part.ROWS, index, name, i, float(errors.max()) / scale, errors / scale))
    return differences


def _points(index: int, name: str, ours: list[mx.array], theirs: list[mx.array]) -> Iterable[Difference]:
    if [a.shape for a in ours] != [a.shape for a in theirs]:
        return [Difference(Part.SHAPE, index, name)]
    reduced = [_reduced(a, b) for a, b in zip(ours, theirs, strict=True)]
    mx.eval(reduced)
    largest = max((_number(magnitude) for _, magnitude in reduced), default=0.0)
    return [
        Difference(Part.POINT, index, name, i, _number(errors) / _scale(_number(magnitude), largest))
        for i, (errors, magnitude) in enumerate(reduced)
    ]


def _rows(cache: Any, adapter: Adapter, start: int, end: int) -> list[mx.array]:
    """The tokens [start, end) of a span leaf as numbers: arrays (1, H, T, D)."""
    rows = [buffer[..., start:end, :] for buffer in adapter.buffers(cache)]
    if isinstance(cache, QuantizedKVCache):
        keys, values = rows[:3], rows[3:]
        grid = {"group_size": cache.group_size, "bits": cache.bits}
        return [mx.dequantize(packed, scales, biases, **grid) for packed, scales, biases in (keys, values)]
    return [array for array in rows if mx.issubdtype(array.dtype, mx.floating)]


def _point_arrays(cache: Any, adapter: Adapter, end: int) -> list[mx.array]:
    """The state of a point leaf."""
    snapshot = adapter.snapshot(cache, 0, end)
    arrays: list[mx.array] = [] if snapshot is None else snapshot.arrays()
    return [a for a in arrays if isinstance(cache, ArraysCache) or mx.issubdtype(a.dtype, mx.floating)]


def _reduced(ours: mx.array, theirs: mx.array, axes: tuple[int, ...] | None = None) -> tuple[mx.array, mx.array]:
    """Largest difference over `axes` (None: all), infinite where one is NaN, and the largest finite magnitude."""
    if ours.size == 0:
        return mx.array(0.0), mx.array(0.0)
    if not mx.issubdtype(ours.dtype, mx.floating):
        return mx.where(mx.array_equal(ours, theirs), 0.0, mx.inf), mx.array(1.0)
    left, right = ours.astype(mx.float32), theirs.astype(mx.float32)
    same = mx.logical_or(left == right, mx.logical_and(mx.isnan(left), mx.isnan(right)))
    difference = mx.where(same, 0.0, mx.abs(left - right))
    difference = mx.where(mx.isnan(difference), mx.inf, difference)
    magnitude = mx.abs(mx.where(mx.isfinite(right), right, 0.0))
    return difference.max(axis=axes), magnitude.max()


def _scale(magnitude: float, largest: float) -> float:
    return max(magnitude, largest * LEAST_SHARE, 1e-30)


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]
