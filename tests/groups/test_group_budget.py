"""Groups on a byte budget: what may go does; then rows go on beyond the budget, with what the device can spare."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from radixcache import Group, PrefixCache, RequestTooLargeError
from radixcache.groups.group import FIRST_TOKENS
from radixcache.layers.layout import Layout
from tests import inside
from tests.groups.cold import ROUNDING, cold, error, opened, shared_model
from tests.groups.rows import known, row_bytes
from tests.memory import held_bytes
from tests.prompts import tokens


def within_budget(cache: PrefixCache, group: Group) -> None:
    assert held_bytes(cache.stats) <= cache.stats.budget_bytes
    group.check()
    cache.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_rows_beyond_the_budget_go_on_and_as_much_is_kept_as_fits_when_they_close(kind: str) -> None:
    model: Any = shared_model(kind)
    budget_bytes = 3 * row_bytes(model, 300) // 2
    cache = known(model, budget_bytes, checkpoint_interval=16)
    prompts = [tokens(20 + count, 300) for count in range(5)]
    with cache.begin_many([], capacity=4000) as group:
        for count, prompt in enumerate(prompts, start=1):
            found = group.prefill(model, group.admit(prompt))
            assert found is not None
            assert error(found[0, 0], cold(model, prompt)) < ROUNDING
            stats = cache.stats
            assert stats.over_budget_bytes == max(0, held_bytes(cache.stats) - budget_bytes)
            assert (stats.over_budget_bytes > 0) == (count > 1)
            assert stats.held_bytes["rows"] >= group.nbytes
        for token in range(3):
            logits = group.step(model, group.rows, [token] * 5)
        for prompt, its in zip(prompts, logits, strict=True):
            assert error(its[0], cold(model, (*prompt, 0, 1, 2))) < ROUNDING
        group.check()
        cache.check()
    assert held_bytes(cache.stats) <= budget_bytes
    assert cache.stats.over_budget_bytes == 0
    assert max(cache.explain([*prompt, 0, 1, 2, 3]).resumable_tokens for prompt in prompts) > 100
    cache.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_of_a_row_that_is_larger_than_the_budget_the_beginning_is_kept(kind: str) -> None:
    model, prompt = shared_model(kind), tokens(1, 1400)
    budget_bytes = row_bytes(model, 700)
    cache = known(model, budget_bytes, checkpoint_interval=100)
    with cache.begin_many([prompt], capacity=4000) as group:
        group.prefill(model, group.rows[0])
        assert held_bytes(cache.stats) > budget_bytes
    assert held_bytes(cache.stats) <= budget_bytes
    kept = cache.explain(prompt).resumable_tokens
    assert 256 <= kept < 1400
    with cache.begin(prompt) as session:
        session.prefill(model)
        assert error(session.step(model, prompt[-1:])[0, -1], cold(model, prompt)) < ROUNDING
    assert session.cached_tokens == kept
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


def test_what_is_refused_costs_no_checkpoint() -> None:
    model: Any = shared_model("qwen3_next")
    budget_bytes = 2 * row_bytes(model, 100)
    cache = known(model, budget_bytes, max_request_bytes=budget_bytes)
    with cache.begin_many([], capacity=4000) as group:
        row = group.admit(tokens(1, 60), marks=[20])
        group.prefill(model, row)
        taken = list(inside.checkpoints(row))
        assert taken
        with pytest.raises(RequestTooLargeError, match=f"max_request_bytes is {budget_bytes} bytes"):
            group.admit(tokens(2, 3000))
        assert inside.checkpoints(row) == taken
        group.check()
    cache.check()


def test_the_first_forward_pass_of_a_cache_takes_few_tokens_and_then_the_limit_is_asked() -> None:
    model: Any = shared_model("llama")
    token_bytes = inside.layout(known(model)).token_bytes
    cache = PrefixCache(model, budget_bytes=1, max_request_bytes=200 * token_bytes)
    with cache.begin_many([tokens(1, 3000)], capacity=100_000) as group:
        with pytest.raises(RequestTooLargeError) as refused:
            group.prefill(model, group.rows[0])
        assert (refused.value.needed_bytes, refused.value.available_bytes) == (3000 * token_bytes, 200 * token_bytes)
        assert group.rows[0].position == FIRST_TOKENS
        with pytest.raises(RequestTooLargeError):
            group.prefill(model, group.rows[0], 100)
        assert group.rows[0].position == FIRST_TOKENS
        group.check()
    cache.check()


def test_rows_that_the_device_cannot_hold_together_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = shared_model("llama")
    cache = known(model, 50_000)
    token_bytes = inside.layout(cache).token_bytes
    device_bytes = 1000 * token_bytes
    monkeypatch.setattr(Layout, "device_bytes", lambda _: device_bytes - cache.stats.live_bytes)
    with cache.begin_many([tokens(2, 600), tokens(3, 600)], capacity=100_000) as group:
        first, second = group.rows
        group.prefill(model, first)
        with pytest.raises(RequestTooLargeError, match="the device can spare"):
            group.prefill(model, second)
        assert second.position == 0
        for refuse in (group.admit, cache.begin):
            with pytest.raises(RequestTooLargeError, match="the device can spare") as refused:
                refuse(tokens(4, 2500))
            assert refused.value.needed_bytes == 2500 * token_bytes
            assert 0 < refused.value.available_bytes <= 1000 * token_bytes
        group.check()
        first.close()
        found = group.prefill(model, second)
        assert found is not None
        assert error(found[0, 0], cold(model, tokens(3, 600))) < ROUNDING
        group.check()
    cache.check()


def test_what_would_not_fit_even_alone_is_known_from_the_first_pass_on() -> None:
    model, cache = opened("qwen3_next", max_request_bytes=1 << 20)
    with cache.begin_many([tokens(1, 20)], capacity=10_000) as group:
        assert group.refusal_of(5_000) is None
        group.prefill(model, group.rows[0])
        refused = group.refusal_of(5_000)
        assert refused is not None
        assert refused.available_bytes == 1 << 20
        token_bytes = inside.layout(cache).token_bytes
        state_bytes = row_bytes(model, 1)
        assert 0 < refused.needed_bytes - 5_000 * token_bytes < state_bytes
        assert group.refusal_of(100) is None
