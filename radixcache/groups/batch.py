"""Batches: rows that go through forward passes together, with their caches and tails.

Tails: keys and values of the tokens that rows do not read in place.

    row 0   in place: 2,000 tokens    . . x x x x     columns: the row's own tokens, right-aligned, so that the next
    row 1   in place: 2,000 tokens    . . . x x x     token of every row goes into the same column
    row 2   in place: nothing         x x x x x x
    -                                 . . . . . .     room for a row that may join later

A pass evaluates the same number of tokens of each row. New columns count only when the pass ends, so a pass that raises
changes nothing. In a check of drafted tokens, each row has its own number of tokens, padded at the end, and keeps the
accepted ones. Rows then end in different columns, and later passes write there, until `Batch.gather` aligns the rows:

    row 0   x x x x a b .             columns: row 0 has kept two of three tokens, row 1 one of one. The next pass
    row 1   . . x x c . .             overwrites what follows a row's last token

A pass of up to CASCADE_TOKENS tokens reads segments in place. A longer pass has one row: for each layer, it copies keys
and values of segments and tail into one array, because MLX's own attention is then faster despite the copy. Where MLX's
exponential is slow, cascade attention is always faster.

Batch: caches of rows that go through forward passes together, or of one row by itself.

A batch of one row has mlx-lm's own windows and recurrent states, and tails with one row. A batch of several rows has
mlx-lm's batched windows, and recurrent states and tails with a row for each.

`take_in` adds a row to a batch that has room; of the tails, it copies only this row's. Otherwise `gather` makes a new
batch and copies all tails and states. State that rows read in place is never copied.

A check is a pass over the next token of each row and drafted tokens after it. `keep` then removes the rejected tokens:

    tails       rejected columns no longer count, and the next pass overwrites them; nothing is copied
    windows     a check writes new arrays, which still have the tokens it pushes out; rejected tokens roll to the front
    recurrent   the state mixes all tokens of the check. A row with a rejected token returns to the state before the
                check, in all layers, and evaluates its kept tokens again in its next pass
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, KVCache, RotatingKVCache, _BaseCache, dynamic_roll

from radixcache.adapters.contract import Spans
from radixcache.adapters.point import untouched
from radixcache.adapters.registry import adapter_for, leaves, with_leaves
from radixcache.adapters.span import SpanSnapshot, own_span, owned
from radixcache.errors import UnsupportedCacheError
from radixcache.groups.attention import Pair, Readers, cascade, handed_out, has_slow_exp

#: Tails grow by this many columns.
GROWTH_COLUMNS = 64
#: Passes of more tokens copy their segments.
CASCADE_TOKENS = 256

#: A segment for all layers: the rows that read it (None: all), and the state.
Part = tuple[tuple[int, ...] | None, Spans]


class PassError(RuntimeError):
    """A model uses keys and values in a way that segments do not support."""


class Columns:
    """Where each row's tokens are: in columns of the tails, or in segments."""

    def __init__(self, lengths: Sequence[int], in_place: Sequence[int], capacity: int = 0, spare_rows: int = 0) -> None:
        self.lengths = list(lengths)  # columns of each row
        self.in_place = list(in_place)  # tokens of each row that are in segments
        self.stops = [max(self.lengths)] * len(self.lengths)  # the column after the last token of each row
        self.capacity = capacity  # how many columns a buffer gets when it is made or grows
        self.row_capacity = len(self.lengths) + spare_rows  # rows of a buffer; the first ones are in use
        self.current: Pass | None = None  # the forward pass that is running

    @property
    def positions(self) -> list[int]:
        return [length + in_place for length, in_place in zip(self.lengths, self.in_place, strict=True)]

    @property
    def end(self) -> int:
        """How many columns are in use: up to the last token of any row."""
        return max(self.stops)

    @property
    def is_aligned(self) -> bool:
        """Whether all rows end in the same column."""
        return min(self.stops) == max(self.stops)

    @property
    def width(self) -> int:
        """How many columns there are from the first token of any row to `end`."""
        return self.end - min(stop - length for stop, length in zip(self.stops, self.lengths, strict=True))

    @contextmanager
    def running(self, tokens: int, parts: Sequence[Part], ours: bool) -> Iterator[None]:
        """Run a forward pass of `tokens` tokens per row in the block. They count if the block raises nothing."""
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
        """Split the rows [first, last) into runs [low, high) of neighbours that end in the same column."""
        if self.is_aligned:
            return [(first, last)]
        cuts = [at for at in range(first + 1, last) if self.stops[at] != self.stops[at - 1]]
        return list(pairwise([first, *cuts, last]))

    def move(self, counts: Sequence[int]) -> None:
        """Add this many columns to the end of each row; a negative count removes columns."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.stops = [stop + count for stop, count in zip(self.stops, counts, strict=True)]


class Pass:
    """One forward pass: how many tokens per row, their columns, and what they read in place."""

    def __init__(self, columns: Columns, tokens: int, parts: Sequence[Part], ours: bool) -> None:
        self.tokens = tokens
        self.parts = parts
        self.is_cascade = ours and (has_slow_exp() or (bool(parts) and tokens <= CASCADE_TOKENS))
        self.masks: list[mx.array] = []
        self.fetched: dict[int, Pair] = {}  # for each leaf, the keys and values that it returned
        self.unattended: set[int] = set()  # ids of returned keys that no attention has read yet
        rows, positions, width = len(columns.lengths), columns.positions, columns.width
        first = columns.end - width
        # Equal in all layers: how many rows, the columns before the pass, and runs of rows that end alike.
        self.rows, self.first, self.end, self.runs = rows, first, columns.end, columns.alike(0, rows)
        # Tokens before the pass: an int for one row, an int32 array (R,) for several.
        self.before: Any = positions[0] if rows == 1 else mx.array(positions, dtype=mx.int32)
        starts = [stop - length - first for stop, length in zip(columns.stops, columns.lengths, strict=True)]
        # Which columns are not left padding, bool (R, 1, 1, C), with columns of the pass; None: all.
        self.padding = mx.arange(width + tokens) >= mx.array(starts)[:, None, None, None] if any(starts) else None
        #: The column of a row's first token in this pass, int32 (R, 1, 1, 1), counted from `first`; None: aligned.
        self.at = (
            None if columns.is_aligned else mx.array([stop - first for stop in columns.stops])[:, None, None, None]
        )
        if self.is_cascade:
            self.seen = self.mask(width)
            self.readers = Readers(rows, [its for its, spans in parts for _ in range(spans.pieces)])

    def mask(self, offset: int, window: int | None = None) -> mx.array | None:
        """Which columns each token sees, bool (T, C) or (R, 1, T, C); None: all.

        `offset`: how many columns are before the pass. A token sees itself and earlier columns, at most `window`.
        """
        if self.at is None:
            if self.tokens == 1 and window is None:
                return self.padding
            return _under(create_causal_mask(self.tokens, offset, window), self.padding)
        columns, own = mx.arange(offset + self.tokens), self.at + mx.arange(self.tokens)[:, None]
        seen = columns <= own if window is None else (columns <= own) & (columns > own - window)
        return _under(seen, self.padding)


class TailLayer(_BaseCache):  # type: ignore[misc]
    """One layer of tails: keys and values (row capacity, H, capacity, D), None until written. `leaf`: its index."""

    def __init__(self, columns: Columns, leaf: int, keys: Any = None, values: Any = None) -> None:
        self.columns, self.leaf = columns, leaf
        self.keys, self.values = keys, values

    # What a model calls

    @property
    def offset(self) -> Any:
        """Tokens before the pass; once the pass has written its tokens, these count too. An int, or int32 (R,)."""
        current = self.columns.current
        if current is None:
            return self.columns.positions[0]
        return current.before + current.tokens if self.leaf in current.fetched else current.before

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Which keys of `update_and_fetch` each of the N tokens of a row sees: a mask in mlx-lm's form."""
        current = self._running
        if current.parts and window_size is not None:
            raise PassError("the model asks for a mask with a window; segments have none.")
        width, positions = self.columns.width, self.columns.positions
        is_plain = current.padding is None and current.at is None and not return_array
        if N > 1 and is_plain and (window_size is None or max(positions) + N <= window_size):
            return "causal"
        if window_size is not None and N == 1 and width < window_size:
            window_size = None
        # In a pass of one row, the keys of segments come before the keys of the tail.
        mask = current.mask(positions[0] if len(positions) == 1 else width, window_size)
        if mask is not None:
            current.masks.append(mask)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Write keys and values (R, H, T, D). Returns those that the tokens read; in cascade attention, the tails."""
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
        """What `update_and_fetch` returned last, for layers that read keys and values of another layer."""
        return self._running.fetched[self.leaf]

    def attend(
        self, queries: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of queries to segments and tails. PassError: values or mask do not come from this layer."""
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

    def copy_columns(self, row: int, start: int, stop: int) -> Pair:
        """Copies of columns [start, stop) of a row, counted from its first."""
        first = self.columns.stops[row] - self.columns.lengths[row]
        its = slice(row, row + 1)
        return tuple(own_span(array[its], first + start, first + stop) for array in self.state)  # type: ignore[return-value]

    def columns_of(self, row: int, start: int, stop: int) -> Pair:
        """Views of columns [start, stop) of a row, counted from its first."""
        first = self.columns.stops[row] - self.columns.lengths[row]
        at = slice(first + start, first + stop)
        return tuple(array[row : row + 1, :, at, :] for array in self.state)  # type: ignore[return-value]

    def take_row(self, at: int, source: TailLayer, source_at: int) -> None:
        """Copy a row of another layer to the last columns of row `at` of this layer, which is a hole or new.

        All other columns become 0: a NaN of an earlier row would survive an attention weight of 0.
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


def filled_tail(columns: Columns, leaf: int, pieces: Sequence[Pair]) -> TailLayer:
    """A layer of one row with these keys and values side by side."""
    starts = accumulate((keys.shape[2] for keys, _ in pieces), initial=columns.end - columns.lengths[0])
    return _laid_out(columns, leaf, [(0, at, pair) for at, pair in zip(starts, pieces, strict=False)])


def join_tails(columns: Columns, leaf: int, runs: Sequence[tuple[TailLayer, int, int]]) -> TailLayer:
    """One layer with the rows [first, last) of each of these layers."""
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
    """A layer with the keys and values of each block, from the block's row and column on."""
    buffers = []
    for like in blocks[0][2] if blocks else ():
        shape = columns.row_capacity, like.shape[1], max(columns.capacity, columns.end + 1), like.shape[3]
        buffers.append(mx.zeros(shape, like.dtype))
    for row, column, pair in blocks:
        for buffer, array in zip(buffers, pair, strict=True):
            buffer[row : row + array.shape[0], :, column : column + array.shape[2]] = array
    return TailLayer(columns, leaf, *buffers)


def _with_room(buffer: mx.array | None, new: mx.array, columns: Columns, stop: int) -> mx.array:
    """A buffer with room up to `stop` and one more column: MLX may alias an array that fills a whole buffer."""
    if buffer is not None and stop < buffer.shape[2]:
        return buffer
    held = 0 if buffer is None else columns.end
    shape = (columns.row_capacity, new.shape[1], max(columns.capacity, stop + 1) - held, new.shape[3])
    more = mx.zeros(shape, new.dtype)
    return more if buffer is None else mx.concatenate([buffer[..., :held, :], more], axis=2)


class LostStateError(RuntimeError):
    """A forward pass raised after it had overwritten state that cannot be restored."""


#: A batch and the number of one of its rows.
Place = tuple["Batch", int]
#: Runs a copy, and may run it again when its allocation fails.
Copying = Callable[[Callable[[], Any]], Any]
#: What undoes a forward pass: lengths and stops of the columns, and a function for each leaf.
Held = tuple[list[int], list[int], list[Callable[[], bool]]]


class Batch:
    """Caches of one row or several, in the order and nesting that the model wants."""

    def __init__(self, columns: Columns, caches: Sequence[Any], rows: Sequence[Any]) -> None:
        self.columns, self.caches = columns, list(caches)
        self.rows = list(rows)  # None is a hole: the place of a row that has left
        self._idle_tokens = 0

    @classmethod
    def of_one(cls, caches: Sequence[Any], row: Any, in_place: int = 0) -> Batch:
        """A batch of one row with `in_place` tokens in segments. UnsupportedCacheError: a layer cannot be in it."""
        columns = Columns([0], [in_place])
        made = [_own(leaf, columns, index) for index, leaf in enumerate(leaves(caches))]
        return cls(columns, _with_leaves(caches, made), [row])

    @classmethod
    def gather(cls, places: Sequence[Place], spare: int = 0, spare_rows: int = 0) -> Batch:
        """Make an evaluated batch of these rows, in this order. Empties batches that have no other rows.

        The tails get `spare` more columns, at least one, and `spare_rows` more rows.
        """
        lengths = [batch.columns.lengths[at] for batch, at in places]
        in_place = [batch.columns.in_place[at] for batch, at in places]
        columns = Columns(lengths, in_place, max(lengths) + max(spare, 1), spare_rows)
        rows = [batch.rows[at] for batch, at in places]
        sources = list({id(batch): batch for batch, _ in places}.values())
        emptied = [each for each in sources if all(row is None or row in rows for row in each.rows)]
        runs = _runs(places)
        made = []
        for index, column in enumerate(zip(*(batch.leaves for batch in sources), strict=True)):
            of_batch = dict(zip(map(id, sources), column, strict=True))
            leaf = _join_leaves([(of_batch[id(batch)], first, last) for batch, first, last in runs], columns, index)
            mx.eval(_arrays_of(leaf))
            made.append(leaf)
            for batch in emptied:
                _empty(of_batch[id(batch)])
        return cls(columns, _with_leaves(sources[0].caches, made), rows)

    def take_over(self) -> None:
        """Make this the batch of its rows, which leave holes in their former batches."""
        for at, row in enumerate(self.rows):
            row.batch.rows[row.at] = None
            row.batch, row.at = self, at

    def take_in(self, rows: Sequence[Any]) -> bool:
        """Add rows, evaluated, in holes or after the last row. False: there is no room, and nothing changed."""
        columns = self.columns
        holes = [at for at, row in enumerate(self.rows) if row is None]
        free = [*holes, *range(len(self.rows), columns.row_capacity)][: len(rows)]
        if len(free) < len(rows) or max(row.batch.columns.lengths[row.at] for row in rows) > columns.end:
            return False
        coming = {at: (row.batch, row.at) for at, row in zip(free, rows, strict=True)}
        runs = _runs([coming.get(at, (self, at)) for at in range(max(len(self.rows), free[-1] + 1))])
        leaves_of = {id(batch): batch.leaves for batch, _, _ in runs}
        made, end = [], columns.end
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, TailLayer):
                for at, (batch, its) in coming.items():
                    leaf.take_row(at, leaves_of[id(batch)][index], its)
            else:
                leaf = _join_leaves([(leaves_of[id(batch)][index], *its) for batch, *its in runs], columns, index)
            mx.eval(_arrays_of(leaf))
            made.append(leaf)
        self.caches = _with_leaves(self.caches, made)
        for at, row in zip(free, rows, strict=True):
            batch, its = row.batch, row.at
            own = slice(at, at + 1)
            columns.lengths[own], columns.in_place[own] = [batch.columns.lengths[its]], [batch.columns.in_place[its]]
            columns.stops[own] = [end]
            batch.rows[its], self.rows[own] = None, [row]
            row.batch, row.at = self, at
        self._idle_tokens = 0
        return True

    def goes_on(self, tokens: int) -> bool:
        """Whether to evaluate the next `tokens` tokens in this batch, and not in a new one.

        A new batch is better in two cases. Holes, or steps of unaligned rows, have cost as much as a step since the
        last row joined. Or tails would grow although many columns are unused.
        """
        columns = self.columns
        self._idle_tokens += self.rows.count(None) * tokens + (tokens == 1 and not columns.is_aligned)
        is_full = columns.end + tokens >= columns.capacity and columns.end - max(columns.lengths) >= GROWTH_COLUMNS
        return self._idle_tokens <= len(self.rows) and not is_full

    @property
    def open_rows(self) -> list[Any]:
        return [row for row in self.rows if row is not None]

    @property
    def leaves(self) -> list[Any]:
        return leaves(self.caches)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for leaf in self.leaves for array in _arrays_of(leaf)]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of a row's recurrent state, which may grow with the first tokens of a text."""
        states = [leaf for leaf in self.leaves if isinstance(leaf, ArraysCache)]
        return [array.shape[1:] for leaf in states for array in _arrays_of(leaf)]

    def forward(
        self,
        model: Any,
        ids: mx.array,
        parts: Sequence[Part] = (),
        *,
        ours: bool = False,
        is_prompt: bool = False,
        counts: Sequence[int] | None = None,
    ) -> mx.array:
        """Run the model on ids (R, T); logits (R, T, V), not evaluated. If the model raises, the pass is undone.

        Rows read `parts` in place. `ours` allows cascade attention, which `parts` need. `is_prompt` copies wrapped
        windows, so that the pass can always be undone. With `counts` this is a check: after its count of tokens a row
        has padding, and the caller must call `keep`. LostStateError: the pass could not be undone.
        """
        held = self.hold(ids.shape[1], is_prompt=is_prompt)
        for leaf in self.leaves if ids.shape[1] > 1 else ():
            if isinstance(leaf, BatchRotatingKVCache):
                leaf._temporal_order()  # its mask for several tokens is right only for this order
        padded = [*counts] if counts is not None and len(set(counts)) > 1 else []
        recurrent = [leaf for leaf in self.leaves if padded and isinstance(leaf, ArraysCache)]
        try:
            for leaf in recurrent:
                leaf.lengths = mx.array(padded)  # not shared: layers change it in place
            with self.columns.running(ids.shape[1], parts, ours):
                logits: mx.array = model(ids, cache=self.caches)
        except BaseException as error:
            self.undo(held, error)
            raise
        for leaf in recurrent:
            leaf.lengths = None
        return logits

    def keep(self, held: Held, given: Sequence[int], counts: Sequence[int]) -> list[bool]:
        """Keep the first `counts` of the `given` tokens of each row after a check. `held`: what undoes the check.

        Returns for which rows the check was undone: recurrent state cannot forget rejected tokens.
        """
        tokens = self.columns.lengths[0] - held[0][0]
        blind = [isinstance(leaf, ArraysCache) and not leaf.empty() for leaf in self.leaves]
        is_back = [any(blind) and count < its for count, its in zip(counts, given, strict=True)]
        if all(back or row is None for back, row in zip(is_back, self.rows, strict=True)):
            is_undone = self._roll_back(held)
            assert is_undone, given  # a pass of several tokens writes new arrays
            return is_back
        kept = [0 if back else count for back, count in zip(is_back, counts, strict=True)]
        self.columns.move([count - tokens for count in kept])
        for leaf, is_blind, undo in zip(self.leaves, blind, held[2], strict=True):
            if is_blind and any(is_back):
                checked = leaf.cache
                undo()
                leaf.cache = [_mix(is_back, *slots) for slots in zip(leaf.cache, checked, strict=True)]
            elif not isinstance(leaf, ArraysCache | TailLayer):
                if any(is_back):
                    _put_back_one(leaf, undo)
                _roll(leaf, [tokens - count for count in kept])
        return is_back

    def hold(self, tokens: int, *, is_prompt: bool = False) -> Held:
        columns = self.columns
        return columns.lengths, columns.stops, [_held(leaf, tokens, is_prompt) for leaf in self.leaves]

    def undo(self, held: Held, error: BaseException) -> None:
        """Undo a forward pass after an error of this pass or of a later one.

        If it cannot be undone, the rows are marked as lost, and LostStateError is raised. An error that is no
        Exception, such as KeyboardInterrupt, is not replaced.
        """
        if not self._roll_back(held):
            lost = f"the model raised after it had overwritten wrapped windows: {error!r}"
            for row in self.open_rows:
                row.lost = lost
            if isinstance(error, Exception):
                raise LostStateError(lost) from error

    def _roll_back(self, held: Held) -> bool:
        self.columns.lengths, self.columns.stops, undo = held
        undone = [each() for each in undo]
        return all(undone)

    @contextmanager
    def scratch(self, first: int) -> Iterator[Batch]:
        """A batch of the caches from `first` on, for any number of passes. The block leaves them as they were."""
        columns = self.columns
        ahead, lengths, stops = Batch(columns, self.caches[first:], self.rows), columns.lengths, columns.stops
        with untouched([leaf for leaf in ahead.leaves if not isinstance(leaf, TailLayer)]):
            try:
                yield ahead
            finally:
                columns.lengths, columns.stops = lengths, stops

    def with_tails(self, columns: Columns, pieces: Callable[[int], Sequence[Pair]]) -> Batch:
        """This batch of one row with new tails: the `pieces` of each leaf, joined and evaluated."""
        made = []
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, TailLayer):
                leaf = filled_tail(columns, index, pieces(index))
                mx.eval(leaf.state)
            made.append(leaf)
        return Batch(columns, _with_leaves(self.caches, made), self.rows)

    def own_points(self) -> None:
        """Replace arrays of layers without tails that may be views or have spare room by evaluated copies."""
        for leaf in self.leaves:
            if isinstance(leaf, BatchRotatingKVCache):
                more = leaf._idx - leaf.max_size  # columns that a pass of several tokens has added
                if more > 0:
                    leaf.keys, leaf.values = (owned(array[..., more:, :]) for array in (leaf.keys, leaf.values))
                    leaf.left_padding, leaf._idx = leaf.left_padding - more, leaf.max_size
                    mx.eval(_arrays_of(leaf))
            elif not isinstance(leaf, TailLayer):
                mx.eval(adapter_for(leaf).own(leaf))
                adapter_for(leaf).reserve(leaf, 0)

    def specimen(self, caches: Sequence[Any]) -> list[Any]:
        """Give fresh mlx-lm caches one token of one row in each layer in use: for shapes only."""
        for cache, leaf in zip(leaves(caches), self.leaves, strict=True):
            if isinstance(leaf, ArraysCache):
                cache.cache = [None if array is None else array[:1] for array in leaf.cache]
            elif leaf.keys is not None and leaf.values is not None:
                cache.keys, cache.values, cache.offset = leaf.keys[:1, :, :1, :], leaf.values[:1, :, :1, :], 1
                if isinstance(cache, RotatingKVCache):
                    cache._idx = 1
        return list(caches)

    def points(self, at: int, caches: Sequence[Any]) -> list[Any]:
        """Fresh mlx-lm caches with one row's state in all layers without tails."""
        own = self.leaves if len(self.rows) == 1 else [_alone(leaf, at) for leaf in self.leaves]
        pairs = zip(leaves(caches), own, strict=True)
        return _with_leaves(caches, [cache if isinstance(leaf, TailLayer) else leaf for cache, leaf in pairs])

    def copy_tails(
        self,
        at: int,
        bounds: Sequence[tuple[int, int]],
        copying: Copying,
        stored: Callable[[SpanSnapshot], SpanSnapshot],
        *,
        emptying: bool,
    ) -> list[Any]:
        """Copy a row's tokens out of the tails: for each leaf an evaluated SpanSnapshot, or None.

        `bounds`: consecutive ranges of tokens. `stored` converts a copy to the form in the tree. `emptying` releases
        each layer after its copy, so that at most one layer is held twice.
        """
        away = self.columns.in_place[at]

        def copy_of(leaf: TailLayer) -> SpanSnapshot | None:
            if not bounds or leaf.empty():
                return None
            pieces = [leaf.copy_columns(at, low - away, high - away) for low, high in bounds]
            found = stored(SpanSnapshot(bounds[0][0], bounds[-1][1], [*pieces]))
            mx.eval(found.arrays())
            return found

        return self._copies(copy_of, copying, of_tails=True, emptying=emptying)

    def copy_points(self, at: int, offset: int, copying: Copying, *, emptying: bool) -> list[Any]:
        """As `copy_tails`, for the state of recurrent layers at `offset`. Windows are released, but not copied."""

        def copy_of(leaf: Any) -> Any:
            if not isinstance(leaf, ArraysCache):
                return None
            snapshot = adapter_for(leaf).snapshot(_alone(leaf, at), 0, offset)
            mx.eval([] if snapshot is None else snapshot.arrays())
            return snapshot

        return self._copies(copy_of, copying, of_tails=False, emptying=emptying)

    def _copies(self, copy_of: Callable[[Any], Any], copying: Copying, *, of_tails: bool, emptying: bool) -> list[Any]:
        found: list[Any] = []
        for leaf in self.leaves:
            is_copied = isinstance(leaf, TailLayer) is of_tails
            found.append(copying(partial(copy_of, leaf)) if is_copied else None)
            if is_copied and emptying:
                _empty(leaf)
        return found


def _with_leaves(caches: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """The same nesting of caches with these leaves."""
    waiting = iter(made)
    return with_leaves(caches, lambda _: next(waiting))


def _arrays_of(leaf: Any) -> list[mx.array]:
    if isinstance(leaf, ArraysCache):
        return [array for array in leaf.cache if array is not None]
    if leaf.keys is None:
        return []
    more = [leaf.offset, leaf.left_padding] if isinstance(leaf, BatchRotatingKVCache) else []
    return [leaf.keys, leaf.values, *more]


def _own(leaf: Any, columns: Columns, index: int) -> Any:
    kind = type(leaf)
    if kind is KVCache:
        return TailLayer(columns, index)
    if kind is ArraysCache or (kind is RotatingKVCache and not leaf.keep):
        return leaf
    detail = f" that keeps its first {leaf.keep} tokens" if kind is RotatingKVCache else ""
    raise UnsupportedCacheError(f"a layer's {kind.__name__}{detail} cannot be decoded in a batch.")


def _runs(places: Sequence[Place]) -> list[tuple[Batch, int, int]]:
    """Runs [first, last) of neighbours in one batch."""
    runs: list[tuple[Batch, int, int]] = []
    for batch, at in places:
        if runs and runs[-1][0] is batch and runs[-1][2] == at:
            runs[-1] = batch, runs[-1][1], at + 1
        else:
            runs.append((batch, at, at + 1))
    return runs


def _join_leaves(runs: Sequence[tuple[Any, int, int]], columns: Columns, index: int) -> Any:
    """One leaf with the rows [first, last) of each of these leaves, which are of one kind."""
    if isinstance(runs[0][0], TailLayer):
        return join_tails(columns, index, runs)
    if isinstance(runs[0][0], ArraysCache):
        return _rows_of([each.cache for each, _, _ in runs], [slice(first, last) for _, first, last in runs])
    alone = [_alone(each, at) for each, first, last in runs for at in range(first, last)]
    if len(alone) > 1:
        return RotatingKVCache.merge(alone)
    return copy.copy(alone[0]) if alone[0] is runs[0][0] else alone[0]  # a copy: the row's batch may be emptied


def _alone(leaf: Any, at: int) -> Any:
    """One row's state in a cache for one row; a tail as it is."""
    if isinstance(leaf, ArraysCache):
        return _rows_of([leaf.cache], [slice(at, at + 1)])
    if isinstance(leaf, RotatingKVCache | TailLayer):
        return leaf
    return RotatingKVCache(leaf.max_size) if leaf.keys is None else leaf.extract(at)


def _rows_of(caches: Sequence[list[Any]], rows: Sequence[slice]) -> ArraysCache:
    """Rows of several lists of arrays as one cache; a slot is empty in all of them or in none."""
    found = ArraysCache(len(caches[0]))
    for index, slot in enumerate(zip(*caches, strict=True)):
        filled_slots = [array for array in slot if array is not None]
        assert len(filled_slots) in (0, len(slot)), (index, len(filled_slots), len(slot))
        if filled_slots:
            parts = [array[its] for array, its in zip(filled_slots, rows, strict=True)]
            found.cache[index] = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return found


def _empty(leaf: Any) -> None:
    if isinstance(leaf, ArraysCache):
        leaf.cache = [None] * len(leaf.cache)
    else:
        leaf.keys = leaf.values = None


def _mix(is_back: Sequence[bool], before: mx.array | None, after: mx.array | None) -> mx.array | None:
    """Recurrent state of each row: from before a check where `is_back`, else from after it."""
    if before is None or after is None:
        return None
    which = mx.array([*is_back]).reshape(-1, *[1] * (after.ndim - 1))
    return mx.where(which, before, after)


def _put_back_one(leaf: Any, undo: Callable[[], bool]) -> None:
    """Put the last token that a check pushed out back into a window: before the check, it was the oldest token."""
    checked = dict(vars(leaf))
    undo()
    leaf._temporal_order()
    lost, before = leaf._idx - leaf.max_size, (leaf.keys, leaf.values)
    vars(leaf).update(checked)
    if lost >= 0:
        pairs = zip(before, (leaf.keys, leaf.values), strict=True)
        leaf.keys, leaf.values = (mx.concatenate([old[..., lost : lost + 1, :], new], axis=2) for old, new in pairs)
        leaf.left_padding, leaf._idx = leaf.left_padding + 1, leaf._idx + 1


def _roll(leaf: Any, surplus: Sequence[int]) -> None:
    """Remove each row's last `surplus` tokens from a window, which still has all tokens that the check pushed out."""
    if not any(surplus):
        return
    if isinstance(leaf, RotatingKVCache):
        leaf.keys, leaf.values = leaf.keys[..., : -surplus[0], :], leaf.values[..., : -surplus[0], :]
        leaf.offset, leaf._idx = leaf.offset - surplus[0], leaf._idx - surplus[0]
        return
    by = mx.array([*surplus])
    leaf.keys, leaf.values = (dynamic_roll(array, by[:, None], axis=2) for array in (leaf.keys, leaf.values))
    # A negative padding counts tokens that are gone. Rolled tokens are in the first columns: padding hides them.
    leaf.left_padding, leaf.offset = mx.maximum(leaf.left_padding, 0) + by, leaf.offset - by


def _held(leaf: Any, tokens: int, is_prompt: bool) -> Callable[[], bool]:
    """Make a function that undoes the next pass, of `tokens` tokens, and returns whether it could."""
    if isinstance(leaf, TailLayer):
        return lambda: True
    if isinstance(leaf, BatchRotatingKVCache):
        before = dict(vars(leaf), offset=leaf.offset + 0, left_padding=leaf.left_padding + 0)  # both change in place
        if tokens == 1 and leaf.keys is not None:  # one token is written in place, several into new arrays
            if is_prompt:
                before.update(keys=mx.array(leaf.keys), values=mx.array(leaf.values))
            elif leaf.rotated or leaf._offset >= leaf.max_size:  # it overwrites a token of the window
                return lambda: False

        def put_back() -> bool:
            vars(leaf).update(before)
            return True

        return put_back
    adapter = adapter_for(leaf)
    return partial(adapter.roll_back, leaf, adapter.hold(leaf, tokens))
