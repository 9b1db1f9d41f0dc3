"""explain: each reason in a timeline that causes it, agreement with begin and fetch, and nothing changed by asking."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from policies import CostModel
from radixcache import Event, EventKind, Explanation, Ledger, PrefixCache, Reason
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from runner.models.tiny import tiny_model, tiny_tokenizer
from tests import inside

MODEL = SizedModel()
TOKENIZER = tiny_tokenizer()


def spans(**options: Any) -> PrefixCache:
    """A cache of a model with full attention alone: 1 byte per token."""
    return sized_cache(SizedLayout(1), **{"budget_bytes": 1 << 30, **options})


def recurrent(**options: Any) -> PrefixCache:
    """A cache of a hybrid model: 1 byte per token, 10 per checkpoint."""
    return sized_cache(SizedLayout(1, 10), **{"budget_bytes": 1 << 30, **options})


def serve(cache: PrefixCache, prompt: list[int], namespace: str = "", **more: Any) -> int:
    with cache.begin(prompt, namespace=namespace, reserve=0, **more) as session:
        session.prefill(MODEL)
        session.step(MODEL, prompt[-1:])
        return session.cached_tokens


def reasons(explanation: Explanation) -> list[tuple[Reason, int, int]]:
    return [(gap.reason, gap.start, gap.end) for gap in explanation.gaps]


def numbers(seed: int, length: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(1000, 9999, length).tolist()
    return drawn


A, B = numbers(1, 100), numbers(2, 100)


NEW, ELSE, LAST, GONE = Reason.NEVER_STORED, Reason.DIVERGED, Reason.LAST_TOKEN, Reason.EVICTED


@pytest.mark.parametrize(
    ("make", "options", "steps", "asked", "wanted"),
    [
        (spans, {}, [], A, [(NEW, 0, 100)]),
        (spans, {}, [A], A, [(LAST, 99, 100)]),
        (spans, {}, [A], [*A, 1, 2], [(NEW, 100, 102)]),
        (spans, {}, [A], B, [(ELSE, 0, 100)]),
        (spans, {"trim_tokens": 1}, [A, 40], [*A, 5, 6, 7], [(GONE, 40, 100), (NEW, 100, 103)]),
        (spans, {}, [A, 0, A], A, [(LAST, 99, 100)]),
        (spans, {}, [A, 0, [*A[:30], 1, 2, 3]], [*A, 5], [(GONE, 30, 100), (NEW, 100, 101)]),
        (recurrent, {}, [A], [*A[:50], 1, 2], [(Reason.NO_CHECKPOINT, 0, 50), (ELSE, 50, 52)]),
        (recurrent, {}, [A], A, [(Reason.NO_CHECKPOINT, 84, 99), (LAST, 99, 100)]),
        # Checkpoints at 48 and 64.
        (recurrent, {"exact": True, "step_size": 16}, [A[:65]], [*A[:37], 7],
         [(Reason.NO_CHECKPOINT, 0, 32), (Reason.OFF_GRID, 32, 37), (ELSE, 37, 38)]),
        (spans, {"budget_bytes": 1}, [A], A, [(GONE, 0, 100)]),
    ],
)  # fmt: skip
def test_each_part_that_is_not_resumed_has_its_reason_and_the_costs_add_up(
    make: Any, options: dict[str, Any], steps: list[Any], asked: list[int], wanted: list[Any]
) -> None:
    """Steps are prompts that are served, and bytes to which the cache is reduced."""
    cost = CostModel(2.0, 0.5, "seconds")
    cache = make(cost=cost, **options)
    for step in steps:
        cache.reclaim(step) if isinstance(step, int) else serve(cache, step)
    found = cache.explain(asked)
    assert reasons(found) == wanted
    edges = [found.resumable_tokens, *(gap.end for gap in found.gaps)]
    assert [gap.start for gap in found.gaps] == edges[:-1]
    assert (edges[-1], found.prompt_tokens) == (len(asked), len(asked))
    assert found.cost == pytest.approx(cost.cost(found.resumable_tokens, len(asked)))
    assert found.cost_unit == "seconds"
    assert found.resumable_tokens == serve(cache, asked)


def test_a_path_that_goes_on_otherwise_is_named_with_its_text_on_both_sides() -> None:
    for tokenizer in (TOKENIZER, None):
        cache = spans(tokenizer=tokenizer)
        serve(cache, TOKENIZER.encode("The library opens at nine on weekdays."))
        found = cache.explain(TOKENIZER.encode("The library opens at noon on weekdays."))
        (gap,) = found.gaps
        assert (gap.reason, gap.start) == (ELSE, len("The library opens at n"))
        texts = tuple(TOKENIZER.decode(list(ids)) for ids in (gap.before, gap.stored, gap.asked))
        assert texts == ("The library opens at n", "ine on weekdays.", "oon on weekdays.")
        assert (gap.before_text, gap.stored_text, gap.asked_text) == (texts if tokenizer else (None, None, None))
        shown = "stored 'ine on weekdays.', asked 'oon on weekdays.'" if tokenizer else f"stored tokens {[*gap.stored]}"
        assert shown in str(found)


def test_keys_and_ids_that_the_tokenizer_does_not_know_are_shown_by_their_numbers() -> None:
    class Refuses:
        def decode(self, ids: list[int]) -> str:
            raise KeyError(ids[0])

    cache = spans(tokenizer=TOKENIZER)
    ids = TOKENIZER.encode("see: ??")
    serve(cache, ids, keys=[*ids[:5], 1 << 40, 1 << 41])
    (gap,) = cache.explain(ids, keys=[*ids[:5], 1 << 42, 7]).gaps
    assert (gap.stored_text, gap.asked_text) == (f"[key {1 << 40:016x}][key {1 << 41:016x}]", "??")
    assert f"see: [key {1 << 40:016x}]" in cache.render()
    cache = spans(tokenizer=Refuses())
    serve(cache, [5, 17, 3])
    (gap,) = cache.explain([5, 17, 8]).gaps
    assert (gap.before_text, gap.stored_text, gap.asked_text) == ("[ids 5 17]", "[ids 3]", "[ids 8]")
    assert '"[ids 5 17 3]"' in cache.dump()
    assert '"[ids 5 17 3]"' in cache.render()


def test_what_was_evicted_is_explained_with_the_tick_of_the_last_time() -> None:
    cache = spans()
    for prompt in (A, A, B):
        serve(cache, prompt)
        cache.reclaim(0)
    assert [(gap.reason, gap.tick) for gap in cache.explain(A).gaps] == [(GONE, 2)]
    assert [(gap.reason, gap.tick) for gap in cache.explain(B).gaps] == [(GONE, 3)]
    cache = spans(remembers=False)
    serve(cache, A)
    cache.reclaim(0)
    assert [gap.reason for gap in cache.explain(A).gaps] == [NEW], "it remembers nothing"
    cache = spans(budget_bytes=250, trim_tokens=16)
    for prompt in (A, *(numbers(seed, 100) for seed in range(10, 13))):
        serve(cache, prompt)
    found = cache.explain(A)
    assert {gap.reason for gap in found.gaps} == {GONE}
    assert len(found.gaps) > 1
    assert str(found).count("evicted at tick") == 1


def test_a_checkpoint_that_was_evicted_is_named() -> None:
    cache = recurrent(checkpoint_budget_bytes=25)
    serve(cache, A, marks=[50])
    assert cache.explain([*A[:50], 7]).resumable_tokens == 50
    serve(cache, [*A, *B], marks=[150])
    serve(cache, [*A, *B, *A], marks=[250])
    found = cache.explain([*A[:86], 7])
    evicted = [gap for gap in found.gaps if gap.reason == Reason.EVICTED]
    assert evicted, reasons(found)
    assert all(gap.checkpoint == gap.end for gap in evicted)
    assert "the checkpoint at" in str(found)


def test_quarantined_tokens_are_named_from_where_they_begin() -> None:
    cache = spans()
    serve(cache, A[:60])
    inside.quarantine(cache, A[:90], 80)
    assert reasons(cache.explain(A)) == [(Reason.NEVER_STORED, 60, 80), (Reason.QUARANTINED, 80, 100)]
    inside.quarantine(cache, A[:90], 30)
    found = cache.explain(A)
    assert reasons(found) == [(Reason.QUARANTINED, 30, 100)]
    assert (found.matched_tokens, found.resumable_tokens) == (30, 30)
    with cache.begin(A) as session:
        assert (session.matched_tokens, session.cached_tokens) == (30, 30)
    cache.clear_quarantine()
    assert reasons(cache.explain(A)) == [(Reason.NEVER_STORED, 60, 100)]


@pytest.mark.parametrize(("kind", "slots"), [("llama", 1), ("llama_sliding", 2), ("nemotron_h", 2)])
def test_explain_agrees_with_begin_on_real_models(kind: str, slots: int) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model, budget_bytes=3_000_000, live_slots=slots)
    draw = np.random.default_rng(0)
    system = draw.integers(0, 200, 40).tolist()
    talks = [list(system) for _ in range(3)]
    for turn in range(15):
        talk = talks[int(draw.integers(3))]
        talk += draw.integers(0, 200, 20).tolist()
        prompt = talk if turn % 4 else [*talk[: -5 - turn], 1, 2, 3]
        before = inside.everything(cache)
        found = cache.explain(prompt)
        assert inside.everything(cache) == before
        with cache.begin(prompt) as session:
            assert (found.matched_tokens, found.resumable_tokens) == (session.matched_tokens, session.cached_tokens)
            session.prefill(model)
            session.step(model, prompt[-1:])
        cache.check()


def test_what_only_another_threads_session_holds_is_live_elsewhere() -> None:
    cache = recurrent(live_slots=2)
    serve(cache, A)
    session = cache.begin([*A, 1])
    found: list[Explanation] = []
    thread = threading.Thread(target=lambda: found.append(cache.explain([*A, 2, 3])))
    thread.start()
    thread.join()
    cached: list[int] = []
    thread = threading.Thread(target=lambda: cached.append(serve(cache, [*A, 2, 3])))
    thread.start()
    thread.join()
    session.close()
    assert found[0].resumable_tokens == cached[0] < 100
    assert found[0].gaps[0].reason == Reason.LIVE_ELSEWHERE
    assert found[0].gaps[0].end == 100


def test_a_hint_names_the_span_and_what_it_costs() -> None:
    cache = spans(tokenizer=TOKENIZER)
    rules = "Answer in one short paragraph, in the language of the question, and say on which page you found it. "
    for day in (2, 13, 24):
        serve(cache, TOKENIZER.encode(f"Today is the {day}. {rules} Is it open?"))
    found = cache.explain(TOKENIZER.encode(f"Today is the 30. {rules} When does it close?"))
    (hint,) = found.hints
    assert (hint.start, hint.end, hint.values) == (13, 15, 4)
    assert (hint.asked_text, hint.other_text) == ("30", "24")
    assert len(rules) <= hint.tokens <= len(rules) + 5
    assert "tokens 13 to 14 change in every request" in str(found)
    assert "All later tokens are recomputed" in str(found)
    assert cache.explain(TOKENIZER.encode("Today is the 30.")).hints == ()


def test_after_clear_nothing_of_earlier_prompts_is_told() -> None:
    cache = spans(tokenizer=TOKENIZER)
    rules = "; answer in short sentences, cite the section and the page, and never guess what is not written there."
    for secret in ("SECRET23757", "SECRET58012", "SECRET77310", "SECRET10466"):
        serve(cache, TOKENIZER.encode(f"id {secret} {rules}"))
    asked = TOKENIZER.encode(f"id 0 {rules}")
    assert "SECRET" in str(cache.explain(asked))
    cache.clear()
    found = cache.explain(asked)
    assert (found.hints, reasons(found)) == ((), [(Reason.NEVER_STORED, 0, len(asked))])
    assert "SECRET" not in str(found)
    for prompt in (TOKENIZER.encode(f"id SECRET10466 {rules}"), asked):
        assert reasons(cache.explain(prompt)) == [(Reason.NEVER_STORED, 0, len(prompt))]
    cache.check()


def listening(make: Any, **options: Any) -> tuple[PrefixCache, list[Event]]:
    told: list[Event] = []
    return make(on_event=told.append, **options), told


def test_a_request_is_told_as_resumed_and_stored() -> None:
    cache, told = listening(spans)
    serve(cache, A, namespace="ann")
    serve(cache, [*A, *B], namespace="ann")
    assert [(e.kind, e.tick, e.namespace, e.start, e.end, e.nbytes) for e in told] == [
        (EventKind.RESUMED, 1, "ann", 0, 0, 0),
        (EventKind.STORED, 1, "ann", 0, 100, 100),
        (EventKind.RESUMED, 2, "ann", 0, 100, 100),
        (EventKind.STORED, 2, "ann", 100, 200, 100),
        (EventKind.MERGED, 2, "ann", 0, 200, 0),
    ]
    assert told[2].detail == {"prompt_tokens": 200, "matched_tokens": 100, "reason": None, "by": "begin"}


def test_of_a_request_that_resumes_short_of_its_match_only_what_it_took_up_is_told_as_resumed() -> None:
    cache, told = listening(recurrent)
    serve(cache, A)
    serve(cache, A)
    resumed = [(e.start, e.end, e.detail["matched_tokens"]) for e in told if e.kind == EventKind.RESUMED]
    assert resumed == [(0, 0, 0), (0, 84, 100)]


def test_a_switch_is_told_as_split_and_paged() -> None:
    cache, told = listening(spans)
    serve(cache, A)
    serve(cache, [*A[:40], *B])
    told.clear()
    serve(cache, [*A, 1])
    assert [(e.kind, e.start, e.end, e.nbytes) for e in told[:3]] == [
        (EventKind.PAGED_OUT, 40, 140, 100),
        (EventKind.PAGED_IN, 40, 100, 60),
        (EventKind.RESUMED, 0, 100, 100),
    ]


def test_checkpoints_are_told_apart() -> None:
    cache, told = listening(recurrent, checkpoint_budget_bytes=25)
    serve(cache, A)
    stored = [(e.end, e.nbytes) for e in told if e.kind == EventKind.STORED and e.detail["state"] == "checkpoint"]
    assert stored == [(84, 10), (100, 10)]
    told.clear()
    serve(cache, [*A, *B])
    evicted = [(e.end, e.detail["state"]) for e in told if e.kind == EventKind.EVICTED]
    assert evicted
    assert all(state == "checkpoint" for _, state in evicted)


def test_a_listener_may_call_the_cache() -> None:
    seen: list[Any] = []

    def listen(event: Event) -> None:
        cache.check()
        seen.append((event.kind, cache.stats.tokens, cache.explain(A).resumable_tokens))
        if event.kind == EventKind.STORED and event.namespace == "":
            serve(cache, B, namespace="shadow")
            cache.reclaim(120)

    cache = spans(on_event=listen)
    serve(cache, A)
    assert [kind for kind, _, _ in seen][:4] == ["resumed", "stored", "paged_out", "resumed"]
    assert [kind for kind, _, _ in seen][-1] == "evicted"
    assert cache.stats.event_failures == 0
    cache.check()


def test_losing_the_live_state_is_told_as_evicted() -> None:
    cache, told = listening(spans)
    with cache.begin(A, reserve=0) as session:
        session.prefill(MODEL)
    told.clear()
    with cache.begin([*A, 1], reserve=0) as session:
        session.is_lost = True
    assert [(e.kind, e.start, e.end) for e in told if e.kind == EventKind.EVICTED] == [(EventKind.EVICTED, 0, 99)]
    assert cache.stats.tokens == 0


def test_what_one_cache_takes_from_another_is_told_to_the_other() -> None:
    ledger = Ledger(300)
    one, told_one = listening(spans, budget_bytes=ledger)
    two, told_two = listening(spans, budget_bytes=ledger)
    serve(one, A)
    told_one.clear()
    serve(two, numbers(20, 250))
    assert {str(event.kind) for event in told_one} == {"evicted"}
    assert [str(event.kind) for event in told_two] == ["resumed", "stored"]
    assert {gap.reason for gap in one.explain(A).gaps} == {Reason.EVICTED}
