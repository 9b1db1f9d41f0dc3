"""Cell table: which token of which sequences each cell of a shared buffer holds. NumPy only, never MLX.

A cell stands for the key and value of one token in every layer. If data has to move or keys have to be rotated, the
table makes a plan. The caller carries the plan out on its buffers and passes it to `apply`.

    append([(1, 4)])            1 1 1 1 . . . .      sequence 1 at positions 0 to 3
    copy_prefix(1, 2, 3)        * * * 1 . . . .      * belongs to both; nothing was copied
    append([(1, 1), (2, 1)])    * * * 1 1 2 . .      one step of decoding, for both at once
    free(1)                     2 2 2 . . 2 . .      the cells that sequence 1 had alone are free
    defragment(room=4)          2 2 2 2 . . . .      one cell moved

A sequence is the list of its cells in order of position. A cell has the number of sequences that hold it.

Invariants, asserted by `CellTable.check`:

  CT1  A cell's number is how many sequences list it. A cell is free if and only if its number is 0.
  CT2  A sequence lists a cell once.
  CT3  A cell has the same position in all its sequences: its index in their lists.

Invariants of every plan:

  CP1  All targets are free cells. So moves may run in any order, and half a plan overwrites nothing in use.
  CP2  Shifts come after moves. Each cell they name belongs to the shifted sequence alone once the plan is applied.

A method that raises leaves the table as it was. Finding room and removal are O(capacity) in NumPy, defragmentation is
O(capacity + cells of all sequences), the others are O(cells of the sequences named). Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import CacheFullError

Cells = NDArray[np.int32]
#: Later than any position.
_NEVER = np.iinfo(np.int32).max


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
class CellPlan:
    """What to do with the data: all moves, then all shifts."""

    moves: tuple[Move, ...]
    stamp: object = field(repr=False, compare=False)
    shifts: tuple[Shift, ...] = ()
    #: A sequence and its positions [begin, end) that go; None: the plan brings free cells together.
    removed: tuple[int, int, int] | None = None


class BatchRow(NamedTuple):
    """Tokens of one sequence in a batch: positions [begin, begin + length)."""

    sequence: int
    begin: int
    length: int


class CellBatch(NamedTuple):
    """Tokens of one forward pass, row after row in cells [start, start + length)."""

    start: int
    rows: tuple[BatchRow, ...]

    @property
    def length(self) -> int:
        return sum(row.length for row in self.rows)


class CellTable:
    """The sequences of `capacity` cells."""

    def __init__(self, capacity: int) -> None:
        if not 0 < capacity < _NEVER:
            raise ValueError(f"capacity is {capacity} cells; wanted 1 to {_NEVER - 1}.")
        self.capacity = capacity
        self._counts: Cells = np.zeros(capacity, dtype=np.int32)
        self._cells: dict[int, Cells] = {}
        self._stamp = object()

    @property
    def used(self) -> int:
        """Cells that hold a token; one that several sequences share counts once."""
        return int(np.count_nonzero(self._counts))

    @property
    def largest_free_run(self) -> int:
        """The most tokens that `append` takes without defragmentation."""
        return int(cut(self._free_cells())[1].max(initial=0))

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids, in the order they were added."""
        return tuple(self._cells)

    def end(self, sequence: int) -> int:
        """Position of the token that comes next. ValueError: no such sequence."""
        return len(self._known(sequence))

    def cells(self, sequence: int) -> Cells:
        """The sequence's cells in order of position, int32, a copy. ValueError: no such sequence."""
        return self._known(sequence).copy()

    def ranges(self, sequence: int, begin: int = 0) -> tuple[CellRun, ...]:
        """Runs of cells that hold the positions of a sequence from `begin` on, in order. ValueError: no such one."""
        starts, lengths = cut(self._known(sequence)[begin:])
        positions = begin + np.cumsum(lengths) - lengths
        return tuple(map(CellRun, starts.tolist(), lengths.tolist(), positions.tolist()))

    def add(self, sequence: int) -> None:
        """Make a sequence without tokens. ValueError: there is one with that id."""
        if sequence in self._cells:
            raise ValueError(f"sequence {sequence} exists already, with {self.end(sequence)} tokens.")
        self._cells[sequence] = np.empty(0, dtype=np.int32)
        self._changed()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target`, which has no tokens, the cells of positions [0, length) of `source`. Takes no cell.

        ValueError: one of them does not exist, `target` has tokens, or `source` ends before `length`.
        """
        cells, held = self._known(source), self.end(target)
        if held:
            raise ValueError(f"sequence {target} has {held} tokens; wanted one without tokens.")
        if not 0 <= length <= len(cells):
            raise ValueError(f"sequence {source} has {len(cells)} tokens; no prefix of {length} can be shared.")
        self._cells[target] = cells[:length].copy()
        self._counts[cells[:length]] += 1
        self._changed()

    def append(self, rows: Iterable[tuple[int, int]]) -> CellBatch:
        """Take the first run of free cells that fits rows (sequence, tokens >= 1); a forward pass then fills it.

        ValueError: no rows, a row without tokens, a sequence twice or unknown, or more tokens than capacity.
        CacheFullError: no run of free cells is that long.
        """
        wanted = [(sequence, int(tokens)) for sequence, tokens in rows]
        rows_of = Counter(sequence for sequence, _ in wanted)
        total = sum(tokens for _, tokens in wanted)
        if not wanted:
            raise ValueError("the batch has no rows; wanted at least one.")
        for sequence, tokens in wanted:
            self._known(sequence)
            if rows_of[sequence] > 1:
                raise ValueError(f"sequence {sequence} is in {rows_of[sequence]} rows of one batch; wanted one.")
            if tokens < 1:
                raise ValueError(f"sequence {sequence}: a row of {tokens} tokens; wanted at least 1.")
        if total > self.capacity:
            raise ValueError(f"a batch of {total} tokens in {len(wanted)} rows never fits {self.capacity} cells.")
        at = start = self.find(total)
        batch = CellBatch(start, tuple(BatchRow(sequence, self.end(sequence), tokens) for sequence, tokens in wanted))
        self._counts[start : start + total] = 1
        for row in batch.rows:
            cells = np.arange(at, at + row.length, dtype=np.int32)
            self._cells[row.sequence] = np.concatenate([self._cells[row.sequence], cells])
            at += row.length
        self._changed()
        return batch

    def find(self, wanted: int) -> int:
        """The first cell of the first run of `wanted` >= 1 free cells. CacheFullError: there is none."""
        starts, lengths = cut(self._free_cells())
        fits = np.flatnonzero(lengths >= wanted)
        if len(fits) == 0:
            raise self._full(wanted)
        return int(starts[fits[0]])

    def free(self, sequence: int) -> int:
        """Take a sequence out; returns how many cells that frees. ValueError: no such sequence."""
        cells = self._known(sequence)
        self._counts[cells] -= 1
        del self._cells[sequence]
        self._changed()
        return int(np.count_nonzero(self._counts[cells] == 0))

    def plan_remove(self, sequence: int, begin: int, end: int) -> CellPlan:
        """Plan to take positions [begin, end) out of a sequence and to close the gap.

            positions   0 1 2 3 4 5 6    remove [2, 4),   0 1 2 3 4    E, F copied to x, y;
            cells       a b c d E F g    E, F shared      a b x y g    x, y, g shifted by -2

        ValueError: no such sequence, or the range is not in it.
        CacheFullError: fewer cells are free than have to be copied, those not counted that this removal frees.
        """
        cells, free = self._known(sequence), self._free_cells()
        if not 0 <= begin <= end <= len(cells):
            raise ValueError(f"sequence {sequence} has positions [0, {len(cells)}); [{begin}, {end}) is outside.")
        rest = cells[end:] if begin < end else cells[:0]
        shared = rest[self._counts[rest] > 1]
        if len(shared) > len(free):
            raise self._full(len(shared))
        moves = pack(shared, free)
        starts, lengths = cut(_destinations(self.capacity, moves)[rest])
        shifts = tuple(Shift(*run, begin - end) for run in zip(starts.tolist(), lengths.tolist(), strict=True))
        return CellPlan(moves, self._stamp, shifts, (sequence, begin, end))

    def plan_defragment(self, room: int | None = None) -> CellPlan:
        """Plan to bring `room` free cells together, or (None) all at the end, with as few moves as possible.

        Of equally cheap places the last is taken.

        ValueError: room is not in 1 to capacity. CacheFullError: fewer cells than `room` are free.
        """
        if room is not None and not 0 < room <= self.capacity:
            raise ValueError(f"room for {room} tokens; wanted 1 to {self.capacity}, the capacity.")
        if room is not None and room > self.capacity - self.used:
            raise self._full(room)
        is_used = self._counts > 0
        start, stop = self.used, self.capacity
        if room is not None:  # the cells in a row with the fewest used ones among them, of these the last
            before = np.concatenate([[0], np.cumsum(is_used)])
            used_inside = before[room:] - before[:-room]
            start = len(used_inside) - 1 - int(np.argmin(used_inside[::-1]))
            stop = start + room
        is_inside = np.zeros_like(is_used)
        is_inside[start:stop] = True
        sources, holes = np.flatnonzero(is_used & is_inside), np.flatnonzero(~is_used & ~is_inside)
        return CellPlan(pack(sources.astype(np.int32), holes.astype(np.int32)), self._stamp)

    def apply(self, plan: CellPlan) -> None:
        """Note that a plan has been carried out on the data. ValueError: another table's plan, or a stale one."""
        if plan.stamp is not self._stamp:
            raise ValueError("the table has changed since this plan was made; plan again.")
        to = _destinations(self.capacity, plan.moves)
        if plan.removed is None:
            sources = np.flatnonzero(to != np.arange(self.capacity))
            self._counts[to[sources]] = self._counts[sources]
            self._counts[sources] = 0
            self._cells = {name: to[cells] for name, cells in self._cells.items()}
        else:  # the sequence goes on in cells `to` of its own
            sequence, begin, end = plan.removed
            before, gone, after = np.split(self._cells[sequence], [begin, end])
            moved = to[after]
            for cells, change in ((gone, -1), (after, -1), (moved, 1)):
                self._counts[cells] += change
            self._cells[sequence] = np.concatenate([before, moved])
        self._changed()

    def remove(self, sequence: int, begin: int, end: int) -> CellPlan:
        """`plan_remove` and `apply` in one, for removals without copies or shifts."""
        plan = self.plan_remove(sequence, begin, end)
        self.apply(plan)
        return plan

    def span(self, batch: CellBatch, *, window: int | None = None) -> tuple[int, int]:
        """The cells [start, stop) from the first to the last that any token of a batch sees; otherwise as `mask`."""
        return _bounds(self._visible(batch, window))

    def mask(self, batch: CellBatch, *, window: int | None = None) -> NDArray[np.bool_]:
        """Which cells of `span` each token of a batch sees, bool, shape (batch.length, stop - start).

        A token sees at most `window` tokens of its sequence, up to itself.

        ValueError: window below 1; a sequence of the batch is gone, or its cells have been removed or moved.
        """
        visible = self._visible(batch, window)
        start, stop = _bounds(visible)
        mask = np.zeros((batch.length, stop - start), dtype=np.bool_)
        at = 0
        for row, cells in zip(batch.rows, visible, strict=True):
            if row.length == 1:  # it sees them all
                mask[at, cells - start] = True
            else:
                end = row.begin + row.length
                keys = np.full(stop - start, _NEVER, dtype=np.int32)
                keys[cells - start] = np.arange(end - len(cells), end, dtype=np.int32)
                queries = np.arange(row.begin, end, dtype=np.int32)[:, None]
                part = mask[at : at + row.length]
                np.less_equal(keys, queries, out=part)
                if window is not None:
                    part &= keys > queries - np.int32(min(window, _NEVER))
            at += row.length
        return mask

    def check(self) -> None:
        """Assert CT1 to CT3."""
        counts, positions = np.zeros_like(self._counts), np.full(self.capacity, _NEVER)
        for name, cells in self._cells.items():
            assert len(np.unique(cells)) == len(cells), (name, cells)
            own, known = np.arange(len(cells)), positions[cells]
            assert np.all((known == own) | (known == _NEVER)), (name, known)
            positions[cells] = own
            counts[cells] += 1
        assert np.array_equal(counts, self._counts), np.flatnonzero(counts != self._counts)

    def dump(self) -> str:
        """The table as text: a line of totals, then one per sequence with its runs of cells."""
        free = self.capacity - self.used
        lines = [f"{self.used} of {self.capacity} cells used, {free} free, {self.largest_free_run} of them in a row"]
        for name, cells in self._cells.items():
            own = int(np.count_nonzero(self._counts[cells] == 1))
            runs = (f"{run.position} in [{run.start}, {run.start + run.length})" for run in self.ranges(name))
            where = ", ".join(runs) or "no cells"
            lines.append(f"  sequence {name}: {len(cells)} tokens, {own} cells of its own; {where}")
        return "\n".join(lines)

    def _known(self, sequence: int) -> Cells:
        if sequence not in self._cells:
            raise ValueError(f"no sequence {sequence}; there are {len(self._cells)}. Make it with add().")
        return self._cells[sequence]

    def _full(self, wanted: int) -> CacheFullError:
        return CacheFullError(self.capacity, self.used, self.largest_free_run, wanted)

    def _changed(self) -> None:
        self._stamp = object()  # earlier plans are stale

    def _free_cells(self) -> Cells:
        return np.flatnonzero(self._counts == 0).astype(np.int32)

    def _visible(self, batch: CellBatch, window: int | None) -> list[Cells]:
        """For each row the cells that any of its tokens sees, in order of position."""
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} tokens; wanted at least 1, the token itself.")
        visible, start = [], batch.start
        for row in batch.rows:
            cells = self._known(row.sequence)[: row.begin + row.length]
            if not np.array_equal(cells[row.begin :], np.arange(start, start + row.length)):
                raise ValueError(f"the cells of sequence {row.sequence} in this batch have been moved or removed.")
            visible.append(cells[0 if window is None else max(row.begin - window + 1, 0) :])
            start += row.length
        return visible


def cut(cells: Cells) -> tuple[Cells, Cells]:
    """Cut cells, in the order given, where the next one is not the one after: starts and lengths of the runs."""
    edges = np.flatnonzero(np.diff(cells, prepend=-2, append=-2) != 1).astype(np.int32)
    return cells[edges[:-1]], np.diff(edges)


def pack(sources: Cells, holes: Cells) -> tuple[Move, ...]:
    """Moves of these cells into free ones, run by run, in order of source; often the fewest possible.

    The longest run goes first, to the smallest hole that takes all of it, of equal holes the first. If there is none,
    the run fills the largest hole, and its rest waits.
    """
    waiting, room = (
        sorted(zip(lengths.tolist(), starts.tolist(), strict=True)) for starts, lengths in (cut(sources), cut(holes))
    )
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


def _destinations(capacity: int, moves: tuple[Move, ...]) -> Cells:
    """Where the token of each of `capacity` cells is after some moves, int32, shape (capacity,)."""
    to = np.arange(capacity, dtype=np.int32)
    for source, target, length in moves:
        to[source : source + length] += target - source
    return to


def _bounds(visible: list[Cells]) -> tuple[int, int]:
    return min(int(cells.min()) for cells in visible), max(int(cells.max()) for cells in visible) + 1
