"""What was made apart and meets in one cache: verification, exact mode, pins, warming, explain, one ledger for two."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache import Event, EventKind, Ledger, PrefixCache, Session, StatsSnapshot
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens
from tests.verify.faults import spoil_live
from tests.walks.spelling import SpellingModel
from tests.whole.exact_logits import REPLY, STEP, Logits, Recorded, differing, exact_cache, serve

PROMPT = tokens(11, 70)


def served(cache: PrefixCache, model: Any, prompt: list[int], **more: Any) -> Session:
    """A session that has prefilled a prompt, closed."""
    with cache.begin(prompt, **more) as session:
        session.prefill(model)
    return session


def verifying(model: Any, **more: Any) -> PrefixCache:
    """A cache that verifies each request."""
    return PrefixCache(model, verify=1.0, step_size=STEP, **more)


class OwnPasses(Recorded):
    """Records what a session evaluates in its own caches, and lets the cold run of a check pass."""

    def __init__(self, model: Any, session: Session) -> None:
        super().__init__(model, session.position)
        self.session = session

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        if cache is not self.session.caches:
            return self.model(ids, cache=cache)
        self.offset = self.session.position
        return super().__call__(ids, cache)


def own_logits(session: Session, model: Any) -> Logits:
    recorded = OwnPasses(model, session)
    session.prefill(recorded)
    for token in (int(session.prompt[-1]), *REPLY):
        session.step(recorded, [token])
    return recorded.logits


def asked_where_it_is_wrong(model: Any) -> tuple[list[int], Logits, PrefixCache]:
    """A prompt, its cold logits, and an exact cache that verifies and has its beginning wrong from token 20 on."""
    prompt = [*PROMPT, *tokens(12, 40)]
    cold = serve(exact_cache(model), model, prompt)
    cache = exact_cache(model, verify=1.0)
    serve(cache, model, PROMPT)
    spoil_live(cache, 0, 20)
    return prompt, cold, cache


def test_a_session_that_starts_over_in_exact_mode_answers_as_a_cold_one_and_stores_whole_chunks() -> None:
    model = tiny_model("llama_sliding")
    prompt, cold, cache = asked_where_it_is_wrong(model)
    with cache.begin(prompt) as session:
        assert session.cached_tokens == 64
        with pytest.warns(RuntimeWarning, match="cold prefill"):
            found = own_logits(session, model)
        assert inside.grid_end(session) == 96
        assert found.keys() == cold.keys()
        assert differing(found, cold) == []
    cache.check()
    start = cache.mismatches[0].quarantined_from
    # What is left ends on the grid: nothing resumes on the right part of the chunk in which the wrong row lies.
    assert start % STEP == 0
    assert all(node.end % STEP == 0 for node in inside.nodes(cache))
    assert inside.stored_tokens(cache, prompt) <= start
    assert cache.explain(prompt).resumable_tokens <= start
    # Once nothing is quarantined any more its whole chunks are stored again, and are right.
    cache.clear_quarantine()
    with cache.begin(prompt) as session:
        assert differing(own_logits(session, model), cold) == []
        assert session.mismatch is None
    cache.check()
    with cache.begin([*prompt, 1]) as session:
        assert session.cached_tokens == 96
        own_logits(session, model)
        assert session.mismatch is None
    cache.check()


def test_step_before_prefill_starts_over_in_whole_chunks_and_stores_them_alone() -> None:
    model = tiny_model("llama")
    prompt, cold, cache = asked_where_it_is_wrong(model)
    with cache.begin(prompt) as session:
        with pytest.warns(RuntimeWarning, match="from token 20 on"):
            logits = session.step(model, prompt[64:70])
        assert logits.shape[1] == 6
        assert np.allclose(np.array(logits[0]), [cold[at] for at in range(64, 70)], atol=1e-4)
        cache.clear_quarantine()
        session.prefill(model)
        # What step() evaluated was not made in a whole chunk: the chunks in front of it are all that is on the grid.
        assert (session.position, inside.grid_end(session)) == (109, 64)
    assert cache.explain(prompt).resumable_tokens == 64
    with cache.begin(prompt) as session:
        assert differing(own_logits(session, model), cold) == []
        assert session.mismatch is None
    cache.check()


def quarantined_cache(**more: Any) -> tuple[Any, PrefixCache]:
    """A cache in which PROMPT is quarantined from token 20 on."""
    model = tiny_model("llama")
    cache = verifying(model, **more)
    for _ in range(2):
        if inside.nodes(cache):
            spoil_live(cache, 0, 20)
        served(cache, model, PROMPT)
    return model, cache


@pytest.mark.filterwarnings("ignore:state up to token")
@pytest.mark.parametrize("exact", [False, True])
def test_quarantined_tokens_are_neither_warmed_nor_pinned_and_the_message_says_so(exact: bool) -> None:
    model, cache = quarantined_cache(exact=exact)
    assert cache.stats.quarantined == 1
    before = cache.stats.requests
    start = 16 if exact else 20

    def unused(*_: Any, **__: Any) -> Any:
        pytest.fail("evaluated in vain")

    for call in (
        lambda: cache.pin(PROMPT),
        lambda: cache.pin(PROMPT, name="a"),
        lambda: cache.warm(unused, PROMPT),
        lambda: cache.warm(unused, PROMPT, name="a"),
    ):
        with pytest.raises(ValueError, match=f"tokens are stored; from offset {start} on they are quarantined.*clear_"):
            call()
    assert (cache.stats.requests, cache.names()) == (before, {})
    assert cache.warm(model, PROMPT[:20]) >= 0
    cache.clear_quarantine()
    assert cache.warm(model, PROMPT, name="a") > 0
    assert list(cache.names()) == ["a"]
    cache.check()


def test_in_exact_mode_unpin_takes_the_pin_of_the_same_tokens_back_whatever_was_stored_since() -> None:
    model = SpellingModel(["kv"])
    cache = PrefixCache(model, exact=True, step_size=4)
    eight, nine = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]
    served(cache, model, eight)
    cache.pin(eight)  # keeps 4
    served(cache, model, nine)
    cache.pin(nine)  # keeps 8
    cache.unpin(eight)
    assert cache.stats.pinned_bytes == 8 * inside.layout(cache).token_bytes
    with pytest.raises(ValueError, match="not pinned"):
        cache.unpin([*nine[:8], 0])
    cache.unpin(nine)
    assert cache.stats.pinned_bytes == 0
    # Twice the same tokens, the last chunk stored in between: the newer pin goes first.
    cache.clear()
    served(cache, model, eight)
    cache.pin(eight)
    cache.warm(model, eight)
    cache.pin(eight)
    cache.unpin(eight)
    assert cache.stats.pinned_bytes == 4 * inside.layout(cache).token_bytes
    cache.unpin(eight)
    assert cache.stats.pinned_bytes == 0
    cache.check()


@pytest.mark.filterwarnings("ignore:state up to token")
def test_the_second_state_counts_for_all_caches_on_the_ledger_and_takes_from_the_other() -> None:
    model = tiny_model("llama")
    per_token = 0
    for budget in (1 << 30, None):
        ledger = Ledger(budget or 3 * 80 * per_token)
        cache, other = (PrefixCache(model, budget_bytes=ledger, verify=1.0, step_size=STEP) for _ in range(2))
        serve(other, model, PROMPT)
        serve(cache, model, PROMPT)
        spoil_live(cache, 0, 20)
        seen = []

        def looking(ids: Any, cache: Any, ledger: Any = ledger, one: Any = cache, two: Any = other) -> Any:
            stats = [one.stats, two.stats]
            seen.append(stats[0].verify_bytes)  # noqa: B023
            total = sum(each.live_bytes + each.paged_bytes + each.verify_bytes for each in stats)
            assert ledger.total_bytes == total
            one.check()
            two.check()
            return model(ids, cache=cache)

        with cache.begin([*PROMPT, 1, 2]) as session:
            session.prefill(looking)
            session.step(looking, [2])
        per_token = inside.layout(cache).token_bytes
        assert max(seen) >= 70 * per_token
        assert session.mismatch is not None
        ledger.check()
        assert ledger.over_bytes() == 0
        assert (cache.stats.verify_bytes, other.stats.quarantined) == (0, 0)
    mx.clear_cache()


@pytest.mark.filterwarnings("ignore:state up to token")
def test_figures_of_a_run_with_mismatches_are_counters_only_where_they_never_fall() -> None:
    model = tiny_model("llama")
    cache = verifying(model)
    seen: list[StatsSnapshot] = []

    def looking(ids: Any, cache_list: Any) -> Any:
        seen.append(cache.snapshot_stats())
        return model(ids, cache=cache_list)

    for _ in range(2):
        if inside.nodes(cache):
            spoil_live(cache, 0, 20)
        served(cache, lambda ids, cache: looking(ids, cache), PROMPT)
    cache.clear_quarantine()
    seen.append(cache.snapshot_stats())
    for name in ("quarantined", "verify_bytes"):
        assert max(each.value(f"radixcache_{name}") for each in seen) > seen[-1].value(f"radixcache_{name}") == 0
    for metric in seen[0].metrics:
        if metric.kind == "counter":
            values = [sum(s.value for m in each.metrics if m.name == metric.name for s in m.samples) for each in seen]
            assert values == sorted(values), metric.name
    units = {metric.name: metric.unit for metric in seen[-1].metrics}
    assert units["radixcache_quarantined"] == "prefixes"
    assert units["radixcache_verify_mismatches_total"] == units["radixcache_verify_skipped_total"] == "requests"


def test_an_infinite_error_is_written_as_prometheus_and_json_can_read_it() -> None:
    model = tiny_model("llama")
    cache = verifying(model)
    served(cache, model, PROMPT)
    leaf = inside.paths(cache)[0].caches[-1]
    leaf.keys = mx.where(mx.arange(leaf.keys.shape[2])[:, None] == 20, mx.nan, leaf.keys)
    mx.eval(leaf.keys)
    with pytest.warns(RuntimeWarning, match="relative error inf"), cache.begin(PROMPT) as session:
        session.prefill(model)
    found = cache.snapshot_stats()
    assert "radixcache_verify_largest_error +Inf\n" in found.exposition()
    text = json.dumps(found.as_dict(), allow_nan=False)
    assert json.loads(text)["metrics"]["radixcache_verify_largest_error"]["samples"] == [
        {"labels": {}, "value": "+Inf"}
    ]


@pytest.mark.filterwarnings("ignore:state up to token")
def test_a_second_session_that_finds_the_same_checkpoint_wrong_does_not_quarantine_what_is_in_front_of_it() -> None:
    model = SpellingModel(["kv", "arrays"])
    cache = PrefixCache(model, verify=1.0, live_slots=3)
    prefix, prompt = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]
    cache.warm(model, prefix)
    cache.warm(model, prompt)
    (node,) = (each for each in inside.nodes(cache) if each.end == len(prompt))
    assert node.start == len(prefix)
    checkpoint = node.payload.checkpoint
    assert checkpoint is not None
    (slots,) = (leaf.state[0] for leaf in checkpoint.leaves if leaf is not None)
    slots[1] = slots[1] + 1
    for slot in [path.slot for path in inside.paths(cache) if path.tip is not None]:
        inside.layout(cache).restore_points(inside.paths(cache)[slot].caches, checkpoint, len(prompt), [])
    first, second = cache.begin([*prompt, 9]), cache.begin([*prompt, 10])
    assert first.cached_tokens == second.cached_tokens == len(prompt)
    for session in (first, second):
        session.step(model, session.prompt[-1:])
        assert session.mismatch is not None
        assert session.mismatch.quarantined_from == len(prefix)
        session.close()
        cache.check()
    assert cache.explain([*prompt, 9]).resumable_tokens == len(prefix)


@pytest.mark.filterwarnings("ignore:state up to token")
def test_a_mismatch_is_told_after_the_request_was_resumed_and_its_state_was_taken_out() -> None:
    model = tiny_model("llama")
    told: list[Event] = []
    cache = verifying(model, on_event=told.append)
    for namespace in ("other", "tenant"):
        served(cache, model, PROMPT, namespace=namespace)
    spoil_live(cache, 0, 20)
    told.clear()
    session = served(cache, model, [*PROMPT, 1], namespace="tenant")
    kinds = [event.kind for event in told if event.kind in ("resumed", "evicted", "quarantined", "stored")]
    assert kinds == ["resumed", "evicted", "quarantined"]
    taken_out, found = (event for event in told if event.kind in (EventKind.EVICTED, EventKind.QUARANTINED))
    assert found.detail == {"mismatch": session.mismatch}
    assert (found.start, found.end) == (20, len(PROMPT) - 1)
    assert taken_out.detail == {"state": "tokens", "was_wrong": True}
    assert (taken_out.start, taken_out.end) == (20, len(PROMPT) - 1)
    assert taken_out.nbytes == inside.layout(cache).token_bytes * (len(PROMPT) - 1 - 20)
    assert {event.namespace for event in told} == {"tenant"}


@pytest.mark.filterwarnings("ignore:state up to token")
def test_what_is_quarantined_in_one_namespace_is_as_it_was_in_another() -> None:
    model = tiny_model("llama")
    cache = verifying(model, live_slots=2)
    for namespace in ("mine", "hidden"):
        served(cache, model, PROMPT, namespace=namespace)

    def told() -> tuple[object, object]:
        return cache.explain([*PROMPT, 1], "mine"), cache.snapshot_stats("mine").exposition()

    before = told()
    spoil_live(cache, 1, 20)
    with cache.begin([*PROMPT, 1], namespace="hidden") as session:
        session.prefill(model)
        assert session.mismatch is not None
    assert told() == before
    assert cache.pin(PROMPT[:-1], "mine", name="a") > 0
    assert cache.warm(model, PROMPT[:-1], "mine") == 0
    cache.clear_quarantine("mine")
    assert cache.stats.quarantined == 1
    cache.check()
