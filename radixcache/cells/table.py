"""Cell table: which token of which sequences each cell of a shared buffer holds. NumPy only, never MLX.

A cell holds the key and value of one token in every layer. The table knows its position and its sequences, and no data:
where data has to move or keys to be rotated, it makes a plan (see plans.py), and changes when the plan is applied.

    append([(1, 4)])            1 1 1 1 . . . .      sequence 1 at positions 0 to 3
    copy_prefix(1, 2, 3)        * * * 1 . . . .      * belongs to both; nothing was copied
    append([(1, 1), (2, 1)])    * * * 1 1 2 . .      one step of decoding, for both at once
    free(1)                     2 2 2 . . 2 . .      what was its own is free
    defragment(room=4)          2 2 2 2 . . . .      one cell moved

A sequence set is a row of 64-bit words, a bit per sequence, as wide as there are sequences. Beside it each sequence has
the list of its cells in order of position: masks and ranges cost what the sequence is long, not what the table is.

Invariants, asserted by `CellTable.check`:

  CT1  A cell is free if and only if its position is -1, and if and only if its sequence set is empty.
  CT2  A cell's set has the bit of a sequence if and only if the cell is in that sequence's list, once.
  CT3  Positions rise strictly along a sequence's list and lie in [0, end of the sequence). They have gaps only where
      they were removed with `shift=False`.
  CT4  Every sequence has a bit of its own, and no other bits are set.
  CT5  Positions are int32 and sets uint64, one row per cell.

A method that raises leaves the table as it was. Finding room and removal are O(capacity) in NumPy, defragmentation is
O(capacity + cells of all sequences), the others are O(cells of the sequences named). Not thread-safe.

Plans: what has to happen to the data in the cells before the cell table may say that it has happened.

`CellTable` makes a plan, the layer above carries it out on the buffers and hands it to `CellTable.apply`. Until then
the table is as it was; a plan made before the table's last change is refused.

    copies, moves    cells [source, source + length)  ->  [target, target + length)
    shifts           keys in cells [start, start + length), rotated by `delta` positions

Invariants, for every plan:

  CP1  All targets are cells that are free in the table the plan was made from.
  CP2  So no cell is both source and target, nor target twice: source and target of a run never overlap, runs may be
      carried out in any order, and one that fails has overwritten nothing that the table still names.
  CP3  Shifts come after copies. Each cell they name belongs to the shifted sequence alone once the plan is applied.

This file never imports MLX.

Batch: the tokens of one forward pass over shared cells, and which cells each of them sees. Never imports MLX.

rows        (1: positions 4, 5)  (2: position 3)          a row per sequence, its tokens in order
cells       [10, 11]             [12]                     in a row, in the order of the rows
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import CacheFullError

Cells = NDArray[np.int32]


class CellRun(NamedTuple):
    """Consecutive cells [start, start + length) that hold consecutive positions, the first of which is `position`."""

    start: int
    length: int
    position: int


class Move(NamedTuple):
    """Cells [source, source + length) whose keys and values go to [target, target + length)."""

    source: int
    target: int
    length: int


class Shift(NamedTuple):
    """Cells [start, start + length) whose keys are rotated by `delta` positions; negative: towards the beginning."""

    start: int
    length: int
    delta: int


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """Positions [begin, end) of a sequence go, and what follows moves down into the gap.

    Attributes:
        copies: carried out first; cells that other sequences hold too, copied so that they can be shifted.
        shifts: carried out next, on keys only; values do not depend on the position.
    """

    sequence: int
    begin: int
    end: int
    copies: tuple[Move, ...]
    shifts: tuple[Shift, ...]
    stamp: object = field(repr=False, compare=False)
    shift: bool = True


@dataclass(frozen=True, slots=True)
class DefragPlan:
    """Moves, of as few cells as can be, after which the free cells asked for stand in a row; empty when they do."""

    moves: tuple[Move, ...]
    stamp: object = field(repr=False, compare=False)


def cut(cells: Cells) -> tuple[Cells, Cells]:
    """Cut cells, in the order given, where the next one is not the one after: starts and lengths of the runs."""
    edges = np.flatnonzero(np.diff(cells, prepend=-2, append=-2) != 1).astype(np.int32)
    return cells[edges[:-1]], np.diff(edges)


def pack(sources: Cells, holes: Cells) -> tuple[Move, ...]:
    """Move cells, in this order, into free ones, rising, run by run; there are enough of them, and none is in both.

    The longest run goes first, to the smallest hole that takes it whole, of equal ones the first. Where none does,
    it fills the largest hole and its rest waits its turn. So each move uses up a run or a hole. Not always the fewest
    possible; in order of source.
    """
    waiting, room = _by_length(sources), _by_length(holes)
    moves = []
    while waiting:
        length, source = waiting.pop()
        assert room, (length, source)
        space, target = room.pop(min(bisect_left(room, (length, -1)), len(room) - 1))
        taken = min(length, space)
        moves.append(Move(source, target, taken))
        if taken < length:
            insort(waiting, (length - taken, source + taken))
        if taken < space:
            insort(room, (space - taken, target + taken))
    return tuple(sorted(moves))


def clear_window(used: NDArray[np.bool_], room: int | None) -> tuple[int, int]:
    """Which cells [start, stop) to clear for room in a row: with the fewest `used` ones among them, of these the last.

    `used` is bool, shape (capacity,); room is at most as many as are free, None for all of them, at the end.
    """
    if room is None:
        return int(np.count_nonzero(used)), len(used)
    before = np.concatenate([[0], np.cumsum(used)])
    used_inside = before[room:] - before[:-room]
    start = len(used_inside) - 1 - int(np.argmin(used_inside[::-1]))
    return start, start + room


def destinations(capacity: int, moves: tuple[Move, ...]) -> Cells:
    """Where the token of each of `capacity` cells is after some moves, int32, shape (capacity,)."""
    to = np.arange(capacity, dtype=np.int32)
    for source, target, length in moves:
        to[source : source + length] += target - source
    return to


def _by_length(cells: Cells) -> list[tuple[int, int]]:
    starts, lengths = cut(cells)
    return sorted(zip(lengths.tolist(), starts.tolist(), strict=True))


#: The position of a cell that a row's sequence does not hold: later than any token.
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Tokens of one sequence in a batch: positions [begin, begin + length)."""

    sequence: int
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class CellBatch:
    """Tokens of one forward pass, row after row in cells [start, start + length)."""

    start: int
    rows: tuple[BatchRow, ...]

    @property
    def length(self) -> int:
        """Tokens in all rows."""
        return sum(row.length for row in self.rows)

    @property
    def positions(self) -> Cells:
        """Position of each token, int32, shape (length,): what RoPE wants."""
        return np.concatenate([np.arange(row.begin, row.begin + row.length, dtype=np.int32) for row in self.rows])


def bounds(visible: list[Cells]) -> tuple[int, int]:
    """The first of all these cells, and the one after the last."""
    return min(int(cells.min()) for cells in visible), max(int(cells.max()) for cells in visible) + 1


def seen(batch: CellBatch, visible: list[Cells], positions: list[Cells], window: int | None) -> NDArray[np.bool_]:
    """Which cells each token sees: those at its own position or before, and less than `window` (>= 1, or None) before.

    `visible` are for each row the cells that any of its tokens sees, in order of position, `positions` theirs. Shape
    (batch.length, stop - start), with (start, stop) the bounds of `visible`.
    """
    start, stop = bounds(visible)
    mask = np.zeros((batch.length, stop - start), dtype=np.bool_)
    at = 0
    for row, cells, held in zip(batch.rows, visible, positions, strict=True):
        if row.length == 1:  # it sees them all
            mask[at, cells - start] = True
        else:
            keys = np.full(stop - start, _NEVER, dtype=np.int32)
            keys[cells - start] = held
            queries = np.arange(row.begin, row.begin + row.length, dtype=np.int32)[:, None]
            part = mask[at : at + row.length]
            np.less_equal(keys, queries, out=part)
            if window is not None:
                part &= keys > queries - np.int32(min(window, _NEVER))
        at += row.length
    return mask


_FREE = -1
_MAX = np.iinfo(np.int32).max


@dataclass(slots=True)
class _Sequence:
    """Cells in order of position; `end` is the position of the token that comes next."""

    bit: int
    cells: Cells
    end: int

    @property
    def word(self) -> int:
        return self.bit // 64

    @property
    def flag(self) -> np.uint64:
        return np.uint64(1 << self.bit % 64)


class CellTable:
    """Positions and sequence sets of `capacity` cells."""

    def __init__(self, capacity: int) -> None:
        if not 0 < capacity < _MAX:
            raise ValueError(f"capacity is {capacity} cells; wanted 1 to {_MAX - 1}.")
        self.capacity = capacity
        self._positions: Cells = np.full(capacity, _FREE, dtype=np.int32)
        self._sets: NDArray[np.uint64] = np.zeros((capacity, 1), dtype=np.uint64)
        self._sequences: dict[int, _Sequence] = {}
        self._stamp = object()

    # What there is

    @property
    def used(self) -> int:
        """Cells that hold a token; one that several sequences share counts once."""
        return int(np.count_nonzero(self._positions != _FREE))

    @property
    def largest_free_run(self) -> int:
        """The most tokens that `append` takes without defragmentation."""
        return int(cut(self._free_cells())[1].max(initial=0))

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the sequences, in the order they were added."""
        return tuple(self._sequences)

    def end(self, sequence: int) -> int:
        """Position of the token that comes next. ValueError: no such sequence."""
        return self._known(sequence).end

    def cells(self, sequence: int) -> Cells:
        """The sequence's cells in order of position, int32, a copy. ValueError: no such sequence."""
        return self._known(sequence).cells.copy()

    def ranges(self, sequence: int, begin: int = 0, end: int | None = None) -> tuple[CellRun, ...]:
        """Runs of cells that hold positions [begin, end) (None: all) of a sequence, in order of position.

        ValueError: no such sequence, or it does not hold every position of the range.
        """
        each = self._known(sequence)
        first, last = self._slice(sequence, begin, each.end if end is None else end)
        return self._runs(each.cells[first:last])

    # Sequences come, share, grow and go

    def add(self, sequence: int) -> None:
        """Make a sequence, without tokens. ValueError: there is one of that id."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is there already, with {self._sequences[sequence].end} tokens.")
        taken = {each.bit for each in self._sequences.values()}
        bit = next(number for number in count() if number not in taken)
        if bit // 64 == self._sets.shape[1]:
            self._sets = np.pad(self._sets, ((0, 0), (0, 1)))
        self._sequences[sequence] = _Sequence(bit, np.empty(0, dtype=np.int32), 0)
        self._changed()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the cells that hold positions [0, length) of `source`. No data moves, no cell is taken.

        ValueError: one of them does not exist, `target` has tokens, or `source` ends before `length`.
        """
        upper, lower = self._known(source), self._known(target)
        if lower.end:
            raise ValueError(f"sequence {target} has {lower.end} tokens; a prefix is given to one that has none.")
        if not 0 <= length <= upper.end:
            raise ValueError(f"sequence {source} has {upper.end} tokens; no prefix of {length} can be shared.")
        cells = upper.cells[: self._index(upper, length)].copy()
        self._sets[cells, lower.word] |= lower.flag
        lower.cells, lower.end = cells, int(length)
        self._changed()

    def append(self, rows: Iterable[tuple[int, int]]) -> CellBatch:
        """Take cells in a row for the next tokens of some sequences, before the forward pass that fills them.

        A forward pass that fails is undone by `remove(row.sequence, row.begin, row.begin + row.length)` for each row.

        Args:
            rows: (sequence, tokens >= 1) for each row of the batch, a sequence at most once.

        Returns:
            Where they go: the first run of free cells that takes all of them.

        Raises:
            ValueError: no rows, a row without tokens, a sequence twice or unknown, or more tokens than capacity.
            CacheFullError: no run of free cells is that long.
        """
        wanted = [(sequence, int(tokens)) for sequence, tokens in rows]
        rows_of = Counter(sequence for sequence, _ in wanted)
        total = sum(tokens for _, tokens in wanted)
        if not wanted:
            raise ValueError("a batch has at least one row.")
        for sequence, tokens in wanted:
            end = self._known(sequence).end
            if rows_of[sequence] > 1:
                raise ValueError(f"sequence {sequence} is in {rows_of[sequence]} rows of one batch; wanted one.")
            if tokens < 1:
                raise ValueError(f"sequence {sequence}: a row of {tokens} tokens; wanted at least 1.")
            if end + tokens >= _MAX:
                raise ValueError(f"sequence {sequence}: position {end + tokens} is past {_MAX - 1}.")
        if total > self.capacity:
            raise ValueError(f"a batch of {total} tokens in {len(wanted)} rows never fits {self.capacity} cells.")
        start = self.find(total)
        batch = CellBatch(start, tuple(BatchRow(name, self._sequences[name].end, tokens) for name, tokens in wanted))
        self._positions[start : start + total] = batch.positions
        for row in batch.rows:
            each = self._sequences[row.sequence]
            cells = np.arange(start, start + row.length, dtype=np.int32)
            self._sets[cells, each.word] = each.flag
            each.cells = np.concatenate([each.cells, cells])
            each.end += row.length
            start += row.length
        self._changed()
        return batch

    def find(self, wanted: int) -> int:
        """The first cell of the first run of `wanted` >= 1 free cells. CacheFullError: there is none."""
        starts, lengths = cut(self._free_cells())
        fits = np.flatnonzero(lengths >= wanted)
        if len(fits) == 0:
            raise self._full(wanted)
        return int(starts[fits[0]])

    def has_run(self, wanted: int, stop: int) -> bool:
        """Whether `find(wanted)` would give cells that all lie in front of `stop`."""
        lengths = cut(np.flatnonzero(self._positions[:stop] == _FREE).astype(np.int32))[1]
        return bool((lengths >= wanted).any())

    def free(self, sequence: int) -> int:
        """Take a sequence out; cells that no other one shares are free. Their count. ValueError: no such sequence."""
        each = self._known(sequence)
        before = self.used
        self._leave(each, each.cells)
        del self._sequences[sequence]
        self._changed()
        return before - self.used

    # Plans

    def plan_remove(self, sequence: int, begin: int, end: int, *, shift: bool = True) -> RemovalPlan:
        """Plan to take positions [begin, end) out of a sequence and to close the gap.

            positions   0 1 2 3 4 5 6    remove [2, 4),   0 1 2 3 4    E, F copied to x, y;
            cells       a b c d E F g    E, F shared      a b x y g    x, y, g shifted by -2

        Shared cells are copied first, as the others still need them where they are. At the end of a sequence nothing
        follows, and this is a rewind. Without `shift` what follows keeps its positions and its cells, for tokens that a
        sliding window has left.

        Raises:
            ValueError: no such sequence, or it does not hold every position of the range.
            CacheFullError: fewer cells are free than have to be copied. Cells that this very removal would free do
                not count, so that a plan that fails half way has overwritten nothing.
        """
        each = self._known(sequence)
        _, last = self._slice(sequence, begin, end)
        rest = each.cells[last:] if shift and begin < end else each.cells[:0]
        shared = rest[self._shared(rest, each)]
        free = self._free_cells()
        if len(shared) > len(free):
            raise self._full(len(shared))
        copies = pack(shared, free)
        starts, lengths = cut(destinations(self.capacity, copies)[rest])
        shifts = tuple(Shift(*run, begin - end) for run in zip(starts.tolist(), lengths.tolist(), strict=True))
        return RemovalPlan(sequence, begin, end, copies, shifts, self._stamp, shift)

    def plan_defragment(self, room: int | None = None) -> DefragPlan:
        """Plan to bring free cells together, moving as few used ones as possible.

        Args:
            room: free cells wanted in a row, anywhere; of equally cheap places the last is taken. None: all used cells
                go to the front, which also shortens what masks and fetches span.

        Raises:
            ValueError: room is not in 1 to capacity.
            CacheFullError: fewer cells than `room` are free.
        """
        if room is not None and not 0 < room <= self.capacity:
            raise ValueError(f"room for {room} tokens; wanted 1 to {self.capacity}, the capacity.")
        if room is not None and room > self.capacity - self.used:
            raise self._full(room)
        used = self._positions != _FREE
        start, stop = clear_window(used, room)
        inside = np.zeros_like(used)
        inside[start:stop] = True
        sources, holes = np.flatnonzero(used & inside), np.flatnonzero(~used & ~inside)
        return DefragPlan(pack(sources.astype(np.int32), holes.astype(np.int32)), self._stamp)

    def apply(self, plan: RemovalPlan | DefragPlan) -> None:
        """Note that a plan has been carried out on the data. ValueError: another table's, or a stale one."""
        if plan.stamp is not self._stamp:
            raise ValueError("the table has changed since this plan was made; plan again.")
        if isinstance(plan, DefragPlan):
            self._apply_defrag(plan)
        else:
            self._apply_removal(plan)
        self._changed()

    def remove(self, sequence: int, begin: int, end: int, *, shift: bool = True) -> RemovalPlan:
        """`plan_remove` and `apply` in one, for removals without copies or shifts."""
        plan = self.plan_remove(sequence, begin, end, shift=shift)
        self.apply(plan)
        return plan

    # What a batch sees

    def span(self, batch: CellBatch, *, window: int | None = None) -> tuple[int, int]:
        """The cells [start, stop) from the first to the last that any token of a batch sees; otherwise as `mask`."""
        return bounds(self._visible(batch, window))

    def mask(self, batch: CellBatch, *, window: int | None = None) -> NDArray[np.bool_]:
        """Which cells each token of a batch sees: those of its own sequence at its own position or before.

        Shape (batch.length, stop - start) with (start, stop) = `span(batch, window=window)`; True: seen.

        Args:
            batch: of `append`; its cells are still where they were. Others may have come and gone.
            window: tokens that a token sees at most, itself included, as in mlx-lm's `create_causal_mask`; None: all.

        Raises:
            ValueError: window below 1; a sequence of the batch is gone, or its cells have been removed or moved.
        """
        visible = self._visible(batch, window)
        return seen(batch, visible, [self._positions[cells] for cells in visible], window)

    def check(self) -> None:
        """Assert CT1 to CT5."""
        assert self._positions.dtype == np.int32 and self._positions.shape == (self.capacity,), self._positions.shape
        assert self._sets.dtype == np.uint64 and self._sets.shape[0] == self.capacity, self._sets.shape
        assert self._positions.min() >= _FREE, self._positions.min()
        is_free = self._positions == _FREE
        assert np.array_equal(is_free, ~self._sets.any(axis=1)), np.flatnonzero(is_free == self._sets.any(axis=1))
        bits = [each.bit for each in self._sequences.values()]
        assert len(set(bits)) == len(bits), bits
        expected = np.zeros_like(self._sets)
        for name, each in self._sequences.items():
            assert len(np.unique(each.cells)) == len(each.cells), (name, each.cells)
            positions = self._positions[each.cells]
            assert bool((np.diff(positions) > 0).all()), (name, positions)
            assert len(positions) == 0 or 0 <= positions[0] <= positions[-1] < each.end, (name, positions, each.end)
            expected[each.cells, each.word] |= each.flag
        assert np.array_equal(expected, self._sets), np.flatnonzero((expected != self._sets).any(axis=1))

    def dump(self) -> str:
        """The table as text: a line of totals, then one per sequence with its runs of cells."""
        free = self.capacity - self.used
        lines = [f"{self.used} of {self.capacity} cells used, {free} free, {self.largest_free_run} of them in a row"]
        for name, each in self._sequences.items():
            own = len(each.cells) - int(np.count_nonzero(self._shared(each.cells, each)))
            runs = (f"{run.position} in [{run.start}, {run.start + run.length})" for run in self._runs(each.cells))
            where = ", ".join(runs) or "no cells"
            lines.append(f"  sequence {name}: {each.end} tokens, {own} cells of its own; {where}")
        return "\n".join(lines)

    def _known(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise ValueError(f"no sequence {sequence}; there are {len(self._sequences)}. Make it with add().")
        return self._sequences[sequence]

    def _full(self, wanted: int) -> CacheFullError:
        return CacheFullError(self.capacity, self.used, self.largest_free_run, wanted)

    def _changed(self) -> None:
        self._stamp = object()  # every plan so far is a stale one

    def _free_cells(self) -> Cells:
        return np.flatnonzero(self._positions == _FREE).astype(np.int32)

    def _runs(self, cells: Cells) -> tuple[CellRun, ...]:
        """Cut cells where the next cell or the next position is not the one after."""
        if len(cells) == 0:
            return ()
        positions = self._positions[cells]
        cuts = np.flatnonzero((np.diff(cells) != 1) | (np.diff(positions) != 1)) + 1
        edges = pairwise([0, *cuts.tolist(), len(cells)])
        return tuple(CellRun(int(cells[first]), last - first, int(positions[first])) for first, last in edges)

    def _index(self, each: _Sequence, position: int) -> int:
        """How many of the sequence's cells hold positions below `position`."""
        if len(each.cells) == each.end:  # no gaps
            return position
        return int(np.searchsorted(self._positions[each.cells], position))

    def _slice(self, sequence: int, begin: int, end: int) -> tuple[int, int]:
        """Where in its list a sequence holds positions [begin, end). ValueError: not all of them are there."""
        each = self._sequences[sequence]
        if not 0 <= begin <= end <= each.end:
            raise ValueError(f"sequence {sequence} has positions [0, {each.end}); [{begin}, {end}) is not in there.")
        first, last = self._index(each, begin), self._index(each, end)
        if last - first != end - begin:
            raise ValueError(f"sequence {sequence} holds {last - first} positions of [{begin}, {end}); wanted all.")
        return first, last

    def _shared(self, cells: Cells, each: _Sequence) -> NDArray[np.bool_]:
        """Which of these cells of a sequence other sequences hold too."""
        others = self._sets[cells]
        others[:, each.word] &= ~each.flag
        shared: NDArray[np.bool_] = np.any(others, axis=1)
        return shared

    def _leave(self, each: _Sequence, cells: Cells) -> None:
        """Take a sequence out of the sets of these cells, and free those it had alone."""
        self._sets[cells, each.word] &= ~each.flag
        self._positions[cells[~self._sets[cells].any(axis=1)]] = _FREE

    def _apply_defrag(self, plan: DefragPlan) -> None:
        to = destinations(self.capacity, plan.moves)
        sources = np.flatnonzero(to != np.arange(self.capacity))
        self._positions[to[sources]] = self._positions[sources]
        self._sets[to[sources]] = self._sets[sources]
        self._positions[sources] = _FREE
        self._sets[sources] = 0
        for each in self._sequences.values():
            each.cells = to[each.cells]

    def _apply_removal(self, plan: RemovalPlan) -> None:
        each = self._sequences[plan.sequence]
        first, last = self._slice(plan.sequence, plan.begin, plan.end)
        length = plan.end - plan.begin
        before, gone, after = each.cells[:first], each.cells[first:last], each.cells[last:]
        self._leave(each, gone)
        if plan.shift:
            moved = destinations(self.capacity, plan.copies)[after]
            positions = self._positions[after] - np.int32(length)
            self._leave(each, after[moved != after])
            self._positions[moved] = positions
            self._sets[moved, each.word] |= each.flag
            after = moved
        each.cells = np.concatenate([before, after])
        if plan.shift or plan.end == each.end:
            each.end -= length

    def _visible(self, batch: CellBatch, window: int | None) -> list[Cells]:
        """For each row the cells that any of its tokens sees, in order of position."""
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} tokens; wanted at least 1, the token itself.")
        visible, cell = [], batch.start
        for row in batch.rows:
            each = self._known(row.sequence)
            first, last = self._slice(row.sequence, row.begin, row.begin + row.length)
            if not np.array_equal(each.cells[first:last], np.arange(cell, cell + row.length)):
                raise ValueError(f"the cells of sequence {row.sequence} in this batch have been moved.")
            seen = 0 if window is None else self._index(each, max(row.begin - window + 1, 0))
            visible.append(each.cells[seen:last])
            cell += row.length
        return visible
