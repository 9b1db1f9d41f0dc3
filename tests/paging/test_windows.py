"""Sliding windows: each token is stored once, and requests resume wherever all that a window reads is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from radixcache import PrefixCache, ShortReason
from runner.models.tiny import tiny_model
from tests import inside
from tests.paging.served import WindowModel
from tests.walks.spelling import spells

#: Bytes of a token in one window of a SpellingModel: a key and a value of two float32 each.
TOKEN_BYTES = 16


def rotating(size: int, keep: int = 0) -> WindowModel:
    return WindowModel(KVCache, lambda: RotatingKVCache(size, keep))


WINDOWS = {
    "16": rotating(16),
    "17 of which 4": rotating(17, 4),
    "chunks of 16": WindowModel(KVCache, lambda: ChunkedKVCache(16)),
    "no full attention": WindowModel(lambda: RotatingKVCache(16)),
    "two sizes": WindowModel(KVCache, lambda: RotatingKVCache(5), lambda: RotatingKVCache(17, 4)),
}


@pytest.fixture(params=WINDOWS)
def model(request: pytest.FixtureRequest) -> WindowModel:
    return WINDOWS[request.param]


def ids(start: int, count: int) -> list[int]:
    return [start + number % 97 for number in range(count)]


def serve(
    cache: PrefixCache, model: WindowModel, prompt: Sequence[int], reply: Sequence[int] = (), step_size: int = 2048
) -> Any:
    """One request; what its caches hold is looked at where it resumes and where it ends."""
    with cache.begin(prompt) as session:
        spells(session.caches, prompt[: session.cached_tokens], model.kinds)
        session.prefill(model, step_size)
        session.step(model, prompt[-1:])
        for token in reply:
            session.step(model, [token])
        spells(session.caches, [*prompt, *reply], model.kinds)
    cache.check()
    return session


@pytest.mark.parametrize(("step_size", "stride"), [(3, 2), (50, 7)])
def test_a_branch_resumes_at_every_token_around_the_wrap(model: WindowModel, step_size: int, stride: int) -> None:
    cache = PrefixCache(model)
    trunk = ids(1, 45)
    serve(cache, model, trunk, step_size=step_size)
    for at, other in [*((at, 200) for at in range(1, 45, stride)), *((at, 210) for at in range(44, 0, -5))]:
        session = serve(cache, model, [*trunk[:at], other, 201, 202], step_size=step_size)
        assert (session.matched_tokens, session.cached_tokens, session.reason) == (at, at, None)


def test_what_was_decoded_past_the_wrap_twice_is_resumed_where_the_window_still_has_it(model: WindowModel) -> None:
    prompt, reply = ids(1, 20), ids(101, 40)
    whole = [*prompt, *reply]
    for at in (1, 15, 29, 43, 44, 45, 56, 59, 60):
        cache = PrefixCache(model)  # another one each: what is prefilled again is stored
        serve(cache, model, prompt, reply)
        session = serve(cache, model, [*whole[:at], 201, 202])
        assert session.cached_tokens == at or session.reason == ShortReason.WINDOW_GAP
        # The prompt's last token is evaluated as a reply's are.
        assert session.cached_tokens == at or len(prompt) <= at < len(whole)


def test_a_checkpoint_a_few_tokens_behind_another_costs_these_tokens() -> None:
    model = rotating(16)
    cache = PrefixCache(model, checkpoint_budget_bytes=1 << 20)
    with cache.begin(ids(1, 60), marks=[30, 33]) as session:
        session.prefill(model)
        session.step(model, session.prompt[-1:])
        inside.own_state(session).trim()
        # At 30 the last 16 tokens, at 33 three more; at the tail, 44, eleven.
        assert sum(each.nbytes for each in inside.own_state(session).windows) == (16 + 3 + 11) * TOKEN_BYTES
    cache.check()


def test_many_users_behind_one_prompt_hold_its_window_once() -> None:
    model = rotating(16)
    cache = PrefixCache(model)
    system = ids(1, 64)
    for user in range(20):
        serve(cache, model, [*system, 120 + user, *ids(30, 9)])
    assert cache.stats.window_bytes == (64 + 20 * 10) * TOKEN_BYTES
    stats = cache.stats
    cache.reclaim(stats.live_bytes + stats.paged_bytes - stats.duplicate_bytes - stats.spare_bytes - 1)
    # First what no checkpoint needs: the beginning of the system prompt.
    assert cache.stats.window_bytes < (64 + 20 * 10) * TOKEN_BYTES
    assert cache.stats.evictions == 0
    assert serve(cache, model, [*system, 130, *ids(30, 9), 5]).cached_tokens == 74


def test_a_pinned_prefix_is_resumed_at_its_end_whatever_comes() -> None:
    model = rotating(16)
    cache = PrefixCache(model, budget_bytes=14_000)
    trunk = ids(1, 100)
    serve(cache, model, trunk)
    cache.pin(trunk[:50])
    for user in range(12):
        serve(cache, model, [110 + user, *ids(1, 99)])
    assert serve(cache, model, [*trunk[:50], 200]).cached_tokens == 50


def test_windows_beside_recurrent_layers_are_resumed_at_checkpoints_alone() -> None:
    model = WindowModel(KVCache, lambda: ArraysCache(size=2), lambda: RotatingKVCache(16))
    cache = PrefixCache(model)
    trunk = ids(1, 60)
    with cache.begin(trunk, marks=[20, 30]) as session:
        session.prefill(model)
        session.step(model, trunk[-1:])
    for at, resumed, other in ((59, 44, 200), (35, 30, 200), (25, 20, 200), (19, 0, 200), (25, 25, 210)):
        session = serve(cache, model, [*trunk[:at], other])
        assert (session.matched_tokens, session.cached_tokens) == (at, resumed)
        assert session.reason == (None if at == resumed else ShortReason.NO_CHECKPOINT)


def test_beside_recurrent_layers_nothing_is_kept_of_windows_that_no_checkpoint_needs() -> None:
    model = WindowModel(KVCache, lambda: ArraysCache(size=2), lambda: RotatingKVCache(16))
    cache = PrefixCache(model)
    serve(cache, model, ids(1, 60))
    # Checkpoints at the tail, 44, and at the end.
    assert cache.stats.window_bytes == (16 + 16) * TOKEN_BYTES


def test_what_is_evaluated_again_after_a_failure_is_kept_once() -> None:
    model = rotating(8)
    cache = PrefixCache(model, checkpoint_interval=20)
    trunk = ids(1, 60)
    with cache.begin(trunk) as session:
        session.prefill(model, 7)
    session = cache.begin([*trunk[:5], *ids(61, 55)])

    def fail_soon(done: int, total: int) -> None:
        model.fail_in_layer = 1 if done > 30 else None

    with pytest.raises(RuntimeError):
        session.prefill(model, 9, on_progress=fail_soon)
    model.fail_in_layer = None
    session.prefill(model, 9)
    assert sum(each.nbytes for each in inside.own_state(session).windows) <= 54 * TOKEN_BYTES
    session.close()
    cache.check()


@pytest.mark.parametrize("gap", [(40, 45), (0, 99)])
def test_a_row_that_loses_tokens_stores_what_is_in_front_of_them(gap: tuple[int, int]) -> None:
    model = tiny_model("llama_sliding")
    cache = PrefixCache(model)
    prompt = [number % 30 for number in range(99)]
    with cache.begin_many(capacity=500) as group:
        row = group.admit(prompt[: 15 if gap[0] == 0 else 99])
        group.prefill(model, row)
        group.remove(model, row, gap[0], min(gap[1], row.position))
        group.check()
    cache.check()
    assert cache.explain([*prompt[:40], 7]).resumable_tokens == gap[0]


def test_a_prefill_token_by_token_is_kept_in_pieces_of_many() -> None:
    model = rotating(200)
    cache = PrefixCache(model)
    trunk = ids(1, 300)
    serve(cache, model, trunk, step_size=1)
    stored = [node.payload.windows for node in inside.nodes(cache) if node.payload.windows is not None]
    assert sum(len(leaf.pieces) for windows in stored for leaf in windows.leaves if leaf is not None) < 12
    assert serve(cache, model, [*trunk[:250], 200]).cached_tokens == 250


def test_explain_and_dump_say_from_where_on_a_window_is_stored() -> None:
    model = rotating(16)
    cache = PrefixCache(model)
    trunk = ids(1, 60)
    serve(cache, model, trunk)
    told = cache.explain([*trunk[:40], 200])
    assert told.windows == ((1, 0),)
    assert "resumes at 40: the window of 1 layer is stored from 0 on" in str(told)
    assert "windows of [0, 44)" in cache.dump()
    cache = PrefixCache(model, checkpoint_budget_bytes=33 * TOKEN_BYTES)
    serve(cache, model, trunk)
    told = cache.explain([*trunk, 200])
    assert told.windows == ((1, 28),)
    assert cache.stats.window_bytes == 32 * TOKEN_BYTES


def test_an_insert_keeps_all_tokens_that_its_windows_still_have(model: WindowModel) -> None:
    trunk = ids(1, 45)
    cache, caches = PrefixCache(model), model.make_cache()
    model(mx.array([trunk]), cache=caches)  # one pass, after which the windows have all tokens
    cache.insert(trunk, caches)
    cache.check()
    for at in (3, 20, 31, 44):
        restored, remaining = cache.fetch([*trunk[:at], 200, 201])
        assert len(remaining) == 2, at
        spells(restored, trunk[:at], model.kinds)
    single = model.make_cache()
    for token in trunk:
        model(mx.array([[token]]), cache=single)
    cache = PrefixCache(model)
    cache.insert(trunk, single)  # token by token: the windows have their last tokens alone
    assert len(cache.fetch([*trunk[:20], 200])[1]) >= 17
    assert len(cache.fetch([*trunk, 200])[1]) == 1


def test_an_insert_keeps_only_what_a_window_needs_when_checkpoints_have_no_more_room() -> None:
    model, trunk = rotating(16), ids(1, 60)
    cache, caches = PrefixCache(model, checkpoint_budget_bytes=20 * TOKEN_BYTES), rotating(16).make_cache()
    model(mx.array([trunk]), cache=caches)
    cache.insert(trunk, caches)
    assert cache.stats.window_bytes == 16 * TOKEN_BYTES
    assert len(cache.fetch([*trunk, 200])[1]) == 1
    cache.check()
