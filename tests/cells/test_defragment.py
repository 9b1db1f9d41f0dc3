"""The defragmentation plan against an exhaustive search over every small table."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest

from radixcache import CacheFullError
from radixcache.cells.table import CellTable, DefragPlan, cut, pack
from tests import inside

CAPACITY = 8
Occupied = frozenset[int]


def table_with(occupied: Occupied, capacity: int = CAPACITY) -> CellTable:
    """A table in which exactly these cells are used, each by a sequence of its own."""
    table = CellTable(capacity)
    for cell in range(capacity):
        table.add(cell)
        table.append([(cell, 1)])
    for cell in set(range(capacity)) - occupied:
        table.free(cell)
    return table


def has_room(occupied: Occupied, room: int | None) -> bool:
    """Whether `room` free cells stand in a row; None: whether all used cells are at the front."""
    if room is None:
        return occupied == frozenset(range(len(occupied)))
    return any(occupied.isdisjoint(range(start, start + room)) for start in range(CAPACITY - room + 1))


def fewest_moved(used: int, room: int | None) -> dict[Occupied, int]:
    """For every way to use so many cells: how many single moves make room. Breadth-first, from the goals."""
    every = [frozenset(cells) for cells in combinations(range(CAPACITY), used)]
    layer = [occupied for occupied in every if has_room(occupied, room)]
    distance = dict.fromkeys(layer, 0)
    while layer:
        reached = []
        for occupied in layer:
            for cell in occupied:
                for hole in set(range(CAPACITY)) - occupied:
                    before = occupied - {cell} | {hole}
                    if before not in distance:
                        distance[before] = distance[occupied] + 1
                        reached.append(before)
        layer = reached
    return distance


def fewest_runs(sources: list[int], holes: list[int]) -> int:
    """The fewest runs in which these cells can be moved into these holes, over all ways to pair them."""
    fewest = len(sources)
    for targets in permutations(holes, len(sources)):
        pairs = set(zip(sources, targets, strict=True))
        fewest = min(fewest, sum((source - 1, target - 1) not in pairs for source, target in pairs))
    return fewest


def moved_cells(plan: DefragPlan) -> int:
    return sum(move.length for move in plan.moves)


def carried_out(occupied: Occupied, plan: DefragPlan) -> Occupied:
    after = set(occupied)
    for source, target, length in plan.moves:
        assert after.issuperset(range(source, source + length))
        assert after.isdisjoint(range(target, target + length))
        after -= set(range(source, source + length))
        after |= set(range(target, target + length))
    return frozenset(after)


@pytest.mark.parametrize("used", range(CAPACITY + 1))
def test_no_plan_moves_fewer_cells_in_any_table_of_eight(used: int) -> None:
    for room in (None, *range(1, CAPACITY - used + 1)):
        distance = fewest_moved(used, room)
        assert len(distance) == len(list(combinations(range(CAPACITY), used)))
        for occupied, fewest in distance.items():
            plan = table_with(occupied).plan_defragment(room)
            assert moved_cells(plan) == fewest, (sorted(occupied), room, plan)
            assert has_room(carried_out(occupied, plan), room), (sorted(occupied), room, plan)


def test_runs_are_never_more_than_those_of_sources_and_holes_and_at_most_one_above_the_fewest_in_small_tables() -> None:
    best = total = 0
    for used in range(1, CAPACITY):
        for cells in combinations(range(CAPACITY), used):
            sources = [cell for cell in cells if cell >= used]
            holes = [cell for cell in range(used) if cell not in cells]
            if not sources:
                continue
            moves = table_with(frozenset(cells)).plan_defragment().moves
            most = sum(len(cut(np.array(each, dtype=np.int32))[0]) for each in (sources, holes)) - 1
            fewest = fewest_runs(sources, holes)
            assert fewest <= len(moves) <= min(most, fewest + 1), (cells, moves)
            best += len(moves) == fewest
            total += 1
    assert best > 0.9 * total, (best, total)


def test_the_longest_run_goes_to_the_smallest_hole_that_takes_it_whole() -> None:
    sources = np.array([20, 21, 22, 30], dtype=np.int32)
    holes = np.array([0, 2, 3, 5, 6, 7, 9, 10, 11, 12], dtype=np.int32)
    assert pack(sources, holes) == ((20, 5, 3), (30, 0, 1))
    # Beginning with the shortest would break the longest in two.
    sources = np.array([30, 40, 41, 50, 51, 52], dtype=np.int32)
    holes = np.array([0, 1, 5, 6, 7, 8], dtype=np.int32)
    assert pack(sources, holes) == ((30, 8, 1), (40, 0, 2), (50, 5, 3))


def test_a_run_longer_than_every_hole_is_split_and_all_of_it_moves() -> None:
    sources, holes = np.arange(20, 27, dtype=np.int32), np.array([0, 1, 2, 5, 6, 9, 11], dtype=np.int32)
    moves = pack(sources, holes)
    assert [move.length for move in moves] == [3, 2, 1, 1]
    assert sorted(cell for move in moves for cell in range(move.target, move.target + move.length)) == holes.tolist()


def test_shared_cells_move_once_for_all_who_share_them() -> None:
    table = CellTable(6)
    for name in (1, 2, 3):
        table.add(name)
    table.append([(1, 2)])
    table.append([(2, 2)])
    table.copy_prefix(2, 3, 2)
    table.free(1)
    plan = inside.defragment(table)
    assert plan.moves == ((2, 0, 2),)
    assert table.cells(2).tolist() == table.cells(3).tolist() == [0, 1]
    table.check()


def test_of_equally_cheap_places_the_last_is_taken_and_a_compact_table_stays_as_it_is() -> None:
    assert table_with(frozenset({0, 3, 6})).plan_defragment(3).moves == ((6, 4, 1),)
    assert table_with(frozenset({0, 1, 2})).plan_defragment().moves == ()
    assert table_with(frozenset({7})).plan_defragment(7).moves == ()


def test_room_that_free_cells_cannot_make_is_refused_with_the_numbers() -> None:
    table = table_with(frozenset({1, 3, 5, 7}))
    with pytest.raises(CacheFullError, match=r"no room for 5 tokens: 4 of 8 cells used, 4 free, 1 of them in a row\."):
        table.plan_defragment(5)
    for room in (0, -1, 9):
        with pytest.raises(ValueError, match="the capacity"):
            table.plan_defragment(room)


def test_a_large_fragmented_table_is_made_compact_with_as_many_cells_as_there_are_holes_at_the_front() -> None:
    table = CellTable(4096)
    for name in range(16):
        table.add(name)
    for _ in range(200):
        table.append([(name, 1) for name in range(16)])
    for name in (3, 4, 9):
        table.free(name)
    before = {name: len(table.cells(name)) for name in table.sequences}
    used = table.used
    holes = sum(not inside.members(table, cell) for cell in range(used))
    plan = inside.defragment(table)
    assert moved_cells(plan) == holes > 0
    assert table.largest_free_run == 4096 - used
    assert {name: len(table.cells(name)) for name in table.sequences} == before
    table.check()
