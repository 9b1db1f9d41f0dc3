"""Groups on a byte budget: what a row takes is asked for first, and what may go does."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from radixcache import BudgetFullError, Group, PrefixCache
from radixcache.groups.group import FIRST_TOKENS
from tests import inside
from tests.groups.cold import opened, shared_model
from tests.prompts import tokens


def held_bytes(cache: PrefixCache) -> int:
    return cache.stats.live_bytes + cache.stats.paged_bytes


def within_budget(cache: PrefixCache, group: Group) -> None:
    assert held_bytes(cache) <= cache.stats.budget_bytes
    group.check()
    cache.check()


def known(model: Any, budget_bytes: int | None = None) -> PrefixCache:
    """A cache that has seen its model run."""
    cache = PrefixCache(model) if budget_bytes is None else PrefixCache(model, budget_bytes=budget_bytes)
    with cache.begin(tokens(9, 8)) as session:
        session.prefill(model)
    cache.clear()
    return cache


def row_bytes(model: Any, length: int) -> int:
    """What one row with so many tokens takes of a budget without bounds."""
    with known(model).begin_many([tokens(1, length)], capacity=length) as group:
        group.prefill(model, group.rows[0])
        return group.nbytes


def open_rows(cache: PrefixCache, group: Group, model: Any, length: int, most: int) -> int:
    """Admit and prefill rows until one is refused; returns how many were not."""
    for count in range(most):
        try:
            group.prefill(model, group.admit(tokens(20 + count, length)))
        except BudgetFullError:
            return count
        assert held_bytes(cache) <= cache.stats.budget_bytes
    return most


@pytest.mark.parametrize("kind", ["mamba", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_rows_with_a_state_of_their_own_are_refused_before_they_are_over_the_budget(kind: str) -> None:
    model: Any = shared_model(kind)
    each = row_bytes(model, 8)
    cache = known(model, 5 * each)
    with cache.begin_many([], capacity=400) as group:
        opened = open_rows(cache, group, model, 8, most=40)
        assert 3 <= opened < 40
        group.check()
        cache.check()
        # The others go on, and the one that was refused has its turn when some of them are through.
        group.rows[0].close()
        mx.eval(group.step(model, group.rows[: opened - 1], [3] * (opened - 1)))
        group.rows[0].close()
        group.prefill(model, group.rows[-1])
        group.check()
    assert held_bytes(cache) <= cache.stats.budget_bytes
    cache.check()


def test_a_row_gives_up_its_checkpoints_rather_than_its_next_token() -> None:
    model: Any = shared_model("mamba")
    each = row_bytes(model, 8)
    cache = known(model, 5 * each // 2)
    with cache.begin_many([], capacity=400) as group:
        row = group.admit(tokens(1, 40), marks=[10, 20, 30])
        group.prefill(model, row)
        # One beside its state; there was no room for the others.
        assert len(inside.checkpoints(row)) == 1
        other = group.admit(tokens(2, 30))
        group.prefill(model, other)
        assert (inside.checkpoints(row), inside.checkpoints(other)) == ([], [])
        mx.eval(group.step(model, [row, other], [5, 6]))
        within_budget(cache, group)


def test_what_cannot_fit_anyway_costs_no_checkpoint() -> None:
    model: Any = shared_model("qwen3_next")
    cache = known(model, 2 * row_bytes(model, 100))
    with cache.begin_many([], capacity=4000) as group:
        row = group.admit(tokens(1, 60), marks=[20])
        group.prefill(model, row)
        taken = list(inside.checkpoints(row))
        assert taken
        with pytest.raises(BudgetFullError):
            group.prefill(model, group.admit(tokens(2, 3000)))
        assert inside.checkpoints(row) == taken
        group.check()
    cache.check()


def test_the_state_of_a_row_that_takes_up_what_another_evaluated_meanwhile_is_asked_for() -> None:
    model: Any = shared_model("mamba")
    each = row_bytes(model, 8)
    prompt = tokens(1, 40)
    cache = known(model, 5 * each // 2)
    with cache.begin_many([prompt, prompt, prompt], capacity=400) as group:
        first, second, third = group.rows
        group.prefill(model, first, 39)
        group.prefill(model, second, 39)
        with pytest.raises(BudgetFullError):
            group.prefill(model, third)
        within_budget(cache, group)
        assert (third.position, third.prompt_left) == (third.cached_tokens, len(prompt) - third.cached_tokens)
        second.close()
        found = group.prefill(model, third)
        wanted = model(mx.array([prompt]))[:, -1:]
        assert found is not None
        assert mx.abs(found - wanted).max().item() < 1e-4
        assert held_bytes(cache) <= cache.stats.budget_bytes
    cache.check()


def test_the_first_forward_pass_of_a_cache_takes_few_tokens_and_then_the_budget_is_asked() -> None:
    model: Any = shared_model("llama")
    token_bytes = inside.layout(known(model)).token_bytes
    cache = PrefixCache(model, budget_bytes=200 * token_bytes)
    with cache.begin_many([tokens(1, 3000)], capacity=100_000) as group:
        with pytest.raises(BudgetFullError, match="do not fit the budget"):
            group.prefill(model, group.rows[0])
        assert group.rows[0].position == FIRST_TOKENS
        within_budget(cache, group)
        group.prefill(model, group.rows[0], 100)
    cache.check()


def test_what_would_not_fit_even_alone_is_known_from_the_first_pass_on() -> None:
    model, cache = opened("qwen3_next", budget_bytes=1 << 20)
    with cache.begin_many([tokens(1, 20)], capacity=10_000) as group:
        assert group.refusal_of(5_000) is None
        group.prefill(model, group.rows[0])
        refused = group.refusal_of(5_000)
        assert refused is not None
        assert (refused.budget_bytes, refused.held_bytes) == (1 << 20, 0)
        token_bytes = inside.layout(cache).token_bytes
        state_bytes = row_bytes(model, 1)
        assert 0 < refused.wanted_bytes - 5_000 * token_bytes < state_bytes
        assert group.refusal_of(100) is None
