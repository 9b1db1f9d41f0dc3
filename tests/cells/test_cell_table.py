"""CellTable, case by case: the picture in its file, shared shifts, masks, and what it refuses."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

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
    assert (picture(table), batch.start, batch.positions.tolist()) == ("***112..", 4, [4, 3])
    assert table.free(1) == 2
    assert picture(table) == "222..2.."
    assert inside.defragment(table, room=4).moves == ((5, 3, 1),)
    assert picture(table) == "2222...."
    assert table.cells(2).tolist() == [0, 1, 2, 3]
    table.check()


def test_sixteen_users_of_a_common_prefix_take_one_copy_of_it() -> None:
    table = table_with(4096, 2000)
    for name in range(2, 17):
        table.add(name)
        table.copy_prefix(1, name, 2000)
    for _ in range(100):
        table.append([(name, 1) for name in range(1, 17)])
    assert table.used == 2000 + 16 * 100
    assert {table.end(name) for name in table.sequences} == {2100}
    table.check()


def test_more_sequences_than_a_word_has_bits_and_their_bits_are_used_again() -> None:
    table = table_with(300, 2)
    for name in range(2, 201):
        table.add(name)
        table.copy_prefix(1, name, 2)
    assert inside.members(table, 1) == tuple(range(1, 201))
    for name in range(1, 200):
        table.free(name)
    assert inside.members(table, 1) == (200,)
    for name in range(201, 400):
        table.add(name)
    table.append([(name, 1) for name in (200, 399)])
    assert inside.members(table, 3) == (399,)
    table.check()


def test_a_shared_tail_is_copied_before_it_is_shifted_and_stays_with_the_others() -> None:
    table = table_with(10, 6, 0)
    table.copy_prefix(1, 2, 6)
    table.append([(2, 1)])
    plan = table.remove(2, 2, 4)
    assert plan.copies == ((4, 7, 2),)
    assert plan.shifts == ((7, 2, -2), (6, 1, -2))
    assert table.cells(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert table.cells(2).tolist() == [0, 1, 7, 8, 6]
    assert [inside.position(table, cell) for cell in table.cells(2)] == [0, 1, 2, 3, 4]
    assert picture(table) == "**1111222."
    table.check()


def test_a_tail_of_its_own_is_shifted_in_place_and_a_rewind_shifts_nothing() -> None:
    table = table_with(10, 6)
    plan = table.remove(1, 1, 3)
    assert (plan.copies, plan.shifts) == ((), ((3, 3, -2),))
    assert table.ranges(1) == ((0, 1, 0), (3, 3, 1))
    plan = table.remove(1, 3, 4)
    assert (plan.copies, plan.shifts) == ((), ())
    assert table.end(1) == 3
    assert picture(table) == "1..11....."
    table.check()


def test_a_row_of_a_failed_step_is_taken_back() -> None:
    table = table_with(10, 4, 0)
    table.copy_prefix(1, 2, 4)
    before = picture(table)
    for row in table.append([(1, 2), (2, 3)]).rows:
        plan = table.remove(row.sequence, row.begin, row.begin + row.length)
        assert not plan.copies
        assert not plan.shifts
    assert (picture(table), table.end(1), table.end(2)) == (before, 4, 4)


def test_an_empty_range_is_no_change_and_moves_nothing() -> None:
    table = table_with(10, 4, 0)
    table.copy_prefix(1, 2, 4)
    plan = table.remove(2, 2, 2)
    assert (plan.copies, plan.shifts, picture(table)) == ((), (), "****......")


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("before", "tokens"), [(0, 1), (0, 7), (5, 1), (5, 4), (9, 7)])
def test_the_mask_of_one_sequence_in_a_row_is_that_of_mlx_lm(before: int, tokens: int, window: int | None) -> None:
    table = table_with(20, before)
    batch = table.append([(1, tokens)])
    start, stop = table.span(batch, window=window)
    expected = np.array(create_causal_mask(tokens, before, window_size=window).astype(mx.int32), dtype=bool)
    assert np.array_equal(table.mask(batch, window=window), expected[:, start:stop])
    assert not expected[:, :start].any()
    assert stop == before + tokens


def test_rows_of_a_batch_do_not_see_each_other_except_what_they_share() -> None:
    table = table_with(12, 3, 2, 0)
    table.copy_prefix(1, 3, 2)
    batch = table.append([(3, 2), (1, 1)])
    assert table.span(batch) == (0, 8)
    assert table.mask(batch).astype(int).tolist() == [
        [1, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 1],
    ]


def test_a_batch_outlives_a_row_that_came_or_went_beside_it_but_not_its_own_cells() -> None:
    table = table_with(12, 2, 3)
    batch = table.append([(1, 2)])
    mask, span = table.mask(batch), table.span(batch)
    table.free(2)
    table.add(7)
    assert np.array_equal(table.mask(batch), mask)
    assert table.span(batch) == span
    inside.defragment(table)
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


def test_a_plan_alone_changes_nothing() -> None:
    table = table_with(8, 3, 2, 0)
    table.copy_prefix(1, 3, 3)
    before = inside.table_fields(table)
    assert table.plan_remove(3, 0, 1).copies
    table.plan_defragment(3)
    assert inside.table_fields(table) == before


def unchanged_by(table: CellTable, call: Callable[[], object], why: str, error: type[Exception] = ValueError) -> None:
    before = inside.table_fields(table)
    with pytest.raises(error, match=why):
        call()
    assert inside.table_fields(table) == before
    table.check()


ABUSE: dict[str, tuple[Callable[[CellTable], object], str]] = {
    "an id twice": (lambda t: t.add(1), "sequence 1 is there already, with 4 tokens"),
    "a row twice": (lambda t: t.append([(1, 1), (2, 1), (1, 1)]), "sequence 1 is in 2 rows of one batch"),
    "an unknown row": (lambda t: t.append([(1, 1), (9, 1)]), "no sequence 9; there are 3"),
    "a row of nothing": (lambda t: t.append([(2, 1), (1, 0)]), "a row of 0 tokens"),
    "a negative row": (lambda t: t.append([(2, 3), (1, -2)]), "a row of -2 tokens"),
    "no rows": (lambda t: t.append([]), "at least one row"),
    "more rows than cells": (lambda t: t.append([(1, 6), (2, 5)]), "11 tokens in 2 rows never fits 10 cells"),
    "a range past the end": (lambda t: t.remove(1, 2, 5), r"positions \[0, 4\); \[2, 5\) is not in there"),
    "a range before 0": (lambda t: t.remove(1, -1, 2), r"\[-1, 2\) is not in there"),
    "a range backwards": (lambda t: t.remove(1, 3, 2), r"\[3, 2\) is not in there"),
    "removal from an unknown": (lambda t: t.remove(9, 0, 1), "no sequence 9"),
    "ranges of an unknown": (lambda t: t.ranges(9), "no sequence 9"),
    "ranges past the end": (lambda t: t.ranges(1, 0, 5), "is not in there"),
    "freeing an unknown": (lambda t: t.free(9), "no sequence 9"),
    "a prefix from an unknown": (lambda t: t.copy_prefix(9, 2, 1), "no sequence 9"),
    "a prefix for an unknown": (lambda t: t.copy_prefix(1, 9, 1), "no sequence 9"),
    "a prefix for one with tokens": (lambda t: t.copy_prefix(1, 3, 1), "sequence 3 has 2 tokens"),
    "a prefix longer than its source": (lambda t: t.copy_prefix(1, 2, 5), "no prefix of 5 can be shared"),
    "a negative prefix": (lambda t: t.copy_prefix(1, 2, -1), "no prefix of -1 can be shared"),
    "no room wanted": (lambda t: t.plan_defragment(0), "the capacity"),
    "a window of nothing": (lambda t: t.mask(t.append([(1, 1)]), window=0), "wanted at least 1"),
}


@pytest.mark.parametrize("case", ABUSE)
def test_what_is_wrong_is_refused_by_name_and_changes_nothing(case: str) -> None:
    table = table_with(10, 4, 0, 2)
    call, why = ABUSE[case]
    if case == "a window of nothing":
        batch = table.append([(1, 1)])
        unchanged_by(table, lambda: table.mask(batch, window=0), why)
        unchanged_by(table, lambda: table.span(batch, window=-3), why)
    else:
        unchanged_by(table, lambda: call(table), why)


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


def test_a_shift_that_cannot_be_copied_is_refused_and_changes_nothing() -> None:
    table = table_with(8, 6, 0)
    table.copy_prefix(1, 2, 6)
    unchanged_by(table, lambda: table.remove(2, 1, 3), "no room for 3 tokens: 6 of 8 cells used", CacheFullError)
    table.remove(2, 1, 4)
    assert picture(table) == "*1111122"


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
