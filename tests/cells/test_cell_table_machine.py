"""CellTable against plain lists per sequence: every operation at random, in a buffer that is always too small.

The machine keeps the data that the table does not: each cell of `buffer` holds a token and the position it was last
rotated to. Plans are carried out on it, their moves in any order, and now and then they are left off half way.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixcache import CacheFullError
from radixcache.cells.table import CellBatch, CellTable, Move, Shift
from tests import inside

#: Few ids, so that sequences come back after they were freed.
NAMES = range(6)
WINDOWS = st.sampled_from([None, None, 1, 2, 3, 5, 100])


class Held:
    """A token in a cell. Two sequences that share the cell hold the same object."""

    def __init__(self, token: int) -> None:
        self.token = token


class CellMachine(RuleBasedStateMachine):
    """`lists` has for each sequence what it holds, in order of position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CellTable(1)
        self.buffer: list[tuple[int, int] | None] = []
        self.lists: dict[int, list[Held]] = {}
        self.next_token = 0

    @initialize(spare=st.integers(3, 10), first=st.integers(3, 9), joined=st.lists(st.integers(0, 6), max_size=3))
    def begin_with(self, spare: int, first: int, joined: list[int]) -> None:
        self.table = CellTable(first + spare)
        self.buffer = [None] * self.table.capacity
        self.table.add(0)
        self.lists[0] = []
        self.append_rows([(0, first)])
        for name, length in enumerate(joined, 1):
            self.join(0, name, max(first - length, 0))

    @precondition(lambda self: len(self.lists) < len(NAMES))
    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        """A new sequence, which shares a prefix of one that is there, or none."""
        name = data.draw(st.sampled_from([name for name in NAMES if name not in self.lists]))
        giver = data.draw(st.sampled_from(sorted(self.lists))) if self.lists else name
        end = len(self.lists.get(giver, []))
        self.join(giver, name, end - data.draw(st.integers(0, end)))

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        name = self.pick(data)
        before = self.used()
        freed = self.table.free(name)
        del self.lists[name]
        assert freed == before - self.used()

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), window=WINDOWS)
    def decode(self, data: Any, window: int | None) -> None:
        cancelled = data.draw(st.sets(st.sampled_from(sorted(self.lists)), max_size=len(self.lists) - 1))
        self.append_rows([(name, 1) for name in self.lists if name not in cancelled], window)

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), window=WINDOWS)
    def prefill(self, data: Any, window: int | None) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.lists)), min_size=1, max_size=2, unique=True))
        self.append_rows([(name, data.draw(st.integers(1, 5))) for name in names], window)

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), spare=st.integers(0, 2))
    def fill_up(self, data: Any, spare: int) -> None:
        """Take every free cell but a few, one run after the other if need be."""
        while (most := min(self.table.largest_free_run, self.table.capacity - self.used() - spare)) > 0:
            self.append_rows([(self.pick(data), most)])

    @precondition(lambda self: any(self.lists.values()))
    @rule(data=st.data(), back=st.integers(0, 3))
    def rewind(self, data: Any, back: int) -> None:
        name = data.draw(st.sampled_from([name for name, each in self.lists.items() if each]))
        end = len(self.lists[name])
        self.remove(data, name, max(0, end - back), end)

    @precondition(lambda self: any(len(each) > 1 for each in self.lists.values()))
    @rule(data=st.data(), length=st.integers(1, 3), half=st.sampled_from([False, False, True]))
    def remove_from_the_middle(self, data: Any, length: int, half: bool) -> None:
        name = data.draw(st.sampled_from([name for name, each in self.lists.items() if len(each) > 1]))
        begin = data.draw(st.integers(0, len(self.lists[name]) - 2))
        self.remove(data, name, begin, min(begin + length, len(self.lists[name]) - 1), half=half)

    @precondition(lambda self: self.branches())
    @rule(data=st.data(), half=st.sampled_from([False, False, True]))
    def shift_below_a_branch(self, data: Any, half: bool) -> None:
        """Remove a token before the last one that is shared: what is shared behind it has to be copied."""
        name, last = data.draw(st.sampled_from(self.branches()))
        begin = data.draw(st.integers(0, last - 1))
        self.remove(data, name, begin, begin + 1, half=half)

    @rule(
        name=st.sampled_from(NAMES), other=st.sampled_from(NAMES), begin=st.integers(-1, 9), length=st.integers(-1, 9)
    )
    def ask_for_what_is_not_there(self, name: int, other: int, begin: int, length: int) -> None:
        end = begin + length
        if name not in self.lists:
            self.refused(lambda: self.table.free(name), "no sequence")
            self.refused(lambda: self.table.end(name), "no sequence")
            self.refused(lambda: self.table.copy_prefix(name, other, 0), "no sequence")
            self.refused(lambda: self.table.append([(name, 1)]), "no sequence")
            self.refused(lambda: self.table.remove(name, begin, end), "no sequence")
            return
        self.refused(lambda: self.table.add(name), "exists already")
        self.refused(lambda: self.table.append([(name, 1), (name, 1)]), "in 2 rows")
        self.refused(lambda: self.table.append([(name, self.table.capacity + 1)]), "never fits")
        self.refused(lambda: self.table.append([(name, 0)]), "wanted at least 1")
        if self.lists[name]:
            self.refused(lambda: self.table.copy_prefix(name, name, 0), "wanted one without")
        if not 0 <= begin <= end <= len(self.lists[name]):
            self.refused(lambda: self.table.remove(name, begin, end), "is outside")
        if other in self.lists and not self.lists[other] and not 0 <= end <= len(self.lists[name]):
            self.refused(lambda: self.table.copy_prefix(name, other, end), "can be shared")

    @rule(data=st.data(), room=st.none() | st.integers(0, 15), half=st.booleans())
    def defragment(self, data: Any, room: int | None, half: bool) -> None:
        free = self.table.capacity - self.used()
        if room is not None and not 0 < room <= self.table.capacity:
            self.refused(lambda: self.table.plan_defragment(room), "the capacity")
            return
        if room is not None and room > free:
            before = inside.table_fields(self.table)
            with pytest.raises(CacheFullError):
                self.table.plan_defragment(room)
            assert inside.table_fields(self.table) == before
            return
        plan = self.table.plan_defragment(room)
        assert sum(move.length for move in plan.moves) == self.fewest_moved(room)
        self.carry_out(data, plan.moves, half)
        if half:
            return
        self.table.apply(plan)
        assert self.table.largest_free_run >= (free if room is None else room)
        if room is None:
            assert all(inside.members(self.table, cell) for cell in range(self.used()))
        assert self.table.plan_defragment(room).moves == ()

    @invariant()
    def check_holds(self) -> None:
        self.table.check()

    @invariant()
    def every_sequence_reads_its_own_tokens_in_order_and_rotated_to_its_positions(self) -> None:
        assert set(self.table.sequences) == set(self.lists)
        for name, expected in self.lists.items():
            assert self.table.end(name) == len(expected)
            read = [self.buffer[cell] for cell in self.table.cells(name)]
            assert read == [(held.token, position) for position, held in enumerate(expected)]

    @invariant()
    def a_cell_belongs_to_those_who_hold_its_token_and_each_token_is_held_once(self) -> None:
        members = [set(inside.members(self.table, cell)) for cell in range(self.table.capacity)]
        for name, expected in self.lists.items():
            for cell, held in zip(self.table.cells(name), expected, strict=True):
                assert members[cell] == {other for other, each in self.lists.items() if held in each}
        assert self.table.used == self.used() == sum(map(bool, members))
        free = "".join("." if not each else "#" for each in members)
        assert self.table.largest_free_run == max(map(len, free.split("#")))

    @invariant()
    def ranges_spell_the_whole_of_a_sequence_in_as_few_runs_as_possible(self) -> None:
        for name in self.lists:
            runs = self.table.ranges(name)
            spelled = [cell for run in runs for cell in range(run.start, run.start + run.length)]
            assert spelled == self.table.cells(name).tolist()
            assert [run.position for run in runs] == [sum(run.length for run in runs[:i]) for i in range(len(runs))]
            assert all(a.start + a.length != b.start for a, b in pairwise(runs))

    def pick(self, data: Any) -> int:
        name: int = data.draw(st.sampled_from(sorted(self.lists)))
        return name

    def join(self, giver: int, name: int, length: int) -> None:
        before = self.used()
        self.table.add(name)
        self.lists[name] = []
        if giver == name:
            return
        self.table.copy_prefix(giver, name, length)
        self.lists[name] = self.lists[giver][:length]
        assert self.used() == before

    def remove(self, data: Any, name: int, begin: int, end: int, half: bool = False) -> None:
        mine = self.lists[name]
        shared = [held for held in mine[end:] if self.is_shared(name, held)] if begin < end else []
        if len(shared) > self.table.capacity - self.used():
            before = inside.table_fields(self.table)
            with pytest.raises(CacheFullError) as raised:
                self.table.remove(name, begin, end)
            assert raised.value.wanted == len(shared)
            assert inside.table_fields(self.table) == before
            return
        plan = self.table.plan_remove(name, begin, end)
        assert sum(move.length for move in plan.moves) == len(shared)
        self.carry_out(data, plan.moves, half)
        if half:
            return
        self.shift(plan.shifts)
        self.table.apply(plan)
        self.lists[name] = mine[:begin] + [Held(held.token) if held in shared else held for held in mine[end:]]

    def used(self) -> int:
        return len({held for each in self.lists.values() for held in each})

    def fewest_moved(self, room: int | None) -> int:
        """How many cells must move so that `room` free ones stand in a row, or (None) all used ones at the front."""
        used = [bool(inside.members(self.table, cell)) for cell in range(self.table.capacity)]
        if room is None:
            return sum(used[self.used() :])
        return min(sum(used[start : start + room]) for start in range(len(used) - room + 1))

    def branches(self) -> list[tuple[int, int]]:
        """Sequences that share more than one token, each with the last position that it shares."""
        last = [
            (name, max((p for p, held in enumerate(each) if self.is_shared(name, held)), default=0))
            for name, each in self.lists.items()
        ]
        return [(name, position) for name, position in last if position]

    def is_shared(self, name: int, held: Held) -> bool:
        return any(held in each for other, each in self.lists.items() if other != name)

    def append_rows(self, rows: list[tuple[int, int]], window: int | None = None) -> None:
        """As the cache above does: append; where no run is long enough, defragment; else give up."""
        total = sum(tokens for _, tokens in rows)
        if total > self.table.capacity:
            self.refused(lambda: self.table.append(rows), "never fits")
            return
        try:
            batch = self.append_or_nothing(rows, total)
        except CacheFullError as error:
            if total > error.free:
                return
            plan = self.table.plan_defragment(total)
            self.move(plan.moves)
            self.table.apply(plan)
            batch = self.table.append(rows)
        cell = batch.start
        for row, (name, tokens) in zip(batch.rows, rows, strict=True):
            assert (row.sequence, row.begin, row.length) == (name, len(self.lists[name]), tokens)
            for position in range(row.begin, row.begin + tokens):
                self.lists[name].append(Held(self.next_token))
                self.buffer[cell] = (self.next_token, position)
                self.next_token += 1
                cell += 1
        assert batch.length == total
        self.compare_mask(batch, window)

    def append_or_nothing(self, rows: list[tuple[int, int]], total: int) -> CellBatch:
        before, longest, used = inside.table_fields(self.table), self.table.largest_free_run, self.used()
        try:
            batch = self.table.append(rows)
        except CacheFullError as error:
            assert total > longest
            assert inside.table_fields(self.table) == before
            numbers = (error.capacity, error.used, error.free, error.largest_free_run, error.wanted)
            assert numbers == (self.table.capacity, used, self.table.capacity - used, longest, total)
            raise
        assert total <= longest
        return batch

    def compare_mask(self, batch: CellBatch, window: int | None) -> None:
        start, stop = self.table.span(batch, window=window)
        mask = self.table.mask(batch, window=window)
        assert mask.shape == (batch.length, stop - start)
        assert mask.dtype == np.bool_
        queries = [(row.sequence, row.begin + i) for row in batch.rows for i in range(row.length)]
        for (name, position), seen in zip(queries, mask, strict=True):
            expected = [
                held.token
                for p, held in enumerate(self.lists[name])
                if p <= position and (window is None or position - p < window)
            ]
            tokens = [self.buffer[start + int(cell)] for cell in np.flatnonzero(seen)]
            assert sorted(token for token, _ in filter(None, tokens)) == expected
        assert mask[:, 0].any(), "the span begins too early"
        assert mask[:, -1].any(), "the span ends too late"

    def carry_out(self, data: Any, moves: tuple[Move, ...], half: bool = False) -> None:
        """In any order; half: only some of them."""
        order = data.draw(st.permutations(moves))
        self.move(order[: data.draw(st.integers(0, len(order)))] if half else order)

    def move(self, moves: Any) -> None:
        for source, target, length in moves:
            assert source + length <= target or target + length <= source, (source, target, length)
            self.buffer[target : target + length] = self.buffer[source : source + length]

    def shift(self, shifts: tuple[Shift, ...]) -> None:
        for start, length, delta in shifts:
            for cell in range(start, start + length):
                token, position = self.buffer[cell] or (-1, -1)
                self.buffer[cell] = (token, position + delta)

    def refused(self, call: Any, why: str) -> None:
        before = inside.table_fields(self.table)
        with pytest.raises(ValueError, match=why):
            call()
        assert inside.table_fields(self.table) == before


TestCellMachine = CellMachine.TestCase
TestCellMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
