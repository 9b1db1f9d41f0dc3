"""fetch and insert: caches that belong to somebody else, such as a batched engine, beside the live path."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache

from radixcache import PrefixCache, SnapshotError
from runner.models.tiny import VOCABULARY_LENGTH
from tests.groups.cold import ROUNDING, cold, error, resumed, serve, shared_model
from tests.prompts import tokens

KINDS = ["llama", "llama_sliding", "nemotron_h"]

TOKEN_BYTES_OF_LLAMA = 3 * 2 * 2 * 64 * 4


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model(request.param)


PROMPT = tokens(1, 60)


def filled(model: Any, prompt: list[Any], caches: list[Any] | None = None) -> list[Any]:
    """Caches after a forward pass of a prompt or of several, not evaluated."""
    caches = list(make_prompt_cache(model)) if caches is None else caches
    model(mx.array(np.atleast_2d(prompt)), cache=caches)
    return caches


def state(cache: PrefixCache) -> tuple[Any, ...]:
    stats = cache.stats
    return cache.dump(), stats.live_bytes, stats.paged_bytes, stats.tokens, stats.copied_bytes, stats.evictions


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


def test_caches_that_stand_short_of_the_tokens_are_stored_up_to_there() -> None:
    for model in map(shared_model, KINDS):
        cache = PrefixCache(model)
        assert cache.insert([*PROMPT, 1, 2, 3], filled(model, PROMPT)) == 60
        assert resumed(cache, model, [*PROMPT, 1, 2, 3, 4]) == 60


def unequal(_: Any, caches: list[Any]) -> list[Any]:
    next(each for each in caches if isinstance(each, KVCache)).trim(7)
    return caches


def halved(_: Any, caches: list[Any]) -> list[Any]:
    for each in caches:
        each.keys, each.values = each.keys.astype(mx.float16), each.values.astype(mx.float16)
    return caches


def narrow(_: Any, caches: list[Any]) -> list[Any]:
    caches[2].keys = caches[2].keys[..., :32]
    return caches


def in_bits(bits: int) -> Any:
    return lambda _, caches: [each.to_quantized(group_size=64, bits=bits) for each in caches]


@pytest.mark.parametrize("how", ["served", "inserted"])
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama_sliding", lambda model, caches: filled(model, [1] * 5, caches), "at offset 65, after the 60 tokens"),
        ("deepseek_v41", lambda model, caches: filled(model, [1] * 5, caches), "at offset 65, after the 60 tokens"),
        ("llama_sliding", unequal, "offsets 53 to 60"),
        ("nemotron_h", unequal, "offsets 53 to 60"),
        ("llama", lambda model, _: filled(model, [PROMPT] * 2), r"layer 0 \(KVCache\) has batch 2; wanted 1"),
        ("llama", halved, r"layer 0.*float16.*float32"),
        ("llama", narrow, r"layer 2.*32.*64"),
        ("llama", lambda _, caches: caches[:2], r"2 KVCache.*wanted 3 KVCache"),
        ("llama", lambda model, _: filled(model, PROMPT, [RotatingKVCache(32) for _ in range(3)]), "3 RotatingKVCache"),
        ("llama", lambda _, caches: [*caches[:2], ArraysCache(1)], "2 KVCache, 1 ArraysCache; wanted 3 KVCache"),
        ("llama", in_bits(8), "3 QuantizedKVCache; wanted 3 KVCache"),
        ("llama in 8 bits", lambda _, caches: caches, "3 KVCache; wanted 3 QuantizedKVCache"),
        ("llama in 8 bits", in_bits(4), "layer 0"),
    ],
)
def test_caches_that_do_not_fit_are_refused_by_name_and_change_nothing(
    kind: str, change: Any, message: str, how: str
) -> None:
    model: Any = shared_model(kind.removesuffix(" in 8 bits"))
    in_8_bits = kind.endswith("in 8 bits")
    cache = PrefixCache(model, kv_bits=8 if in_8_bits else None)
    if how == "served":
        with cache.begin(tokens(5, 20)) as session:
            session.prefill(model)
    else:
        caches = filled(model, tokens(5, 20))
        cache.insert(tokens(5, 20), in_bits(8)(model, caches) if in_8_bits else caches)
    before = state(cache)
    with pytest.raises(SnapshotError, match=message):
        cache.insert(PROMPT, change(model, filled(model, PROMPT)))
    assert state(cache) == before
    cache.check()


def test_caches_of_a_first_token_are_stored_though_they_have_fewer_token_ids_than_later_ones() -> None:
    model: Any = shared_model("longcat_flash_ngram")
    cache = PrefixCache(model)
    serve(cache, model, [5, 6, 7, 8])
    caches, _ = cache.fetch([9])
    mx.eval(model(mx.array([[9]]), cache=caches))
    assert cache.insert([9], caches) == 1
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


@pytest.mark.parametrize("kind", ["llama_sliding", "nemotron_h"])
def test_prompts_resume_where_an_engine_inserted_at_the_offsets_it_was_told(kind: str) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model)
    system, users = tokens(0, 400), [[user, *tokens(user, 40)] for user in (1, 2, 3)]

    def prefill(prompt: list[int], marks: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Where an engine resumes a prompt, and the offsets at which it stops to insert."""
        before = state(cache)
        offsets = cache.insert_offsets(prompt, marks=marks)
        assert state(cache) == before
        caches, remaining = cache.fetch(prompt)
        start = resumed_at = len(prompt) - len(remaining)
        for end in (*offsets, len(prompt)):
            logits = model(mx.array(prompt[start:end])[None], cache=caches)[0, -1]
            start = cache.insert(prompt[:end], caches)
            assert start == end
        assert error(logits, cold(model, prompt)) < ROUNDING
        cache.check()
        return resumed_at, offsets

    assert prefill([*system, *users[0]], marks=[400]) == (0, [400, 425])
    assert prefill([*system, *users[1]]) == (400, [425])
    # The second user of another system prompt diverges where nothing was inserted; the third one resumes there.
    other = [9, *system]
    assert prefill([*other, *users[0]]) == (0, [426])
    assert prefill([*other, *users[1]]) == (0, [401, 426])
    assert prefill([*other, *users[2]]) == (401, [426])
    finer = PrefixCache(model, checkpoint_interval=100)
    assert finer.insert_offsets([*system, *users[0]]) == [100, 200, 300, 400, 425]


def test_no_offset_is_better_than_another_if_the_layers_resume_anywhere_or_nothing_can_be_inserted(llama: Any) -> None:
    assert PrefixCache(llama).insert_offsets(PROMPT, marks=[20]) == []
    assert PrefixCache(shared_model("nemotron_h"), exact=True).insert_offsets(PROMPT, marks=[20]) == []


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_a_batched_engine_fetches_merges_decodes_extracts_and_inserts(kind: str) -> None:
    model = shared_model(kind)
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
            logits = model(mx.array(current)[:, None], cache=merged)[:, -1]
            for found, prompt in zip(logits, prompts, strict=True):
                assert error(found, cold(model, prompt)) < ROUNDING
            current = mx.argmax(logits, axis=1).tolist()
            prompts = [[*prompt, token] for prompt, token in zip(prompts, current, strict=True)]
        for row, prompt in enumerate(prompts):
            # The last token of each was drawn, not evaluated.
            done = prompt[:-1]
            assert cache.insert(done, [layer.extract(row) for layer in merged]) == len(done)
            assert resumed(cache, model, prompt) == len(done)
        prompts = [[*prompt, turn, 5] for prompt in prompts]
    cache.check()
