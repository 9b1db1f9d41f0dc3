"""Rows that join a batch: where it has room for them, nothing is copied but what is theirs."""

from __future__ import annotations

import mlx.core as mx
import pytest

from radixcache import PrefixCache
from radixcache.groups.batch import Batch
from radixcache.groups.row import Row
from radixcache.groups.tails import GROWTH_COLUMNS
from tests.groups.cold import shared_model
from tests.groups.test_begin_many import stored
from tests.groups.test_holes import SINGLE, Talk
from tests.groups.test_prefill_many import PROMPTS, SYSTEM, tokens
from tests.groups.test_ways import WAYS

LONGEST = max(PROMPTS, key=len)


@pytest.mark.parametrize("segment_bytes", [0, None])
@pytest.mark.parametrize("kind", [kind for kind in WAYS if kind not in SINGLE])
def test_who_has_yet_to_come_gets_room_and_who_comes_after_another_left_its_place(
    kind: str, segment_bytes: int | None
) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model)
    stored(cache, model, SYSTEM)
    prompts = [[*SYSTEM, *tokens(seed, own)] for seed, own in ((3, 30), (6, 20), (2, 9), (7, 5))]
    with cache.begin_many(prompts, capacity=600, segment_bytes=segment_bytes) as group:
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
        turns = 3 * GROWTH_COLUMNS // 5
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
