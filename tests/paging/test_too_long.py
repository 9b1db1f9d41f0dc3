"""Prompts that the budget has no room for: as much is kept of them as it has room for, and is right."""

from __future__ import annotations

import pytest

from radixcache import PrefixCache
from runner.models.tiny import tiny_model
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
