"""fetch and insert: caches that belong to somebody else, such as a batched engine, beside the live path."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache
from numpy.typing import NDArray

from radixcache import PrefixCache, Session, SnapshotError
from runner.models.tiny import VOCABULARY_LENGTH, tiny_model
from tests.prompts import tokens

ROUNDING = 1e-4
KINDS = ["llama", "llama_sliding", "nemotron_h"]

TOKEN_BYTES_OF_LLAMA = 3 * 2 * 2 * 64 * 4


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


PROMPT = tokens(1, 60)


def filled(model: Any, prompt: list[int], caches: list[Any] | None = None) -> list[Any]:
    """Caches after a forward pass of `prompt`, not evaluated."""
    caches = list(make_prompt_cache(model)) if caches is None else caches
    model(mx.array([prompt]), cache=caches)
    return caches


def last_logits(model: Any, prompt: Sequence[int], caches: list[Any] | None = None) -> NDArray[Any]:
    caches = make_prompt_cache(model) if caches is None else caches
    return np.array(model(mx.array([list(prompt)]), cache=caches)[0, -1])


def serve(cache: PrefixCache, model: Any, prompt: list[int], reply: Sequence[int] = (), namespace: str = "") -> Session:
    with cache.begin(prompt, namespace=namespace, reserve=32) as session:
        session.prefill(model)
        for token in (prompt[-1], *reply):
            session.step(model, [token])
    cache.check()
    return session


def resumed(cache: PrefixCache, model: Any, prompt: list[int], namespace: str = "") -> int:
    """How many tokens of a prompt are restored; its logits are compared with a cold run."""
    with cache.begin(prompt, namespace=namespace) as session:
        session.prefill(model)
        logits = np.array(session.step(model, prompt[-1:])[0, -1])
    cache.check()
    assert np.abs(logits - last_logits(model, prompt)).max() < ROUNDING
    return session.cached_tokens


def state(cache: PrefixCache) -> tuple[Any, ...]:
    stats = cache.stats
    return cache.dump(), stats.live_bytes, stats.paged_bytes, stats.tokens, stats.copied_bytes, stats.evictions


# insert


def test_insert_copies_only_what_the_tree_does_not_hold(llama: Any) -> None:
    cache = PrefixCache(llama)
    cache.insert(PROMPT, filled(llama, PROMPT))
    assert cache.stats.paged_out_bytes == 60 * TOKEN_BYTES_OF_LLAMA
    longer = [*PROMPT, *tokens(2, 25)]
    assert cache.insert(longer, filled(llama, longer)) == 85
    assert cache.stats.paged_out_bytes == 85 * TOKEN_BYTES_OF_LLAMA
    assert cache.insert(longer, filled(llama, longer)) == 85
    assert cache.insert(PROMPT, filled(llama, PROMPT)) == 60
    assert cache.stats.paged_out_bytes == 85 * TOKEN_BYTES_OF_LLAMA
    assert cache.stats.paged_bytes == 85 * TOKEN_BYTES_OF_LLAMA
    branch = [*PROMPT[:30], *tokens(3, 20)]
    cache.insert(branch, filled(llama, branch))
    # The branch's own tokens, and the node that it cuts in two.
    assert cache.stats.paged_bytes == (85 + 20) * TOKEN_BYTES_OF_LLAMA
    cache.check()


def test_insert_leaves_the_callers_caches_as_they_were_and_shares_nothing_with_them(model: Any) -> None:
    cache = PrefixCache(model)
    caches = filled(model, PROMPT)
    cache.insert(PROMPT, caches)
    following = last_logits(model, [9, 8, 7], caches)
    assert np.abs(following - last_logits(model, [*PROMPT, 9, 8, 7])).max() < ROUNDING
    last_logits(model, tokens(9, 40), caches)
    assert resumed(cache, model, [*PROMPT, 1, 2, 3]) == 60


def test_caches_that_stand_short_of_the_tokens_are_stored_up_to_there() -> None:
    for kind in ("llama", "llama_sliding", "nemotron_h"):
        model = tiny_model(kind)
        cache = PrefixCache(model)
        assert cache.insert([*PROMPT, 1, 2, 3], filled(model, PROMPT)) == 60
        assert resumed(cache, model, [*PROMPT, 1, 2, 3, 4]) == 60


def test_span_caches_that_stand_beyond_the_tokens_are_cut(llama: Any) -> None:
    cache = PrefixCache(llama)
    assert cache.insert(PROMPT[:40], filled(llama, PROMPT)) == 40
    assert cache.stats.tokens == 40
    assert resumed(cache, llama, PROMPT) == 40


@pytest.mark.parametrize("kind", ["llama_sliding", "deepseek_v41"])
def test_point_state_beyond_the_tokens_is_refused_with_the_numbers(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    serve(cache, model, tokens(5, 20))
    before = state(cache)
    with pytest.raises(SnapshotError, match="are at offset 60, after the 40 tokens"):
        cache.insert(PROMPT[:40], filled(model, PROMPT))
    assert state(cache) == before
    cache.check()


@pytest.mark.parametrize("kind", ["llama_sliding", "nemotron_h"])
def test_unequal_offsets_beside_point_state_are_refused_with_the_numbers(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    caches = filled(model, PROMPT)
    next(c for c in caches if isinstance(c, KVCache)).trim(7)
    before = state(cache)
    with pytest.raises(SnapshotError, match="offsets 53 to 60"):
        cache.insert(PROMPT, caches)
    assert state(cache) == before


def test_a_batch_is_refused(llama: Any) -> None:
    cache = PrefixCache(llama)
    caches = make_prompt_cache(llama)
    llama(mx.array([PROMPT, PROMPT]), cache=caches)
    with pytest.raises(SnapshotError, match=r"layer 0 \(KVCache\) has batch 2; wanted 1"):
        cache.insert(PROMPT, caches)
    assert cache.stats.tokens == 0


@pytest.mark.parametrize("how", ["served", "inserted"])
def test_another_dtype_or_shape_than_the_trees_is_refused_with_both(llama: Any, how: str) -> None:
    cache = PrefixCache(llama)
    if how == "served":
        serve(cache, llama, PROMPT)
    else:
        cache.insert(PROMPT, filled(llama, PROMPT))
    before = state(cache)
    halved = filled(llama, [7, *PROMPT])
    for each in halved:
        each.keys, each.values = each.keys.astype(mx.float16), each.values.astype(mx.float16)
    with pytest.raises(SnapshotError, match=r"layer 0.*float16.*float32"):
        cache.insert([7, *PROMPT], halved)
    narrow = filled(llama, [7, *PROMPT])
    narrow[2].keys = narrow[2].keys[..., :32]
    with pytest.raises(SnapshotError, match=r"layer 2.*32.*64"):
        cache.insert([7, *PROMPT], narrow)
    assert state(cache) == before
    assert resumed(cache, llama, [*PROMPT, 1]) == 60


def test_caches_of_a_first_token_are_stored_though_they_have_fewer_token_ids_than_later_ones() -> None:
    model, longer = tiny_model("longcat_flash_ngram"), [5, 6, 7, 8]
    cache = PrefixCache(model)
    with cache.begin(longer) as session:
        session.prefill(model)
        session.step(model, longer[-1:])
    caches, _ = cache.fetch([9])
    mx.eval(model(mx.array([[9]]), cache=caches))
    assert cache.insert([9], caches) == 1
    cache.check()


def test_other_cache_classes_or_another_number_of_them_are_refused_by_name(llama: Any) -> None:
    cache = PrefixCache(llama)
    caches = filled(llama, PROMPT)
    with pytest.raises(SnapshotError, match=r"2 KVCache.*wanted 3 KVCache"):
        cache.insert(PROMPT, caches[:2])
    rotating = filled(llama, PROMPT, [RotatingKVCache(max_size=32) for _ in caches])
    with pytest.raises(SnapshotError, match=r"3 RotatingKVCache.*wanted 3 KVCache"):
        cache.insert(PROMPT, rotating)
    with pytest.raises(SnapshotError, match=r"2 KVCache, 1 ArraysCache; wanted 3 KVCache"):
        cache.insert(PROMPT, [*caches[:2], ArraysCache(1)])
    assert cache.stats.tokens == 0
    cache.check()


def test_caches_in_bits_are_refused_where_the_tree_has_none_and_the_other_way_round(llama: Any) -> None:
    in_bits = [c.to_quantized(group_size=64, bits=8) for c in filled(llama, PROMPT)]
    with pytest.raises(SnapshotError, match="QuantizedKVCache"):
        PrefixCache(llama).insert(PROMPT, in_bits)
    cache = PrefixCache(llama, kv_bits=8)
    with pytest.raises(SnapshotError, match="3 KVCache; wanted 3 QuantizedKVCache"):
        cache.insert(PROMPT, filled(llama, PROMPT))
    assert cache.insert(PROMPT, in_bits) == 60
    serve(cache, llama, tokens(2, 20))
    four_bits = [c.to_quantized(group_size=64, bits=4) for c in filled(llama, [7, *PROMPT])]
    with pytest.raises(SnapshotError, match="layer 0"):
        cache.insert([7, *PROMPT], four_bits)
    cache.check()


@pytest.mark.parametrize("wrong", [[], [VOCABULARY_LENGTH], "text"])
def test_tokens_that_are_none_are_refused_everywhere(llama: Any, wrong: Any) -> None:
    cache = PrefixCache(llama)
    calls = (
        lambda: cache.insert(wrong, make_prompt_cache(llama)),
        lambda: cache.fetch(wrong),
        lambda: cache.begin(wrong),
        lambda: cache.pin(wrong),
    )
    for call in calls:
        with pytest.raises(ValueError, match="tokens"):
            call()
    assert cache.stats.requests == 0
    cache.check()


def test_an_insert_larger_than_the_budget_stores_what_fits_of_a_pure_span_model(llama: Any) -> None:
    cache = PrefixCache(llama, budget_bytes=30 * TOKEN_BYTES_OF_LLAMA)
    stored = cache.insert(PROMPT, filled(llama, PROMPT))
    assert 0 < stored <= 30
    assert cache.stats.live_bytes + cache.stats.paged_bytes <= cache.stats.budget_bytes
    cache.check()
    with cache.begin([*PROMPT, 1]) as session:
        assert session.cached_tokens == stored


# fetch


def test_a_miss_gives_fresh_empty_caches_and_all_tokens(model: Any) -> None:
    cache = PrefixCache(model)
    serve(cache, model, PROMPT)
    other = [(PROMPT[0] + 1) % VOCABULARY_LENGTH, *PROMPT[1:]]
    caches, remaining = cache.fetch(other)
    assert remaining.dtype == np.int32
    assert remaining.tolist() == other
    assert all(c.empty() for c in caches)
    assert np.abs(last_logits(model, remaining.tolist(), caches) - last_logits(model, other)).max() < ROUNDING


def test_remaining_is_never_empty(model: Any) -> None:
    cache = PrefixCache(model)
    serve(cache, model, PROMPT, reply=[5, 6])
    for prompt in (PROMPT, PROMPT[:30], [*PROMPT, 5, 6], PROMPT[:1]):
        caches, remaining = cache.fetch(prompt)
        assert len(remaining) >= 1
        assert remaining.tolist() == prompt[len(prompt) - len(remaining) :]
        assert np.abs(last_logits(model, remaining.tolist(), caches) - last_logits(model, prompt)).max() < ROUNDING


def test_fetched_caches_belong_to_the_caller(model: Any) -> None:
    cache = PrefixCache(model)
    serve(cache, model, PROMPT)
    caches, remaining = cache.fetch([*PROMPT, 1, 2, 3])
    assert remaining.tolist() == [1, 2, 3]
    again, _ = cache.fetch([*PROMPT, 1, 2, 3])
    assert not {id(c) for c in caches} & {id(c) for c in again}
    last_logits(model, tokens(3, 50), caches)
    assert np.abs(last_logits(model, [1, 2, 3], again) - last_logits(model, [*PROMPT, 1, 2, 3])).max() < ROUNDING
    assert resumed(cache, model, [*PROMPT, 4, 5]) == 60


def test_a_fetch_leaves_the_live_path_where_it_is(llama: Any) -> None:
    cache = PrefixCache(llama)
    serve(cache, llama, tokens(2, 30))
    serve(cache, llama, PROMPT)
    copied = cache.stats.copied_bytes
    before = cache.dump()
    cache.fetch([*tokens(2, 30), 1])
    cache.fetch([*PROMPT, 1])
    assert cache.dump() == before
    serve(cache, llama, [*PROMPT, 1])
    assert cache.stats.copied_bytes == copied


def test_keys_stand_for_tokens_in_fetch_and_insert(model: Any) -> None:
    cache = PrefixCache(model)
    image = (1 << 61) + 12345
    keys = [*PROMPT[:20], *([image] * 10), *PROMPT[30:]]
    cache.insert(PROMPT, filled(model, PROMPT), keys=keys)
    assert len(cache.fetch([*PROMPT, 1], keys=[*keys, 1])[1]) == 1
    other = [*PROMPT[:20], *([image + 1] * 10), *PROMPT[30:], 1]
    assert len(cache.fetch([*PROMPT, 1], keys=other)[1]) >= 41
    with pytest.raises(ValueError, match="keys has 60 entries; wanted 61"):
        cache.fetch([*PROMPT, 1], keys=keys)
    cache.check()


# Beside an open session


def test_fetch_and_insert_work_while_a_session_is_open(model: Any) -> None:
    cache = PrefixCache(model)
    serve(cache, model, PROMPT)
    other = tokens(2, 40)
    with cache.begin([*PROMPT, 1, 2, 3]) as session:
        session.prefill(model)
        caches, remaining = cache.fetch([*PROMPT, 7, 8])
        assert remaining.tolist() == [7, 8]
        assert np.abs(last_logits(model, [7, 8], caches) - last_logits(model, [*PROMPT, 7, 8])).max() < ROUNDING
        assert cache.insert(other, filled(model, other)) == 40
        assert cache.insert([*PROMPT, 7, 8], caches) == 62
        cache.check()
        logits = np.array(session.step(model, [3])[0, -1])
    assert np.abs(logits - last_logits(model, [*PROMPT, 1, 2, 3])).max() < ROUNDING
    cache.check()
    for prompt, stored in ((other, 40), ([*PROMPT, 7, 8], 62), ([*PROMPT, 1, 2, 3], 63)):
        assert resumed(cache, model, [*prompt, 9, 9]) == stored


def test_many_threads_may_fetch_and_insert_at_once(llama: Any) -> None:
    cache = PrefixCache(llama, budget_bytes=400 * TOKEN_BYTES_OF_LLAMA)
    prompts = [[user, *PROMPT[:30], *tokens(user, 20)] for user in range(6)]
    made = [filled(llama, prompt) for prompt in prompts]
    mx.eval([c.state for caches in made for c in caches])
    wrong: list[str] = []

    def work(user: int) -> None:
        for turn in range(8):
            chosen = (user + turn) % len(prompts)
            cache.insert(prompts[chosen], made[chosen])
            caches, remaining = cache.fetch([*prompts[chosen], 1])
            length = len(prompts[chosen]) + 1 - len(remaining)
            for found, expected in zip(caches, made[chosen], strict=True):
                same = length == 0 or bool(mx.array_equal(found.keys[..., :length, :], expected.keys[..., :length, :]))
                if not same:
                    wrong.append(f"user {user}, turn {turn}")

    threads = [threading.Thread(target=work, args=(user,)) for user in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    cache.check()


# A batched engine


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_a_batched_engine_fetches_merges_decodes_extracts_and_inserts(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    system = tokens(0, 30)
    prompts = [[*system, 1, *tokens(1, 20)], [*system, 2, *tokens(2, 11)], [*system, 3, *tokens(3, 15)]]
    for prompt in prompts:
        serve(cache, model, [*system, *prompt[30:40]])
    for turn in range(2):
        rows = []
        for prompt in prompts:
            caches, remaining = cache.fetch(prompt)
            if len(remaining) > 1:
                model(mx.array(remaining[None, :-1]), cache=caches)
            rows.append(caches)
        merged = [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)]
        assert kind != "llama" or all(isinstance(c, BatchKVCache) for c in merged)
        current = [prompt[-1] for prompt in prompts]
        for _ in range(5):
            logits = np.array(model(mx.array(current)[:, None], cache=merged)[:, -1])
            for row, prompt in enumerate(prompts):
                assert np.abs(logits[row] - last_logits(model, prompt)).max() < ROUNDING
            current = logits.argmax(axis=1).tolist()
            prompts = [[*prompt, token] for prompt, token in zip(prompts, current, strict=True)]
        for row, prompt in enumerate(prompts):
            # The last token of each was drawn, not evaluated.
            done = prompt[:-1]
            assert cache.insert(done, [layer.extract(row) for layer in merged]) == len(done)
            assert resumed(cache, model, prompt) == len(done)
        prompts = [[*prompt, turn, 5] for prompt in prompts]
    cache.check()
