"""Verifier: prefill a random share of the resumed requests cold, and compare the restored state with the cold state.

    begin            decide at random whether to check the request
    first pass       cold: [0, resume) | compare every layer | [resume, end of the prompt) -> logits; then free all
                     live: stands at `resume` and is only read
    last token       the live logits of the prompt's last token are compared with the cold logits

After a mismatch the session quarantines the path, empties the live caches and begins again at offset 0. Its answers are
then equal, bit by bit, to those of a session after a miss. The cold state counts against the budget. If the cold state
does not fit, the check is skipped.

Rows of a group are drawn too, and have two checks: see groups/checks.py.

Also skipped: state from fetch(), requests whose `keys` are not their token ids, wrapped windows with `keep` (their
content depends on the lengths of forward passes), and sessions whose caller ran the model before prefill() or step().
If the caller runs the model itself after prefill(), the state is compared and the logits are not.

`compare_states` compares span layers row by row over [0, end), windows by the rows that they read, in order of time,
and other point layers as a whole. An error is the largest difference, divided by the largest magnitude in the same cold
array. Different offsets or shapes are an infinite error. Small errors are rounding: the two states come from forward
passes of different lengths. With `stored_bits`, a model with experts may pick other experts for some tokens, so a few
wrong rows are no mismatch. Not compared: integer arrays of unknown classes, and leaves that the model does not write.
All work runs on the device, in batches of rows, and keeps no reference to live buffers.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache

from radixcache.adapters.contract import Adapter
from radixcache.adapters.window import WindowAdapter
from radixcache.errors import describe
from radixcache.layers.layout import NATIVE_ERRORS, TOGETHER_BYTES, Layout
from radixcache.layers.trials import PICKED_ROWS, PICKED_TOLERANCE, has_experts, tolerance_of
from radixcache.ledger import Lock
from radixcache.tokens import Keys, TokenIds
from radixcache.tree.history import QUARANTINED, Events

#: How many rows of a span layer are compared at a time.
ROWS = 1024
#: How many of the last mismatches are kept, each with all data to reproduce it.
RECORDED_MISMATCHES = 16
#: The smallest scale of an array, relative to the largest magnitude in its leaf. Smaller arrays may be only rounding.
LEAST_SHARE = 1e-4


class Part(StrEnum):
    OFFSET = "offset"
    SHAPE = "shape"
    ROWS = "rows"
    WINDOW = "window"
    POINT = "point"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Difference:
    """The error of one array of a leaf, or of the leaf's offset or shape (array -1). For logits the layer is -1.

    `error` is the largest difference, divided by the largest magnitude of the cold array. `row_errors` has this error
    for each row of a span layer or a window.
    """

    part: Part
    layer: int
    cache_class: str
    array: int = -1
    error: float = float("inf")
    row_errors: np.ndarray[Any, np.dtype[np.float64]] | None = None

    def first_wrong_row(self, tolerance: float) -> int | None:
        wrong = np.zeros(0) if self.row_errors is None else self.row_errors > tolerance
        return int(wrong.argmax()) if wrong.any() else None


def compare_states(
    layout: Layout, restored: Sequence[Any], cold: Sequence[Any], end: int, offsets: Sequence[int | None]
) -> list[Difference]:
    """Compare all leaves of restored live caches with the leaves of cold caches. Both stand at offset `end`.

    `offsets`: the offset of each restored leaf, in order, when the leaf was restored.
    """
    differences: list[Difference] = []
    pairs = zip(layout.leaves(restored), layout.leaves(cold), offsets, strict=True)
    for index, ((ours, adapter), (theirs, _), offset) in enumerate(pairs):
        name = type(ours).__name__
        if adapter.is_empty(theirs) or (adapter.is_empty(ours) and not layout.is_in_use(index)):
            continue  # This model does not use the leaf, or did not when the state was made.
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
    """Compare the logits (V,) that follow restored state with the logits that follow cold state."""
    if restored.shape != cold.shape:
        return Difference(Part.LOGITS, -1, "", 0)
    errors, magnitude = _reduce(restored[None, None], cold[None, None], axes=(0, 1, 2))
    return Difference(Part.LOGITS, -1, "", 0, _number(errors) / _scale(_number(magnitude), 0.0))


def _spans(index: int, name: str, ours: Any, theirs: Any, adapter: Adapter, end: int) -> Iterable[Difference]:
    parts: list[list[tuple[mx.array, mx.array]]] = []
    pending_bytes, done = 0, 0
    for start in range(0, end, ROWS):
        stop = min(end, start + ROWS)
        left, right = (_rows(cache, adapter, start, stop) for cache in (ours, theirs))
        if [a.shape for a in left] != [a.shape for a in right]:
            return [Difference(Part.SHAPE, index, name)]
        parts.append([_reduce(a, b, axes=(0, 1, 3)) for a, b in zip(left, right, strict=True)])
        pending_bytes += sum(a.size for a in left) * 4
        if pending_bytes > TOGETHER_BYTES or stop == end:
            mx.eval(parts[done:])
            pending_bytes, done = 0, len(parts)
    return _row_differences(index, name, parts)


def _window(index: int, name: str, ours: Any, theirs: Any, adapter: WindowAdapter, end: int) -> Iterable[Difference]:
    """Compare by row of the sequence; rows that the window does not read count as equal."""
    left, right = adapter.state(ours), adapter.state(theirs)
    if [a.shape for a in left] != [a.shape for a in right]:
        return [Difference(Part.SHAPE, index, name)]
    part = [_reduce(a, b, axes=(0, 1, 3)) for a, b in zip(left, right, strict=True)]
    mx.eval(part)
    rows = [row for low, high in adapter.window(ours).needs(end) for row in range(low, high)]
    differences = []
    for each in _row_differences(index, name, [part]):
        row_errors = np.zeros(end)
        row_errors[rows] = each.row_errors
        differences.append(replace(each, part=Part.WINDOW, row_errors=row_errors))
    return differences


def _row_differences(index: int, name: str, parts: Sequence[list[tuple[mx.array, mx.array]]]) -> list[Difference]:
    """The errors of each array by row, from the reductions of each batch of rows."""
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
    reduced = [_reduce(a, b) for a, b in zip(ours, theirs, strict=True)]
    mx.eval(reduced)
    largest = max((_number(magnitude) for _, magnitude in reduced), default=0.0)
    return [
        Difference(Part.POINT, index, name, i, _number(errors) / _scale(_number(magnitude), largest))
        for i, (errors, magnitude) in enumerate(reduced)
    ]


def _rows(cache: Any, adapter: Adapter, start: int, end: int) -> list[mx.array]:
    """The tokens [start, end) of a span leaf as floating-point arrays (1, H, T, D)."""
    rows = [buffer[..., start:end, :] for buffer in adapter.buffers(cache)]
    if isinstance(cache, QuantizedKVCache):
        keys, values = rows[:3], rows[3:]
        grid = {"group_size": cache.group_size, "bits": cache.bits}
        return [mx.dequantize(packed, scales, biases, **grid) for packed, scales, biases in (keys, values)]
    return [array for array in rows if mx.issubdtype(array.dtype, mx.floating)]


def _point_arrays(cache: Any, adapter: Adapter, end: int) -> list[mx.array]:
    snapshot = adapter.snapshot(cache, 0, end)
    arrays: list[mx.array] = [] if snapshot is None else snapshot.arrays()
    return [a for a in arrays if isinstance(cache, ArraysCache) or mx.issubdtype(a.dtype, mx.floating)]


def _reduce(ours: mx.array, theirs: mx.array, axes: tuple[int, ...] | None = None) -> tuple[mx.array, mx.array]:
    """The largest difference over `axes` (None: all; infinite if one side is NaN), and the largest finite magnitude."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """State that differs from a cold prefill, with what is needed to reproduce it.

    Attributes:
        namespace, tick: of the request.
        tokens: int32 token ids of the prompt; for a row that was compared at its end, also of the reply so far.
        resume_offset: the offset at which the request resumed; for a row that was compared at its end, this end.
        step_size: tokens per forward pass of both prefills.
        part: what differed: "offset", "shape", "rows" (full attention), "window", "point" (recurrent) or "logits".
        layer, cache_class: index and class of the first cache object that differed; -1 for the logits. The index skips
            layers without a cache, and counts each cache of a list.
        array: index of the array in that cache object; -1 for an offset.
        row: the first token whose state differed in a layer of full attention; None: no such token.
        error: the largest difference, divided by the largest magnitude in the same cold array.
        tolerance: the largest accepted error.
        quarantined_from: the first quarantined offset of the path.
        seed: verify_seed of the cache.
    """

    namespace: str
    tick: int
    tokens: TokenIds
    resume_offset: int
    step_size: int
    part: Part
    layer: int
    cache_class: str
    array: int
    row: int | None
    error: float
    tolerance: float
    quarantined_from: int
    seed: int

    def __str__(self) -> str:
        where = "the logits" if self.part is Part.LOGITS else f"layer {self.layer} ({self.cache_class}, {self.part})"
        row = "" if self.row is None else f", from token {self.row} on"
        return (
            f"state up to token {self.resume_offset} of {len(self.tokens)} differs from a cold prefill: "
            f"{where}{row}, relative error {self.error:.1e}, tolerance {self.tolerance:.1e}"
        )


class Finding(NamedTuple):
    """Wrong state: all paths that begin with the first `length` tokens of the prompt, from offset `start` on.

    `start=None`: from the start of the node where these tokens end. `is_branch`: from the start of their branch.
    `Verifier.record` fills in the mismatch's namespace, tick and `quarantined_from`.
    """

    mismatch: Mismatch
    length: int
    start: int | None
    is_branch: bool = False


#: Book all bytes that the cold run holds; False: they do not fit.
Book = Callable[[int], bool]


class Verifier:
    """Draws requests, counts checks and records mismatches, for one cache.

    `verified` counts requests that were compared, `skipped` requests that were drawn but could not be compared.
    `largest_error` is the largest relative error of all comparisons.
    """

    def __init__(self, share: float, seed: int, lock: Lock, events: Events) -> None:
        self.seed = seed
        self.verified = self.skipped = self.mismatch_count = 0
        self.largest_error = 0.0
        self.mismatches: deque[Mismatch] = deque(maxlen=RECORDED_MISMATCHES)
        self._lock, self._events = lock, events
        self._share, self._random = share, random.Random(seed)
        self._warned: set[str] = set()

    def is_drawn(self) -> bool:
        """Decide at random whether to check a request."""
        return bool(self._share) and self._random.random() < self._share

    def pass_over(self) -> None:
        """Draw a restored request that cannot be compared. If it is drawn, count it as skipped."""
        self.skipped += self.is_drawn()

    def count(self, differences: Sequence[Difference], *, is_request: bool) -> None:
        """Count a comparison. `is_request`: also count one more verified request."""
        with self._lock:
            self.verified += is_request
            self.largest_error = max((self.largest_error, *(d.error for d in differences)))

    def record(self, found: Mismatch, namespace: str, tick: int, start: int) -> Mismatch:
        """Count and record a mismatch, after a quarantine from `start` on. The caller holds the lock."""
        mismatch = replace(found, namespace=namespace, tick=tick, quarantined_from=start)
        self.mismatch_count += 1
        self.mismatches.append(mismatch)
        self._events.emit(QUARANTINED, namespace, start, mismatch.resume_offset, 0, {"mismatch": mismatch})
        return mismatch

    def warn(self, mismatch: Mismatch) -> None:
        """Warn of the first mismatch only."""
        what = "The path is quarantined, and a reply that has not begun is served cold; see PrefixCache.mismatches."
        self._warn_once("mismatch", f"{mismatch}. {what}", 6)

    def warn_of_failure(self, error: Exception) -> None:
        """Warn of a check that failed, once. Not for a lack of memory."""
        what = "The request is served from the restored state, without verification."
        self._warn_once("failure", f"verification failed with {describe(error)}. {what}", 5)

    def _warn_once(self, subject: str, text: str, stacklevel: int) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


class Check:
    """One check of a request: compare its `caches` at offset `resume`, and the logits of one token of its prompt.

    Args:
        logits_at: the index of this token; None: the last token.
        is_part: the request has other checks too, and the owner of the checks counts the request.
    """

    def __init__(
        self,
        verifier: Verifier,
        layout: Layout,
        prompt: TokenIds,
        caches: Sequence[Any],
        resume: int,
        *,
        logits_at: int | None = None,
        is_part: bool = False,
    ) -> None:
        self.verifier, self._layout, self._prompt, self._resume = verifier, layout, prompt, resume
        self._logits_at, self._is_part = len(prompt) - 1 if logits_at is None else logits_at, is_part
        self._offsets = self._leaf_offsets(caches)
        self._step_size, self._tolerance = 0, 0.0
        self._has_experts = False
        self.was_made = False  # whether the states were compared
        self.cold_logits: mx.array | None = None  # (V,), until they are compared
        self.is_pending = True

    def run(
        self, model: Any, keys: Keys, caches: Sequence[Any], step_size: int, book: Book, is_untouched: bool
    ) -> Finding | None:
        """Compare the restored state with a cold run. None: nothing is wrong, or nothing could be compared.

        If the cold run fails, the check counts as skipped. The first failure that does not come from MLX gives a
        warning. `caches` are only read. `is_untouched`: no forward pass has used `caches` since they were restored.
        """
        self.is_pending = False
        self._step_size = step_size
        self._has_experts = self._layout.stored_bits is not None and has_experts(model)
        if (keys != self._prompt).any() or not is_untouched or not self._is_comparable(caches):
            return None
        differences: list[Difference] = []
        try:
            if book(self._second_nbytes(caches)):
                differences = self._run_cold(model, caches, book)
        except Exception as error:
            self.cold_logits = None
            if not isinstance(error, NATIVE_ERRORS):
                self.verifier.warn_of_failure(error)
        finally:
            book(0)
            self._layout.release()
        return self._finding([each for each in differences if self._is_wrong(each)])

    def compare_last(self, logits: mx.array, start: int) -> Finding | None:
        """Compare the logits of the token at `logits_at`. Waits for the logits.

        `logits`: (1, T, V), of the tokens from `start` on. None: the logits agree, do not include this token, or were
        compared before.
        """
        index = self._logits_at - start
        if self.cold_logits is None or not 0 <= index < logits.shape[1]:
            return None
        cold, self.cold_logits = self.cold_logits, None
        difference = compare_logits(logits[0, index], cold)
        self.verifier.count([difference], is_request=False)
        return self._finding([difference]) if self._is_wrong(difference) else None

    def close(self) -> None:
        """End the check. If it was not made, count it as skipped."""
        if not self.was_made:
            self.verifier.skipped += 1
        self.is_pending, self.was_made, self.cold_logits = False, True, None

    def _run_cold(self, model: Any, restored: Sequence[Any], book: Book) -> list[Difference]:
        """Prefill the prompt cold and return all differences. If none is a mismatch, keep the logits of the token."""
        prompt, caches, position = self._prompt, self._layout.fresh(), 0
        cold_logits: mx.array | None = None
        differences: list[Difference] = []
        try:
            while position < len(prompt):
                end = self._next_stop(position)
                logits = model(mx.array(prompt[position:end])[None], cache=caches)
                self._layout.own(caches)
                if position == 0:
                    self._layout.reserve(caches, len(prompt) + 1)
                position = end
                if not book(self._layout.live_nbytes(caches)):
                    return []
                if position == self._resume:
                    self._tolerance = tolerance_of(self._layout, caches, logits.dtype)
                    differences = compare_states(self._layout, restored, caches, position, self._offsets)
                    self.was_made = True
                    self.verifier.count(differences, is_request=not self._is_part)
                    if any(map(self._is_wrong, differences)):
                        return differences
                if position == self._logits_at + 1:
                    cold_logits = mx.contiguous(logits[0, -1])
                    mx.eval(cold_logits)
                self._layout.release()
            self.cold_logits = cold_logits
        finally:
            caches.clear()
        return differences

    def _is_wrong(self, difference: Difference) -> bool:
        """Whether an error is too large for rounding, and for the choice of other experts that rounding causes."""
        errors = difference.row_errors
        if not self._has_experts or difference.error <= self._tolerance:
            return difference.error > self._tolerance
        if errors is None or difference.error > 2 * PICKED_TOLERANCE:  # larger than the error of any other token
            return difference.error > max(self._tolerance, PICKED_TOLERANCE)
        compared = len(errors) if difference.part is Part.ROWS else np.count_nonzero(errors)
        return int(np.count_nonzero(errors > self._tolerance)) > max(1, compared * PICKED_ROWS)

    def _next_stop(self, position: int) -> int:
        grid, at = (position // self._step_size + 1) * self._step_size, self._logits_at
        return min(stop for stop in (grid, self._resume, at, at + 1, len(self._prompt)) if stop > position)

    def _is_comparable(self, caches: Sequence[Any]) -> bool:
        length, leaves = len(self._prompt), self._layout.leaves(caches)
        has_wrapped = any(getattr(cache, "keep", 0) and length > cache.max_size for cache, _ in leaves)
        return not has_wrapped and self._leaf_offsets(caches) == self._offsets

    def _second_nbytes(self, caches: Sequence[Any]) -> int:
        """The bytes of the cold state at the end of the prompt."""
        points = [adapter.buffers(cache) for cache, adapter in self._layout.leaves(caches) if adapter.is_point]
        span_nbytes = self._layout.token_bytes * (len(self._prompt) + 1)
        return span_nbytes + sum(buffer.nbytes for buffers in points for buffer in buffers)

    def _leaf_offsets(self, caches: Sequence[Any]) -> list[int | None]:
        return [adapter.offset(cache) for cache, adapter in self._layout.leaves(caches)]

    def _finding(self, wrong: Sequence[Difference]) -> Finding | None:
        if not wrong:
            return None
        rows = [row for each in wrong if (row := each.first_wrong_row(self._tolerance)) is not None]
        row, first = min(rows, default=None), wrong[0]
        length, start, is_branch = self._resume, None if first.part is not Part.LOGITS else 0, False
        if row is not None and all(each.part in (Part.ROWS, Part.WINDOW) for each in wrong):
            length, start = row + 1, row
            # State before a window was not compared and may be wrong.
            is_branch = any(each.part is Part.WINDOW for each in wrong)
        request = ("", 0, self._prompt.copy(), self._resume, self._step_size)
        where = (first.part, first.layer, first.cache_class, first.array, row)
        error = max(each.error for each in wrong)
        return Finding(
            Mismatch(*request, *where, error, self._tolerance, 0, self.verifier.seed), length, start, is_branch
        )
