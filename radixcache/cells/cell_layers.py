"""CellLayer: what an attention layer sees of the cells. RowStates: the layers that have a state per sequence instead.

A forward pass is one row of any length or several rows of one token. It fetches the C cells between the first and the
last that any row sees, without a copy:

    one row         keys (1, H, T, D) are written behind each other; a view (1, H, C, D) is fetched, mask (T, C)
    several rows    keys (N, H, 1, D) are written side by side; the same view is fetched for all, by broadcast
                    (N, H, C, D), and the mask (N, 1, 1, C) says which cells belong to which row

RowStates has an ArraysCache per sequence and recurrent layer. A step of several sequences joins them into caches with a
row for each, which stay joined while the same sequences step in the same order.

Invariants of RowStates, asserted by `check`:

  CS1  Joined sequences exist, none is there twice, and each array of the joined caches has a row for each.
  CS2  A joined state is held once: the sequence's own caches have None in every slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, _BaseCache

from radixcache.adapters.point import copied
from radixcache.adapters.span import owned
from radixcache.cells.table import CellBatch, CellTable, Move

Mask = mx.array | str | None
#: Buffers grow by a twentieth of their cells, and by GROWTH_CELLS at least.
GROWTH_CELLS = 64
GROWTH_PART = 20


class CellPass:
    """One forward pass over the cells: where its tokens go, and what each of them sees."""

    def __init__(self, table: CellTable, batch: CellBatch) -> None:
        self._table = table
        self.batch = batch
        self.row_count = len(batch.rows)
        self.tokens_per_row = batch.rows[0].length
        begins = [row.begin for row in batch.rows]
        # Tokens in front of the pass: an int for one row, an int32 array (N,) for several.
        self.before: Any = begins[0] if self.row_count == 1 else mx.array(begins, dtype=mx.int32)
        self._spans: dict[int | None, tuple[int, int]] = {}
        self._masks: dict[tuple[int | None, int | None, bool], Mask] = {}

    def span(self, window: int | None) -> tuple[int, int]:
        """The cells [start, stop) that a layer with this window fetches."""
        if window not in self._spans:
            self._spans[window] = self._table.span(self.batch, window=window)
        return self._spans[window]

    def mask(self, span_window: int | None, window: int | None, as_array: bool) -> Mask:
        """What each token sees of `span(span_window)`, with a window that is no wider, in the form of mlx-lm.

        A bool mask is (T, C) for T > 1, or (N, 1, 1, C), as some models gather from it.
        """
        key = span_window, window, as_array
        if key not in self._masks:
            self._masks[key] = self._mask(*key)
        return self._masks[key]

    def _mask(self, span_window: int | None, window: int | None, as_array: bool) -> Mask:
        start, stop = self.span(span_window)
        row, cells, tokens = self.batch.rows[0], stop - start, self.tokens_per_row
        begin = 0 if span_window is None else max(row.begin - span_window + 1, 0)
        if self.row_count == 1 and len(self._table.ranges(row.sequence, begin)) == 1:  # a single run of cells
            is_cut = window is not None and cells > window
            if not is_cut and (tokens == 1 or not as_array):
                return None if tokens == 1 else "causal"
            in_order: mx.array = create_causal_mask(tokens, cells - tokens, window_size=window if is_cut else None)
            return in_order
        first, last = self.span(window)
        mask = mx.array(self._table.mask(self.batch, window=window))
        if (first, last) != (start, stop):
            mask = mx.pad(mask, [(0, 0), (first - start, stop - last)])
        return mask if tokens > 1 else mask[:, None, None, :]


class CellLayer(_BaseCache):  # type: ignore[misc]
    """One layer's keys and values of all cells: buffers (1, H, cells, Dk) and (1, H, cells, Dv), made when written."""

    def __init__(self, capacity: int, window: int | None = None) -> None:
        self.capacity = capacity  # the most cells
        self.window = window  # how many tokens a token sees, itself included; None: all
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._pass: CellPass | None = None
        self._is_written = False

    def enter(self, current: CellPass | None) -> None:
        """Begin a forward pass; None: it is over."""
        self._pass = current
        self._is_written = False

    # What a model asks

    @property
    def offset(self) -> Any:
        """Tokens in front of the pass, and with those of the pass once they are written: an int, or int32 (N,)."""
        before = self._running.before
        return before + self._running.tokens_per_row if self._is_written else before

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """What each of the pass's N tokens per row sees of what `update_and_fetch` returns."""
        given = [each for each in (window_size, self.window) if each is not None]
        return self._running.mask(self.window, min(given, default=None), return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the pass's keys and values, shape (N, H, T, D), and return views of all cells that it sees."""
        current = self._running
        if keys.shape[0] != current.row_count or keys.shape[2] != current.tokens_per_row:
            wanted = f"{current.row_count} rows with {current.tokens_per_row} tokens each"
            raise ValueError(f"keys of shape {keys.shape} in a pass of {wanted}.")
        if current.row_count > 1:
            keys, values = keys.transpose(2, 1, 0, 3), values.transpose(2, 1, 0, 3)
        self.write(current.batch.start, keys, values)
        self._is_written = True
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of all cells that the pass sees: for layers that read what another one wrote."""
        start, stop = self._running.span(self.window)
        keys, values = (buffer[..., start:stop, :] for buffer in self.state)
        count = self._running.row_count
        if count == 1:
            return keys, values
        return mx.broadcast_to(keys, (count, *keys.shape[1:])), mx.broadcast_to(values, (count, *values.shape[1:]))

    @property
    def state(self) -> tuple[mx.array, ...]:
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.state)

    # What the cache asks

    @property
    def token_bytes(self) -> int:
        """Bytes that a cell takes; 0 without buffers."""
        return sum(buffer.nbytes // buffer.shape[2] for buffer in self.state)

    def write(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Put keys and values (1, H, T, D) into the cells [start, start + T).

        ValueError: the buffers are for other heads or head sizes: another model's.
        """
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if buffer is not None and (buffer.shape[1], buffer.shape[3]) != (new.shape[1], new.shape[3]):
                raise ValueError(
                    f"keys or values have shape {new.shape}, the cells {buffer.shape}; use one model per cache."
                )
        keys, values = without_overflow(keys, values)
        stop = start + keys.shape[2]
        self.keys = _with_room(self.keys, keys, stop, self.capacity)
        self.values = _with_room(self.values, values, stop, self.capacity)
        if stop - start == self.keys.shape[2]:
            # MLX would take what is written for the buffer, and with it all that this is a part of.
            keys, values = owned(keys), owned(values)
        self.keys[..., start:stop, :] = keys
        self.values[..., start:stop, :] = values

    def move(self, moves: Sequence[Move]) -> None:
        """Copy cells to free cells: read all, evaluate, then write."""
        if not moves or self.keys is None or self.values is None:
            return
        sources = np.concatenate([np.arange(each.source, each.source + each.length) for each in moves])
        cells = mx.array(sources.astype(np.int32))
        keys, values = mx.take(self.keys, cells, axis=2), mx.take(self.values, cells, axis=2)
        mx.eval(keys, values)
        at = 0
        for move in moves:
            self.write(move.target, keys[..., at : at + move.length, :], values[..., at : at + move.length, :])
            at += move.length
        mx.eval(self.state)

    @property
    def _running(self) -> CellPass:
        if self._pass is None:
            raise ValueError("no forward pass is running; use CausalCache.prefill() or step().")
        return self._pass


def without_overflow(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Replace what is not finite in keys and values (1, H, T, D) by 0, and mark its tokens by NaN.

    MLX's attention multiplies values that a row may not see by 0, so they must be finite; it replaces scores. So the
    NaN goes into what only makes scores: the keys, or the second array in latent attention, whose first one is both.
    """
    is_latent = keys.shape[1] == 1 and keys.shape[3] != values.shape[3] > 0
    content, scored = (keys, values) if is_latent else (values, keys)
    is_finite = mx.isfinite(content)
    scored = mx.where(mx.all(is_finite, axis=-1, keepdims=True), scored, mx.array(float("nan"), scored.dtype))
    content = mx.where(is_finite, content, mx.array(0, content.dtype))
    return (content, scored) if is_latent else (scored, content)


def _with_room(buffer: mx.array | None, like: mx.array, cells: int, capacity: int) -> mx.array:
    """The buffer with room for at least so many cells; it grows by a part of its length, so a cell is copied O(1)."""
    held = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and cells <= held:
        return buffer
    wanted = min(capacity, max(cells, held + max(GROWTH_CELLS, held // GROWTH_PART)))
    like = like if buffer is None else buffer
    more = mx.zeros((*like.shape[:2], wanted - held, like.shape[3]), dtype=like.dtype)
    return more if buffer is None else mx.concatenate([buffer, more], axis=2)


Held = list[tuple[Any, list[mx.array | None]]]


class RowStates:
    """State of all sequences in the layers without cells; `slots`: how many arrays each such layer has."""

    def __init__(self, slots: list[int]) -> None:
        self._slots = slots
        self._own: dict[int, list[Any]] = {}
        self._joined: tuple[int, ...] = ()
        self._batch: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._slots)

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._own)

    def add(self, sequence: int) -> None:
        self._own[sequence] = [ArraysCache(size) for size in self._slots]

    def free(self, sequence: int) -> None:
        self._settle()
        del self._own[sequence]

    def copy(self, source: int, target: int) -> None:
        self._settle()
        for theirs, mine in zip(self._own[source], self._own[target], strict=True):
            mine.cache = copied(theirs.cache, mx.array)

    def take(self, sequences: tuple[int, ...]) -> list[Any]:
        """Caches for a forward pass of these sequences, a row for each: an ArraysCache per layer."""
        if len(sequences) == 1 or sequences != self._joined:
            self._settle()
        if len(sequences) == 1:
            return self._own[sequences[0]]
        if sequences != self._joined:
            owners = [self._own[each] for each in sequences]
            self._batch = [_join(column) for column in zip(*owners, strict=True)]
            self._joined = sequences
            for cache in (cache for own in owners for cache in own):
                cache.cache = [None] * len(cache.cache)  # the batch holds it now
        return self._batch

    def can_join(self, sequences: tuple[int, ...]) -> bool:
        """Whether their arrays have the same shapes; those that hold their last tokens are shorter at first."""
        if sequences == self._joined:
            return True
        self._settle()
        caches = [[cache.cache for cache in self._own[each]] for each in sequences]
        shapes = [[None if array is None else array.shape for arrays in each for array in arrays] for each in caches]
        return all(each == shapes[0] for each in shapes)

    def hold(self, sequences: tuple[int, ...]) -> Held:
        """The caches for a forward pass of these sequences, with their present arrays."""
        return [(cache, copied(cache.cache, mx.array)) for cache in self.take(sequences)]

    def arrays(self) -> list[mx.array]:
        joined = set(self._joined)
        caches = [cache for name, own in self._own.items() if name not in joined for cache in own]
        return [array for cache in (*caches, *self._batch) for array in cache.cache if array is not None]

    def check(self) -> None:
        """Assert CS1 and CS2."""
        assert len(set(self._joined)) == len(self._joined), self._joined
        assert set(self._joined) <= set(self._own), (self._joined, self.sequences)
        for joined in self._batch:
            shapes = [array.shape for array in joined.cache if array is not None]
            assert all(shape[0] == len(self._joined) for shape in shapes), (self._joined, shapes)
        for sequence in self._joined:
            assert all(array is None for own in self._own[sequence] for array in own.cache), sequence

    def _settle(self) -> None:
        """Give each sequence of the joined caches its own state again."""
        for row, sequence in enumerate(self._joined):
            for joined, own in zip(self._batch, self._own[sequence], strict=True):
                own.cache = copied(joined.cache, lambda array, row=row: mx.contiguous(array[row : row + 1]))
        self._joined, self._batch = (), []


def _join(caches: tuple[Any, ...]) -> Any:
    joined = ArraysCache(len(caches[0].cache))
    slots = zip(*(cache.cache for cache in caches), strict=True)
    joined.cache = [None if arrays[0] is None else mx.concatenate(list(arrays)) for arrays in slots]
    return joined
