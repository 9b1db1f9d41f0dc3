"""Rows that read what they share where the tree holds it: held once, whoever comes, goes, evicts, or is wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache, Row, ShortReason
from runner.models.tiny import tiny_model
from tests import inside
from tests.groups.cold import ROUNDING, cold, error, opened, serve, shared_model
from tests.groups.rows import Watched, checked, decoded, grouped, prefilled
from tests.prompts import tokens

SYSTEM, QUARTERS = tokens(1, 60), [tokens(20 + number, 40) for number in range(3)]


def in_place(row: Row) -> int:
    return sum(spans.end - spans.start for spans in row.reads())


def three_levels() -> list[list[int]]:
    """Prompts of six rows: all share the system prompt, pairs of them a quarter behind that, and one nothing."""
    prompts = [[*SYSTEM, *QUARTERS[number // 2], *tokens(40 + number, 3 + 2 * number)] for number in range(5)]
    return [*prompts, tokens(70, 33)]


SLOW = [pytest.param(kind, 0, marks=pytest.mark.slow) for kind in ("gemma3_text", "gpt_oss", "qwen3_next")]


@pytest.mark.parametrize(("kind", "segment_bytes"), [("llama", 0), ("gemma3_text", None), *SLOW])
def test_rows_that_share_at_several_levels_answer_as_cold_runs_do(kind: str, segment_bytes: int | None) -> None:
    with grouped(kind, capacity=2000, segment_bytes=segment_bytes) as (model, cache, group):
        running: list[tuple[Row, mx.array]] = []
        for number, prompt in enumerate(three_levels()):
            row = group.admit(prompt, marks=[60, 100] if number < 5 else [])
            assert row.cached_tokens == (0 if number in (0, 5) else 100 if number in (1, 3) else 60)
            running.append((row, prefilled(group, model, row, 16)))
            decoded(group, model, [each for each, _ in running], [logits for _, logits in running], 1)
            checked(cache, group)
        if segment_bytes == 0:
            assert [in_place(row) for row, _ in running] == [100, 100, 100, 100, 60, 0]
        running[2][0].close()
        some = [running[4], running[0], running[5], running[3]]
        decoded(group, model, [row for row, _ in some], [logits for _, logits in some], 2)
        running[0][0].close()
        back = group.admit([*three_levels()[2], 7], marks=[60, 100])
        assert back.cached_tokens >= 100
        logits = prefilled(group, model, back)
        decoded(group, model, [running[3][0], back], [running[3][1], logits], 2)


def test_a_row_keeps_what_the_tree_has_only_in_the_buffers_of_a_session_in_another_thread() -> None:
    prompt = tokens(1, 90)
    with grouped("llama", [[*prompt, 1, 2, 3]], capacity=400, segment_bytes=0) as (model, cache, group):
        (row,) = group.rows
        prefilled(group, model, row)
        serve(cache, model, [*prompt, 7])
        with ThreadPoolExecutor(1) as other:
            session = other.submit(cache.begin, [*prompt, 8]).result()
            try:
                new = group.admit([*prompt, 1, 2, 9])
                assert new.reason == ShortReason.LIVE_ELSEWHERE
                checked(cache, group)
                assert in_place(row) == 2
                assert error(group.step(model, [row], [4])[0, -1], cold(model, [*prompt, 1, 2, 3, 4])) < ROUNDING
            finally:
                other.submit(session.close).result()
        assert error(prefilled(group, model, new), cold(model, [*prompt, 1, 2, 9])) < ROUNDING


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_what_is_live_in_an_idle_slot_and_in_a_session_of_another_thread_gets_a_snapshot_for_a_row(kind: str) -> None:
    model, cache = opened(kind, live_slots=2)
    prompt = tokens(1, 90)
    serve(cache, model, prompt)
    with cache.begin([*prompt, 8]):
        serve(cache, model, prompt)
    assert cache.stats.paged_bytes == cache.stats.checkpoint_bytes, "both slots have it live"
    with ThreadPoolExecutor(1) as other:
        session = other.submit(cache.begin, [*prompt, 9]).result()
        try:
            with cache.begin_many([[*prompt, 7]], capacity=400, segment_bytes=0) as group:
                assert group.rows[0].cached_tokens == 90
                assert error(prefilled(group, model, group.rows[0]), cold(model, [*prompt, 7])) < ROUNDING
                checked(cache, group)
        finally:
            other.submit(session.close).result()
    cache.check()


def test_nothing_takes_away_what_rows_read() -> None:
    """Neither the budget, nor a session that has the same live, nor one that parts in the middle of it."""
    prompt = tokens(1, 90)
    prompts = [[*prompt, 1], [*prompt, 2]]
    with grouped("llama", prompts, capacity=400, segment_bytes=0, stores=prompt) as (model, cache, group):
        logits = [prefilled(group, model, row) for row in group.rows]
        assert [in_place(row) for row in group.rows] == [90, 90]
        with cache.begin([*prompt, 5]) as session:
            session.prefill(model)
            assert cache.stats.duplicate_bytes == 90 * inside.layout(cache).token_bytes
            cache.reclaim(0)
            assert [in_place(row) for row in group.rows] == [90, 90]
            decoded(group, model, group.rows, logits, 1)
        serve(cache, model, [*prompt[:37], 6, 7])
        cache.reclaim(0)
        checked(cache, group)
        assert [in_place(row) for row in group.rows] == [90, 90]
        assert [len(row.reads()) for row in group.rows] == [2, 2]
        decoded(group, model, group.rows, logits, 2)
        cache.clear()
        decoded(group, model, group.rows, logits, 1)
    cache.reclaim(0)
    assert cache.stats.live_bytes + cache.stats.paged_bytes == 0
    cache.check()


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_row_goes_on_when_what_it_reads_is_found_wrong_and_gives_none_of_it_away(kind: str) -> None:
    model, cache = opened(kind)
    prompt = tokens(1, 80)
    serve(cache, model, prompt, marks=[50])
    with cache.begin_many([[*prompt, 1], [*prompt[:50], 2]], capacity=400, segment_bytes=0) as group:
        logits = [prefilled(group, model, row) for row in group.rows]
        reads = [in_place(row) for row in group.rows]
        inside.expel_tokens(cache, prompt, 50)
        checked(cache, group)
        assert cache.explain([*prompt, 1]).matched_tokens == 50
        assert [in_place(row) for row in group.rows] == reads == [80, 50]
        decoded(group, model, group.rows, logits, 2)
        if kind == "llama":
            group.remove(model, group.rows[0], 60, 70)
            group.step(model, group.rows, [5, 6])
            checked(cache, group)
    assert cache.explain([*prompt, 1]).matched_tokens == 50
    assert cache.explain([*prompt[:50], 2, 3]).matched_tokens >= 51
    cache.check()


@pytest.mark.parametrize(("kind", "segment_bytes"), [("llama", 0), ("gemma3_text", 0), ("llama_sliding", None)])
def test_a_shift_out_of_a_segment_is_a_rotation_and_others_do_not_notice(kind: str, segment_bytes: int | None) -> None:
    """Keys behind the gap are those that the same tokens would have had at their new places, but for what they saw."""
    model, cache = opened(kind)
    prompt = tokens(1, 100)
    serve(cache, model, prompt[:80], marks=[60])
    with cache.begin_many([prompt, [*prompt[:80], 1]], capacity=800, segment_bytes=segment_bytes) as group:
        one, two = group.rows
        prefilled(group, model, one)
        logits = prefilled(group, model, two)
        decoded(group, model, [two], [logits], 1)
        before = inside.first_layer(one)
        group.remove(model, one, 30, 50)
        after = inside.first_layer(one)
        # The first layer's keys depend on token and position alone.
        fresh = inside.first_layer_alone(model, [*prompt[:30], *prompt[50:]])
        for name in ("keys", "values"):
            assert float(mx.max(mx.abs(after[name] - fresh[name][..., -after[name].shape[2] :, :]))) < 1e-4
        assert float(mx.max(mx.abs(after["keys"][..., -1, :] - before["keys"][..., -1, :]))) > 1e-2
        assert (one.position, one.clean_tokens) == (80, 30)
        decoded(group, model, [two], [logits], 1)
        mx.eval(group.step(model, [one, two], [3, 4]))
        checked(cache, group)
        assert in_place(two) == (80 if segment_bytes == 0 else 0)
    cache.check()


@pytest.mark.parametrize(("kind", "at"), [("gpt_bigcode", 2), ("jamba", 1)])
def test_a_pass_that_raises_for_any_row_has_happened_for_none(kind: str, at: int) -> None:
    prompts = [tokens(1, 20), tokens(2, 13), tokens(3, 9)]
    with grouped(kind, prompts, capacity=200) as (model, cache, group):
        logits = [prefilled(group, model, row) for row in group.rows]
        decoded(group, model, group.rows, logits, 1)
        places = [row.position for row in group.rows]
        with pytest.raises(ValueError, match="broke off"):
            group.step(Watched(model, fails_at=at, error=ValueError), group.rows, [1, 2, 3])
        assert [row.position for row in group.rows] == places
        checked(cache, group)
        found = group.step(model, group.rows, [4, 5, 6])
        for row, each in zip(group.rows, found, strict=True):
            assert error(each[0], cold(model, row.known_keys().tolist())) < ROUNDING


def test_in_half_precision_rows_are_as_near_as_in_mlx_lms_batches() -> None:
    whole, half = shared_model("llama"), tiny_model("llama")
    half.set_dtype(mx.bfloat16)
    prompts = [[*SYSTEM, *tokens(number, 8)] for number in range(2, 6)]
    cache = PrefixCache(half)
    singles = []
    with cache.begin_many(prompts, capacity=800, segment_bytes=0) as group:
        for row in group.rows:
            prefilled(group, half, row)
            singles.append(make_prompt_cache(half))
            half(mx.array([row.prompt.tolist()]), cache=singles[-1])
        assert [in_place(row) for row in group.rows] == [60] * 4
        batch = [type(column[0]).merge(list(column)) for column in zip(*singles, strict=True)]
        found = group.step(half, group.rows, [5, 6, 7, 8])
        own = half(mx.array([[5], [6], [7], [8]]), cache=batch)
    wanted = mx.stack([cold(whole, [*prompt, 5 + number]) for number, prompt in enumerate(prompts)])
    ours, theirs = (error(each[:, -1].astype(mx.float32), wanted) for each in (found, own))
    assert 0 < ours < 2 * theirs
