"""verify=1.0 checks rows of a group: what they resume on, and when they close, all that they evaluated.

Faults are planted as in faults.py. Faults of passes are planted in masks; with verify=0 each of them gives wrong
logits and leaves wrong state in the tree.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache

import radixcache.groups.batch
from radixcache import Event, EventKind, Group, PrefixCache, Row
from radixcache.errors import RequestTooLargeError
from radixcache.groups.batch import TailLayer
from radixcache.verify import Part
from tests import inside
from tests.groups.cold import ROUNDING, cold, error, resumed, serve, shared_model
from tests.groups.rows import known, row_bytes
from tests.prompts import tokens
from tests.verify.faults import MATTERS, PROMPT_A, PROMPT_B, TURN, Hidden, fault, wrong_span

__all__ = ["fault"]  # a fixture

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning:radixcache")

REPLY = [0, 1, 2]


def answer(group: Group, model: Any, row: Row) -> list[mx.array]:
    """Logits (V,) of the prompt's last token and of a reply that does not depend on them."""
    logits = [group.prefill(model, row)]
    logits += [group.step(model, [row], [token]) for token in REPLY]
    return [each[0, -1] for each in logits if each is not None]


def cold_answer(model: Any, prompt: Sequence[int]) -> list[mx.array]:
    return [cold(model, [*prompt, *REPLY[:count]]) for count in range(len(REPLY) + 1)]


def furthest(found: Sequence[mx.array], wanted: Sequence[mx.array]) -> float:
    return max(error(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def draw(cache: PrefixCache, *drawn: bool) -> None:
    """Draw the next requests so, and none behind them."""
    chosen = iter([0.0 if its else 1.0 for its in drawn])
    inside.core(cache).verifier._random.random = lambda: next(chosen, 1.0)


def found_wrong(cache: PrefixCache, count: int = 1) -> bool:
    stats = cache.stats
    return (stats.verify_mismatches, stats.verify_bytes, len(cache.mismatches)) == (count, 0, count)


@pytest.mark.parametrize("segment_bytes", [0, None])
def test_a_row_that_resumes_on_a_planted_fault_is_served_cold_and_the_fault_is_quarantined(
    fault: Any, segment_bytes: int | None
) -> None:
    model, make, parts, _ = fault
    prompt = [*PROMPT_A, *REPLY, *TURN]
    expected = cold_answer(model, prompt)
    with make().begin_many([prompt], capacity=500, segment_bytes=segment_bytes) as group:
        assert group.rows[0].cached_tokens > 0
        assert furthest(answer(group, model, group.rows[0]), expected) > MATTERS

    told: list[Event] = []
    cache = make(verify=1.0, on_event=told.append)
    before = cache.stats
    with cache.begin_many([prompt, [*prompt, 7]], capacity=500, segment_bytes=segment_bytes) as group:
        row, other = group.rows
        at = row.cached_tokens
        assert at > 0
        with pytest.warns(RuntimeWarning, match="differs from a cold prefill"):
            found = answer(group, model, row)
        group.check()
        assert (row.cached_tokens, row.matched_tokens, row.remaining.tolist()) == (0, 0, prompt)
        assert (other.cached_tokens, other.right_tokens) == (at, inside.quarantined_from(cache, prompt))
        assert furthest(found, expected) < ROUNDING
        mismatch = row.mismatch
        assert cache.mismatches == (mismatch,)
        assert mismatch is not None
        assert (mismatch.tokens.tolist(), mismatch.resume_offset) == (prompt, at)
        assert mismatch.part in parts
        assert not mismatch.error <= mismatch.tolerance
        assert inside.quarantined_from(cache, prompt) == mismatch.quarantined_from < at
        (event,) = [event for event in told if event.kind == EventKind.QUARANTINED]
        assert event.detail["mismatch"] is mismatch
        # The other one had not begun on the same state, and resumes on none of it.
        assert furthest(answer(group, model, other), cold_answer(model, [*prompt, 7])) < ROUNDING
        assert other.cached_tokens <= mismatch.quarantined_from
        is_in_restoring = parts == {Part.OFFSET}  # which is still wrong
        assert (other.mismatch is not None) == is_in_restoring
    cache.check()
    assert found_wrong(cache, 1 + is_in_restoring)
    stats = cache.stats
    assert stats.verified_requests == before.verified_requests + 2
    assert stats.verify_skipped == before.verify_skipped
    assert inside.stored_tokens(cache, prompt) <= mismatch.quarantined_from


def test_rows_that_begin_with_the_one_that_finds_the_fault_begin_again_with_it() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    serve(cache, model, PROMPT_A)
    wrong_span_of_live(cache)
    draw(cache, False, True)
    prompts = [[*PROMPT_A, 5, 6], [*PROMPT_A, 7]]
    with cache.begin_many(prompts, capacity=500) as group:
        rows = group.rows
        assert [row.cached_tokens for row in rows] == [len(PROMPT_A)] * 2
        with pytest.warns(RuntimeWarning, match="from token 20 on"):
            found = dict(group.prefill_many(model, rows))
        for row, prompt in zip(rows, prompts, strict=True):
            assert error(found[row][0, -1], cold(model, prompt)) < ROUNDING
            assert row.cached_tokens == 0
        assert [row.mismatch is None for row in rows] == [True, False]
        group.check()
    cache.check()
    assert cache.stats.hit_tokens + cache.stats.miss_tokens == sum(map(len, [PROMPT_A, tokens(9, 30), *prompts]))


def first_pass(group: Group, model: Any, row: Row, way: str) -> mx.array:
    """Logits (V,) of the prompt's last token, by way of each method that may be the first one of a row."""
    if way == "prefill":
        logits = group.prefill(model, row)
        assert logits is not None
        return logits[0, -1]
    if way == "step":
        return group.step(model, [row], row.prompt[-1:])[0, -1]
    found: list[mx.array] = []
    group.check_drafts(model, [row], [row.prompt[-1:]], lambda logits: found.append(logits) or [1])  # type: ignore[func-returns-value]
    return found[0][0, 0]


@pytest.mark.parametrize("way", ["prefill", "step", "check_drafts"])
@pytest.mark.parametrize("wrong", ["state", "logits"])
def test_a_row_begins_again_whatever_its_first_pass_is_and_goes_on_from_where_its_caller_has_it(
    way: str, wrong: str
) -> None:
    shared = shared_model("llama")
    model = Hidden(shared)
    cache = PrefixCache(shared, verify=1.0)
    serve(cache, shared, PROMPT_A)
    if wrong == "state":
        wrong_span_of_live(cache)
    with cache.begin_many([PROMPT_A], capacity=500) as group:
        (row,) = group.rows
        assert row.cached_tokens == len(PROMPT_A) - 1
        is_wrong = wrong == "logits"
        model.wrong = lambda live: is_wrong and row.mismatch is None and isinstance(live[0], TailLayer)
        with pytest.warns(RuntimeWarning, match="the logits" if is_wrong else "from token 20 on"):
            logits = first_pass(group, model, row, way)
        assert error(logits, cold(shared, PROMPT_A)) < ROUNDING
        assert row.cached_tokens == 0
        group.check()
        for count in range(1, len(REPLY) + 1):
            logits = group.step(model, [row], REPLY[count - 1 : count])[0, -1]
            assert error(logits, cold(shared, [*PROMPT_A, *REPLY[:count]])) < ROUNDING
        assert row.position == len(PROMPT_A) + len(REPLY)
    cache.check()
    assert found_wrong(cache)
    assert cache.mismatches[0].part is (Part.LOGITS if is_wrong else Part.ROWS)
    assert inside.stored_tokens(cache, PROMPT_A) == cache.mismatches[0].quarantined_from == (0 if is_wrong else 20)


def wrong_span_of_live(cache: PrefixCache) -> None:
    """Page out what is live, and plant a wrong key at token 20."""
    serve(cache, shared_model("llama"), tokens(9, 30))
    wrong_span(0)(cache)


@pytest.mark.parametrize("way", ["step", "check_drafts"])
def test_a_row_that_has_no_room_to_begin_again_catches_up_in_a_later_pass(way: str) -> None:
    shared = shared_model("llama")
    model = Hidden(shared)
    cache = PrefixCache(shared, verify=1.0)
    serve(cache, shared, PROMPT_A)
    with cache.begin_many([PROMPT_A], capacity=500) as group:
        (row,) = group.rows
        model.wrong = lambda live: row.mismatch is None and isinstance(live[0], TailLayer)
        with pytest.warns(RuntimeWarning, match="the logits"):
            first_pass(group, model, row, way)
        room, right = group._room, group._room.require_row

        def refuse(need_tokens: int) -> None:
            raise RequestTooLargeError(need_tokens, 0)

        room.require_row = refuse  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(RequestTooLargeError):
                group.step(model, [row], REPLY[:1])
        room.require_row = right  # type: ignore[method-assign]
        logits = group.step(model, [row], REPLY[:1])[0, -1]
        assert error(logits, cold(shared, [*PROMPT_A, *REPLY[:1]])) < ROUNDING
    cache.check()
    assert found_wrong(cache)


# Faults of passes


@contextmanager
def seeing_padding(kind: str) -> Iterator[None]:
    """Let the shorter rows of a pass of several tokens attend to padding."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "llama":
            under = radixcache.groups.batch._under

            def wrong_under(mask: mx.array, padding: mx.array | None) -> mx.array:
                return mask if mask.shape[-2] > 1 else under(mask, padding)

            patch.setattr(radixcache.groups.batch, "_under", wrong_under)
        else:
            make_mask = BatchRotatingKVCache.make_mask

            def wrong_mask(self: Any, N: int, **more: Any) -> Any:
                right = self.left_padding
                self.left_padding = right - 100 * (N > 1)
                try:
                    return make_mask(self, N, **more)
                finally:
                    self.left_padding = right

            patch.setattr(BatchRotatingKVCache, "make_mask", wrong_mask)
        yield


LONG, SHORT = tokens(21, 32), tokens(22, 8)
DRAFTS, KEPT = [[20, 21, 22], [40, 41]], [1, 2]


def drafted(group: Group, model: Any, kind: str) -> mx.array:
    """Prefill both rows, let them step, and check drafts in which the short row sees padding; its logits (2, V)."""
    for row in group.rows:
        group.prefill(model, row)
    group.step(model, group.rows, [9, 9])
    assert group.drafts_together(model)
    held: list[mx.array] = []
    with seeing_padding(kind):
        group.check_drafts(model, group.rows, DRAFTS, lambda logits: (held.append(logits), mx.eval(logits), KEPT)[2])
    return held[0][1, :2]


TEXT = [*SHORT, 9, 40, 41]


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "llama_sliding", "gemma3_text"])
def test_wrong_state_of_a_pass_with_drafts_is_noticed_and_not_stored(kind: str) -> None:
    model = shared_model(kind)
    blind = PrefixCache(model)
    with blind.begin_many([LONG, SHORT], capacity=500) as group:
        assert error(drafted(group, model, kind)[1], cold(model, TEXT)) > MATTERS
    with blind.begin([*TEXT, 5]) as session:
        assert session.cached_tokens == len(TEXT)
        session.prefill(model)
        assert error(session.step(model, [5])[0, -1], cold(model, [*TEXT, 5])) > MATTERS

    cache = PrefixCache(model, verify=1.0)
    group = cache.begin_many([LONG, SHORT], capacity=500)
    long, short = group.rows
    drafted(group, model, kind)
    with pytest.warns(RuntimeWarning, match=f"state up to token {len(TEXT)} of {len(TEXT)} differs"):
        group.close()
    cache.check()
    assert long.mismatch is None
    assert short.mismatch is not None
    assert short.mismatch.tokens.tolist() == TEXT
    assert cache.mismatches == (short.mismatch,)
    assert found_wrong(cache)
    assert (cache.stats.verified_requests, cache.stats.verify_skipped) == (2, 0)
    start = short.mismatch.quarantined_from
    assert inside.stored_tokens(cache, TEXT) <= start
    assert inside.stored_tokens(cache, [*LONG, 9, 20]) == len(LONG) + 2
    for _ in range(2):
        resumed(cache, model, [*TEXT, 5])
        assert inside.stored_tokens(cache, TEXT) <= start
    cache.clear_quarantine()
    assert resumed(cache, model, [*TEXT, 5, 6]) <= start
    assert resumed(cache, model, [*TEXT, 5, 6]) == len(TEXT) + 1


def test_where_only_the_logits_of_a_pass_with_drafts_are_wrong_that_is_noticed_behind_later_steps() -> None:
    shared = shared_model("llama")
    model = Hidden(shared)
    cache = PrefixCache(shared, verify=1.0)
    serve(cache, shared, SHORT)
    with cache.begin_many([TEXT], capacity=99) as group:
        (row,) = group.rows
        assert row.cached_tokens == len(SHORT)
        group.prefill(model, row)
        model.wrong = lambda live: isinstance(live[0], TailLayer)
        group.check_drafts(model, [row], [[1, 2]], lambda logits: [1])
        model.wrong = lambda live: False
        group.step(model, [row], [3])
        with pytest.warns(RuntimeWarning, match="the logits, relative error"):
            row.close()
    cache.check()
    assert row.mismatch is not None
    assert row.mismatch.part is Part.LOGITS
    # What it resumed on was compared.
    assert row.mismatch.quarantined_from == inside.stored_tokens(cache, TEXT) == len(SHORT)


def test_a_row_is_compared_once_it_closes_and_others_that_have_its_text_are_told() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    draw(cache, False, True, False)
    with cache.begin_many([LONG, SHORT], capacity=500) as group:
        long, short = group.rows
        drafted(group, model, "llama")
        other = group.admit([*TEXT, 5, 6])
        assert other.cached_tokens == len(TEXT)
        group.prefill(model, other)
        with pytest.warns(RuntimeWarning, match="differs from a cold prefill"):
            short.close()
        group.check()
        assert short.mismatch is not None
        start = short.mismatch.quarantined_from
        assert start < len(TEXT)
        assert other.right_tokens == start
        assert inside.stored_tokens(cache, TEXT) == start
        group.step(model, [long, other], [1, 1])
        group.check()
    cache.check()
    assert inside.stored_tokens(cache, [*TEXT, 5, 6, 1]) == start
    assert found_wrong(cache)
    assert other.mismatch is None
    resumed(cache, model, [*TEXT, 5, 6])


def test_a_row_that_reads_a_reply_in_place_keeps_it_when_that_is_found_wrong() -> None:
    """Its path of the tree goes beyond its own prompt."""
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    draw(cache, True, True, False)
    with cache.begin_many([LONG, SHORT], capacity=500, segment_bytes=0) as group:
        drafted(group, model, "llama")
        _, short = group.rows
        other = group.admit([*TEXT, 5, 6])
        assert short.path_end == len(TEXT) > len(SHORT)
        group.prefill(model, other)
        with pytest.warns(RuntimeWarning, match="differs from a cold prefill"):
            short.close()
        group.check()
        logits = group.step(model, [other], [7])
        assert bool(mx.isfinite(logits).all())
    cache.check()
    assert found_wrong(cache)


# Which rows are drawn, and which are skipped


def test_the_drawn_rows_are_the_same_each_time_and_also_those_that_resume_on_nothing() -> None:
    model = shared_model("llama")
    found = []
    for seed in (7, 7, 8):
        cache, draws, verified, wanted = PrefixCache(model, verify=0.5, verify_seed=seed), random.Random(seed), [], []
        with cache.begin_many(capacity=900) as group:
            for number in range(12):
                before = cache.stats.verified_requests
                row = group.admit(tokens(number % 4, 12))
                answer(group, model, row)
                row.close()
                verified.append(cache.stats.verified_requests > before)
                wanted.append(draws.random() < 0.5)
        assert verified == wanted
        assert cache.stats.verify_skipped == 0
        found.append(verified)
    assert found[0] == found[1] != found[2]


def test_a_check_costs_a_prefill_of_the_prompt_and_one_of_the_text_and_none_without_verify() -> None:
    shared = shared_model("llama")
    model = Hidden(shared)
    evaluated = {}
    for share in (0.0, 1.0):
        cache = PrefixCache(shared, verify=share)
        serve(cache, shared, PROMPT_A)
        with cache.begin_many([[*PROMPT_A, *TURN]], capacity=500) as group:
            group.drafts_together(model)
            model.passes.clear()
            answer(group, model, group.rows[0])
        evaluated[share] = sum(model.passes)
        assert (cache.stats.verified_requests, cache.stats.verify_skipped) == (int(share), 0)
    length = len(PROMPT_A) + len(TURN)
    assert evaluated[0.0] == len(TURN) + len(REPLY)
    assert evaluated[1.0] == evaluated[0.0] + length + length + len(REPLY)


@pytest.mark.parametrize(("rows", "fits"), [(2.5, False), (6.0, True)])
def test_a_check_that_does_not_fit_the_budget_is_skipped_and_counted(rows: float, fits: bool) -> None:
    model, prompt = shared_model("llama"), tokens(3, 300)
    cache = known(model, int(rows * row_bytes(model, 320)), verify=1.0)
    watched = Hidden(model, cache)
    with cache.begin_many([prompt], capacity=900) as group:
        group.drafts_together(model)
        answer(group, watched, group.rows[0])
    cache.check()
    stats = cache.stats
    assert (stats.verified_requests, stats.verify_skipped) == (int(fits), int(not fits))
    assert (max(watched.held) > 2 * len(prompt) * inside.layout(cache).token_bytes) == fits
    assert (stats.verify_bytes, stats.verify_mismatches) == (0, 0)
    assert stats.peak_bytes <= stats.budget_bytes
    assert inside.stored_tokens(cache, prompt) == len(prompt)


def taken_back(group: Group, model: Any, row: Row) -> None:
    group.remove(model, row, row.position - 2, row.position)


def shifted(group: Group, model: Any, row: Row) -> None:
    group.remove(model, row, 4, 8)


def with_owed_tokens(group: Group, model: Any, row: Row) -> None:
    group.check_drafts(model, [row], [[4, 5, 6]], lambda logits: [2])


@pytest.mark.parametrize(
    ("kind", "change", "is_verified"),
    [
        ("llama", taken_back, True),
        ("llama", shifted, False),
        ("llama", with_owed_tokens, True),
        ("qwen3_next", with_owed_tokens, True),
        ("gpt_bigcode", with_owed_tokens, True),
    ],
)
def test_a_row_is_compared_as_far_as_its_state_is_that_of_its_tokens(
    kind: str, change: Callable[[Group, Any, Row], None], is_verified: bool
) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model, verify=1.0)
    serve(cache, model, PROMPT_A)
    with cache.begin_many([[*PROMPT_A, *TURN]], capacity=500) as group:
        (row,) = group.rows
        answer(group, model, row)
        change(group, model, row)
    stats = cache.stats
    assert (stats.verified_requests, stats.verify_skipped) == (int(is_verified), int(not is_verified))
    assert stats.verify_mismatches == 0


def test_keys_that_are_not_the_token_ids_are_skipped() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    with cache.begin_many(capacity=500) as group:
        for _ in range(2):
            row = group.admit(PROMPT_A, np.array(PROMPT_A) + 1000)
            answer(group, model, row)
            row.close()
    assert row.cached_tokens == len(PROMPT_A) - 1
    assert (cache.stats.verified_requests, cache.stats.verify_skipped) == (0, 2)


# When a check breaks off


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TypeError])
@pytest.mark.parametrize("at", ["first pass", "close"])
def test_a_check_that_breaks_off_leaves_the_row_as_it_was_and_closes_it(at: str, raised: type[BaseException]) -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    serve(cache, model, PROMPT_A)
    prompt = [*PROMPT_A, *TURN]
    breaks = at == "first pass"

    def failing(ids: mx.array, cache: Any) -> mx.array:
        if breaks and not isinstance(cache[0], TailLayer):
            raise raised("broken off")
        logits: mx.array = model(ids, cache=cache)
        return logits

    def run() -> None:
        nonlocal breaks
        with cache.begin_many([prompt], capacity=500) as group:
            (row,) = group.rows
            if at == "first pass" and raised is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    group.prefill(failing, row)
                group.check()
                breaks = False
            assert furthest(answer(group, failing, row), cold_answer(model, prompt)) < ROUNDING
            breaks = True

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if at == "close" and raised is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                run()
        elif at == "first pass" and raised is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                run()  # and again when it closes
        else:
            run()
    assert [str(each.message)[:25] for each in caught] == ["verification failed with "] * (raised is TypeError)
    cache.check()
    stats = cache.stats
    assert (stats.verified_requests, stats.verify_skipped, stats.verify_bytes) == (0, 1, 0)
    assert inside.stored_tokens(cache, [*prompt, *REPLY]) == len(prompt) + len(REPLY)


def test_where_warnings_are_errors_the_row_is_closed_all_the_same() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    group = cache.begin_many([LONG, SHORT], capacity=500)
    drafted(group, model, "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match="differs from a cold prefill"):
            group.close()
    assert group.is_closed
    cache.check()
    assert found_wrong(cache)


def test_a_group_that_closes_because_of_an_error_stores_its_rows_without_a_check() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    with pytest.raises(ZeroDivisionError), cache.begin_many([PROMPT_B], capacity=500) as group:  # noqa: PT012
        answer(group, model, group.rows[0])
        raise ZeroDivisionError
    assert (cache.stats.verified_requests, cache.stats.verify_skipped) == (0, 1)
    assert inside.stored_tokens(cache, PROMPT_B) == len(PROMPT_B)


def test_a_row_that_steps_its_prompt_and_closes_in_the_middle_of_it_raises_no_alarm() -> None:
    model, prompt = shared_model("llama"), tokens(1, 20)
    cache = PrefixCache(model, verify=1.0)
    with cache.begin_many([prompt], capacity=200) as group:
        for token in prompt[:12]:
            group.step(model, group.rows, [token])
    assert (cache.stats.verify_mismatches, cache.stats.verified_requests) == (0, 1)
