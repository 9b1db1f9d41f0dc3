"""Pins: a pinned prefix stays whatever the pressure, until it is let go as often as it was pinned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixcache import PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from runner.models.tiny import VOCABULARY_LENGTH, tiny_model
from tests.groups.cold import serve, shared_model
from tests.memory import held_bytes
from tests.paging.served import LLAMA_TOKEN_BYTES, PROMPT, SYSTEM
from tests.prompts import tokens

KINDS = ["llama", "nemotron_h"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model(request.param)


def test_a_pinned_prefix_without_a_checkpoint_of_its_own_keeps_the_nearest_above_it() -> None:
    cache = sized_cache(SizedLayout(1, 10), budget_bytes=1 << 20)
    prompt = list(range(100))
    with cache.begin(prompt, marks=[30, 60]) as session:
        session.prefill(SizedModel())
    cache.pin(prompt[:80])
    cache.reclaim(0)
    cache.check()
    assert cache.explain([*prompt[:80], 7]).resumable_tokens == 60


def test_a_live_path_is_not_cut_back_over_a_fork_that_a_pinned_prefix_hangs_on() -> None:
    cache = sized_cache(SizedLayout(1, 10), budget_bytes=1 << 20)
    system = list(range(50))
    pinned, live = [*system, *range(100, 150)], [*system, *range(200, 250)]
    with cache.begin(pinned) as session:
        session.prefill(SizedModel())
    cache.pin(pinned[:-1])
    with cache.begin(live) as session:
        session.step(SizedModel(), live)  # at once, so that no checkpoint is taken where the two part
    cache.reclaim(0)
    cache.check()
    assert cache.explain([*live, 1]).resumable_tokens == len(live)
    assert cache.explain(pinned).resumable_tokens == len(pinned) - 1


def test_a_pinned_prefix_survives_what_evicts_everything_else(model: Any) -> None:
    cache = PrefixCache(model)
    serve(cache, model, PROMPT, marks=[len(SYSTEM)])
    serve(cache, model, tokens(5, 50))
    kept = cache.pin(SYSTEM)
    assert kept == cache.stats.pinned_bytes > 0
    cache.reclaim(0)
    cache.check()
    assert cache.stats.tokens == len(SYSTEM)
    assert held_bytes(cache.stats) >= kept
    assert serve(cache, model, [*SYSTEM, *tokens(6, 10)], marks=[len(SYSTEM)]).cached_tokens == len(SYSTEM)
    cache.unpin(SYSTEM)
    cache.reclaim(0)
    assert held_bytes(cache.stats) == cache.stats.tokens == cache.stats.pinned_bytes == 0


def test_a_pin_inside_an_edge_keeps_exactly_its_tokens(llama: Any) -> None:
    cache = PrefixCache(llama)
    serve(cache, llama, PROMPT)
    assert cache.pin(PROMPT[:25]) == 25 * LLAMA_TOKEN_BYTES
    cache.check()
    cache.reclaim(0)
    assert cache.stats.tokens == 25
    assert serve(cache, llama, PROMPT).cached_tokens == 25


def test_only_a_prefix_that_is_stored_whole_can_be_pinned(model: Any) -> None:
    cache = PrefixCache(model)
    serve(cache, model, PROMPT)
    before = cache.dump()
    with pytest.raises(ValueError, match="only 70 of 72 tokens are stored; prefill them before pinning"):
        cache.pin([*PROMPT, 1, 2])
    with pytest.raises(ValueError, match="only 0 of 3 tokens are stored"):
        cache.pin([(PROMPT[0] + 1) % VOCABULARY_LENGTH, 1, 2])
    with pytest.raises(ValueError, match="only 0 of 70 tokens are stored"):
        cache.pin(PROMPT, namespace="other")
    assert cache.dump() == before
    cache.check()


def test_a_pinned_live_path_gives_up_its_spare_room_and_nothing_else(llama: Any) -> None:
    cache = PrefixCache(llama)
    serve(cache, llama, PROMPT)
    cache.pin(PROMPT)
    assert cache.stats.spare_bytes > LLAMA_TOKEN_BYTES
    cache.reclaim(0)
    assert cache.stats.spare_bytes <= LLAMA_TOKEN_BYTES
    assert cache.stats.tokens == len(PROMPT)
    assert serve(cache, llama, [*PROMPT, 1]).cached_tokens == len(PROMPT)


@pytest.mark.parametrize("slots", [1, 3])
def test_room_is_made_in_one_namespace_and_the_others_stay_as_they_are(model: Any, slots: int) -> None:
    cache = PrefixCache(model, budget_bytes=1 << 24, live_slots=slots)
    branches = [[*SYSTEM, *tokens(seed, 20)] for seed in (2, 3, 4)]
    for namespace in ("ann", "bob"):
        for prompt in (PROMPT, *branches):
            serve(cache, model, prompt, marks=[len(SYSTEM)], namespace=namespace)
    cache.pin(branches[0], "ann")
    theirs = cache.dump(namespace="bob").splitlines()[2:]
    before = cache.stats
    assert cache.reclaim(1 << 24, "ann") == 0
    freed = cache.reclaim(1 << 15, "ann")
    cache.check()
    after = cache.stats
    assert freed == before.live_bytes + before.paged_bytes - after.live_bytes - after.paged_bytes > 0
    last, first = (cache.explain([*prompt, 1], "ann").resumable_tokens for prompt in (branches[2], PROMPT))
    assert last >= first
    cache.reclaim(0, "ann")
    cache.check()
    assert cache.explain([*branches[0], 1], "ann").resumable_tokens == len(branches[0])
    assert cache.explain([*branches[2], 1], "ann").matched_tokens == len(SYSTEM)
    assert cache.dump(namespace="bob").splitlines()[2:] == theirs
    assert cache.reclaim(0, "nobody") == 0
    cache.clear()
    cache.check()


def test_one_namespace_is_dropped_with_its_pins_and_the_others_stay_as_they_are(model: Any) -> None:
    cache = PrefixCache(model, budget_bytes=1 << 24, live_slots=2)
    for namespace in ("ann", "bob"):
        serve(cache, model, PROMPT, marks=[len(SYSTEM)], namespace=namespace)
        serve(cache, model, [*SYSTEM, *tokens(2, 20)], marks=[len(SYSTEM)], namespace=namespace)
        cache.pin(SYSTEM, namespace, name="system")
    before = cache.explain(PROMPT, "bob").resumable_tokens
    with cache.begin(PROMPT[:-1], namespace="ann", reserve=4):
        cache.clear("ann")  # what the session uses stays
        cache.check()
    cache.clear("ann")
    cache.check()
    assert cache.explain(PROMPT, "ann").matched_tokens == 0
    assert cache.names("ann") == {}
    assert cache.explain(PROMPT, "bob").resumable_tokens == before > 0
    assert list(cache.names("bob")) == ["system"]
    cache.clear("nobody")
    cache.check()


def test_what_is_above_a_pinned_end_counts_as_pinned(llama: Any) -> None:
    system = tokens(1, 200)
    cache = PrefixCache(llama, budget_bytes=600 * LLAMA_TOKEN_BYTES)
    for number in (2, 3):
        serve(cache, llama, [*system, *tokens(number, 40, first=number)])
    cache.pin([*system, *tokens(3, 40, first=3)][:230])
    with cache.begin_many(capacity=1000) as group:
        assert group.has_bytes_for({}, np.array(tokens(4, 350, first=7)), 350)
        assert not group.has_bytes_for({}, np.array(tokens(4, 400, first=7)), 400)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
def test_pinned_state_of_point_layers_is_held_once_under_pressure(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    cache.warm(model, tokens(1, 90), name="system")
    cache.reclaim(0)
    cache.check()
    assert held_bytes(cache.stats) == cache.stats.pinned_bytes
    assert cache.explain([*tokens(1, 90), 5]).resumable_tokens == 90


@pytest.mark.parametrize("is_live", [True, False])
def test_no_room_is_promised_that_pinned_state_takes(llama: Any, is_live: bool) -> None:
    pinned, other = tokens(1, 250), tokens(2, 400, first=7)
    cache = PrefixCache(llama, budget_bytes=600 * LLAMA_TOKEN_BYTES)
    serve(cache, llama, pinned)
    cache.pin(pinned)
    if not is_live:
        serve(cache, llama, tokens(3, 20, first=9))
    with cache.begin_many(capacity=1000) as group:
        assert group.has_bytes_for({}, np.array(other[:300]), 300)
        assert not group.has_bytes_for({}, np.array(other), 400)
