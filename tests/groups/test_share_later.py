"""Rows that were admitted together, on prompts that begin alike and are nowhere yet: the beginning is held once.

What a row evaluates is there for the others from then on; each looks again when its own first chunk is due.
"""

from __future__ import annotations

import numpy as np
import pytest

from radixcache.layers.layout import Layout, LiveStateError
from tests.groups.cold import ROUNDING, cold, error, opened
from tests.groups.rows import checked, decoded, grouped, prefilled
from tests.prompts import tokens

SYSTEM = tokens(1, 60)
PROMPTS = [[*SYSTEM, *tokens(number, 5 + number)] for number in range(2, 6)]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_prompts_begun_together_hold_their_common_beginning_once(kind: str) -> None:
    """Recurrent rows share at a mark that another row has passed."""
    marks = [60] if kind == "qwen3_next" else []
    with grouped(kind, capacity=256) as (model, cache, group):
        rows = [group.admit(prompt, marks=marks) for prompt in PROMPTS]
        assert [row.cached_tokens for row in rows] == [0, 0, 0, 0]
        logits = [prefilled(group, model, row) for row in rows]
        checked(cache, group)
        assert [row.cached_tokens for row in rows] == [0, 60, 60, 60]
        assert [row.remaining.tolist() for row in rows[1:]] == [prompt[60:] for prompt in PROMPTS[1:]]
        assert group.used_tokens == 60 + sum(len(prompt) - 60 for prompt in PROMPTS)
        assert (cache.stats.hit_tokens, cache.stats.requests) == (180, 4)
        assert cache.stats.hit_tokens + cache.stats.miss_tokens == sum(map(len, PROMPTS))
        for prompt, found in zip(PROMPTS, logits, strict=True):
            assert error(found, cold(model, prompt)) < ROUNDING
        decoded(group, model, rows, logits, 3)


def test_of_a_recurrent_row_so_much_can_be_shared_later_as_its_chunks_end_at() -> None:
    _, cache = opened("mamba")
    with cache.begin_many([PROMPTS[0]], capacity=256) as group:
        (row,) = group.rows
        keys = np.asarray(PROMPTS[1], dtype=np.int64)
        # Where a chunk of so many tokens ends in what the two have in common, or at the checkpoint at 51.
        for chunk_tokens, end in ((20, 60), (26, 52), (100, 51)):
            assert group.sharable_later(keys, row, chunk_tokens) == end


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_token_that_is_given_to_a_row_is_evaluated_where_the_row_stood(kind: str) -> None:
    """A row that has not begun is not moved by step() behind what another row has evaluated since."""
    with grouped(kind, capacity=256) as (model, cache, group):
        first, second = (group.admit([*SYSTEM, token]) for token in (7, 8))
        decoded(group, model, [first], [prefilled(group, model, first)], 1)
        for token in range(3):
            found = group.step(model, [second], [SYSTEM[token]])[0, -1]
            assert error(found, cold(model, SYSTEM[: token + 1])) < ROUNDING
        assert second.position == 3
        assert error(prefilled(group, model, second), cold(model, [*SYSTEM, 8])) < ROUNDING
        checked(cache, group)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba"])
def test_what_the_first_steps_of_a_cache_evaluate_is_shared(kind: str) -> None:
    with grouped(kind, capacity=256) as (model, cache, group):
        first, second = group.admit([*SYSTEM, 7]), group.admit([*SYSTEM[:3], 8])
        for token in SYSTEM[:5]:
            group.step(model, [first], [token])
        assert error(prefilled(group, model, second), cold(model, [*SYSTEM[:3], 8])) < ROUNDING
        assert second.cached_tokens == (0 if kind == "mamba" else 3)
        checked(cache, group)


def test_a_row_that_cannot_take_up_more_after_all_stands_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    with grouped("mamba", capacity=256) as (model, cache, group):
        first, second = (group.admit(prompt, marks=[60]) for prompt in PROMPTS[:2])
        prefilled(group, model, first)
        real = Layout.restore_points

        def failing(self: Layout, *arguments: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(Layout, "restore_points", failing)
        with pytest.raises(LiveStateError, match="no room"):
            group.prefill(model, second)
        assert (second.position, second.cached_tokens) == (0, 0)
        checked(cache, group)
        monkeypatch.setattr(Layout, "restore_points", real)
        assert error(prefilled(group, model, second), cold(model, PROMPTS[1])) < ROUNDING
        assert second.cached_tokens == 60
