"""Bytes: the statistics agree with what MLX allocated, each distinct token is stored once, and the budget holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from radixcache import Ledger, PrefixCache, Session
from runner.models.tiny import TINY_KINDS, tiny_model
from tests import inside
from tests.memory import active_bytes, held_bytes
from tests.prompts import tokens

#: float32 keys and values of one token, from the configurations of the tiny models; 8 bits: packed, scales, biases.
TOKEN_BYTES = {
    "gpt_bigcode": 3 * 2 * 1 * 16 * 4,
    "deepseek_v3": 3 * 1 * (32 + 16) * 4,
    "llama in 8 bits": 3 * 2 * 2 * (64 + 4 + 4),
}

#: Arrays of rwkv7 and nemotron_h, as the model leaves them, hold more memory than their shape says.
FAST_KINDS = ["rwkv7", "nemotron_h", "llama_sliding"]
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST_KINDS)) for kind in TINY_KINDS]
SYSTEM_LENGTH = 300

Pure = tuple[Any, Callable[..., PrefixCache], int]
pytestmark = pytest.mark.usefixtures("exact_allocations")


@pytest.fixture(params=[pytest.param("gpt_bigcode", marks=pytest.mark.slow), "deepseek_v3", "llama in 8 bits"])
def pure(request: pytest.FixtureRequest) -> Pure:
    """A model with span layers alone, how its PrefixCache is made, and bytes per token."""
    name = request.param
    model: Any = tiny_model(name.removesuffix(" in 8 bits"))
    bits = 8 if name.endswith("8 bits") else None
    return model, lambda **more: PrefixCache(model, kv_bits=bits, **more), TOKEN_BYTES[name]


def serve(cache: PrefixCache, model: Any, prompt: list[int], reply: Sequence[int] = (1, 2, 3), **begin: Any) -> Session:
    """Answer a prompt with given tokens; returns the closed session."""
    with cache.begin(prompt, **begin) as session:
        session.prefill(model, step_size=512)
        for token in (prompt[-1], *reply):
            session.step(model, [token])
    cache.check()
    return session


def interleaved(users: int, turns: int) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, reply) of users who take turns; every second one shares a system prompt."""
    prompts = {user: [*tokens(user % 2, SYSTEM_LENGTH), user] for user in range(users)}
    for turn in range(turns):
        for user in prompts:
            prompt = prompts[user] + tokens(1000 * user + turn, 120)
            reply = tokens(7000 * user + turn, 8)
            yield prompt, reply
            prompts[user] = prompt + reply


class DistinctTokens:
    """Counts the distinct prefixes of sequences, one dictionary per token."""

    def __init__(self) -> None:
        self.count = 0
        self._root: dict[int, Any] = {}

    def add(self, sequence: Sequence[int]) -> None:
        node = self._root
        for token in sequence:
            if token not in node:
                node[token] = {}
                self.count += 1
            node = node[token]


# Each distinct token once


def test_each_distinct_token_is_held_once(pure: Pure) -> None:
    model, open_cache, token_bytes = pure
    cache = open_cache()
    distinct = DistinctTokens()
    for prompt, reply in interleaved(users=3, turns=3):
        serve(cache, model, prompt, reply)
        distinct.add(prompt + reply)
        stats = cache.stats
        wanted = distinct.count * token_bytes + stats.spare_bytes + stats.duplicate_bytes
        assert held_bytes(stats) == pytest.approx(wanted, rel=0.02)
        assert stats.tokens == distinct.count
    assert stats.evictions == 0
    assert stats.duplicate_bytes > 0
    assert stats.spare_bytes > 0


def test_pressure_takes_duplicates_then_spare_capacity_then_tokens(pure: Pure) -> None:
    model, open_cache, token_bytes = pure
    cache = open_cache()
    for prompt, reply in interleaved(users=3, turns=3):
        serve(cache, model, prompt, reply)
    before = cache.stats
    assert min(before.duplicate_bytes, before.spare_bytes) > 2 * token_bytes

    cache.reclaim(held_bytes(before) - 1)
    some = cache.stats
    assert some.duplicate_bytes < before.duplicate_bytes
    assert (some.spare_bytes, some.tokens, some.evictions) == (before.spare_bytes, before.tokens, 0)

    cache.reclaim(held_bytes(before) - before.duplicate_bytes)
    lean = cache.stats
    assert lean.duplicate_bytes == 0
    assert (lean.spare_bytes, lean.tokens, lean.evictions) == (before.spare_bytes, before.tokens, 0)

    cache.reclaim(held_bytes(lean) - 1)
    leaner = cache.stats
    assert leaner.spare_bytes <= token_bytes
    assert (leaner.tokens, leaner.evictions) == (before.tokens, 0)
    assert held_bytes(leaner) == pytest.approx(before.tokens * token_bytes, rel=0.02)

    cache.reclaim(held_bytes(leaner) - 1)
    assert cache.stats.tokens < before.tokens
    assert cache.stats.evictions == 1
    cache.check()


def test_a_budget_that_just_fits_evicts_nothing(pure: Pure) -> None:
    model, open_cache, token_bytes = pure
    distinct = DistinctTokens()
    requests = list(interleaved(users=4, turns=2))
    for prompt, reply in requests:
        distinct.add(prompt + reply)
    # In the worst moment the new path's own tokens are in buffers and snapshots at once, until they are dropped.
    longest = max(len(prompt) + len(reply) for prompt, reply in requests)
    cache = open_cache(budget_bytes=(distinct.count + longest + 16) * token_bytes)
    for prompt, reply in requests:
        serve(cache, model, prompt, reply, reserve=16)
    assert (cache.stats.evictions, cache.stats.tokens) == (0, distinct.count)


def test_paging_in_a_long_path_evicts_nothing(pure: Pure) -> None:
    model, open_cache, token_bytes = pure
    cache = open_cache(budget_bytes=800 * token_bytes)
    long, other, short = tokens(1, 300), tokens(2, 300), tokens(3, 20)
    for prompt in (long, other, short):
        serve(cache, model, prompt, reserve=4)
    assert (cache.stats.evictions, cache.stats.spare_bytes < 40 * token_bytes) == (0, True)
    assert serve(cache, model, [*long, 1, 2, 3, 5], reserve=4).cached_tokens == 303
    assert cache.stats.evictions == 0


def test_what_must_go_at_once_is_not_copied_out(pure: Pure) -> None:
    model, open_cache, token_bytes = pure
    cache = open_cache(budget_bytes=130 * token_bytes)
    for seed in (1, 2):
        serve(cache, model, tokens(seed, 80), reserve=4)
    assert (cache.stats.evictions, cache.stats.paged_out_bytes) == (1, 0)


def test_closing_a_session_adds_nothing_for_span_layers(pure: Pure) -> None:
    model, open_cache, _ = pure
    cache = open_cache()
    for prompt, reply in interleaved(users=2, turns=2):
        session = cache.begin(prompt)
        session.prefill(model)
        for token in (prompt[-1], *reply):
            mx.eval(session.step(model, [token]))
        before, active = cache.stats, active_bytes()
        session.close()
        after = cache.stats
        assert held_bytes(after) <= held_bytes(before)
        assert after.copied_bytes == before.copied_bytes
        assert after.checkpoint_bytes == 0
        assert active_bytes() <= active


@pytest.mark.parametrize("kind", ["nemotron_h", "llama_sliding"])
def test_closing_a_session_adds_the_checkpoint_at_its_end_and_no_more(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    session = cache.begin(tokens(1, 200))
    session.prefill(model)
    logits = session.step(model, session.prompt[-1:])
    _evaluate(session, logits)
    del logits
    before, active = cache.stats, active_bytes()
    session.close()
    del session
    after = cache.stats
    # One more beside the one that was taken 16 tokens before the end, of the same size; of windows the last token.
    has_states = inside.layout(cache).has_states
    added = before.checkpoint_bytes if has_states else before.checkpoint_bytes // 199
    assert after.checkpoint_bytes - before.checkpoint_bytes == added > 0
    assert held_bytes(after) - held_bytes(before) == added
    assert 0 < active_bytes() - active <= added


# Statistics and memory


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_in_the_statistics_are_those_that_mlx_allocated(kind: str) -> None:
    model = tiny_model(kind)
    # Constants that the model makes at its first use.
    mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))
    base = active_bytes()
    cache = PrefixCache(model, checkpoint_interval=64)

    def agree() -> None:
        assert active_bytes() - base == pytest.approx(held_bytes(cache.stats), rel=0.01)

    for prompt, reply in interleaved(users=2, turns=2):
        with cache.begin(prompt, marks=[SYSTEM_LENGTH]) as session:
            agree()
            session.prefill(model, step_size=512)
            agree()
            for token in (prompt[-1], *reply):
                logits = session.step(model, [token])
            _evaluate(session, logits)
            del logits
            agree()
        del session
        agree()
    cache.check()
    for target in (held_bytes(cache.stats) // 2, 0):
        before, active = held_bytes(cache.stats), active_bytes()
        freed = cache.reclaim(target)
        assert freed == before - held_bytes(cache.stats)
        assert active - active_bytes() == pytest.approx(freed, rel=0.01)
    assert held_bytes(cache.stats) == 0
    assert active_bytes() - base == pytest.approx(0, abs=4096)


def test_what_a_loop_of_the_callers_own_evaluated_keeps_nothing_else_in_memory() -> None:
    model = tiny_model("nemotron_h")
    mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))
    base = active_bytes()
    cache = PrefixCache(model)
    prompt = tokens(1, 500)
    with cache.begin(prompt) as session:
        logits = model(mx.array([prompt]), cache=session.caches)
        _evaluate(session, logits)
        del logits
    del session
    assert cache.stats.tokens == len(prompt)
    assert active_bytes() - base == pytest.approx(held_bytes(cache.stats), rel=0.01)


def _evaluate(session: Session, logits: mx.array) -> None:
    """Evaluate the logits, and the writes to the caches that the logits did not need."""
    mx.eval(logits, [c.state for c in session.caches if c is not None and not c.empty()])


def test_fetched_and_inserted_caches_share_no_memory_with_the_cache() -> None:
    model = tiny_model("nemotron_h")
    cache = PrefixCache(model)
    prompt = tokens(1, 400)
    serve(cache, model, prompt)
    before, active = held_bytes(cache.stats), active_bytes()
    caches, _ = cache.fetch([*prompt, 1, 2, 3, 4])
    assert held_bytes(cache.stats) == before
    own = sum(c.nbytes for c in caches)
    assert active_bytes() - active == pytest.approx(own, rel=0.01)
    # The fetched caches stay when the cache has given everything back, and are copied when they are inserted.
    cache.clear()
    assert active_bytes() - active == pytest.approx(own - before, rel=0.01)
    cache.insert([*prompt, 1, 2, 3], caches)
    assert active_bytes() - active == pytest.approx(own - before + held_bytes(cache.stats), rel=0.01)


# The budget


def test_reclaim_refuses_a_negative_target() -> None:
    with pytest.raises(ValueError, match="target_bytes is -1; wanted a whole number of bytes, 0 or more"):
        PrefixCache(caches=lambda: [KVCache()]).reclaim(-1)


def test_two_caches_on_one_ledger_hold_its_budget_together() -> None:
    ledger = Ledger(600_000)
    models = [tiny_model("llama"), tiny_model("nemotron_h")]
    caches = [PrefixCache(model, budget_bytes=ledger) for model in models]
    for turn in range(10):
        for cache, model in zip(caches, models, strict=True):
            serve(cache, model, tokens(turn, 30 + 5 * turn), reserve=8)
            assert sum(held_bytes(each.stats) for each in caches) <= 600_000
    assert all(each.stats.evictions for each in caches)
    assert all(each.stats.tokens for each in caches)


def test_without_a_budget_the_statistics_say_what_it_became_and_why() -> None:
    stats = PrefixCache(tiny_model("llama")).stats
    assert stats.budget_bytes > 0
    assert stats.budget_source.startswith("a quarter of")
    assert PrefixCache(tiny_model("llama"), budget_bytes=1 << 20).stats.budget_source == "given"
