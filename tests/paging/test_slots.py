"""Several live paths side by side: which slot a request takes, what it copies, what it costs, and who gives way.

Each timeline runs on real tiny models; whatever a session is handed must give the logits of a cold run.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import radixcache.paging.pager
from radixcache import CacheBusyError, PrefixCache, Session, ShortReason
from runner.models.tiny import tiny_model
from tests import inside
from tests.groups.cold import run, serve, shared_model
from tests.paging.served import LLAMA_TOKEN_BYTES
from tests.prompts import tokens
from tests.sessions.faults import failed_decomposition

KINDS = ["llama", "llama_sliding", "nemotron_h"]

SYSTEM = tokens(0, 200)
ANNA, BEN, CARLA = ([*SYSTEM, *tokens(seed, 60)] for seed in (1, 2, 3))


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model(request.param)


@pytest.fixture
def _short_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy between slots in so many cuts that their seams show."""
    monkeypatch.setattr(radixcache.paging.pager, "CUT_TOKENS", 64)


def slot_of(session: Session) -> int:
    return inside.live(session).slot


@pytest.mark.parametrize(("slots", "copies"), [(1, True), (2, False)])
def test_users_who_each_have_a_slot_take_turns_without_a_copy(llama: Any, slots: int, copies: bool) -> None:
    cache = PrefixCache(llama, live_slots=slots)
    histories = [tokens(7, 150), tokens(8, 150)]
    for turn in range(4):
        for user, history in enumerate(histories):
            session = serve(cache, llama, [*history, 5], reply=[turn, user])
            assert session.cached_tokens == (len(history) if turn else 0)
            history += [5, turn, user]
    assert (cache.stats.copied_bytes > 0, cache.stats.paged_bytes > 0) == (copies, copies)


def test_the_free_slot_with_the_longest_common_prefix_is_taken(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=3)
    first, second = serve(cache, llama, ANNA), serve(cache, llama, tokens(9, 100))
    assert slot_of(first) != slot_of(second)
    with cache.begin([*ANNA, 9]) as again:
        assert slot_of(again) == slot_of(first)
        # That slot is taken now: the next best is a free one that holds nothing, not the one that holds something else.
        with cache.begin([*SYSTEM, 9]) as third:
            assert slot_of(third) not in (slot_of(first), slot_of(second))
    assert slot_of(serve(cache, llama, [*tokens(9, 100), 4])) == slot_of(second)


def test_of_slots_that_share_nothing_the_one_used_longest_ago_is_taken(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2)
    first, second = serve(cache, llama, tokens(7, 50)), serve(cache, llama, tokens(8, 50))
    assert slot_of(serve(cache, llama, tokens(9, 50))) == slot_of(first)
    assert slot_of(serve(cache, llama, tokens(10, 50))) == slot_of(second)


@pytest.mark.usefixtures("_short_cuts")
def test_a_request_reads_what_is_live_in_an_idle_slot(model: Any) -> None:
    cache = PrefixCache(model, live_slots=2)
    serve(cache, model, ANNA, marks=[len(SYSTEM)])
    with cache.begin(tokens(9, 30)) as other:
        run(other, model)
        # The slot of ANNA is the only free one; then it is busy, and the other one takes over from it.
    with cache.begin([*ANNA, 1]) as anna:
        with cache.begin(BEN) as ben:
            assert slot_of(ben) != slot_of(anna)
            assert ben.cached_tokens == len(SYSTEM)
            run(ben, model)
        run(anna, model)
    cache.check()


def test_a_slot_behind_another_pages_nothing_out_that_is_live_there(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2)
    with cache.begin(ANNA) as anna, cache.begin(ANNA) as again:
        run(anna, llama)
        run(again, llama)
    before = cache.stats
    serve(cache, llama, tokens(9, 30))
    assert cache.stats.paged_out_bytes == before.paged_out_bytes


def test_a_slot_that_nobody_came_back_to_does_not_shield_its_state_from_the_policy(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2, budget_bytes=1_000 * LLAMA_TOKEN_BYTES)
    serve(cache, llama, tokens(1, 300), reserve=0)
    # They all share SYSTEM and so the other slot; the tails of the first that come are the policy's victims.
    for seed in range(2, 22):
        serve(cache, llama, [*SYSTEM, *tokens(seed, 60)], reserve=0)
    assert inside.paths(cache)[0].offset == 0
    assert inside.stored_tokens(cache, tokens(1, 300)) == 0
    assert serve(cache, llama, [*SYSTEM, *tokens(14, 60), 1], reserve=0).cached_tokens == len(SYSTEM) + 60


@pytest.mark.own_process
def test_a_session_outlives_the_slot_that_held_what_it_matched() -> None:
    mamba: Any = tiny_model("mamba2")
    cache = PrefixCache(mamba, live_slots=2)
    serve(cache, mamba, ANNA)
    anna = cache.begin([*ANNA, 5])
    # All of this is in the tree and only in the slot of ANNA; without a checkpoint there nothing of it is resumed.
    with cache.begin([*ANNA[:100], 7, 8]) as ben:
        assert (ben.matched_tokens, ben.cached_tokens) == (100, 0)
        anna.caches[0][0] = anna.caches[0][0] + failed_decomposition()
        anna.close()
        assert anna.is_lost
        cache.check()
        run(ben, mamba)
    cache.check()
    serve(cache, mamba, [*ANNA, 6])


@pytest.mark.own_process
def test_state_that_is_pending_on_a_failure_is_not_read_by_another_slot(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2)
    serve(cache, llama, ANNA)
    anna = cache.begin([*ANNA, 5])
    anna.caches[0].keys = anna.caches[0].keys + failed_decomposition()
    with cache.begin([*ANNA, 6]) as ben:
        assert ben.cached_tokens == 0
        assert ben.reason is ShortReason.LIVE_ELSEWHERE
        run(ben, llama)
    assert anna.is_lost
    anna.close()
    cache.check()
    assert serve(cache, llama, [*ANNA, 6, 3]).cached_tokens == len(ANNA) + 1


def test_what_two_slots_hold_is_not_joined_with_what_one_of_them_goes_on_with(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2)
    with cache.begin(SYSTEM) as shorter, cache.begin(ANNA) as longer:
        run(shorter, llama)
        run(longer, llama)
    cache.check()
    with cache.begin([*SYSTEM, 1, 2, 7]) as again:
        assert slot_of(again) == slot_of(shorter)
        assert again.cached_tokens == len(SYSTEM)
        run(again, llama)
    cache.check()


def test_a_busy_error_names_who_holds_each_slot(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2)
    first = cache.begin(ANNA, turn=3, kind="chat")
    second = cache.begin(BEN, namespace="tenant")
    with pytest.raises(CacheBusyError) as caught:
        cache.begin(CARLA)
    message = str(caught.value)
    assert "all 2 live slots are taken" in message
    assert "slot 0 by a request in thread MainThread of kind chat, turn 3, request 1, at 0 of 260 prompt" in message
    assert "slot 1 by a request in thread MainThread" in message
    assert len(caught.value.holders) == 2
    # What another namespace asks for stays its own.
    assert "request 2" not in message
    first.close()
    assert slot_of(cache.begin(CARLA)) == 0
    second.close()
    gc.collect()
    cache.check()


def test_a_slot_count_that_is_none_is_refused(llama: Any) -> None:
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=r"live_slots is .*; wanted a whole number of slots, 1 or more"):
            PrefixCache(llama, live_slots=wrong)  # type: ignore[arg-type]


def test_a_session_collected_in_the_middle_of_an_operation_is_closed_after_it(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PrefixCache(llama, live_slots=2)
    serve(cache, llama, ANNA)
    abandoned: list[Session | None] = [cache.begin([*ANNA, 5])]
    abandoned[0].prefill(llama)  # type: ignore[union-attr]
    is_open_after: list[bool] = []

    def collect() -> None:
        abandoned[0] = None
        gc.collect()
        is_open_after.append(any(path.is_open and path.tip is not None for path in inside.paths(cache)))

    states = inside.states(cache)
    split = states.split
    monkeypatch.setattr(states, "split", lambda *arguments: (collect(), split(*arguments))[1])
    serve(cache, llama, BEN)
    monkeypatch.undo()
    assert is_open_after
    assert all(is_open_after)
    assert not any(path.is_open for path in inside.paths(cache))
    cache.check()


def test_buffers_that_another_thread_works_on_are_not_read_and_the_reason_says_so(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2)
    serve(cache, llama, ANNA)
    with cache.begin([*ANNA, 5]) as anna:
        found: list[Session] = []
        thread = threading.Thread(target=lambda: found.append(serve(cache, llama, BEN)))
        thread.start()
        thread.join()
        run(anna, llama)
    assert [(each.cached_tokens, each.reason) for each in found] == [(0, ShortReason.LIVE_ELSEWHERE)]
    assert cache.stats.short_reasons[ShortReason.LIVE_ELSEWHERE] == 1
    cache.check()


def test_a_snapshot_is_not_dropped_as_a_duplicate_while_another_thread_needs_it(llama: Any) -> None:
    cache = PrefixCache(llama, live_slots=2, budget_bytes=1_100 * LLAMA_TOKEN_BYTES)
    for prompt in (ANNA, tokens(9, 50), tokens(10, 50)):
        serve(cache, llama, prompt, (1, 2), 128, reserve=0)
    with cache.begin([*ANNA, 5], reserve=0) as anna:
        assert cache.stats.duplicate_bytes == len(ANNA) * LLAMA_TOKEN_BYTES
        found: list[Session] = []
        thread = threading.Thread(
            target=lambda: found.append(serve(cache, llama, [*ANNA, 6], (1, 2), 128, reserve=400))
        )
        thread.start()
        thread.join()
        run(anna, llama)
    assert [each.cached_tokens for each in found] == [len(ANNA)]
    cache.check()


@pytest.fixture(autouse=True)
def _no_session_left() -> Iterator[None]:
    yield
    gc.collect()
