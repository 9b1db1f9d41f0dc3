"""begin_many: rows that decode together answer as cold runs do, share what they have in common, and are stored back.

The oracle is numeric: logits of a cold run of the same tokens through caches of mlx-lm's own. `other` in each test is
a prompt of the same length whose logits are far off, so that the comparison could fail.
"""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from radixcache import (
    CacheFullError,
    Event,
    EventKind,
    Group,
    PrefixCache,
    Reason,
    SessionClosedError,
    UnsupportedCacheError,
)
from radixcache.errors import ShiftError
from radixcache.groups.batch import LostStateError
from radixcache.layers.sizes import SizedLayout
from radixcache.sized_cache import sized_cache
from tests import inside
from tests.groups.cold import ROUNDING, WRONG, cold, error, opened, resumed, serve, shared_model
from tests.groups.rows import Watched, checked, decoded, grouped, prefilled
from tests.memory import active_bytes, held_bytes
from tests.prompts import tokens
from tests.sessions.faults import Fuse, fused, raising, refused_product, spoiling

SLOW_KINDS = ("deepseek_v3", "llama_sliding", "gpt_oss", "gemma4_text", "mamba2", "rwkv7", "recurrent_gemma")
KINDS = ("llama", "gemma3_text", "qwen3_next", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS))

SYSTEM = tokens(1, 70)
PROMPTS = [[*SYSTEM, *tokens(2, 30)], [*SYSTEM, *tokens(3, 41)], tokens(4, 25)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_answer_as_cold_runs_do_and_what_they_leave_is_resumed_at_its_end(kind: str) -> None:
    model, cache = opened(kind)
    serve(cache, model, PROMPTS[0], marks=[70])
    prompts = [[*PROMPTS[0], 1], *PROMPTS[1:]]
    with cache.begin_many(prompts, capacity=512) as group:
        checked(cache, group)
        assert [row.cached_tokens for row in group.rows] == [100, 70, 0]
        assert [len(row.remaining) for row in group.rows] == [1, 41, 25]
        logits = [prefilled(group, model, row) for row in group.rows]
        for prompt, found in zip(prompts, logits, strict=True):
            assert error(found, cold(model, prompt)) < ROUNDING
        other = [*prompts[0][:-3], 250, *prompts[0][-2:]]
        assert error(logits[0], cold(model, other)) > WRONG
        said = decoded(group, model, group.rows, logits, 3)
        checked(cache, group)
    cache.check()
    for prompt, replies in zip(prompts, said, strict=True):
        told = [*prompt, *replies]
        assert resumed(cache, model, [*told, 7]) == len(told)


@pytest.mark.parametrize("kind", ["gemma4_text", "mamba2"])
def test_chunks_marks_and_other_rows_between_them_change_nothing(kind: str) -> None:
    first, second = [*SYSTEM, *tokens(5, 23)], [*tokens(6, 40), *tokens(7, 30)]
    with grouped(kind, capacity=512) as (model, cache, group):
        one, two = group.admit(first, marks=[70]), group.admit(second, marks=[11, 40])
        done: dict[int, mx.array] = {}
        while len(done) < 2:
            for row in (one, two):
                if row.prompt_left and (logits := group.prefill(model, row, 9)) is not None:
                    done[row.id] = logits[0, 0]
            checked(cache, group)
        assert error(done[one.id], cold(model, first)) < ROUNDING
        assert error(done[two.id], cold(model, second)) < ROUNDING
        # A third takes up what the first left at its mark, which the tree does not have yet.
        third = group.admit([*SYSTEM, *tokens(8, 12)])
        assert third.cached_tokens == 70
        used = group.used_tokens
        assert used == len(first) + len(second)
        found = prefilled(group, model, third, 5)
        assert error(found, cold(model, third.prompt.tolist())) < ROUNDING
        assert group.used_tokens == used + 12
        decoded(group, model, group.rows, [done[one.id], done[two.id], found], 3)
    for prompt, mark in ((first, 70), (second, 40)):
        assert resumed(cache, model, [*prompt[:mark], 9, 9]) == mark


def test_marks_between_the_first_and_the_last_get_a_checkpoint_where_it_saves_enough() -> None:
    prompt = tokens(1, 270)
    with grouped("mamba2", capacity=512, interval=4096) as (model, cache, group):
        for length, marks in ((180, [20, 60, 100, 160, 170]), (270, [20, 200, 260])):
            row = group.admit(prompt[:length], marks=marks, mark_tokens=64)
            prefilled(group, model, row)
            row.close()
            checked(cache, group)
    # 60 is 40 behind 20, and 160 is 60 behind 100. The second prompt resumed at 180, where the first ended.
    for asked, found in ((20, 20), (60, 20), (100, 100), (160, 100), (170, 170), (200, 180), (260, 260)):
        assert resumed(cache, model, [*prompt[:asked], 9, 9]) == found, asked


@pytest.mark.parametrize("kind", ["baichuan_m1", "recurrent_gemma"])
def test_the_end_of_a_reply_is_stored_where_another_prompt_has_windows_at_the_same_offsets(kind: str) -> None:
    model, cache = opened(kind)
    first, second = [*SYSTEM, *tokens(5, 60)], [*SYSTEM, *tokens(6, 30)]
    with cache.begin_many(capacity=512) as group:
        for prompt in (first, second):
            row = group.admit(prompt)
            prefilled(group, model, row)
            row.close()
            checked(cache, group)
    assert resumed(cache, model, [*second, 7]) == len(second)


def test_the_ids_of_a_prompt_stand_for_its_keys_where_it_has_keys() -> None:
    prompt = tokens(1, 40)
    image = np.array(prompt, dtype=np.int64)
    image[10] += 1 << 40
    with grouped("llama", [prompt], capacity=256) as (model, cache, group):
        prefilled(group, model, group.rows[0])
        row = group.admit([*prompt, 1], keys=[*image, 1])
        assert (row.cached_tokens, row.matched_tokens) == (10, 10)
        prefilled(group, model, row)
    assert cache.explain(prompt).matched_tokens == 40
    assert cache.explain(prompt, keys=image).matched_tokens == 40
    cache.check()


def test_every_distinct_edge_is_restored_once_and_shared_by_all_rows() -> None:
    model = shared_model("llama")
    told: list[Event] = []
    cache = PrefixCache(model, on_event=told.append)
    turn = [*SYSTEM, *tokens(9, 20)]
    for prompt in (turn, PROMPTS[1]):
        serve(cache, model, prompt)
    cache.reclaim(cache.stats.paged_bytes + cache.stats.live_bytes)
    before = cache.stats
    told.clear()
    prompts = [PROMPTS[0], [*turn, 1, 2], [*turn, 3], [*PROMPTS[1], 4], [*SYSTEM[:33], 5], [*turn, 1, 2, 6]]
    with cache.begin_many(prompts, capacity=512, segment_bytes=0) as group:
        assert [row.cached_tokens for row in group.rows] == [70, 90, 90, 111, 33, 90]
        # The system prompt, the turn behind it, and the other prompt's rest.
        assert group.used_tokens == 70 + 20 + 41
        assert cache.stats.paged_in_bytes == before.paged_in_bytes
        assert not [event for event in told if event.kind == EventKind.PAGED_IN]
        checked(cache, group)
        held = cache.stats.paged_bytes
        for row in group.rows:
            assert error(prefilled(group, model, row), cold(model, row.prompt.tolist())) < ROUNDING
        # Nothing was copied but two tokens that two of them begin with: tails hold what is new, and room to grow.
        assert cache.stats.paged_in_bytes == before.paged_in_bytes
        assert cache.stats.paged_bytes == held + 2 * inside.layout(cache).token_bytes
        assert cache.stats.live_bytes <= inside.slots_bytes(cache) + 6 * 70 * inside.layout(cache).token_bytes
    cache.check()


def test_what_a_session_stored_beside_a_row_is_not_counted_as_shared_with_the_row() -> None:
    prompt = PROMPTS[0]
    with grouped("llama", [prompt[:40], prompt], capacity=1000, stores=prompt[:20]) as (model, cache, group):
        for row in group.rows:
            prefilled(group, model, row)
        serve(cache, model, prompt)
        for longer, shared in (([*prompt, 5], 40), ([*prompt[:30], 5], 30)):
            used, promised = group.used_tokens, group.sharable_tokens(np.array(longer))
            row = group.admit(longer)
            assert row.cached_tokens == len(longer) - 1
            assert (promised, group.used_tokens - used) == (shared, row.cached_tokens - shared)
            row.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba"])
def test_what_the_tree_has_no_room_for_is_not_counted_as_shared(kind: str) -> None:
    model, cache = opened(kind, budget_bytes=1)
    with cache.begin_many([PROMPTS[0]], capacity=1000) as group:
        (row,) = group.rows
        prefilled(group, model, row)
        promised = group.sharable_tokens(np.array([*PROMPTS[0], 5]))
        used = group.used_tokens
        assert (promised, group.admit([*PROMPTS[0], 5]).cached_tokens, group.used_tokens - used) == (0, 0, 0)
        checked(cache, group)


def test_a_row_shares_what_a_running_row_has_generated_and_at_most_all_but_its_last_token() -> None:
    with grouped("llama", [PROMPTS[2]], capacity=128) as (model, _, group):
        (first,) = group.rows
        (said,) = decoded(group, model, [first], [prefilled(group, model, first)], 6)
        told = [*PROMPTS[2], *said]
        second = group.admit(told)
        assert (second.cached_tokens, second.remaining.tolist()) == (len(told) - 1, told[-1:])
        assert second.reason == "last_token"
        assert error(prefilled(group, model, second), cold(model, told)) < ROUNDING
        assert group.used_tokens == len(told) + 1


@pytest.mark.parametrize("kind", ["mamba2", "recurrent_gemma"])
def test_recurrent_state_is_shared_only_where_it_is_known(kind: str) -> None:
    prompt = tokens(1, 60)
    with grouped(kind, [prompt], capacity=512, interval=4096) as (model, _, group):
        (first,) = group.rows
        logits = prefilled(group, model, first)
        # Where the first stands now, at its tail's checkpoint 16 tokens before, and nowhere else.
        same = group.admit([*prompt, 1, 2])
        parted = group.admit([*prompt[:50], 3])
        before = group.admit([*prompt[:30], 4])
        assert [row.cached_tokens for row in (same, parted, before)] == [60, 44, 0]
        assert [(row.matched_tokens, row.reason) for row in (same, parted, before)] == [
            (60, None), (50, "no_checkpoint"), (30, "no_checkpoint"),
        ]  # fmt: skip
        decoded(group, model, [first], [logits], 2)
        assert error(prefilled(group, model, same), cold(model, same.prompt.tolist())) < ROUNDING
        late = group.admit([*prompt, 5])
        assert late.cached_tokens == 60
        for row in (parted, before, late):
            assert error(prefilled(group, model, row), cold(model, row.prompt.tolist())) < ROUNDING


def test_windows_are_shared_wherever_the_tree_has_them_also_where_a_row_holds_none_of_them() -> None:
    """A row restored at 140 has no window in front of 124; one that parts from it at 60 takes it from the tree."""
    model, cache = opened("gemma3_text", checkpoint_interval=4096)
    prompt = tokens(1, 140)
    serve(cache, model, prompt, marks=[100])
    with cache.begin_many([[*prompt, 1]], capacity=512) as group:
        assert group.rows[0].cached_tokens == 140
        for parted, cached in (([*prompt[:60], 2], 60), ([*prompt[:110], 3], 110), ([*prompt, 4], 140)):
            row = group.admit(parted)
            assert row.cached_tokens == cached
            assert error(prefilled(group, model, row), cold(model, parted)) < ROUNDING
        assert group.used_tokens == 140 + 3
        group.rows[0].close()
        row = group.admit([*prompt[:50], 5])
        assert row.cached_tokens == 50
        for each in group.rows:
            each.close()
        cache.clear()
        row = group.admit([*prompt[:50], 6])
        assert row.cached_tokens == 0
        assert error(prefilled(group, model, row), cold(model, row.prompt.tolist())) < ROUNDING
        checked(cache, group)
    cache.check()


def test_rows_count_as_requests_in_stats_history_events_pins_and_traces(tmp_path: Path) -> None:
    model = shared_model("llama")
    told: list[Event] = []
    path = tmp_path / "trace.jsonl"
    cache = PrefixCache(model, on_event=told.append, trace=path)
    cache.warm(model, SYSTEM, name="system", ttl_requests=3)
    requests = cache.stats.requests
    told.clear()
    with cache.begin_many(PROMPTS[:2], capacity=512, priority=2) as group:
        resumed = [event for event in told if event.kind == EventKind.RESUMED]
        assert [(event.end, event.detail["by"]) for event in resumed] == [(70, "begin_many")] * 2
        assert list(cache.names()) == ["system"]
        group.admit(PROMPTS[2])
        assert list(cache.names()) == []
        assert cache.stats.requests == requests + 3
        assert cache.stats.hit_tokens == 140
        for row in group.rows:
            prefilled(group, model, row)
        decoded(group, model, group.rows[:1], [mx.arange(8)], 2)
    ticks = [node.payload.entry.priority for node in inside.nodes(cache) if node.payload.entry is not None]
    assert 2 in ticks
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["output"] for line in lines if "request" in line] == [0, 2, 0, 0]
    cache.reclaim(0)
    assert {gap.reason for gap in cache.explain(PROMPTS[0]).gaps} == {Reason.EVICTED}
    cache.check()


def test_what_is_quarantined_is_neither_restored_nor_stored() -> None:
    keys = np.array(PROMPTS[0], dtype=np.int64)
    prompts = [[*PROMPTS[0], 1], [*PROMPTS[0], 3]]
    with grouped("llama", prompts, capacity=512, stores=PROMPTS[0]) as (model, cache, group):
        early, fresh = group.rows
        assert early.cached_tokens == fresh.cached_tokens == 100
        prefilled(group, model, early)
        with cache.begin(PROMPTS[0]) as session:
            inside.find_wrong(cache, session, 100, 50)
            session.prefill(model)
        late = group.admit([*PROMPTS[0], 2])
        assert late.cached_tokens == 50
        for row in (late, fresh):
            prefilled(group, model, row)
        cache.clear_quarantine()
        # The first stood on what was found wrong; the others evaluated it themselves.
        assert fresh.cached_tokens <= 50
        early.close()
        assert inside.stored_tokens(cache, keys) == 50
        late.close()
        assert inside.stored_tokens(cache, [*PROMPTS[0], 2]) == 101
        assert inside.stored_tokens(cache, [*PROMPTS[0], 1]) == 100
        fresh.close()
        assert inside.stored_tokens(cache, [*PROMPTS[0], 3]) == 101


def test_the_tainted_part_of_a_row_is_never_found_in_the_tree() -> None:
    with grouped("llama", [PROMPTS[0], PROMPTS[1]], capacity=512) as (model, cache, group):
        one, two = group.rows
        for row in (one, two):
            prefilled(group, model, row)
        one._tainted = 80
        third = group.admit([*PROMPTS[0], 1])
        assert third.cached_tokens == 80
        third.close()
        decoded(group, model, [one], [mx.arange(8)], 1)
    assert cache.explain([*PROMPTS[0], 1]).matched_tokens == 80
    assert cache.explain([*PROMPTS[1], 1]).matched_tokens == len(PROMPTS[1])
    with cache.begin([*PROMPTS[0], 1]) as session:
        session.prefill(model)
        assert error(session.step(model, [1])[0, -1], cold(model, [*PROMPTS[0], 1])) < ROUNDING
    cache.check()


@pytest.mark.parametrize("kind", ["llama_sliding", "jamba"])
def test_a_tainted_row_with_point_layers_is_stored_up_to_where_their_state_is_known(kind: str) -> None:
    prompt = tokens(1, 100)
    with grouped(kind, capacity=512, interval=4096) as (model, cache, group):
        row = group.admit(prompt, marks=[40])
        prefilled(group, model, row)
        row._tainted = 60
    assert resumed(cache, model, [*prompt, 1]) == (40 if inside.layout(cache).has_states else 60)


def test_a_window_that_has_gone_round_is_not_rewound() -> None:
    with grouped("gemma3_text", [[*PROMPTS[0], 1, 2, 3]], capacity=256, stores=PROMPTS[0]) as (model, cache, group):
        (row,) = group.rows
        prefilled(group, model, row)
        for begin, end in ((90, 103), (102, 103), (80, 95)):
            with pytest.raises(ShiftError, match="windows of 16 tokens"):
                group.remove(model, row, begin, end)
            checked(cache, group)
        found = group.step(model, [row], [9])[0, -1]
        assert error(found, cold(model, [*PROMPTS[0], 1, 2, 3, 9])) < ROUNDING


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
def test_the_ledger_says_what_is_held_while_a_group_is_open_and_after(kind: str) -> None:
    model, cache = opened(kind)
    inside.try_ways(model)  # what a model keeps of its first passes
    base = active_bytes()

    def agrees() -> None:
        assert active_bytes() - base == pytest.approx(held_bytes(cache.stats), rel=0.01, abs=4096)

    with cache.begin_many([PROMPTS[0], [*SYSTEM, *tokens(5, 300)]], capacity=2048) as group:
        agrees()
        for row in group.rows:
            prefilled(group, model, row, 64)
            agrees()
        group.rows[0].close()
        agrees()
        checked(cache, group)
        assert group.nbytes > 0
    agrees()
    cache.clear()
    agrees()


def test_recurrent_state_does_not_keep_the_activations_of_its_chunk() -> None:
    model = shared_model("mamba2")
    mx.eval(model.parameters())
    cache = PrefixCache(model)
    base = active_bytes()
    with cache.begin_many([tokens(1, 512)], capacity=520) as group:
        group.prefill(model, group.rows[0], 500)
        stats = cache.stats
        assert active_bytes() - base == pytest.approx(stats.live_bytes + stats.paged_bytes, rel=0.05)


def test_the_logits_of_a_prompt_hold_the_bytes_of_one_token_and_no_buffer() -> None:
    with grouped("llama", [tokens(1, 30)], capacity=256) as (model, _, group):
        logits = group.prefill(model, group.rows[0])
        held = active_bytes()
        assert logits is not None
        nbytes = logits.nbytes
        del logits
        assert held - active_bytes() <= nbytes + 64
        for _ in range(2):  # a write into a buffer that something else holds would copy all of it
            held = active_bytes()
            mx.reset_peak_memory()
            mx.eval(group.step(model, group.rows, [1]))
        assert mx.get_peak_memory() - held < group.nbytes // 2


def test_tokens_run_out_with_the_numbers_and_nothing_is_lost() -> None:
    with grouped("llama", [PROMPTS[2]], capacity=60, stores=PROMPTS[0]) as (model, cache, group):
        (row,) = group.rows
        logits = prefilled(group, model, row)
        before = cache.stats.requests
        with pytest.raises(CacheFullError) as caught:
            group.admit(PROMPTS[0])
        assert (caught.value.capacity, caught.value.used, caught.value.wanted) == (60, 25, 99)
        assert (group.rows, cache.stats.requests) == ([row], before)
        second = group.admit(tokens(9, 50))
        with pytest.raises(CacheFullError):
            group.prefill(model, second)
        assert second.position == 0
        assert group.prefill(model, second, 35) is None
        with pytest.raises(CacheFullError):
            group.step(model, [row], [1])
        checked(cache, group)
        second.close()
        decoded(group, model, [row], [logits], 3)
    assert cache.explain([*tokens(9, 50), 1]).matched_tokens == 35
    cache.check()


@pytest.mark.parametrize(("kind", "error_class"), [("gemma3_text", RuntimeError), ("jamba", KeyboardInterrupt)])
def test_what_was_evaluated_before_an_exception_becomes_a_stored_prefix(
    kind: str, error_class: type[BaseException]
) -> None:
    model, cache = opened(kind)
    failing = Watched(model, fails_at=4, error=error_class)
    prompt = tokens(1, 90)
    group = cache.begin_many([prompt], capacity=256)

    def loop() -> None:
        with group:
            while group.prefill(failing, group.rows[0], 20) is None:
                checked(cache, group)

    with pytest.raises(error_class, match="broke off"):
        loop()
    cache.check()
    assert group.is_closed
    assert resumed(cache, model, [*prompt, 1]) == 60
    with pytest.raises(SessionClosedError, match="group is closed"):
        group.admit(prompt)


@pytest.mark.parametrize("rows", [1, 2])
def test_an_interrupt_over_wrapped_windows_stays_one_and_the_rows_say_that_they_are_lost(rows: int) -> None:
    prompts = [tokens(1, 24), tokens(2, 6)][:rows]
    for raised, seen in ((KeyboardInterrupt, KeyboardInterrupt), (ValueError, LostStateError)):
        model, cache = opened("llama_sliding")
        with cache.begin_many([*prompts, tokens(3, 20)], capacity=200) as group:
            *stepped, other = group.rows
            for row in group.rows:
                prefilled(group, model, row)
            group.step(model, stepped, [5] * rows)
            with fused(model, Fuse(1, raising(raised, after=True))), pytest.raises(seen):
                group.step(model, stepped, [6] * rows)
            for row in stepped:
                with pytest.raises(SessionClosedError, match=f"overwritten wrapped windows: {raised.__name__}"):
                    group.step(model, [row], [6])
            assert error(group.step(model, [other], [7])[0, -1], cold(model, [*tokens(3, 20), 7])) < ROUNDING
        cache.check()
        for prompt in prompts:
            resumed(cache, model, [*prompt, 5])


def test_a_failed_evaluation_loses_the_rows_and_nothing_of_them_is_stored() -> None:
    model, cache = opened("llama")
    serve(cache, model, PROMPTS[0])
    with cache.begin_many([PROMPTS[2], PROMPTS[1]], capacity=512) as group:
        first, second = group.rows
        prefilled(group, model, second)
        with fused(model, Fuse(1, spoiling(refused_product))), pytest.raises(RuntimeError):
            group.prefill(model, first)
        with pytest.raises(SessionClosedError, match="lost"):
            group.step(model, [second], [1])
    cache.check()
    assert cache.explain([*PROMPTS[1], 1]).matched_tokens == 70
    assert cache.stats.live_bytes == inside.slots_bytes(cache)


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("close", ["row", "group"])
def test_a_copy_out_of_the_tails_is_tried_again_once_and_one_that_fails_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch, failures: int, close: str
) -> None:
    model, cache = opened("llama")
    group = cache.begin_many(PROMPTS[:2], capacity=512)
    for row in group.rows:
        prefilled(group, model, row)
    real, left = mx.contiguous, [failures]

    def failing(*arguments: Any, **more: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise MemoryError("no room")
        return real(*arguments, **more)

    monkeypatch.setattr(mx, "contiguous", failing)
    closing = group.rows[0].close if close == "row" else group.close
    if failures == 1:
        closing()
    else:
        with pytest.raises(MemoryError, match="no room"):
            closing()
    cache.check()
    # What both begin with was there before.
    assert cache.explain([*PROMPTS[0], 1]).matched_tokens == (100 if failures == 1 else 70)
    if close == "row":
        checked(cache, group)
        assert error(group.step(model, group.rows, [1])[0, -1], cold(model, [*PROMPTS[1], 1])) < ROUNDING
    group.close()
    cache.check()
    assert cache.stats.live_bytes == 0
    assert cache.explain([*PROMPTS[1], 1]).matched_tokens == 111 + (close == "row")


@pytest.mark.parametrize("is_in_a_cycle", [False, True])
def test_a_group_that_nobody_closed_is_stored_and_its_bytes_are_given_back(is_in_a_cycle: bool) -> None:
    model, cache = opened("llama")
    group = cache.begin_many([PROMPTS[0]], capacity=256)
    prefilled(group, model, group.rows[0])
    if is_in_a_cycle:
        group.myself = group  # type: ignore[attr-defined]
    del group
    gc.collect()
    cache.check()
    assert cache.stats.live_bytes == 0
    assert cache.explain([*PROMPTS[0], 1]).matched_tokens == 100


def test_a_group_whose_finalizer_was_interrupted_is_taken_back_by_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, cache = opened("llama")
    monkeypatch.setattr(Group, "__del__", lambda self: None)
    other = cache.begin_many(capacity=64)
    requests = [
        lambda: serve(cache, model, PROMPTS[2]),
        lambda: cache.begin_many(capacity=8).close(),
        lambda: other.admit(PROMPTS[2]),
    ]
    for ask in requests:
        group = cache.begin_many([PROMPTS[0]], capacity=256)
        prefilled(group, model, group.rows[0])
        held = group.nbytes
        del group
        gc.collect()
        assert cache.stats.live_bytes >= held
        ask()
        cache.check()
        assert cache.stats.live_bytes == other.nbytes + inside.slots_bytes(cache)
    other.close()


def test_caches_whose_state_cannot_be_among_others_are_refused() -> None:
    model = shared_model("llama")
    refused: list[tuple[PrefixCache, str]] = [
        (PrefixCache(model, exact=True), "exact"),
        (PrefixCache(model, kv_bits=8), "quantized"),
        (sized_cache(SizedLayout(8), budget_bytes=1 << 20), "sizes"),
    ]
    for cache, reason in refused:
        with pytest.raises(ValueError, match=reason):
            cache.begin_many(capacity=64)
    for kind in ("llama4", "deepseek_v41"):
        with pytest.raises(UnsupportedCacheError):
            PrefixCache(shared_model(kind)).begin_many(capacity=64)
    kept = PrefixCache(model, caches=lambda: [RotatingKVCache(max_size=16, keep=4) for _ in model.layers])
    with pytest.raises(UnsupportedCacheError, match="keeps its first 4"):
        kept.begin_many(capacity=64)


def test_arguments_out_of_their_range_are_named_and_change_nothing() -> None:
    model, cache = opened("llama")
    prompt, wrong = PROMPTS[2], PROMPTS[2][24] + 1
    refused: list[tuple[str, Any]] = [
        *(("capacity is", partial(cache.begin_many, capacity=each)) for each in (0, -1, 1.5, True, None)),
        ("namespace", lambda: cache.begin_many(capacity=8, namespace=3)),  # type: ignore[arg-type]
        ("tokens is empty", lambda: cache.begin_many([PROMPTS[0], []], capacity=8)),
        ("prompts is a NoneType", lambda: cache.begin_many(None, capacity=10)),  # type: ignore[arg-type]
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
    cache.check()
    assert not inside.core(cache).bookings
    with cache.begin_many([prompt], capacity=256) as group, cache.begin_many([[1, 2]], capacity=8) as another:
        (row,), (foreign,) = group.rows, another.rows
        group.prefill(model, row, 24)
        refused = [
            ("mark 26", lambda: group.admit(prompt, marks=[26])),
            ("marks is a NoneType", lambda: group.admit(prompt, marks=None)),  # type: ignore[arg-type]
            ("mark 1.5 is a float; wanted an int", lambda: group.admit(prompt, marks=[1.5])),  # type: ignore[list-item]
            ("namespace is", lambda: group.admit(prompt, namespace="\ud800")),
            *(("mark_tokens is", partial(group.admit, prompt, mark_tokens=each)) for each in (0, -5, 1.5, "8", None)),
            ("tokens is", lambda: group.prefill(model, row, 0)),
            ("tokens is", lambda: group.prefill(model, row, -3)),
            ("another group", lambda: group.prefill(model, foreign)),
            ("a int is not a row", lambda: group.step(model, [0], [1])),  # type: ignore[list-item]
            (f"{wrong - 1} follows", lambda: group.step(model, [row], [wrong])),
            ("one token for each", lambda: group.step(model, [row], [1, 2])),
            ("one token for each", lambda: group.step(model, [row, foreign][:1], mx.array([[1, 2]]))),
            ("wanted integers", lambda: group.step(model, [row], mx.array([1.0]))),
            ("no rows", lambda: group.step(model, [], [])),
            ("twice", lambda: group.step(model, [row, row], [wrong - 1] * 2)),
        ]
        for message, call in refused:
            with pytest.raises(ValueError, match=message):
                call()
            for each in (group, another, cache):
                each.check()
        assert group.rows == [row]
        group.step(model, [row], [wrong - 1])
        assert (row.prompt_left, row.known_tokens) == (0, 25)
        with pytest.raises(ValueError, match="use step"):
            group.prefill(model, row)
        row.close()
        with pytest.raises(SessionClosedError, match="row 0 is closed"):
            group.step(model, [row], [1])
        assert (row.position, row.clean_tokens) == (0, 0)
    assert cache.explain([*prompt, 1]).matched_tokens == 25


@pytest.mark.parametrize(("kind", "last"), [("llama", 1), ("qwen3_next", 10)])
def test_the_last_token_goes_by_itself_only_behind_many(kind: str, last: int) -> None:
    """No model makes logits for many tokens that nobody reads, and none a pass for one token behind a few."""
    model = shared_model(kind)
    lengths: list[int] = []

    def seen(ids: mx.array, cache: Any) -> Any:
        lengths.append(ids.shape[1])
        return model(ids, cache=cache)

    with PrefixCache(model, budget_bytes=1 << 30) as cache, cache.begin_many(capacity=512) as group:
        row = group.admit(tokens(9, 100), marks=[90])
        assert error(prefilled(group, seen, row), cold(model, tokens(9, 100))) < ROUNDING
    assert lengths[-1] == last
