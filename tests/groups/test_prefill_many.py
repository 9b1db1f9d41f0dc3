"""Prompts of several rows that are prefilled together: the same logits and state, in fewer forward passes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import Group, PrefixCache
from radixcache.groups.passes import Way, way_of
from radixcache.groups.row import Row
from radixcache.layers.layout import Layout, LiveStateError
from tests import inside
from tests.groups.cold import ROUNDING, cold, error, opened, serve, shared_model
from tests.groups.rows import PROMPTS, SYSTEM, WAYS, Watched, checked, decoded, grouped, prefilled
from tests.prompts import tokens


def through(group: Group, model: Any, rows: list[Row], chunk: int | None = None) -> dict[Row, mx.array]:
    found: dict[Row, mx.array] = {}
    while left := [row for row in rows if row.prompt_left]:
        found.update(group.prefill_many(model, left, chunk))
    return found


FAST = ("llama", "gpt_bigcode")
SLOW = [pytest.param(kind, None, marks=pytest.mark.slow) for kind in WAYS if kind not in FAST]


@pytest.mark.parametrize(("kind", "chunk"), [*((kind, None) for kind in FAST), ("gemma3_text", 16), *SLOW])
def test_rows_that_are_prefilled_together_get_what_each_gets_alone(kind: str, chunk: int | None) -> None:
    (model, cache), way = opened(kind), WAYS[kind]
    trial = way_of(model, lambda: make_prompt_cache(model))
    assert (trial.way, bool(trial.reason)) == (way, way is not Way.SEGMENTS)
    counting = Watched(model)
    serve(cache, model, SYSTEM)
    with cache.begin_many(PROMPTS, capacity=600, segment_bytes=0) as group:
        found = through(group, counting, group.rows, chunk)
        logits = [found[row][0, 0] for row in group.rows]
        for prompt, each in zip(PROMPTS, logits, strict=True):
            assert error(each, cold(model, prompt)) < ROUNDING
        group.check()
        assert (max(rows for rows, _ in counting.shapes) > 1) == (way is not Way.SINGLE)
        decoded(group, model, group.rows, logits, 4)
        is_in_place = way is Way.SEGMENTS and kind not in ("mamba2", "recurrent_gemma")
        assert bool(group.rows[0].reads()) == is_in_place
    for prompt in PROMPTS:
        assert cache.explain([*prompt, 99]).resumable_tokens >= len(prompt) - 16
        with cache.begin([*prompt, 7]) as session:
            assert error(session.step(model, session.remaining)[0, -1], cold(model, [*prompt, 7])) < ROUNDING
    cache.check()


@pytest.mark.parametrize(("kind", "position"), [("llama_sliding", 29), ("gemma3_text", 20), ("qwen3_next", 29)])
def test_a_pass_that_raises_leaves_every_row_of_it_as_it_was(kind: str, position: int) -> None:
    prompts = [tokens(index, 30) for index in (2, 3, 4)]
    prompts[1][29] = bad = max(set(range(256)) - {token for prompt in prompts for token in prompt})
    with grouped(kind, prompts, capacity=600) as (model, _, group):
        rows = group.rows
        list(group.prefill_many(model, rows, position))  # beyond the windows of those that have some
        assert [row.position for row in rows] == [position] * 3
        before = [inside.point_state(row, model) for row in rows]
        with pytest.raises(ValueError, match="bad token"):
            list(group.prefill_many(Watched(model, bad), rows))
        for row, its in zip(rows, before, strict=True):
            assert all(map(np.array_equal, inside.point_state(row, model), its))
        assert [row.position for row in rows] == [position] * 3
        group.check()
        found = through(group, model, rows)
        for row in rows:
            assert error(found[row][0, 0], cold(model, row.prompt.tolist())) < ROUNDING


def test_a_row_that_does_not_fit_beside_others_is_prefilled_alone() -> None:
    model, cache = opened("llama", budget_bytes=450 * 3072)
    prompts = [tokens(2, 300), *(tokens(index, 20) for index in (3, 4))]
    serve(cache, model, tokens(9, 5))
    cache.clear()
    with cache.begin_many(prompts, capacity=600, segment_bytes=1 << 30) as group:
        list(group.prefill_many(model, group.rows[:1], 280))
        counting = Watched(model)
        found = through(group, counting, group.rows)
        assert {rows for rows, _ in counting.shapes} == {1, 2}  # the long one goes alone
        for row in group.rows:
            assert error(found[row][0, 0], cold(model, row.prompt.tolist())) < ROUNDING
        cache.check()


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_last_tokens_are_left_to_the_step_that_others_take(kind: str) -> None:
    model = shared_model(kind)
    counting = Watched(model)
    prompts = [tokens(index, 60) for index in (2, 3, 4)]
    cache = PrefixCache(model)
    with cache.begin_many([tokens(5, 20), *prompts, tokens(6, 20)], capacity=600) as group:
        first, *rows, last = group.rows
        found = through(group, model, [first])
        counting.shapes.clear()
        assert list(group.prefill_many(counting, rows, leaves_last=True)) == []
        assert [row.prompt_left for row in rows] == [1, 1, 1]
        assert 1 not in [count for _, count in counting.shapes]
        # A pass over few tokens has room for the last one's logits.
        assert [row for row, _ in group.prefill_many(model, [last], leaves_last=True)] == [last]
        said = int(mx.argmax(found[first][0, 0]))
        logits = group.step(model, [first, *rows], [said, *(prompt[-1] for prompt in prompts)])
        for at, prompt in enumerate([[*tokens(5, 20), said], *prompts]):
            assert error(logits[at, 0], cold(model, prompt)) < ROUNDING
        group.check()
    cache.check()


def test_a_few_tokens_behind_a_checkpoint_take_one_pass_with_the_last_one() -> None:
    model, prompt = shared_model("qwen3_next"), tokens(2, 60)
    counting = Watched(model)
    with PrefixCache(model).begin_many(capacity=600) as group:
        row = group.admit(prompt, marks=[55])
        list(group.prefill_many(model, [row], 1))  # a cache's first pass is short
        found = dict(group.prefill_many(counting, [row], leaves_last=True))
        assert counting.shapes == [(1, 54), (1, 5)]
        assert error(found[row][0, 0], cold(model, prompt)) < ROUNDING


#: Kinds with recurrent layers; RecurrentGemma's first token has a rule of its own.
RECURRENT = ("qwen3_next", "recurrent_gemma", "nemotron_h")
MORE_RECURRENT = ("mamba", "mamba2", "rwkv7", "falcon_h1", "jamba", "kimi_linear", "lfm2", "plamo2", "baichuan_m1")


@pytest.mark.parametrize("kind", [*RECURRENT, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_RECURRENT)])
def test_a_row_that_has_begun_and_one_that_has_not_keep_their_recurrent_states(kind: str) -> None:
    """With as many tokens left of both prompts, and in a step with a prompt of one token."""
    model, cache = opened(kind)
    first, second = tokens(1, 9), tokens(2, 6)
    serve(cache, model, tokens(3, 9))
    with cache.begin_many([first, second, [7]], capacity=300) as group:
        rows = group.rows
        group.prefill(model, rows[0], 3)
        found = dict(group.prefill_many(model, rows[:2]))
        for row, prompt in zip(rows, (first, second), strict=False):
            assert error(found[row][0, 0], cold(model, prompt)) < ROUNDING
        logits = group.step(model, rows, [5, 6, 7])
        for its, text in zip(logits, ([*first, 5], [*second, 6], [7]), strict=True):
            assert error(its[0], cold(model, text)) < ROUNDING
        group.check()


def test_rows_that_have_begun_share_a_pass_while_a_new_row_goes_alone() -> None:
    model, prompts = shared_model("qwen3_next"), [tokens(1, 9), tokens(2, 9), tokens(3, 6)]
    counting = Watched(model)
    with PrefixCache(model).begin_many(prompts, capacity=300, segment_bytes=0) as group:
        list(group.prefill_many(model, group.rows[:2], 3))
        found = dict(group.prefill_many(counting, group.rows))
        assert sorted(counting.shapes) == [(1, 6), (2, 6)]
        assert all(error(found[row][0, 0], cold(model, prompts[at])) < ROUNDING for at, row in enumerate(group.rows))


ALIKE = [[*SYSTEM, *tokens(number, 5 + number)] for number in range(2, 6)]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_prompts_begun_together_hold_their_common_beginning_once(kind: str) -> None:
    """Recurrent rows share at a mark that another row has passed."""
    marks = [60] if kind == "qwen3_next" else []
    with grouped(kind, capacity=256) as (model, cache, group):
        rows = [group.admit(prompt, marks=marks) for prompt in ALIKE]
        assert [row.cached_tokens for row in rows] == [0, 0, 0, 0]
        logits = [prefilled(group, model, row) for row in rows]
        checked(cache, group)
        assert [row.cached_tokens for row in rows] == [0, 60, 60, 60]
        assert [row.remaining.tolist() for row in rows[1:]] == [prompt[60:] for prompt in ALIKE[1:]]
        assert group.used_tokens == 60 + sum(len(prompt) - 60 for prompt in ALIKE)
        assert (cache.stats.hit_tokens, cache.stats.requests) == (180, 4)
        assert cache.stats.hit_tokens + cache.stats.miss_tokens == sum(map(len, ALIKE))
        for prompt, found in zip(ALIKE, logits, strict=True):
            assert error(found, cold(model, prompt)) < ROUNDING
        decoded(group, model, rows, logits, 3)


def test_of_a_recurrent_row_so_much_can_be_shared_later_as_its_chunks_end_at() -> None:
    _, cache = opened("mamba")
    with cache.begin_many([ALIKE[0]], capacity=256) as group:
        (row,) = group.rows
        keys = np.asarray(ALIKE[1], dtype=np.int64)
        # Where a chunk of so many tokens ends in what the two have in common, or at the checkpoint at 51.
        for chunk_tokens, end in ((20, 60), (26, 52), (100, 51)):
            assert group.sharable_later(keys, row, chunk_tokens) == end


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_token_that_is_given_to_a_row_is_evaluated_where_the_row_stood(kind: str) -> None:
    """A row that has not begun is not moved by step() behind what another row has evaluated since."""
    with grouped(kind, capacity=256) as (model, _, group):
        first, second = (group.admit([*SYSTEM, token]) for token in (7, 8))
        decoded(group, model, [first], [prefilled(group, model, first)], 1)
        for token in range(3):
            found = group.step(model, [second], [SYSTEM[token]])[0, -1]
            assert error(found, cold(model, SYSTEM[: token + 1])) < ROUNDING
        assert second.position == 3
        assert error(prefilled(group, model, second), cold(model, [*SYSTEM, 8])) < ROUNDING


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba"])
def test_what_the_first_steps_of_a_cache_evaluate_is_shared(kind: str) -> None:
    with grouped(kind, capacity=256) as (model, _, group):
        first, second = group.admit([*SYSTEM, 7]), group.admit([*SYSTEM[:3], 8])
        for token in SYSTEM[:5]:
            group.step(model, [first], [token])
        assert error(prefilled(group, model, second), cold(model, [*SYSTEM[:3], 8])) < ROUNDING
        assert second.cached_tokens == (0 if kind == "mamba" else 3)


def test_a_row_that_cannot_take_up_more_after_all_stands_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    with grouped("mamba", capacity=256) as (model, cache, group):
        first, second = (group.admit(prompt, marks=[60]) for prompt in ALIKE[:2])
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
        assert error(prefilled(group, model, second), cold(model, ALIKE[1])) < ROUNDING
        assert second.cached_tokens == 60
