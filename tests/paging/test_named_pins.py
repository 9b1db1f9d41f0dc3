"""Pins with a name and a time, and prefixes that are warmed ahead of use."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import CacheBusyError, Ledger, PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from runner.models.tiny import tiny_model
from tests.groups.cold import ROUNDING, serve
from tests.paging.served import LLAMA_TOKEN_BYTES, PROMPT, SYSTEM
from tests.prompts import tokens


def test_a_name_changes_over_only_when_the_new_prefix_is_stored_beside_the_old_one() -> None:
    cache = sized_cache(SizedLayout(1), budget_bytes=100)
    model = SizedModel()
    cache.warm(model, [1] * 60, name="a")
    with pytest.raises(ValueError, match=r"of 70 tokens could be stored: .* in the budget of 100 bytes"):
        cache.warm(model, [2] * 70, name="a")
    assert cache.names()["a"].tokens == 60
    assert cache.warm(model, [1] * 60) == 0
    cache.warm(model, [2] * 40, name="a")
    assert cache.names()["a"].tokens == 40
    cache.warm(model, [3] * 60, name="b")
    assert {name: pin.kept_bytes for name, pin in cache.names().items()} == {"a": 40, "b": 60}
    with pytest.raises(ValueError, match="pins would keep 101 bytes; the budget is 100 bytes"):
        cache.warm(model, [4] * 41, name="a")
    assert cache.names()["a"].tokens == 40
    cache.check()


def test_names_of_one_namespace_tell_nothing_of_another(llama: Any) -> None:
    cache = PrefixCache(llama)
    for namespace in ("a", "b"):
        serve(cache, llama, PROMPT, namespace=namespace)
        cache.pin(PROMPT, namespace, name="same")
    cache.pin(SYSTEM, "b", name="secret")
    assert list(cache.names("a")) == ["same"]
    assert list(cache.names("b")) == ["same", "secret"]
    assert cache.names() == {}
    with pytest.raises(ValueError, match=r"no pin is named 'secret' in namespace 'a'; named pins there: 'same'"):
        cache.unpin(name="secret", namespace="a")
    cache.unpin(name="same", namespace="a")
    assert list(cache.names("b")) == ["same", "secret"]
    cache.check()


def test_wrong_arguments_are_refused_and_change_nothing(llama: Any) -> None:
    cache = PrefixCache(llama)
    serve(cache, llama, PROMPT)
    before = cache.dump()
    wrong = ({"ttl_s": 0}, {"ttl_s": -1.0}, {"ttl_s": True}, {"ttl_s": math.nan}, {"ttl_s": math.inf}, {"ttl_s": "1"})
    wrong += ({"name": ""}, {"name": 3}, {"ttl_requests": 0}, {"ttl_requests": True}, {"ttl_requests": 1.5})
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"wanted"):
            cache.pin(SYSTEM, **arguments)
        with pytest.raises(ValueError, match=r"wanted"):
            cache.warm(llama, SYSTEM, **arguments)
    for arguments in ({}, {"tokens": SYSTEM, "name": "a"}):
        with pytest.raises(ValueError, match="exactly one"):
            cache.unpin(**arguments)
    with pytest.raises(ValueError, match="these 40 tokens are not pinned in namespace ''"):
        cache.unpin(SYSTEM)
    with pytest.raises(ValueError, match="mark 41 is outside the prompt of 40 tokens"):
        cache.warm(llama, SYSTEM, marks=[41])
    assert (cache.dump(), cache.names()) == (before, {})


def test_a_pin_ends_when_its_seconds_are_over_at_the_next_call_whatever_that_is(llama: Any) -> None:
    now_s = 100.0
    cache = PrefixCache(llama, seconds=lambda: now_s)
    serve(cache, llama, PROMPT)
    serve(cache, llama, [9, *PROMPT])
    cache.pin(SYSTEM, name="support", ttl_s=60)
    cache.pin([9, *PROMPT], ttl_s=20.5, ttl_requests=100)
    assert cache.warm(llama, SYSTEM[:30], name="short", ttl_s=10) == 0
    now_s = 109
    assert {name: pin.seconds_left for name, pin in cache.names().items()} == {"support": 51, "short": 1}
    now_s = 110
    assert list(cache.names()) == ["support"]
    cache.reclaim(0)
    assert cache.stats.tokens == 40 + 1 + len(PROMPT)
    now_s = 121
    cache.reclaim(0)
    assert cache.stats.tokens == 40
    now_s = 160
    serve(cache, llama, tokens(50, 5))
    assert (cache.names(), cache.stats.pinned_bytes) == ({}, 0)
    cache.reclaim(0)
    assert cache.stats.tokens == 0
    cache.check()


def test_no_clock_is_read_without_a_pin_that_needs_one(llama: Any) -> None:
    def seconds() -> float:
        raise AssertionError("a clock was read")

    cache = PrefixCache(llama, seconds=seconds)
    serve(cache, llama, PROMPT)
    cache.pin(SYSTEM, name="support", ttl_requests=3)
    serve(cache, llama, PROMPT)
    assert cache.names()["support"].seconds_left is None
    with pytest.raises(ValueError, match="seconds is 3; wanted a function"):
        PrefixCache(llama, seconds=3)  # type: ignore[arg-type]


def test_a_pin_ends_with_its_last_request_and_the_prefix_is_ordinary_again(llama: Any) -> None:
    cache = PrefixCache(llama)
    serve(cache, llama, PROMPT)
    cache.pin(SYSTEM, name="support", ttl_requests=3)
    for left in (3, 2, 1):
        assert cache.names()["support"].requests_left == left
        cache.reclaim(0)
        assert cache.stats.tokens == 40
        if left == 2:
            cache.fetch(tokens(50 + left, 5))
        else:
            serve(cache, llama, tokens(50 + left, 5))
    assert cache.names() == {}
    assert cache.stats.pinned_bytes == 0
    cache.reclaim(0)
    assert cache.stats.tokens == 0
    cache.check()


def test_pins_of_all_caches_on_a_ledger_count_together(llama: Any) -> None:
    ledger = Ledger(100 * LLAMA_TOKEN_BYTES)
    ours, theirs = PrefixCache(llama, budget_bytes=ledger), PrefixCache(llama, budget_bytes=ledger)
    serve(ours, llama, SYSTEM)
    ours.pin(SYSTEM, name="ours")
    for seed in range(4):
        serve(theirs, llama, tokens(20 + seed, 45))
    assert serve(ours, llama, [*SYSTEM, 1]).cached_tokens == 40
    theirs.clear()
    with pytest.raises(ValueError, match=r"pins would keep \d+ bytes, \d+ of them for caches that share the budget"):
        theirs.warm(llama, tokens(30, 70), name="theirs")
    assert theirs.names() == {}
    assert list(ours.names()) == ["ours"]


def test_a_pin_of_live_state_that_is_lost_is_gone_with_it_and_no_other(llama: Any) -> None:
    cache = PrefixCache(llama)
    cache.warm(llama, tokens(8, 20), name="paged")
    cache.warm(llama, PROMPT, name="live")
    with cache.begin([*PROMPT, 1, 2, 3]) as session:
        session.prefill(llama)
        session.is_lost = True
    cache.check()
    assert list(cache.names()) == ["paged"]
    assert cache.stats.pinned_bytes == 20 * LLAMA_TOKEN_BYTES
    assert serve(cache, llama, [*tokens(8, 20), 5]).cached_tokens == 20


@pytest.mark.parametrize("kind", ["llama", "llama_sliding", "nemotron_h"])
def test_a_warmed_prefix_is_resumed_at_its_very_end(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model, live_slots=2)
    with cache.begin(tokens(3, 30)) as other:
        other.prefill(model)
        assert cache.warm(model, SYSTEM, name="system", step_size=16) == len(SYSTEM)
        cache.check()
    assert cache.warm(model, SYSTEM, name="system") == 0
    cache.reclaim(0)
    assert cache.stats.tokens == len(SYSTEM)
    for seed in (5, 6):
        session = serve(cache, model, [*SYSTEM, *tokens(seed, 20)])
        assert (session.cached_tokens, session.reason) == (len(SYSTEM), None)
    assert cache.warm(model, [*SYSTEM, *tokens(7, 10)]) == 10, "only what is missing is evaluated"


def test_what_is_there_is_warm_at_once_even_with_no_slot_free(llama: Any) -> None:
    cache = PrefixCache(llama)
    cache.warm(llama, SYSTEM)
    before = cache.stats.requests
    with cache.begin(tokens(3, 10)):
        assert cache.warm(llama, SYSTEM, name="system") == 0
        assert list(cache.names()) == ["system"]
        with pytest.raises(CacheBusyError):
            cache.warm(llama, PROMPT, name="prompt")
    assert list(cache.names()) == ["system"]
    assert cache.stats.requests == before + 1


def test_warming_takes_no_checkpoint_but_those_asked_for_and_the_one_at_its_end() -> None:
    mamba = tiny_model("mamba")
    cache = PrefixCache(mamba)
    cache.warm(mamba, SYSTEM, marks=[10])
    assert [(node.end, node.checkpoint) for node in cache.view().nodes] == [(10, "mark"), (40, "mark")]


def test_progress_of_warming_is_told_in_tokens_of_the_prefix(llama: Any) -> None:
    told: list[tuple[int, int]] = []
    PrefixCache(llama).warm(llama, SYSTEM, step_size=16, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 40), (16, 40), (32, 40), (40, 40)]


def test_a_prefix_that_cannot_stay_is_refused_before_anything_is_evaluated_and_is_no_request() -> None:
    cache = sized_cache(SizedLayout(1), budget_bytes=100)
    first, second = tokens(8, 80), tokens(9, 60)
    cache.warm(SizedModel(), first, name="a", ttl_requests=2)
    before = (cache.stats, cache.names(), cache.dump())
    assert cache.names()["a"].requests_left == 2
    told: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match="pins would keep 140 bytes; the budget is 100 bytes"):
        cache.warm(SizedModel(), second, name="b", on_progress=lambda *at: told.append(at))
    assert told == []
    assert (cache.stats, cache.names(), cache.dump()) == before
    with pytest.raises(ValueError, match="pins would keep 140 bytes"):
        cache.warm(SizedModel(), second, ttl_requests=5)


def test_a_failure_while_warming_leaves_what_was_evaluated_and_no_pin(llama: Any) -> None:
    cache = PrefixCache(llama)
    calls = 0

    def breaks_at_the_third(array: mx.array, cache: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("planted")
        return llama(array, cache=cache)

    with pytest.raises(RuntimeError, match="planted"):
        cache.warm(breaks_at_the_third, SYSTEM, name="system", step_size=16)
    cache.check()
    assert (cache.stats.tokens, cache.names()) == (32, {})
    assert cache.warm(llama, SYSTEM, name="system") == 8


def test_a_prefix_is_warmed_for_a_draft_model_too(llama: Any) -> None:
    draft = tiny_model("qwen3")
    cache = PrefixCache(caches=lambda: [*make_prompt_cache(llama), *make_prompt_cache(draft)], budget_bytes=1 << 30)
    assert cache.warm(llama, SYSTEM, draft_model=draft) == 40
    layers = len(llama.layers)
    with cache.begin([*SYSTEM, 1]) as session:
        assert session.cached_tokens == 40
        for model, caches in ((llama, session.caches[:layers]), (draft, session.caches[layers:])):
            cold = np.array(model(mx.array([[*SYSTEM, 1]]), cache=make_prompt_cache(model))[0, -1])
            assert np.abs(np.array(model(mx.array([[1]]), cache=caches)[0, -1]) - cold).max() < ROUNDING
    with pytest.raises(ValueError, match=r"has \d+ layer caches; draft_model needs the \d+ of both models, in order"):
        PrefixCache(llama).warm(llama, SYSTEM, draft_model=draft)
