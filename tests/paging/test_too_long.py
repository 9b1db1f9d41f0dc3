"""Prompts that the budget has no room for: as much is kept of them as it has room for, and is right."""

from __future__ import annotations

import pytest

from radixcache import PrefixCache
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens
from tests.restarts import cold, is_close, serve

KINDS = ["llama_sliding", "nemotron_h"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_resumes_as_far_as_the_budget_reaches(kind: str) -> None:
    model, prompt = tiny_model(kind), tokens(1, 700)
    whole = PrefixCache(model)
    serve(whole, model, prompt[:600])
    budget_bytes = whole.stats.live_bytes // 3
    cache = PrefixCache(model, budget_bytes=budget_bytes, checkpoint_interval=16)
    assert serve(cache, model, prompt[:600])[0] == 0
    for length in (650, 700):
        cached, logits = serve(cache, model, prompt[:length])
        assert 100 <= cached < 500
        assert is_close(logits, cold(model, prompt[:length]))
        assert cache.stats.live_bytes + cache.stats.paged_bytes <= budget_bytes


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("qwen3_next", marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_as_many_tokens_are_kept_as_the_budget_has_room_for(kind: str, share: float) -> None:
    model, prompt = tiny_model(kind), tokens(1, 700)
    whole = PrefixCache(model)
    serve(whole, model, prompt)
    layout = inside.layout(whole)
    budget_bytes = int(share * layout.request_bytes(700))
    cache = PrefixCache(model, budget_bytes=budget_bytes)
    serve(cache, model, tokens(2, 50))
    serve(cache, model, prompt)
    point_bytes = layout.request_bytes(700) - 700 * layout.token_bytes
    kept = cache.explain(prompt).resumable_tokens
    # Point state is live and in the tree.
    room = (budget_bytes - 2 * point_bytes) // layout.token_bytes
    assert room - 1 <= kept <= room
    assert cache.stats.live_bytes + cache.stats.paged_bytes <= budget_bytes


def test_a_budget_of_one_byte_still_serves() -> None:
    for kind in KINDS:
        model, prompt = tiny_model(kind), tokens(1, 100)
        cache = PrefixCache(model, budget_bytes=1)
        for _ in range(2):
            cached, logits = serve(cache, model, prompt)
            assert cached == 0
            assert is_close(logits, cold(model, prompt))
            assert cache.stats.live_bytes + cache.stats.paged_bytes == 0
            cache.check()
