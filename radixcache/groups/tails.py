"""Tails: keys and values of rows that go through forward passes together, behind the segments that they read in place.

    row 0   in place: 2,000 tokens    . . x x x x     columns: tokens of a row's own, right-aligned, so that the next
    row 1   in place: 2,000 tokens    . . . x x x     token of every row goes into the same column
    row 2   in place: nothing         x x x x x x
    -                                 . . . . . .     room for a row that is still to come

`Columns` say where things are, once for all layers; a `TailLayer` has one layer's buffers, and is the cache that the
model sees. A pass that breaks off has changed nothing: columns count once it is through.

A pass evaluates as many tokens of each row. Where they have segments, few tokens attend to them in place, and many, of
a row alone, get keys and values side by side in a buffer that is gone when the layer is through: the model's own
attention on those is worth the copy. Where MLX's exponential is slow it is not, and ours the faster one throughout.

MLX's CPU backend waits while more than some ten tasks lie ahead of it, so that what Python does between two evaluations
is not done meanwhile. There a step is dispatched layer by layer, and runs while it is still being built; the passes of
prompts, in which building is next to nothing, take a fifth longer so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from radixcache.adapters.contract import Spans
from radixcache.adapters.span import owned_span
from radixcache.groups.attention import Pair, Plan, cascade, handed, has_slow_exp, is_on_cpu

#: Tails grow by so many columns, for the room that is spare is taken in every row.
GROWTH_COLUMNS = 64
#: Up to so many tokens of a pass attend to segments in place, where MLX's own attention is the faster one.
CASCADE_TOKENS = 256

#: A segment for all layers: the rows that read it (None: all), and the state.
Part = tuple[tuple[int, ...] | None, Spans]


class PassError(RuntimeError):
    """A model does with keys and values what cannot be done on segments."""


class Pass:
    """One forward pass: how many tokens per row, where they stand, and what they read in place.

    Attributes:
        before: tokens in front of each row's: an int for one row, an int32 array (R,) for several.
        padding: what of the tails is a row's own, bool (R, 1, 1, C), tokens to come included; None: all of them.
        seen: what of the tails each token sees, bool (T, C) or (R, 1, T, C); None: all of them. In a cascade alone.
        plan: who reads which segment, piece by piece. In a cascade alone.
        fetched: by leaf what its layer returned, once it is written.
    """

    def __init__(self, columns: Columns, tokens: int, parts: Sequence[Part], ours: bool) -> None:
        self.tokens = tokens
        self.parts = parts
        self.is_cascade = ours and (has_slow_exp() or (bool(parts) and tokens <= CASCADE_TOKENS))
        self.is_dispatched_early = tokens == 1 and is_on_cpu()
        self.masks: list[mx.array] = []
        self.fetched: dict[int, Pair] = {}
        self._handed: set[int] = set()
        self._attended: set[int] = set()
        rows, positions, width = len(columns.lengths), columns.positions, columns.width
        self.before: Any = positions[0] if rows == 1 else mx.array(positions, dtype=mx.int32)
        starts = [width - length for length in columns.lengths]
        is_ragged = any(starts)
        self.padding = mx.arange(width + tokens) >= mx.array(starts)[:, None, None, None] if is_ragged else None
        if self.is_cascade:
            self.seen = self.padding if tokens == 1 else _under(create_causal_mask(tokens, width), self.padding)
            self.plan = Plan(rows, [its for its, spans in parts for _ in range(spans.pieces)])

    @property
    def after(self) -> Any:
        """Tokens up to and with each row's, like `before`."""
        return self.before + self.tokens

    def hand_out(self, layer: TailLayer, keys: mx.array) -> None:
        """From now on attention to these keys is the layer's."""
        self._handed.add(id(keys))
        handed.by_keys[id(keys)] = layer.attend

    def attended(self, keys: mx.array) -> None:
        """The keys have been attended."""
        self._attended.add(id(keys))

    def end(self) -> None:
        """No keys are handed out any more."""
        for each in self._handed:
            handed.by_keys.pop(each, None)

    def require_attended(self) -> None:
        """Raise PassError where keys were fetched, and what was done with them nobody knows."""
        if self._handed != self._attended:
            raise PassError("keys were fetched and not attended by the module's scaled_dot_product_attention.")


class Columns:
    """Where the tokens of a batch of rows are.

    Attributes:
        lengths: columns of each row.
        in_place: tokens of each row that are in segments instead.
        end: columns in use; a row's are the last ones.
        capacity: columns that buffers are given when they are made, or grow.
        row_capacity: rows that they have; the first ones are in use.
    """

    def __init__(self, lengths: Sequence[int], in_place: Sequence[int], capacity: int = 0, spare_rows: int = 0) -> None:
        self.lengths = list(lengths)
        self.in_place = list(in_place)
        self.end = max(self.lengths)
        self.capacity = capacity
        self.row_capacity = len(self.lengths) + spare_rows
        self.current: Pass | None = None

    @property
    def positions(self) -> list[int]:
        """Tokens of each row."""
        return [length + in_place for length, in_place in zip(self.lengths, self.in_place, strict=True)]

    @property
    def width(self) -> int:
        """Columns up to `end` that a row has something in."""
        return max(self.lengths)

    @contextmanager
    def running(self, tokens: int, parts: Sequence[Part], ours: bool) -> Iterator[None]:
        """A forward pass of so many tokens per row; they count when the block ends without an error.

        Args:
            ours: whether the model's attention may be cascade attention.
        """
        self.current = current = Pass(self, tokens, parts, ours)
        try:
            yield
            current.require_attended()
            self.lengths = [length + tokens for length in self.lengths]
            self.end += tokens
        finally:
            current.end()
            self.current = None


class TailLayer(_BaseCache):  # type: ignore[misc]
    """One layer of tails, made when they are first written.

    Keys are (row capacity, H, capacity, D) and values (row capacity, H, capacity, Dv).

    Args:
        leaf: which of the layout's leaves it stands for.
    """

    def __init__(
        self, columns: Columns, leaf: int, keys: mx.array | None = None, values: mx.array | None = None
    ) -> None:
        self.columns = columns
        self.leaf = leaf
        self.keys = keys
        self.values = values

    # What a model asks

    @property
    def offset(self) -> Any:
        """Tokens in front of each row's, and with them once they are written: an int, or an int32 array (R,)."""
        current = self.columns.current
        if current is None:
            return self.columns.positions[0]
        return current.after if self.leaf in current.fetched else current.before

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """What each of the N tokens of a row sees of what `update_and_fetch` returns, as mlx-lm's caches say it."""
        current = self._running
        if current.parts and window_size is not None:
            raise PassError("a mask with a window of its own, over segments whose order says nothing.")
        width, padding, positions = self.columns.width, current.padding, self.columns.positions
        if N == 1 and (window_size is None or width < window_size):
            if padding is None:
                return None
            mask = padding
        elif padding is None and not return_array and (window_size is None or max(positions) + N <= window_size):
            return "causal"
        else:
            # One row's segments are in front of its tail.
            mask = create_causal_mask(N, positions[0] if len(positions) == 1 else width, window_size)
            mask = _under(mask, padding)
        current.masks.append(mask)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Write the pass's keys and values, (R, H, T, D), and return all that its tokens read, or stand-ins for it."""
        current, columns = self._running, self.columns
        end, stop = columns.end, columns.end + keys.shape[2]
        rows, first = len(columns.lengths), end - columns.width
        self.keys, self.values = (
            _with_room(self.keys, keys, columns, stop),
            _with_room(self.values, values, columns, stop),
        )
        self.keys[:rows, :, end:stop] = keys
        self.values[:rows, :, end:stop] = values
        found = self.keys[:rows, :, first:stop], self.values[:rows, :, first:stop]
        if current.is_cascade:
            current.hand_out(self, found[0])
        elif current.parts:
            both = zip(*self._segments(current), found, strict=True)
            found_keys, found_values = (mx.concatenate(list(arrays), axis=2) for arrays in both)
            found = found_keys, found_values
        elif current.is_dispatched_early:
            mx.async_eval(self.keys, self.values)
        current.fetched[self.leaf] = found
        return found

    def keys_and_values(self) -> Pair:
        """What was fetched last: for layers that read what another one wrote."""
        return self._running.fetched[self.leaf]

    def attend(self, queries: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of the pass's queries to segments and tails.

        PassError: with values or a mask that it was not given.
        """
        current = self._running
        keys, own = current.fetched[self.leaf]
        if values is not own or not (mask is None or isinstance(mask, str) or any(mask is m for m in current.masks)):
            raise PassError("attention with values or a mask of the model's own.")
        current.attended(keys)
        plan, segments = current.plan, self._segments(current)
        output = cascade(queries, keys, own, plan, segments, scale=scale, mask=current.seen, sinks=sinks)
        if current.is_dispatched_early:
            mx.async_eval(output)
        return output

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The buffers, for mx.eval."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.state)

    def empty(self) -> bool:
        """Whether there are no buffers."""
        return self.keys is None

    # What the batch asks

    def copied_columns(self, row: int, start: int, stop: int) -> Pair:
        """Copies of some of a row's columns, counted from its first."""
        assert self.keys is not None and self.values is not None
        first = self.columns.end - self.columns.lengths[row]
        its = slice(row, row + 1)
        return tuple(owned_span(array[its], first + start, first + stop) for array in self.state)  # type: ignore[return-value]

    def columns_of(self, row: int, start: int, stop: int) -> Pair:
        """Views of some of a row's columns, counted from its first."""
        assert self.keys is not None and self.values is not None
        first = self.columns.end - self.columns.lengths[row]
        at = slice(first + start, first + stop)
        return self.keys[row : row + 1, :, at, :], self.values[row : row + 1, :, at, :]

    def take_row(self, at: int, source: TailLayer, source_at: int) -> None:
        """Copy all columns of a row of another layer to the last ones of one here, of which nobody has any.

        What was left in front of them is wiped: a value that is no number would come through a weight of zero.
        """
        width = source.columns.lengths[source_at]
        there, here = source.columns.end, self.columns.end
        for buffer in self.state:
            buffer[at : at + 1, :, : here - width] = 0
        for buffer, array in zip(self.state, source.state if width else (), strict=False):
            buffer[at : at + 1, :, here - width : here] = array[source_at : source_at + 1, :, there - width : there]

    def _segments(self, current: Pass) -> list[Pair]:
        snapshots = [spans.leaves[self.leaf] for _, spans in current.parts]
        return [arrays for snapshot in snapshots if snapshot is not None for arrays in snapshot.segments]

    @property
    def _running(self) -> Pass:
        current = self.columns.current
        if current is None:
            raise ValueError("tails are read and written by Group.prefill and step; no forward pass is running.")
        return current


def _under(mask: mx.array, padding: mx.array | None) -> mx.array:
    return mask if padding is None else mask & padding


def filled(columns: Columns, leaf: int, pieces: Sequence[Pair]) -> TailLayer:
    """A layer of one row with these keys and values side by side: as many as it has columns."""
    if not pieces:
        return TailLayer(columns, leaf)
    buffers = [_zeros(pieces[0][name], columns) for name in (0, 1)]
    at = columns.end - columns.lengths[0]
    for pair in pieces:
        stop = at + pair[0].shape[2]
        for buffer, piece in zip(buffers, pair, strict=True):
            buffer[..., at:stop, :] = piece
        at = stop
    return TailLayer(columns, leaf, *buffers)


def joined(columns: Columns, leaf: int, runs: Sequence[tuple[TailLayer, int, int]]) -> TailLayer:
    """A layer of the rows [first, last) of each of these."""
    like = next((layer for layer, _, _ in runs if not layer.empty()), None)
    if like is None:
        return TailLayer(columns, leaf)
    buffers = [_zeros(array, columns) for array in like.state]
    row = 0
    for layer, first, last in runs:
        width = max(layer.columns.lengths[first:last])
        its = slice(layer.columns.end - width, layer.columns.end)
        for buffer, array in zip(buffers, layer.state, strict=False):
            buffer[row : row + last - first, :, columns.end - width : columns.end] = array[first:last, :, its]
        row += last - first
    return TailLayer(columns, leaf, *buffers)


def _zeros(like: mx.array, columns: Columns) -> mx.array:
    _, heads, _, width = like.shape
    return mx.zeros((columns.row_capacity, heads, max(columns.capacity, columns.end + 1), width), like.dtype)


def _with_room(buffer: mx.array | None, new: mx.array, columns: Columns, stop: int) -> mx.array:
    """A buffer with room up to `stop` and one more column: a full one would alias what is written to it."""
    if buffer is not None and stop < buffer.shape[2]:
        return buffer
    held = 0 if buffer is None else columns.end
    shape = (columns.row_capacity, new.shape[1], max(columns.capacity, stop + 1) - held, new.shape[3])
    more = mx.zeros(shape, new.dtype)
    return more if buffer is None else mx.concatenate([buffer[..., :held, :], more], axis=2)
