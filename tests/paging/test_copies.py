"""Copies: the live path goes on for free, and a switch between users moves only what they do not share.

Shown three ways that do not know of each other: what the statistics count, the peak of MLX's memory, and where the live
buffers lie. A last test holds a reference to a buffer, which makes MLX copy it, to show that the other two would see.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from radixcache import PrefixCache, Session
from runner.models.tiny import WINDOW_LENGTH, tiny_model
from tests import inside
from tests.paging.served import WindowModel
from tests.prompts import tokens

#: Bytes that the span layers of the tiny models take per token, from the configurations in runner/models/tiny.py.
TOKEN_BYTES = {
    "llama": 3 * 2 * 2 * 64 * 4,
    "llama in 8 bits": 3 * 2 * 2 * (64 + 4 + 4),
    "llama_sliding": 2 * 2 * 2 * 32 * 4,
    "nemotron_h": 2 * 2 * 2 * 32 * 4,
}

LONG_LENGTH = 1000
SHARED_LENGTH = 800
TAIL_LENGTH = 150

pytestmark = pytest.mark.usefixtures("exact_allocations")


@pytest.fixture(params=[pytest.param(k, marks=[pytest.mark.slow] * k.endswith("bits")) for k in sorted(TOKEN_BYTES)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_and_cache(kind: str, **more: Any) -> tuple[Any, PrefixCache]:
    model: Any = tiny_model(kind.removesuffix(" in 8 bits"))
    return model, PrefixCache(model, kv_bits=8 if kind.endswith("8 bits") else None, **more)


def serve(
    cache: PrefixCache,
    model: Any,
    prompt: list[int],
    reply: Sequence[int] = (1, 2, 3),
    reserve: int = 1000,
    marks: Sequence[int] = (),
) -> int:
    """Answer a prompt with given tokens; returns how many were cached."""
    with cache.begin(prompt, reserve=reserve, marks=marks) as session:
        _run(session, model, reply)
        cached = session.cached_tokens
    cache.check()
    return cached


def _run(session: Session, model: Any, reply: Sequence[int]) -> None:
    session.prefill(model, step_size=512)
    for token in (int(session.prompt[-1]), *reply):
        mx.eval(session.step(model, [token]))


def span_buffers(session: Session) -> list[mx.array]:
    return [buffer for layer in session.caches for buffer in _buffers(layer)]


def _buffers(layer: Any) -> list[mx.array]:
    if isinstance(layer, CacheList):
        return [buffer for inner in layer.caches for buffer in _buffers(inner)]
    if isinstance(layer, KVCache):
        return [layer.keys, layer.values]
    return [*layer.keys, *layer.values] if isinstance(layer, QuantizedKVCache) else []


def addresses(session: Session) -> list[int]:
    """Where the live buffers of the span layers lie in memory. Keeps no reference to them."""
    mx.eval(span_buffers(session))
    return [int(np.asarray(buffer).ctypes.data) for buffer in span_buffers(session) if buffer.size]


def peak_growth_bytes(base_bytes: int) -> int:
    mx.synchronize()
    return mx.get_peak_memory() - base_bytes


def start_peak() -> int:
    gc.collect()
    mx.synchronize()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def test_a_request_that_continues_the_live_path_copies_nothing(kind: str) -> None:
    model, cache = model_and_cache(kind)
    prompt = tokens(1, LONG_LENGTH)
    with cache.begin(prompt, reserve=1000) as session:
        _run(session, model, (1, 2, 3))
        before = addresses(session)
    del session
    assert before
    following = [*prompt, 1, 2, 3, *tokens(2, 20)]
    plain = _plain_growth_bytes(cache, model, following, (4, 5, 6))
    copied, live = cache.stats.copied_bytes, cache.stats.live_bytes
    base = start_peak()
    with cache.begin(following) as session:
        assert session.cached_tokens == LONG_LENGTH + 3
        assert addresses(session) == before
        # Nothing but the checkpoint of what stands there, if that was not taken before.
        assert peak_growth_bytes(base) < live // 50
        _run(session, model, (4, 5, 6))
        assert addresses(session) == before
    # What is new in windows, the prompt's last token and all behind it, is copied out of them once.
    new_tokens = len(following) + 3 - (LONG_LENGTH + 3)
    assert cache.stats.copied_bytes == copied + new_tokens * inside.window_bytes(cache)
    assert peak_growth_bytes(base) < plain + live // 50
    cache.check()


def _plain_growth_bytes(cache: PrefixCache, model: Any, prompt: list[int], reply: Sequence[int]) -> int:
    """What the same forward passes take at their peak over caches that nobody manages: activations, and no copy."""
    caches, remaining = cache.fetch(prompt)
    base = start_peak()
    if len(remaining) > 1:
        mx.eval(model(mx.array(remaining[None, :-1]), cache=caches), [c.state for c in caches])
    for token in (int(remaining[-1]), *reply):
        mx.eval(model(mx.array([[token]]), cache=caches))
    return peak_growth_bytes(base)


def test_a_conversation_of_many_turns_moves_its_buffers_only_now_and_then(kind: str) -> None:
    model, cache = model_and_cache(kind)
    prompt = tokens(1, 600)
    moves = 0
    before: list[int] = []
    for turn in range(12):
        with cache.begin(prompt) as session:
            _run(session, model, ())
            moves += addresses(session) != before
            before = addresses(session)
        prompt = [*prompt, *tokens(turn, 100)]
    assert cache.stats.copied_bytes == (600 + 11 * 100) * inside.window_bytes(cache)
    # Growing by half each time, 600 tokens become 1,700 in three steps; the first allocation and a spare one besides.
    assert moves <= 5


def test_a_switch_between_users_copies_out_and_in_only_what_lies_below_their_common_ancestor(kind: str) -> None:
    model, cache = model_and_cache(kind)
    token_bytes = TOKEN_BYTES[kind]
    shared = tokens(1, SHARED_LENGTH)
    users = [[*shared, user, *tokens(user, TAIL_LENGTH - 1)] for user in (10, 20)]
    stored = TAIL_LENGTH + 3
    for prompt in users:
        serve(cache, model, prompt, marks=[SHARED_LENGTH])
    # The second user left the first one's tail and had nothing of its own to bring in.
    assert cache.stats.paged_out_bytes == stored * token_bytes
    assert cache.stats.paged_in_bytes == 0
    for turn in range(4):
        user = turn % 2
        prompt = [*users[user], 1, 2, 3, *tokens(turn, 20)]
        before = cache.stats
        with cache.begin(prompt, reserve=64, marks=[SHARED_LENGTH]) as session:
            assert session.cached_tokens == len(users[user]) + 3
            after = cache.stats
        below = (len(users[user]) + 3 - SHARED_LENGTH) * token_bytes
        assert after.paged_in_bytes - before.paged_in_bytes == below
        # Out goes what the other one added since it was last paged out, and never the common prefix.
        other_below = (len(users[1 - user]) + 3 - SHARED_LENGTH) * token_bytes
        assert after.paged_out_bytes - before.paged_out_bytes <= other_below
        serve(cache, model, prompt, marks=[SHARED_LENGTH])
        users[user] = prompt


def test_a_regenerated_reply_copies_nothing_in() -> None:
    kind = "llama in 8 bits"
    model, cache = model_and_cache(kind)
    prompt = tokens(1, 600)
    serve(cache, model, prompt, reply=tokens(2, 40))
    assert serve(cache, model, prompt, reply=tokens(3, 40)) == len(prompt) - 1
    # The first reply is kept: it is copied out, with the token that is evaluated again.
    assert cache.stats.paged_in_bytes == 0
    assert cache.stats.paged_out_bytes <= 41 * TOKEN_BYTES[kind]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy that code of the cache makes; those of mlx-lm's classes and of the model do not count."""
    found: list[int] = []

    def counting(make: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def made(*arguments: Any, **more: Any) -> mx.array:
            array = make(*arguments, **more)
            if sys._getframe(1).f_globals["__name__"].startswith("radixcache."):
                found.append(array.nbytes)
            return array

        return made

    for name in ("concatenate", "contiguous"):
        monkeypatch.setattr(mx, name, counting(getattr(mx, name)))
    return found


def test_a_growing_conversation_with_windows_copies_what_is_new_and_a_switch_one_window_more(copied: list[int]) -> None:
    model, cache = model_and_cache("llama_sliding")
    users = [[user, *tokens(user, 300)] for user in (1, 2)]
    for prompt in users:
        serve(cache, model, prompt, reserve=2000)
    token_bytes = inside.window_bytes(cache)
    for turn in range(3):
        prompt = users[1] = [*users[1], 1, 2, 3, *tokens(turn, 40)]
        copied.clear()
        assert serve(cache, model, prompt, reserve=64, marks=[len(prompt) - 8]) == len(prompt) - 40
        assert sum(copied) == (40 + 3) * token_bytes
    for turn in range(4):
        user = turn % 2
        prompt = users[user] = [*users[user], 1, 2, 3, *tokens(turn, 40)]
        copied.clear()
        before = cache.stats.paged_out_bytes
        assert serve(cache, model, prompt, reserve=64) == len(prompt) - 40
        windows = sum(copied) - (cache.stats.paged_out_bytes - before)
        assert windows == (40 + 3 + WINDOW_LENGTH) * token_bytes


def test_a_window_that_has_lost_nothing_yet_is_copied_once_after_its_first_forward_pass(copied: list[int]) -> None:
    model = WindowModel(lambda: RotatingKVCache(4096))
    cache = PrefixCache(model)
    prompt = [number % 50 for number in range(300)]
    serve(cache, model, prompt, marks=[100, 200])
    token_bytes = inside.window_bytes(cache)
    assert sum(copied) == (100 + 300 + 3) * token_bytes
    for turn in range(3):
        prompt = [*prompt, 1, 2, 3, *([turn] * 40)]
        copied.clear()
        assert serve(cache, model, prompt) == len(prompt) - 40
        assert sum(copied) == (40 + 3) * token_bytes


def test_a_reference_to_a_live_buffer_would_have_been_noticed() -> None:
    model, cache = model_and_cache("llama")
    prompt = tokens(1, LONG_LENGTH)
    with cache.begin(prompt, reserve=64) as session:
        session.prefill(model, step_size=512)
        before = addresses(session)
        layer_bytes = cache.stats.live_bytes // 6
        base = start_peak()
        held = session.caches[1].keys[..., :10, :]
        mx.eval(held)
        mx.eval(session.step(model, prompt[-1:]))
        assert peak_growth_bytes(base) > layer_bytes
        assert [a != b for a, b in zip(addresses(session), before, strict=True)] == [i == 2 for i in range(6)]
        del held
