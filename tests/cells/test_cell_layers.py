"""CellPass and CellLayer by themselves: masks against positions, views against what was written, marks of overflow."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from numpy.typing import NDArray

from radixcache.cells.cell_layers import CellLayer, CellPass, without_overflow
from radixcache.cells.table import CellTable
from tests import inside

CELLS = 40
HEADS, SIZE = 2, 4


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


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("before", [0, 12])
@pytest.mark.parametrize("window", [None, 8])
def test_a_sequence_in_order_gets_the_kind_of_mask_that_it_gets_from_mlx_lm(
    window: int | None, before: int, tokens: int, as_array: bool
) -> None:
    table = CellTable(CELLS)
    table.add(1)
    plain = KVCache() if window is None else RotatingKVCache(max_size=window)
    for length in filter(None, (before, tokens)):
        current = CellPass(table, table.append([(1, length)]))
        layer = CellLayer(CELLS, window)
        layer.enter(current)
        mine = layer.make_mask(length, return_array=as_array)
        theirs = plain.make_mask(length, window_size=None, return_array=as_array)
        keys = mx.zeros((1, HEADS, length, SIZE))
        cells = plain.update_and_fetch(keys, keys)[0].shape[2]
    assert type(mine) is type(theirs)
    if isinstance(mine, mx.array):
        assert mine.shape == theirs.shape == (tokens, cells)
        np.testing.assert_array_equal(np.array(mine), np.array(theirs))


@pytest.mark.parametrize(("bad", "dtype"), [(float("nan"), mx.float32), (-float("inf"), mx.float16)])
def test_a_value_that_is_not_finite_marks_its_token_and_no_other(bad: float, dtype: mx.Dtype) -> None:
    keys, values = mx.ones((1, HEADS, 3, SIZE), dtype=dtype), mx.ones((1, HEADS, 3, SIZE), dtype=dtype)
    values[0, 1, 2, 1] = bad
    marked, clean = without_overflow(keys, values)
    assert (marked.dtype, clean.dtype) == (dtype, dtype)
    assert np.isfinite(np.array(clean.astype(mx.float32))).all()
    lost = np.isnan(np.array(marked.astype(mx.float32)))
    assert lost[0, 1, 2].all()
    assert lost.sum() == SIZE


def test_latent_attention_is_marked_in_its_second_array() -> None:
    latent, rotary = mx.ones((1, 1, 3, 8)), mx.ones((1, 1, 3, 2))
    latent[0, 0, 1, 3] = float("inf")
    clean, marked = without_overflow(latent, rotary)
    assert np.isfinite(np.array(clean)).all()
    assert np.isnan(np.array(marked))[0, 0].any(axis=-1).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(1, 1, 3, 0), (1, 2, 3, 0)])
def test_keys_without_values_are_left_as_they_are(shape: tuple[int, ...]) -> None:
    keys = mx.ones((*shape[:3], 4))
    found, none = without_overflow(keys, mx.zeros(shape))
    assert np.array(found).tolist() == np.array(keys).tolist()
    assert none.shape == shape
