"""plan_prefill: what an engine with caches of its own evaluates, where it pauses, and which prompts wait."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import pytest

from radixcache import PrefixCache
from radixcache.mlx_server import PrefillPlan, plan_prefill
from tests.groups.cold import ROUNDING, cold, error, opened, serve
from tests.prompts import tokens

KINDS = ["llama", "llama_sliding", "nemotron_h"]
PROMPT = tokens(1, 300)


def planned(cache: PrefixCache, prompt: list[int], **options: Any) -> PrefillPlan:
    plan = plan_prefill(cache, prompt, **options)
    assert plan is not None
    return plan


def waits(cache: PrefixCache, prompt: list[int], **options: Any) -> bool:
    return plan_prefill(cache, prompt, **options) is None


def other(length: int, seed: int = 9) -> list[int]:
    """A prompt that leaves PROMPT after so many tokens."""
    return [*PROMPT[:length], (PROMPT[length] + 1) % 100, *tokens(seed, 30)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_keeps_to_a_plan_answers_as_a_cold_run_and_shares_each_stop(kind: str) -> None:
    model, cache = opened(kind)
    plan = planned(cache, PROMPT, marks=[120], waiting=[other(200), other(210, 8)])
    assert {120, 200, 299} <= {*plan.stops}
    assert all(high - low >= 64 for low, high in pairwise((0, *plan.stops[:-1])))
    segments = plan.segments()
    assert [*accumulate(map(len, segments))] == [*plan.stops, 300]
    for segment, stop in zip(segments, plan.stops, strict=False):
        model(mx.array([segment]), cache=plan.caches)
        assert cache.insert(PROMPT, plan.caches) == stop
        plan.position = stop
    assert error(model(mx.array([segments[-1]]), cache=plan.caches)[0, -1], cold(model, PROMPT)) < ROUNDING
    for stop in plan.stops:
        assert planned(cache, other(stop) if stop < 299 else PROMPT).start == stop


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_waits_until_the_stop_that_it_shares_is_stored(kind: str) -> None:
    model, cache = opened(kind)
    plan = planned(cache, PROMPT, waiting=[other(200)])
    assert waits(cache, other(200), running=[plan])
    model(mx.array([PROMPT[:200]]), cache=plan.caches)
    cache.insert(PROMPT, plan.caches)
    plan.position = 200
    assert planned(cache, other(200), running=[plan]).start == 200
    # The end of the prompt is still to come.
    assert waits(cache, [*PROMPT, 1, 2], running=[plan])


def test_a_prompt_does_not_wait_where_it_gains_little_or_nothing_soon() -> None:
    _, cache = opened("llama")
    plan = planned(cache, PROMPT)
    assert not waits(cache, other(40), running=[plan])  # less than a pass is worth
    assert waits(cache, other(150), running=[plan])
    assert not waits(cache, other(100), running=[plan])  # 299 tokens to wait, for 100 of 131
    assert not waits(cache, other(150), namespace="b", running=[plan])
    plan = planned(cache, PROMPT, marks=[64])
    assert waits(cache, [*other(64), *PROMPT], running=[plan])
    assert not waits(cache, [*other(63), *PROMPT], running=[plan])
    plan.position = 299
    assert not waits(cache, [*other(64), *PROMPT], running=[plan])  # the state could not be stored
    _, cache = opened("nemotron_h")
    plan = planned(cache, PROMPT)
    assert not waits(cache, other(250), running=[plan])  # there will be no checkpoint


def test_a_prompt_that_is_the_beginning_of_another_one_waits_for_a_stop_before_its_last_token() -> None:
    _, cache = opened("nemotron_h")
    assert not waits(cache, PROMPT[:200], running=[planned(cache, PROMPT, marks=[200])])
    assert waits(cache, PROMPT[:200], running=[planned(cache, PROMPT, waiting=[PROMPT[:200]])])


def test_a_prompt_that_is_stored_does_not_wait() -> None:
    model, cache = opened("llama")
    plan = planned(cache, PROMPT)
    serve(cache, model, PROMPT)
    assert planned(cache, other(200), running=[plan]).start == 200


def test_a_long_prompt_is_stored_in_pieces() -> None:
    _, cache = opened("llama", checkpoint_interval=100)
    assert planned(cache, PROMPT).stops == (100, 200, 299)
    assert planned(cache, PROMPT[:1]).stops == ()
    assert planned(cache, PROMPT[:1]).segments() == [PROMPT[:1]]
