"""Rows that leave a batch leave holes for some steps, and rows that join take them: nobody else is copied."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest

from radixcache.groups.batch import GROWTH_COLUMNS, Batch
from radixcache.groups.row import Row
from radixcache.paging.pager import Pager
from tests.groups import rows as shared
from tests.groups.cold import ROUNDING, cold, error
from tests.groups.rows import PROMPTS, SYSTEM, TOGETHER
from tests.prompts import tokens

LONGEST = max(PROMPTS, key=len)
TOKEN_BYTES = 3072


talking = partial(shared.talking, watches=True)


def step(talk: shared.Talk, *some: Row) -> int:
    """Step these rows; returns how many the model's pass had."""
    talk.step(*some)
    return int(talk.model.shapes[-1][0])


@pytest.mark.parametrize("kind", TOGETHER)
def test_a_batch_goes_on_with_a_hole_for_as_many_steps_as_it_has_rows(kind: str) -> None:
    with talking(kind, PROMPTS, stores=SYSTEM, segment_bytes=0) as talk:
        rows = talk.rows
        talk.prefill(*rows)
        assert step(talk, *rows) == 4
        rows[1].close()
        left = [rows[3], rows[0], rows[2]]  # in any order
        assert [step(talk, *left) for _ in range(6)] == [4, 4, 4, 4, 3, 3]
        rows[0].close()
        left.remove(rows[0])
        assert step(talk, *left) == 3
        left.append(talk.join([*talk.texts[rows[0]], 5]))  # in the hole, on what the other row left
        assert [step(talk, *left) for _ in range(2)] == [3, 3]


def test_a_row_that_stays_behind_is_no_hole() -> None:
    with talking("llama", PROMPTS) as talk:
        talk.prefill(*talk.rows)
        step(talk, *talk.rows)
        talk.rows[0].close()
        assert step(talk, *talk.rows[1:3]) == 2
        assert step(talk, *talk.rows[1:]) == 3


def test_a_hole_is_given_up_where_there_is_no_room_for_it() -> None:
    # A column for each of three steps, and one that is never written to.
    budget_bytes = TOKEN_BYTES * len(PROMPTS) * (len(LONGEST) + 3)
    with talking("llama", PROMPTS, budget_bytes=budget_bytes, segment_bytes=1 << 30) as talk:
        talk.prefill(*talk.rows)
        assert step(talk, *talk.rows) == 4
        talk.rows[0].close()
        assert [step(talk, *talk.rows[1:]) for _ in range(3)] == [4, 3, 3]


def test_a_checkpoint_of_windows_that_cannot_be_taken_costs_nobody_else_their_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with talking("gemma3_text", PROMPTS[2:]) as talk:
        (first, other), model = talk.rows, talk.alone
        list(talk.group.prefill_many(model, [first], 20))

        def fail(*_: object) -> None:
            raise MemoryError("no room for a copy")

        with monkeypatch.context() as patching:
            patching.setattr(Pager, "take_checkpoint", fail)
            with pytest.raises(MemoryError, match="no room"):
                talk.prefill(other)
        other.close()
        found = dict(talk.group.prefill_many(model, [first]))
        assert error(found[first][0, 0], cold(model, first.prompt.tolist())) < ROUNDING
        talk.group.check()


@pytest.mark.parametrize("kind", TOGETHER)
def test_who_has_yet_to_come_gets_room_and_who_comes_after_another_left_its_place(kind: str) -> None:
    prompts = [[*SYSTEM, *tokens(seed, own)] for seed, own in ((3, 30), (6, 20), (2, 9), (7, 5))]
    with talking(kind, prompts, stores=SYSTEM, segment_bytes=0 if kind == "llama" else None) as talk:
        first, second, third, last = talk.rows
        talk.prefill(first)
        talk.prefill(second)
        assert step(talk, first, second) == 2
        batch = first.batch
        assert batch.columns.row_capacity == 4
        talk.prefill(third, last)
        assert step(talk, third, second, last, first) == 4
        assert [row.batch for row in talk.rows] == [batch] * 4
        second.close()
        fifth = talk.join([*prompts[1], 7, 7])
        assert step(talk, first, fifth, third, last) == 4
        assert (fifth.batch, fifth.at) == (batch, 1)
        assert step(talk, last, fifth, third, first) == 4


def test_a_row_with_more_columns_than_the_batch_has_all_gathered() -> None:
    with talking("llama", [LONGEST[:9], LONGEST[1:10]]) as talk:
        first, second = talk.rows
        talk.prefill(first, second)
        step(talk, first, second)
        before = first.batch
        assert before.columns.row_capacity == 2
        third = talk.join(LONGEST[2:])
        second.close()  # its place is of no use
        assert step(talk, first, third) == 2
        assert first.batch is third.batch is not before


def test_rows_get_no_room_ahead_where_the_budget_has_none() -> None:
    budget_bytes = TOKEN_BYTES * (3 * (len(LONGEST) + 2) + len(LONGEST) // 2)
    prompts = [LONGEST, LONGEST[::-1], LONGEST[1:]]
    with talking("llama", prompts, budget_bytes=budget_bytes, segment_bytes=1 << 30) as talk:
        first, second, _ = talk.rows
        talk.prefill(first)
        talk.prefill(second)
        assert step(talk, first, second) == 2
        assert first.batch.columns.row_capacity == 2
        assert talk.group.nbytes <= budget_bytes


def test_room_for_rows_that_did_not_come_is_given_up_where_the_others_need_it() -> None:
    length = 40
    budget_tokens = 2 * 3 * (length + 1 + GROWTH_COLUMNS)  # enough to reserve room for a third row
    prompts = [LONGEST[at : at + length] for at in range(3)]
    with talking("llama", prompts, budget_bytes=budget_tokens * TOKEN_BYTES, segment_bytes=1 << 30) as talk:
        first, second, third = talk.rows
        talk.prefill(first)
        talk.prefill(second)
        step(talk, first, second)
        assert first.batch.columns.row_capacity == 3
        third.close()
        while 3 * first.position <= budget_tokens:
            step(talk, first, second)
        assert step(talk, first, second) == 2
        assert first.batch.columns.row_capacity == 2


@pytest.mark.parametrize("is_all_in_place", [False, True])
def test_what_a_row_without_numbers_left_behind_does_not_come_to_who_takes_its_place(is_all_in_place: bool) -> None:
    segment_bytes = 0 if is_all_in_place else 1 << 30
    with talking("llama", [LONGEST, LONGEST[::-1]], stores=SYSTEM, segment_bytes=segment_bytes) as talk:
        first, second = talk.rows
        talk.prefill(first, second)
        step(talk, first, second)
        batch, at = second.batch, second.at
        for leaf in batch.leaves:
            leaf.values[at : at + 1] = mx.nan
        second.distrust_from(0)
        second.close()
        third = talk.join([*SYSTEM, 9] if is_all_in_place else LONGEST[3:20])
        assert step(talk, first, third) == 2
        assert (third.batch, third.at) == (batch, at)


def test_rows_that_come_and_go_do_not_make_the_batch_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    gather = Batch.gather.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Batch], places: list[tuple[Batch, int]], *room: int) -> Batch:
        gathered.append(len(places))
        made: Batch = gather(cls, places, *room)
        return made

    with talking("llama", [LONGEST, LONGEST[1:]], segment_bytes=1 << 30) as talk:
        rows = talk.rows
        talk.prefill(*rows)
        step(talk, *rows)
        monkeypatch.setattr(Batch, "gather", classmethod(counted))
        turns = (2 * GROWTH_COLUMNS + 16) // 5
        for turn in range(turns):
            rows.pop(0).close()
            rows.append(talk.join([turn % 50 + 9, *LONGEST[5:]]))
            for _ in range(5):
                step(talk, *rows)
            assert rows[0].batch.columns.end <= len(LONGEST) + 2 * GROWTH_COLUMNS
    assert len(gathered) <= turns // 8
