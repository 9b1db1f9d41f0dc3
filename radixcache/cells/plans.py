"""Plans: what has to happen to the data in the cells before the cell table may say that it has happened.

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
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.int32]


class Run(NamedTuple):
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
