"""CellTable, case by case: the picture in its file, shared shifts, what it refuses, and defragmentation."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest

from radixcache import CacheFullError
from radixcache.cells.table import CellTable
from tests import inside


def table_with(capacity: int, *tokens: int) -> CellTable:
    """Sequences 1, 2, ... of so many tokens, one after the other."""
    table = CellTable(capacity)
    for name, length in enumerate(tokens, 1):
        table.add(name)
        if length:
            table.append([(name, length)])
    return table


def picture(table: CellTable) -> str:
    """A character per cell: its sequence, * for several, . for none."""
    members = [inside.members(table, cell) for cell in range(table.capacity)]
    return "".join("." if not each else "*" if len(each) > 1 else str(each[0]) for each in members)


def test_the_picture_at_the_top_of_the_file_is_what_happens() -> None:
    table = table_with(8, 4, 0)
    assert picture(table) == "1111...."
    table.copy_prefix(1, 2, 3)
    assert picture(table) == "***1...."
    batch = table.append([(1, 1), (2, 1)])
    assert (picture(table), batch.start, [row.begin for row in batch.rows]) == ("***112..", 4, [4, 3])
    assert table.free(1) == 2
    assert picture(table) == "222..2.."
    plan = table.plan_defragment(4)
    table.apply(plan)
    assert plan.moves == ((5, 3, 1),)
    assert picture(table) == "2222...."
    assert table.cells(2).tolist() == [0, 1, 2, 3]
    table.check()


def test_a_shared_tail_is_copied_before_it_is_shifted_and_stays_with_the_others() -> None:
    table = table_with(10, 6, 0)
    table.copy_prefix(1, 2, 6)
    table.append([(2, 1)])
    plan = table.remove(2, 2, 4)
    assert plan.moves == ((4, 7, 2),)
    assert plan.shifts == ((7, 2, -2), (6, 1, -2))
    assert table.cells(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert table.cells(2).tolist() == [0, 1, 7, 8, 6]
    assert [inside.position(table, cell) for cell in table.cells(2)] == [0, 1, 2, 3, 4]
    assert picture(table) == "**1111222."
    table.check()


def test_a_batch_outlives_a_row_that_came_or_went_beside_it_but_not_its_own_cells() -> None:
    table = table_with(12, 2, 3)
    batch = table.append([(1, 2)])
    mask, span = table.mask(batch), table.span(batch)
    table.free(2)
    table.add(7)
    assert np.array_equal(table.mask(batch), mask)
    assert table.span(batch) == span
    table.apply(table.plan_defragment())
    with pytest.raises(ValueError, match="the cells of sequence 1 in this batch have been moved"):
        table.mask(batch)
    batch = table.append([(1, 1)])
    table.free(1)
    with pytest.raises(ValueError, match="no sequence 1"):
        table.span(batch)


def test_a_plan_is_refused_once_the_table_has_changed_or_when_it_is_of_another() -> None:
    table, other = table_with(8, 3, 2), table_with(8, 3, 2)
    defrag, removal = table.plan_defragment(), table.plan_remove(1, 0, 1)
    for stranger in (other.plan_defragment(), other.plan_remove(1, 0, 1)):
        unchanged_by(table, lambda stranger=stranger: table.apply(stranger), "plan again")
    table.apply(removal)
    for stale in (defrag, removal):
        unchanged_by(table, lambda stale=stale: table.apply(stale), "plan again")


def unchanged_by(table: CellTable, call: Callable[[], object], why: str, error: type[Exception] = ValueError) -> None:
    before = inside.table_fields(table)
    with pytest.raises(error, match=why):
        call()
    assert inside.table_fields(table) == before
    table.check()


def test_a_full_table_says_so_with_the_numbers_and_changes_nothing() -> None:
    table = table_with(10, 3, 3, 3)
    table.free(2)
    with pytest.raises(CacheFullError) as raised:
        table.append([(1, 2), (3, 2)])
    error = raised.value
    numbers = (error.capacity, error.used, error.free, error.largest_free_run, error.wanted)
    assert numbers == (10, 6, 4, 3, 4)
    assert str(error) == "no room for 4 tokens: 6 of 10 cells used, 4 free, 3 of them in a row. Defragment."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    unchanged_by(table, lambda: table.append([(1, 5)]), "Free a sequence or remove a range", CacheFullError)


@pytest.mark.parametrize("capacity", [0, -1, 1 << 31])
def test_a_table_has_at_least_one_cell_and_its_positions_fit_32_bits(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity is {capacity} cells"):
        CellTable(capacity)


def test_dump_says_who_is_where() -> None:
    table = table_with(9, 3, 0, 0)
    table.copy_prefix(1, 2, 2)
    table.append([(1, 1), (2, 1)])
    assert table.dump().splitlines() == [
        "5 of 9 cells used, 4 free, 4 of them in a row",
        "  sequence 1: 4 tokens, 2 cells of its own; 0 in [0, 4)",
        "  sequence 2: 3 tokens, 1 cells of its own; 0 in [0, 2), 2 in [4, 5)",
        "  sequence 3: 0 tokens, 0 cells of its own; no cells",
    ]
