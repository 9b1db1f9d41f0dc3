"""Rows that leave a batch leave holes for some steps, and rows that join take them: nobody else is copied."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from radixcache import Group, PrefixCache
from radixcache.core import Core
from radixcache.groups.batch import Batch
from radixcache.groups.row import Row
from radixcache.groups.tails import GROWTH_COLUMNS
from tests.groups.cold import ROUNDING, cold, cold_last, error, shared_model
from tests.groups.test_begin_many import stored
from tests.groups.test_prefill_many import PROMPTS, SYSTEM, Counting, tokens
from tests.groups.test_ways import TOGETHER


class Talk:
    """Rows that are stepped on tokens of no meaning.

    Attributes:
        said: the tokens of each row.
        answers: the logits (V,) of each row, by how many tokens it had then.
    """

    def __init__(self, group: Group, model: Any) -> None:
        self.group, self.counting = group, Counting(model)
        self.said: dict[Row, list[int]] = {}
        self.answers: dict[Row, dict[int, mx.array]] = {}
        for row in group.rows:
            self.join(row)

    def join(self, row: Row) -> None:
        self.said[row], self.answers[row] = row.prompt.tolist(), {}

    def step(self, rows: list[Row]) -> int:
        """Step these rows; returns how many the model's pass had."""
        for row in rows:
            self.said[row].append(len(self.said[row]) % 200)
        logits = self.group.step(self.counting, rows, [self.said[row][-1] for row in rows])
        mx.eval(logits)
        for row, found in zip(rows, logits, strict=True):
            self.answers[row][len(self.said[row])] = found[0]
        self.group.check()
        return self.counting.shapes[-1][0]

    def check(self) -> None:
        """Compare each answer with that of a cold run of all that its row was told."""
        for row, said in self.said.items():
            wanted = cold_last(self.counting.model, said, len(said) - len(row.prompt) + 1)
            for length, found in self.answers[row].items():
                assert error(found, wanted[length - len(said) - 1]) < ROUNDING, (row, length)


@pytest.mark.parametrize("kind", TOGETHER)
def test_a_batch_goes_on_with_a_hole_for_as_many_steps_as_it_has_rows(kind: str) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model)
    stored(cache, model, SYSTEM)
    with cache.begin_many(PROMPTS, capacity=600, segment_bytes=0) as group:
        list(group.prefill_many(model, group.rows))
        rows = group.rows
        talk = Talk(group, model)
        assert talk.step(rows) == 4
        rows[1].close()
        left = [rows[3], rows[0], rows[2]]  # in any order
        assert [talk.step(left) for _ in range(6)] == [4, 4, 4, 4, 3, 3]
        rows[0].close()
        left.remove(rows[0])
        assert talk.step(left) == 3
        left.append(group.admit([*talk.said[rows[0]], 5]))  # it takes the hole's place, on what the other left
        talk.join(left[-1])
        list(group.prefill_many(model, left[-1:]))
        assert [talk.step(left) for _ in range(2)] == [3, 3]
        talk.check()
    cache.check()


def test_a_row_that_stays_behind_is_no_hole() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model)
    with cache.begin_many(PROMPTS, capacity=600) as group:
        list(group.prefill_many(model, group.rows))
        rows = group.rows
        talk = Talk(group, model)
        talk.step(rows)
        rows[0].close()
        assert talk.step(rows[1:3]) == 2
        assert talk.step(rows[1:]) == 3
        talk.check()


def test_a_hole_is_given_up_where_there_is_no_room_for_it() -> None:
    model = shared_model("llama")
    # A column for each of three steps, and one that is never written to.
    budget_bytes = 3072 * len(PROMPTS) * (max(map(len, PROMPTS)) + 3)
    cache = PrefixCache(model, budget_bytes=budget_bytes)
    with cache.begin_many(PROMPTS, capacity=600, segment_bytes=1 << 30) as group:
        list(group.prefill_many(model, group.rows))
        rows = group.rows
        talk = Talk(group, model)
        assert talk.step(rows) == 4
        rows[0].close()
        assert [talk.step(rows[1:]) for _ in range(3)] == [4, 3, 3]
        talk.check()
        cache.check()


def test_a_checkpoint_of_windows_that_cannot_be_taken_costs_nobody_else_their_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared_model("gemma3_text")
    cache = PrefixCache(model)
    with cache.begin_many(PROMPTS[2:], capacity=600) as group:
        first, other = group.rows
        list(group.prefill_many(model, [first], 20))

        def fail(*_: object) -> None:
            raise MemoryError("no room for a copy")

        with monkeypatch.context() as patching:
            patching.setattr(Core, "take_checkpoint", fail)
            with pytest.raises(MemoryError, match="no room"):
                list(group.prefill_many(model, [other]))
        other.close()
        found = dict(group.prefill_many(model, [first]))
        assert error(found[first][0, 0], cold(model, first.prompt.tolist())) < ROUNDING
        group.check()
    cache.check()


LONGEST = max(PROMPTS, key=len)


@pytest.mark.parametrize("kind", TOGETHER)
def test_who_has_yet_to_come_gets_room_and_who_comes_after_another_left_its_place(kind: str) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model)
    stored(cache, model, SYSTEM)
    prompts = [[*SYSTEM, *tokens(seed, own)] for seed, own in ((3, 30), (6, 20), (2, 9), (7, 5))]
    with cache.begin_many(prompts, capacity=600, segment_bytes=0 if kind == "llama" else None) as group:
        first, second, third, last = group.rows
        talk = Talk(group, model)
        list(group.prefill_many(model, [first]))
        list(group.prefill_many(model, [second]))
        assert talk.step([first, second]) == 2
        batch = first.batch
        assert batch.columns.row_capacity == 4
        list(group.prefill_many(model, [third, last]))
        assert talk.step([third, second, last, first]) == 4
        assert [row.batch for row in (first, second, third, last)] == [batch] * 4
        second.close()
        fifth = group.admit([*prompts[1], 7, 7])
        talk.join(fifth)
        list(group.prefill_many(model, [fifth]))
        assert talk.step([first, fifth, third, last]) == 4
        assert (fifth.batch, fifth.at) == (batch, 1)
        assert talk.step([last, fifth, third, first]) == 4
        talk.check()
    cache.check()


def test_a_row_with_more_columns_than_the_batch_has_all_gathered() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model)
    with cache.begin_many([LONGEST[:9], LONGEST[1:10]], capacity=600) as group:
        list(group.prefill_many(model, group.rows))
        talk = Talk(group, model)
        rows = group.rows
        talk.step(rows)
        before = rows[0].batch
        rows.append(group.admit(LONGEST[2:]))
        assert before.columns.row_capacity == 2
        talk.join(rows[2])
        list(group.prefill_many(model, rows[2:]))
        rows[1].close()  # its place is of no use
        assert talk.step([rows[0], rows[2]]) == 2
        assert rows[0].batch is rows[2].batch is not before
        talk.check()
    cache.check()


def test_rows_get_no_room_ahead_where_the_budget_has_none() -> None:
    model = shared_model("llama")
    token_bytes = 3072
    columns = len(LONGEST) + 2
    budget_bytes = token_bytes * (3 * columns + len(LONGEST) // 2)
    cache = PrefixCache(model, budget_bytes=budget_bytes)
    prompts = [LONGEST, LONGEST[::-1], LONGEST[1:]]
    with cache.begin_many(prompts, capacity=600, segment_bytes=1 << 30) as group:
        rows = group.rows
        for row in rows[:2]:
            list(group.prefill_many(model, [row]))
        talk = Talk(group, model)
        assert talk.step(rows[:2]) == 2
        assert rows[0].batch.columns.row_capacity == 2
        assert group.nbytes <= budget_bytes
        talk.check()
    cache.check()


def test_room_for_rows_that_did_not_come_is_given_up_where_the_others_need_it() -> None:
    model = shared_model("llama")
    token_bytes, length = 3072, 40
    budget_tokens = 2 * 3 * (length + 1 + GROWTH_COLUMNS)  # as much as lets a third row have its room
    cache = PrefixCache(model, budget_bytes=budget_tokens * token_bytes)
    prompts = [LONGEST[at : at + length] for at in range(3)]
    with cache.begin_many(prompts, capacity=900, segment_bytes=1 << 30) as group:
        rows = group.rows
        for row in rows[:2]:
            list(group.prefill_many(model, [row]))
        talk = Talk(group, model)
        talk.step(rows[:2])
        assert rows[0].batch.columns.row_capacity == 3
        rows[2].close()
        while 3 * rows[0].position <= budget_tokens:
            talk.step(rows[:2])
        assert talk.step(rows[:2]) == 2
        assert rows[0].batch.columns.row_capacity == 2
        talk.check()
    cache.check()


@pytest.mark.parametrize("is_all_in_place", [False, True])
def test_what_a_row_without_numbers_left_behind_does_not_come_to_who_takes_its_place(is_all_in_place: bool) -> None:
    model = shared_model("llama")
    cache = PrefixCache(model)
    stored(cache, model, SYSTEM)
    with cache.begin_many(
        [LONGEST, LONGEST[::-1]], capacity=600, segment_bytes=0 if is_all_in_place else 1 << 30
    ) as group:
        first, second = group.rows
        list(group.prefill_many(model, [first, second]))
        talk = Talk(group, model)
        talk.step([first, second])
        batch, at = second.batch, second.at
        for leaf in batch.leaves:
            leaf.values[at : at + 1] = mx.nan
        second.distrust_from(0)
        second.close()
        third = group.admit([*SYSTEM, 9] if is_all_in_place else LONGEST[3:20])
        talk.join(third)
        list(group.prefill_many(model, [third]))
        assert talk.step([first, third]) == 2
        assert (third.batch, third.at) == (batch, at)
        talk.check()
    cache.check()


def test_rows_that_come_and_go_do_not_make_the_batch_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    cache = PrefixCache(model)
    gathered: list[int] = []
    gather = Batch.gathered.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Batch], places: list[tuple[Batch, int]], *room: int) -> Batch:
        gathered.append(len(places))
        made: Batch = gather(cls, places, *room)
        return made

    with cache.begin_many([LONGEST, LONGEST[1:]], capacity=6000, segment_bytes=1 << 30) as group:
        rows: list[Row] = group.rows
        list(group.prefill_many(model, rows))
        talk = Talk(group, model)
        talk.step(rows)
        monkeypatch.setattr(Batch, "gathered", classmethod(counted))
        turns = (2 * GROWTH_COLUMNS + 16) // 5
        for turn in range(turns):
            rows.pop(0).close()
            rows.append(group.admit([turn % 50 + 9, *LONGEST[5:]]))
            talk.join(rows[1])
            list(group.prefill_many(model, rows[1:]))
            for _ in range(5):
                talk.step(rows)
            assert rows[0].batch.columns.end <= len(LONGEST) + 2 * GROWTH_COLUMNS
        talk.check()
    assert len(gathered) <= turns // 8
    cache.check()
