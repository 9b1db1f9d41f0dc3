"""Rows that leave a batch: for some steps it goes on with holes, instead of being gathered anew."""

from __future__ import annotations

import pytest

from radixcache import Group, PrefixCache
from radixcache.groups.row import Row
from radixcache.groups.storing import Storing
from radixcache.groups.ways import Way
from runner.models.tiny import tiny_model
from tests.groups.test_begin_many import ROUNDING, cold, error, stored
from tests.groups.test_prefill_many import PROMPTS, SYSTEM, Counting
from tests.groups.test_ways import WAYS

SINGLE = {kind for kind, way in WAYS.items() if way is Way.SINGLE}


def stepped(group: Group, counting: Counting, rows: list[Row], said: dict[Row, list[int]]) -> int:
    """Step these rows on tokens of no meaning, compare each with a cold run; rows that the model's pass had."""
    for row in rows:
        said[row].append(len(said[row]) % 200)
    logits = group.step(counting, rows, [said[row][-1] for row in rows])
    for row, found in zip(rows, logits, strict=True):
        assert error(found[0], cold(counting.model, said[row])) < ROUNDING
    group.check()
    return counting.shapes[-1][0]


@pytest.mark.parametrize("segment_bytes", [0, None])
@pytest.mark.parametrize("kind", [kind for kind in WAYS if kind not in SINGLE])
def test_a_batch_goes_on_with_a_hole_for_as_many_steps_as_it_has_rows(kind: str, segment_bytes: int | None) -> None:
    model = tiny_model(kind)
    cache, counting = PrefixCache(model), Counting(model)
    stored(cache, model, SYSTEM)
    with cache.begin_many(PROMPTS, capacity=600, segment_bytes=segment_bytes) as group:
        list(group.prefill_many(model, group.rows))
        rows = group.rows
        said = {row: row.prompt.tolist() for row in rows}
        assert stepped(group, counting, rows, said) == 4
        rows[1].close()
        left = [rows[3], rows[0], rows[2]]  # in any order
        assert [stepped(group, counting, left, said) for _ in range(6)] == [4, 4, 4, 4, 3, 3]
        rows[0].close()
        left.remove(rows[0])
        assert stepped(group, counting, left, said) == 3
        left.append(group.admit([*said[rows[0]], 5]))  # one that comes takes the hole's place, on what the other left
        said[left[-1]] = [*said[rows[0]], 5]
        list(group.prefill_many(model, left[-1:]))
        assert [stepped(group, counting, left, said) for _ in range(2)] == [3, 3]
    cache.check()


def test_a_row_that_stays_behind_is_no_hole() -> None:
    model = tiny_model("llama")
    cache, counting = PrefixCache(model), Counting(model)
    with cache.begin_many(PROMPTS, capacity=600) as group:
        list(group.prefill_many(model, group.rows))
        rows = group.rows
        said = {row: row.prompt.tolist() for row in rows}
        stepped(group, counting, rows, said)
        rows[0].close()
        assert stepped(group, counting, rows[1:3], said) == 2
        assert stepped(group, counting, rows[1:], said) == 3


def test_a_hole_is_given_up_where_there_is_no_room_for_it() -> None:
    model = tiny_model("llama")
    # A column for each of three steps, and one that is never written to.
    budget_bytes = 3072 * len(PROMPTS) * (max(map(len, PROMPTS)) + 3)
    cache, counting = PrefixCache(model, budget_bytes=budget_bytes), Counting(model)
    with cache.begin_many(PROMPTS, capacity=600, segment_bytes=1 << 30) as group:
        list(group.prefill_many(model, group.rows))
        rows = group.rows
        said = {row: row.prompt.tolist() for row in rows}
        assert stepped(group, counting, rows, said) == 4
        rows[0].close()
        assert [stepped(group, counting, rows[1:], said) for _ in range(3)] == [4, 3, 3]
        cache.check()


def test_a_checkpoint_of_windows_that_cannot_be_taken_costs_nobody_else_their_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("gemma3_text")
    cache = PrefixCache(model)
    with cache.begin_many(PROMPTS[2:], capacity=600) as group:
        first, other = group.rows
        list(group.prefill_many(model, [first], 20))

        def fail(*_: object) -> None:
            raise MemoryError("no room for a copy")

        with monkeypatch.context() as patching:
            patching.setattr(Storing, "take_checkpoint", fail)
            with pytest.raises(MemoryError, match="no room"):
                list(group.prefill_many(model, [other]))
        other.close()
        found = dict(group.prefill_many(model, [first]))
        assert error(found[first][0, 0], cold(model, first.prompt.tolist())) < ROUNDING
        group.check()
    cache.check()
