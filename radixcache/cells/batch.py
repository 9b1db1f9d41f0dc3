"""Batch: the tokens of one forward pass over shared cells, and which cells each of them sees. Never imports MLX.

rows        (1: positions 4, 5)  (2: position 3)          a row per sequence, its tokens in order
cells       [10, 11]             [12]                     in a row, in the order of the rows
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixcache.cells.plans import Cells

#: The position of a cell that a row's sequence does not hold: later than any token.
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Tokens of one sequence in a batch: positions [begin, begin + length)."""

    sequence: int
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
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


def seen(batch: Batch, visible: list[Cells], positions: list[Cells], window: int | None) -> NDArray[np.bool_]:
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
