"""CellPass and CellLayer by themselves: masks against positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from radixcache.cells.cell_layers import CellLayer, CellPass
from radixcache.cells.table import CellTable
from tests import inside

CELLS = 40


def in_pieces() -> CellTable:
    """Sequences 1 and 2 share positions [0, 5); then their cells take turns, with free ones between."""
    table = CellTable(CELLS)
    for sequence in (1, 2, 3):
        table.add(sequence)
    table.append([(1, 5)])
    table.copy_prefix(1, 2, 5)
    table.append([(3, 2)])
    table.append([(2, 4)])
    table.append([(1, 6)])
    table.free(3)
    table.append([(2, 3)])
    return table


def wanted(table: CellTable, current: CellPass, span: tuple[int, int], window: int | None) -> NDArray[np.bool_]:
    """Cell by cell: its sequence's own, at its own position or before, within the window."""
    mask = []
    for row in current.batch.rows:
        for position in range(row.begin, row.begin + row.length):
            first = 0 if window is None else position - window + 1
            mask.append(
                [
                    row.sequence in inside.members(table, cell)
                    and first <= (inside.position(table, cell) or 0) <= position
                    for cell in range(*span)
                ]
            )
    return np.array(mask)


def spelled_out(mask: Any, tokens: int, cells: int) -> NDArray[np.bool_]:
    """A mask as mlx-lm's models read it, shape (rows of tokens, cells)."""
    if mask is None:
        return np.ones((tokens, cells), dtype=np.bool_)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tri(tokens, cells, cells - tokens, dtype=np.bool_)
    return np.array(mask).reshape(-1, cells)


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("asked", [None, 3])
@pytest.mark.parametrize("window", [None, 4, 8])
@pytest.mark.parametrize("rows", [[(1, 1)], [(1, 7)], [(4, 1)], [(4, 9)], [(2, 1), (4, 1), (1, 1)]])
def test_a_token_sees_what_its_position_lets_it_see(
    rows: list[tuple[int, int]], window: int | None, asked: int | None, as_array: bool
) -> None:
    table = in_pieces()
    table.add(4)
    table.append([(4, 6)])  # in order, alone behind all others
    current = CellPass(table, table.append(rows))
    layer = CellLayer(CELLS, window)
    layer.enter(current)
    mask = layer.make_mask(current.tokens_per_row, return_array=as_array, window_size=asked)
    span = current.span(window)
    narrowest = min((each for each in (window, asked) if each is not None), default=None)
    found = spelled_out(mask, current.tokens_per_row, span[1] - span[0])
    np.testing.assert_array_equal(found, wanted(table, current, span, narrowest))
