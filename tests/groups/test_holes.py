"""Rows that leave a batch: for some steps it goes on with holes, instead of being gathered anew."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from radixcache import Group, PrefixCache
from radixcache.groups.passes import Way
from radixcache.groups.row import Row
from radixcache.groups.sharing import Sharing
from tests.groups.cold import ROUNDING, cold, cold_last, error, shared_model
from tests.groups.test_begin_many import stored
from tests.groups.test_prefill_many import PROMPTS, SYSTEM, Counting
from tests.groups.test_ways import WAYS

SINGLE = {kind for kind, way in WAYS.items() if way is Way.SINGLE}


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


@pytest.mark.parametrize("segment_bytes", [0, None])
@pytest.mark.parametrize("kind", [kind for kind in WAYS if kind not in SINGLE])
def test_a_batch_goes_on_with_a_hole_for_as_many_steps_as_it_has_rows(kind: str, segment_bytes: int | None) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model)
    stored(cache, model, SYSTEM)
    with cache.begin_many(PROMPTS, capacity=600, segment_bytes=segment_bytes) as group:
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
            patching.setattr(Sharing, "take_checkpoint", fail)
            with pytest.raises(MemoryError, match="no room"):
                list(group.prefill_many(model, [other]))
        other.close()
        found = dict(group.prefill_many(model, [first]))
        assert error(found[first][0, 0], cold(model, first.prompt.tolist())) < ROUNDING
        group.check()
    cache.check()
