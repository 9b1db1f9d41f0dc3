"""Tails: keys and values of rows that go through forward passes together, behind the segments that they read in place.

    row 0   in place: 2,000 tokens    . . x x x x     columns: tokens of a row's own, right-aligned, so that the next
    row 1   in place: 2,000 tokens    . . . x x x     token of every row goes into the same column
    row 2   in place: nothing         x x x x x x
    -                                 . . . . . .     room for a row that is still to come

A pass evaluates equally many tokens of each row. Its columns count when it ends, so a pass that raises changes nothing.
In a check of drafted tokens, each row has its own number of tokens, padded at the end, and keeps those that are right.
Then rows end in different columns, and later passes write there, until `Batch.gathered` aligns the rows again:

    row 0   x x x x a b .             columns: row 0 has kept two of three tokens, row 1 one of one. What is behind a
    row 1   . . x x c . .             row's last token is overwritten by the next pass

Up to CASCADE_TOKENS tokens attend to segments in place. For more tokens, of one row alone, keys and values of segments
and tail are copied side by side and released after the layer: MLX's own attention is faster and worth the copy. Where
MLX's exponential is slow, cascade attention is always faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from radixcache.adapters.contract import Spans
from radixcache.adapters.span import owned_span
from radixcache.groups.attention import Pair, Readers, cascade, handed_out, has_slow_exp

#: Tails grow by so many columns.
GROWTH_COLUMNS = 64
#: Passes of more tokens copy their segments.
CASCADE_TOKENS = 256

#: A segment for all layers: the rows that read it (None: all), and the state.
Part = tuple[tuple[int, ...] | None, Spans]


class PassError(RuntimeError):
    """A model uses keys and values in a way that segments do not support."""


class Columns:
    """Where the tokens of a batch of rows are."""

    def __init__(self, lengths: Sequence[int], in_place: Sequence[int], capacity: int = 0, spare_rows: int = 0) -> None:
        self.lengths = list(lengths)  # columns of each row
        self.in_place = list(in_place)  # tokens of each row that are in segments instead
        self.stops = [max(self.lengths)] * len(self.lengths)  # the column behind the last token of each row
        self.capacity = capacity  # columns of a buffer when it is made or grows
        self.row_capacity = len(self.lengths) + spare_rows  # rows of a buffer; the first ones are in use
        self.current: Pass | None = None  # the forward pass that is running

    @property
    def positions(self) -> list[int]:
        return [length + in_place for length, in_place in zip(self.lengths, self.in_place, strict=True)]

    @property
    def end(self) -> int:
        """Columns in use; a row has the last of them."""
        return max(self.stops)

    @property
    def is_aligned(self) -> bool:
        """Whether all rows end in the same column."""
        return min(self.stops) == max(self.stops)

    @property
    def width(self) -> int:
        """Columns up to `end` that are not empty in all rows."""
        return self.end - min(stop - length for stop, length in zip(self.stops, self.lengths, strict=True))

    @contextmanager
    def running(self, tokens: int, parts: Sequence[Part], ours: bool) -> Iterator[None]:
        """Run a forward pass of so many tokens per row; they count if the block ends without an error."""
        self.current = current = Pass(self, tokens, parts, ours)
        try:
            yield
            if current.unattended:
                raise PassError("the layer reads keys outside the module's scaled_dot_product_attention.")
            self.move([tokens] * len(self.lengths))
        finally:
            handed_out.by_keys.clear()
            self.current = None

    def alike(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs [low, high) of the rows [first, last) that end in the same column."""
        if self.is_aligned:
            return [(first, last)]
        cuts = [at for at in range(first + 1, last) if self.stops[at] != self.stops[at - 1]]
        return list(pairwise([first, *cuts, last]))

    def move(self, counts: Sequence[int]) -> None:
        """Add so many columns to the end of each row; below 0: take them off."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.stops = [stop + count for stop, count in zip(self.stops, counts, strict=True)]


class Pass:
    """One forward pass: how many tokens per row, where they stand, and what they read in place."""

    def __init__(self, columns: Columns, tokens: int, parts: Sequence[Part], ours: bool) -> None:
        self.tokens = tokens
        self.parts = parts
        self.is_cascade = ours and (has_slow_exp() or (bool(parts) and tokens <= CASCADE_TOKENS))
        self.masks: list[mx.array] = []
        self.fetched: dict[int, Pair] = {}  # by leaf the keys and values that its layer returned
        self.unattended: set[int] = set()  # ids of keys that were handed out and not attended yet
        rows, positions, width = len(columns.lengths), columns.positions, columns.width
        first = columns.end - width
        # The same for all layers: how many rows, their columns in front of the pass, and which of them end alike.
        self.rows, self.first, self.end, self.runs = rows, first, columns.end, columns.alike(0, rows)
        # Tokens in front of the pass: an int for one row, an int32 array (R,) for several.
        self.before: Any = positions[0] if rows == 1 else mx.array(positions, dtype=mx.int32)
        starts = [stop - length - first for stop, length in zip(columns.stops, columns.lengths, strict=True)]
        # Which columns are not in front of a row, bool (R, 1, 1, C), those of the pass included; None: all.
        self.padding = mx.arange(width + tokens) >= mx.array(starts)[:, None, None, None] if any(starts) else None
        #: The column of a row's first token in this pass, int32 (R, 1, 1, 1), counted from `first`; None: all alike.
        self.at = (
            None if columns.is_aligned else mx.array([stop - first for stop in columns.stops])[:, None, None, None]
        )
        if self.is_cascade:
            self.seen = self.mask(width)
            self.readers = Readers(rows, [its for its, spans in parts for _ in range(spans.pieces)])

    def mask(self, offset: int, window: int | None = None) -> mx.array | None:
        """Which columns each token sees, bool (T, C) or (R, 1, T, C); None: all.

        The pass is behind `offset` columns, of rows that are aligned; it sees the last `window` of them.
        """
        if self.at is None:
            if self.tokens == 1 and window is None:
                return self.padding
            return _under(create_causal_mask(self.tokens, offset, window), self.padding)
        columns, own = mx.arange(offset + self.tokens), self.at + mx.arange(self.tokens)[:, None]
        seen = columns <= own if window is None else (columns <= own) & (columns > own - window)
        return _under(seen, self.padding)


class TailLayer(_BaseCache):  # type: ignore[misc]
    """One layer of tails: keys and values (row capacity, H, capacity, D), made when written; `leaf`: of the layout."""

    def __init__(self, columns: Columns, leaf: int, keys: Any = None, values: Any = None) -> None:
        self.columns, self.leaf = columns, leaf
        self.keys, self.values = keys, values

    # What a model calls

    @property
    def offset(self) -> Any:
        """Tokens in front of the pass, and with those of the pass once they are written: an int, or int32 (R,)."""
        current = self.columns.current
        if current is None:
            return self.columns.positions[0]
        return current.before + current.tokens if self.leaf in current.fetched else current.before

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """What each of the N tokens of a row sees of what `update_and_fetch` returns, in the form of mlx-lm."""
        current = self._running
        if current.parts and window_size is not None:
            raise PassError("the model asks for a mask with a window; segments have none.")
        width, positions = self.columns.width, self.columns.positions
        is_plain = current.padding is None and current.at is None and not return_array
        if N > 1 and is_plain and (window_size is None or max(positions) + N <= window_size):
            return "causal"
        if window_size is not None and N == 1 and width < window_size:
            window_size = None
        # In a pass of one row, its segments are in front of its tail.
        mask = current.mask(positions[0] if len(positions) == 1 else width, window_size)
        if mask is not None:
            current.masks.append(mask)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Write keys and values of the pass, (R, H, T, D), and return what its tokens read; in a cascade the tails."""
        current, columns = self._running, self.columns
        stop = current.end + keys.shape[2]
        self.keys = _with_room(self.keys, keys, columns, stop)
        self.values = _with_room(self.values, values, columns, stop)
        for low, high in current.runs:
            at = slice(columns.stops[low], columns.stops[low] + keys.shape[2])
            self.keys[low:high, :, at] = keys[low:high]
            self.values[low:high, :, at] = values[low:high]
        rows, first = current.rows, current.first
        found = self.keys[:rows, :, first:stop], self.values[:rows, :, first:stop]
        if current.is_cascade:
            current.unattended.add(id(found[0]))
            handed_out.by_keys[id(found[0])] = self.attend
        elif current.parts:
            both = zip(*self._segments(current), found, strict=True)
            found = tuple(mx.concatenate(list(arrays), axis=2) for arrays in both)  # type: ignore[assignment]
        current.fetched[self.leaf] = found
        return found

    def keys_and_values(self) -> Pair:
        """What was fetched last, for layers that read what another layer wrote."""
        return self._running.fetched[self.leaf]

    def attend(
        self, queries: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of queries to segments and tails. PassError: values or mask are the model's own."""
        current = self._running
        keys, own = current.fetched[self.leaf]
        if values is not own or not (mask is None or isinstance(mask, str) or any(mask is m for m in current.masks)):
            raise PassError("the attention uses values or a mask of its own.")
        current.unattended.discard(id(keys))
        readers, segments = current.readers, self._segments(current)
        return cascade(queries, keys, own, readers, segments, scale=scale, mask=current.seen, sinks=sinks)

    @property
    def state(self) -> tuple[mx.array, ...]:
        return () if self.keys is None else (self.keys, self.values)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.state)

    def empty(self) -> bool:
        return self.keys is None

    # What a batch calls

    def copied_columns(self, row: int, start: int, stop: int) -> Pair:
        """Copies of columns [start, stop) of a row, counted from its first."""
        first = self.columns.stops[row] - self.columns.lengths[row]
        its = slice(row, row + 1)
        return tuple(owned_span(array[its], first + start, first + stop) for array in self.state)  # type: ignore[return-value]

    def columns_of(self, row: int, start: int, stop: int) -> Pair:
        """Views of columns [start, stop) of a row, counted from its first."""
        first = self.columns.stops[row] - self.columns.lengths[row]
        at = slice(first + start, first + stop)
        return tuple(array[row : row + 1, :, at, :] for array in self.state)  # type: ignore[return-value]

    def take_row(self, at: int, source: TailLayer, source_at: int) -> None:
        """Copy a row of another layer to the last columns of a row here that is a hole, or new.

        All other columns become 0: a NaN of an earlier row would pass through a weight of 0.
        """
        width = source.columns.lengths[source_at]
        there, here = source.columns.stops[source_at], self.columns.end
        for buffer in self.state:
            buffer[at : at + 1] = 0
        for buffer, array in zip(self.state, source.state if width else (), strict=False):
            buffer[at : at + 1, :, here - width : here] = array[source_at : source_at + 1, :, there - width : there]

    def _segments(self, current: Pass) -> list[Pair]:
        snapshots = [spans.leaves[self.leaf] for _, spans in current.parts]
        return [arrays for snapshot in snapshots if snapshot is not None for arrays in snapshot.readable]

    @property
    def _running(self) -> Pass:
        current = self.columns.current
        if current is None:
            raise ValueError("no forward pass is running; use Group.prefill_many() or step().")
        return current


def _under(mask: mx.array, padding: mx.array | None) -> mx.array:
    return mask if padding is None else mask & padding


def filled(columns: Columns, leaf: int, pieces: Sequence[Pair]) -> TailLayer:
    """A layer of one row with these keys and values side by side."""
    starts = accumulate((keys.shape[2] for keys, _ in pieces), initial=columns.end - columns.lengths[0])
    return _laid_out(columns, leaf, [(0, at, pair) for at, pair in zip(starts, pieces, strict=False)])


def joined(columns: Columns, leaf: int, runs: Sequence[tuple[TailLayer, int, int]]) -> TailLayer:
    """A layer of the rows [first, last) of each of these layers."""
    blocks, row = [], 0
    for layer, first, last in runs:
        for low, high in layer.columns.alike(first, last):
            width, stop = max(layer.columns.lengths[low:high]), layer.columns.stops[low]
            if not layer.empty():
                keys, values = (array[low:high, :, stop - width : stop] for array in layer.state)
                blocks.append((row, columns.end - width, (keys, values)))
            row += high - low
    return _laid_out(columns, leaf, blocks)


def _laid_out(columns: Columns, leaf: int, blocks: Sequence[tuple[int, int, Pair]]) -> TailLayer:
    """A layer with keys and values from a row and a column on, for each block."""
    buffers = []
    for like in blocks[0][2] if blocks else ():
        shape = columns.row_capacity, like.shape[1], max(columns.capacity, columns.end + 1), like.shape[3]
        buffers.append(mx.zeros(shape, like.dtype))
    for row, column, pair in blocks:
        for buffer, array in zip(buffers, pair, strict=True):
            buffer[row : row + array.shape[0], :, column : column + array.shape[2]] = array
    return TailLayer(columns, leaf, *buffers)


def _with_room(buffer: mx.array | None, new: mx.array, columns: Columns, stop: int) -> mx.array:
    """A buffer with room up to `stop` and one more column: MLX would alias what fills a buffer."""
    if buffer is not None and stop < buffer.shape[2]:
        return buffer
    held = 0 if buffer is None else columns.end
    shape = (columns.row_capacity, new.shape[1], max(columns.capacity, stop + 1) - held, new.shape[3])
    more = mx.zeros(shape, new.dtype)
    return more if buffer is None else mx.concatenate([buffer[..., :held, :], more], axis=2)
