"""A cache whose state at rest has fewer bits: what is live is not touched, and what is rounded is near and counted."""

# ruff: noqa: F811

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache
from radixcache.layers.trials import STORED_TOLERANCES
from runner.engine.generator import ParallelGenerator
from runner.models.load import load_model
from runner.models.tiny import TINY_KINDS, tiny_model
from tests import inside
from tests.groups.cold import cold, error, shared_model
from tests.prompts import tokens
from tests.restarts import Open, opened, reading  # noqa: F401

FIRST, OTHER = tokens(1, 120), tokens(2, 100, first=7)
SECOND = [*FIRST[:60], *tokens(3, 60)]
#: Every layer that is rounded, one beside recurrent layers, and two kinds of window.
FAST = ("llama", "qwen3_next", "gemma3_text", "llama4")
#: Recurrent layers and heads of less than 32 elements stay as they are.
SAME = ["baichuan_m1", "gpt_bigcode", "jamba", "lfm2", "mamba", "mamba2", "recurrent_gemma", "rwkv7", "step3p5"]
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in TINY_KINDS]


def serve(cache: PrefixCache, model: Any, prompt: Sequence[int]) -> tuple[int, mx.array]:
    """Answer a prompt; returns the cached tokens and the logits (V,) of its last token."""
    with cache.begin(prompt, marks=[60]) as session:
        session.prefill(model, step_size=32)
        logits = session.step(model, prompt[-1:])[0, -1]
        mx.eval(logits)
    cache.check()
    return session.cached_tokens, logits


def in_bfloat16(kind: str) -> Any:
    model = tiny_model(kind)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    return model


def forms_held(cache: PrefixCache) -> set[int | None]:
    """The bits of all spans and windows in the tree; None: not rounded."""
    held = [part for node in inside.nodes(cache) for part in (node.payload.spans, node.payload.windows)]
    leaves = [leaf for spans in held if spans is not None for leaf in spans.leaves if leaf is not None]
    pieces = [piece for leaf in leaves for piece in getattr(leaf, "pieces", [leaf])]
    return {form.bits for piece in pieces for form in piece.forms if form} | {
        None for piece in pieces if not piece.forms
    }


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_tokens_are_cached_and_the_answers_are_near(kind: str) -> None:
    model, found = shared_model(kind), {}
    for bits in (None, 8, 4):
        cache = PrefixCache(model, budget_bytes=1 << 30, stored_bits=bits)
        answers = [serve(cache, model, prompt) for prompt in (FIRST, OTHER, SECOND, [*OTHER, 5], [*FIRST, 3])]
        found[bits] = [cached for cached, _ in answers]
        for (_, logits), prompt, most in zip(answers, (FIRST, OTHER, SECOND), (0, 0, bits), strict=False):
            assert error(logits, cold(model, prompt)) < STORED_TOLERANCES.get(most or 0, 1e-3)
    assert found[8] == found[4] == found[None]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_a_request_that_goes_on_from_live_state_is_the_same_to_the_bit(kind: str) -> None:
    model, answers = shared_model(kind), []
    for bits in (None, 4):
        cache = PrefixCache(model, stored_bits=bits)
        prompt, logits = [*FIRST], []
        for turn in range(3):
            logits.append(np.array(serve(cache, model, prompt)[1]))
            prompt += tokens(50 + turn, 20)
        answers.append(logits)
        assert cache.stats.paged_in_bytes == 0
    assert all(np.array_equal(*each) for each in zip(*answers, strict=True))


def test_what_is_live_in_one_slot_is_copied_to_another_to_the_bit() -> None:
    model, answers = shared_model("llama"), []
    for bits in (None, 4):
        cache = PrefixCache(model, stored_bits=bits, live_slots=2)
        serve(cache, model, FIRST)
        with cache.begin([*FIRST, 3]) as session:
            session.prefill(model)
            found, logits = serve(cache, model, SECOND)
            assert found == 60
            answers.append(np.array(logits))
    assert np.array_equal(*answers)


@pytest.mark.parametrize(("bits", "times"), [(8, 1.88), (4, 3.55)])
def test_a_budget_holds_more_tokens_of_bfloat16(bits: int, times: float) -> None:
    model, tokens_held = in_bfloat16("llama"), []
    live_bytes = 200 * 3 * 2 * 2 * 64 * 2
    for stored_bits in (None, bits):
        cache = PrefixCache(model, budget_bytes=30 * live_bytes, stored_bits=stored_bits)
        caches = make_prompt_cache(model)
        model(mx.array([FIRST + FIRST[:80]]), cache=caches)
        for number in range(120):
            cache.insert(tokens(number, 200, first=number), caches)
        stats = cache.stats
        paged_tokens = stats.tokens
        assert stats.paged_bytes == pytest.approx(paged_tokens * inside.layout(cache).stored_token_bytes, rel=0.01)
        tokens_held.append(stats.tokens)
    assert tokens_held[1] / tokens_held[0] == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize("kind", ["llama", "llama_sliding"])
def test_a_store_has_the_same_form_and_state_in_fewer_bits_is_a_miss(opened: Open, kind: str) -> None:
    model, sizes = shared_model(kind), {}
    for bits in (4, 8, None):
        for cached in (0, 100):
            with opened() as store, PrefixCache(model, store=store, stored_bits=bits) as cache:
                before = store.stats.stored_bytes
                found, logits = serve(cache, model, [*OTHER, 5])
                assert found == cached
                assert error(logits, cold(model, [*OTHER, 5])) < STORED_TOLERANCES.get(bits or 0, 1e-4)
                assert forms_held(cache) <= {bits}
                cache.flush()
                sizes.setdefault(bits, store.stats.stored_bytes - before)
    assert sizes[None] > 2.5 * sizes[8] > 3.5 * sizes[4]  # each file has a head besides


@pytest.mark.parametrize("kind", ["llama", "llama_sliding", "qwen3_next"])
@pytest.mark.parametrize("before", [None, 8])
def test_after_a_change_to_fewer_bits_stored_state_is_read_rounded_and_written_again(
    opened: Open, kind: str, before: int | None
) -> None:
    model, read_bytes = shared_model(kind), []
    with opened() as store, PrefixCache(model, store=store, stored_bits=before) as cache:
        serve(cache, model, OTHER)
    for _ in range(2):
        with opened() as store, PrefixCache(model, store=store, stored_bits=4) as cache:
            found, logits = serve(cache, model, [*OTHER, 5])
            assert found == 100
            assert error(logits, cold(model, [*OTHER, 5])) < STORED_TOLERANCES[4]
            read_bytes.append(store.stats.read_bytes)
            serve(cache, model, FIRST)
            assert forms_held(cache) == {4}
    assert read_bytes[1] < read_bytes[0]


def test_wrong_state_is_removed_from_a_store_in_each_form(opened: Open) -> None:
    model = shared_model("llama")
    for bits in (None, 8):
        with opened() as store, PrefixCache(model, store=store, stored_bits=bits) as cache:
            serve(cache, model, OTHER)
            cache.flush()
            assert store.stats.blocks == (2 if bits is None else 4)
            if bits:
                inside.expel_tokens(cache, OTHER, 0)
                assert store.stats.blocks == 0


@pytest.mark.parametrize("segment_bytes", [0, 1 << 30])
def test_rows_read_one_plain_copy_that_goes_with_the_last_of_them(segment_bytes: int) -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, stored_bits=8)
    for prompt in (FIRST, OTHER):
        serve(cache, model, prompt)
    stored = cache.stats.paged_bytes
    plain = len(FIRST) * inside.layout(cache).token_bytes
    prompts = [[*FIRST, 9], [*FIRST, 11]]
    with cache.begin_many(prompts, capacity=1000, segment_bytes=segment_bytes) as group:
        for row in group.rows:
            while row.prompt_left:
                found = group.prefill(model, row)
            assert row.cached_tokens == 120
            assert error(found, cold(model, row.prompt.tolist())) < STORED_TOLERANCES[8]
            group.check()
            cache.check()
            assert cache.stats.paged_bytes == stored + (0 if segment_bytes else plain)
        group.rows[0].close()
        assert cache.stats.paged_bytes >= stored + (0 if segment_bytes else plain)
    assert forms_held(cache) == {8}
    tail = 2 * inside.layout(cache).stored_token_bytes
    assert cache.stats.paged_bytes == stored + tail


def test_a_row_that_gives_its_prefix_away_goes_on_with_its_own_values() -> None:
    """The tree stores it rounded, and the row reads it there as it evaluated it."""
    model = shared_model("llama")
    answers = []
    for bits in (None, 4):
        cache = PrefixCache(model, stored_bits=bits)
        with cache.begin_many(capacity=1000, segment_bytes=0) as group:
            one = group.admit([*FIRST, 9])
            while one.prompt_left:
                group.prefill(model, one)
            two = group.admit([*FIRST, 11])
            while two.prompt_left:
                group.prefill(model, two)
            assert two.cached_tokens == 120
            logits = group.step(model, [one], [3])
            mx.eval(logits)
            answers.append(np.array(logits))
        assert forms_held(cache) == {bits}
    assert np.array_equal(*answers)


def test_a_copy_to_read_in_place_is_counted_once() -> None:
    model, prompt = shared_model("llama"), tokens(1, 1000)
    cache = PrefixCache(model, stored_bits=8)
    with cache.begin_many([prompt], capacity=2000) as group:
        group.prefill(model, group.rows[0])
    with cache.begin_many([[*prompt, 5]], capacity=2000, segment_bytes=0) as group:
        group.prefill(model, group.rows[0])
        stats = cache.stats
        assert stats.paged_bytes > 1000 * inside.layout(cache).token_bytes
        assert stats.peak_bytes == stats.paged_bytes + stats.live_bytes


def test_no_request_is_admitted_whose_copy_to_read_does_not_fit() -> None:
    loaded, prefix = load_model("tiny:llama"), tokens(1, 900)
    cache = PrefixCache(loaded.model, budget_bytes=3_900_000, stored_bits=8)
    serve(cache, loaded.model, prefix)
    with ParallelGenerator(cache, loaded.model, loaded.tokenizer, capacity=1 << 20, step_size=256) as generator:
        for number in range(5):
            generator.submit([*prefix, *tokens(2 + number, 20 + 10 * number)], max_tokens=30, stop_tokens=[])
        for _ in generator:
            assert cache.stats.over_budget_bytes == 0
    assert cache.stats.requests == 6, "nobody was sent back"
    cache.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("bits", [8, 4])
def test_verify_takes_rounding_for_rounding_and_wrong_state_for_wrong(kind: str, bits: int) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model, stored_bits=bits, verify=1.0)
    for prompt in (FIRST, OTHER, SECOND, [*OTHER, 5], [*FIRST, 3]):
        serve(cache, model, prompt)
    stats = cache.stats
    assert stats.verified_requests > 0
    assert stats.verify_mismatches == 0
    assert 1e-3 < stats.verify_largest_error < STORED_TOLERANCES[bits]


def test_wrong_state_in_few_bits_is_found() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, stored_bits=8, verify=1.0)
    serve(cache, model, FIRST)
    serve(cache, model, OTHER)
    (node,) = inside.path_of(cache, FIRST)
    codes = node.payload.spans.leaves[1].segments[0][0]
    codes[..., 40, :] = mx.bitwise_invert(codes[..., 40, :])
    with pytest.warns(RuntimeWarning, match="differs from a cold prefill"):
        _, logits = serve(cache, model, [*FIRST, 3])
    assert error(logits, cold(model, [*FIRST, 3])) < 1e-4
    assert cache.mismatches[0].row == 40


@pytest.mark.parametrize(("kind", "seeds"), [("gpt_oss", (0, 5, 8)), ("deepseek_v3", (5, 11)), ("qwen3_next", (2,))])
def test_other_experts_after_rounding_are_no_wrong_state(kind: str, seeds: Sequence[int]) -> None:
    """With these seeds a few tokens get other experts, on one machine at least."""
    model = shared_model(kind)
    for seed in seeds:
        cache = PrefixCache(model, stored_bits=8, verify=1.0)
        chats = [tokens(1000 * seed + number, 150, first=number) for number in range(2)]
        for turn in range(3):
            for number in range(2):
                chats[number] = [*chats[number], *tokens(1000 * seed + 10 * turn + number, 30)]
                serve(cache, model, chats[number])
        assert cache.stats.verified_requests == 4
        assert cache.mismatches == ()


@pytest.mark.parametrize(("wrong_rows", "times", "is_found"), [(1, 1, False), (30, 1, True), (1, 1000, True)])
def test_of_a_model_with_experts_many_wrong_rows_or_large_errors_are_found(
    wrong_rows: int, times: int, is_found: bool
) -> None:
    model = shared_model("deepseek_v3")
    cache = PrefixCache(model, stored_bits=8, verify=1.0)
    for prompt in (FIRST, OTHER):
        serve(cache, model, prompt)
    node = inside.nodes(cache)[0]
    codes, scales, *_ = node.payload.spans.leaves[1].segments[0]
    codes[..., 40 : 40 + wrong_rows, :] = mx.bitwise_invert(codes[..., 40 : 40 + wrong_rows, :])
    scales[..., 40 : 40 + wrong_rows, :] *= times
    with warnings.catch_warnings(record=True):
        serve(cache, model, [*FIRST, 3])
    assert [each.row for each in cache.mismatches] == ([40] if is_found else [])


def test_many_switches_do_not_add_up() -> None:
    """Two conversations take turns in one slot under a budget without room for duplicates."""
    model = in_bfloat16("llama")
    cache = PrefixCache(model, stored_bits=8, budget_bytes=1_000_000)
    prompts = {name: tokens(seed, 100, first=seed) for seed, name in enumerate("ab")}
    errors = []
    for turn in range(20):
        for seed, name in enumerate(prompts):
            _, logits = serve(cache, model, prompts[name])
            fresh = model(mx.array(prompts[name])[None], cache=make_prompt_cache(model))[0, -1]
            errors.append(error(logits.astype(mx.float32), fresh.astype(mx.float32)))
            prompts[name] = [*prompts[name], *tokens(100 * turn + seed, 3)]
    assert cache.stats.paged_in_bytes > 30 * 100 * inside.layout(cache).token_bytes
    assert max(errors[-8:]) < 0.1


@pytest.mark.parametrize("kind", [each for each in KINDS if each.values[0] not in SAME])
def test_a_conversation_too_long_for_live_buffers_is_kept_as_it_is_stored(kind: str) -> None:
    model, prompt, cached = shared_model(kind), tokens(1, 1000), {}
    budget_bytes = 1 << 30
    for name in ("all", "less"):
        cache = PrefixCache(model, budget_bytes=budget_bytes, stored_bits=4)
        with cache.begin(prompt, reserve=0) as session:
            session.prefill(model)
            session.step(model, prompt[-1:])
        cache.check()
        held = cache.stats.live_bytes + cache.stats.paged_bytes
        assert held <= budget_bytes
        if name == "all":
            serve(cache, model, OTHER)
            stored = cache.stats.paged_bytes
            assert stored < 0.8 * held
            budget_bytes = (held + stored) // 2
        cached[name], _ = serve(cache, model, [*prompt, 5])
    assert cached["all"] == cached["less"] == 1000


def test_moving_away_evicts_no_more_than_the_pages_take() -> None:
    # Both fill the buffers, which grow by 256 tokens.
    model, prompts = shared_model("llama"), (tokens(1, 250), tokens(2, 254, first=7))
    budget_bytes = 1 << 30
    for _ in range(2):
        cache = PrefixCache(model, budget_bytes=budget_bytes, stored_bits=8)
        for prompt in prompts:
            with cache.begin(prompt, reserve=0) as session:
                session.prefill(model)
                session.step(model, prompt[-1:])
            cache.check()
        stats = cache.stats
        budget_bytes = stats.live_bytes + stats.paged_bytes
        assert stats.evictions == 0
        assert inside.stored_tokens(cache, prompts[0]) == len(prompts[0])


def test_a_cache_that_cannot_round_anything_says_so_once() -> None:
    model = shared_model("mamba2")
    cache = PrefixCache(model, stored_bits=8)
    with pytest.warns(RuntimeWarning, match="stored_bits=8 changes nothing: no layer has keys and values"):
        cache.learn(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cache.begin([1, 2, 3]) as session:
            session.prefill(model)


def test_wrong_settings_are_refused_by_name() -> None:
    model = shared_model("llama")
    for wrong in (2, 16, "8", True, 8.0, np.float32(8), np.array([8])):
        with pytest.raises(ValueError, match="wanted None, 4 or 8"):
            PrefixCache(model, stored_bits=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stored_bits=8 rounds stored state, so exact=True is impossible"):
        PrefixCache(model, stored_bits=8, exact=True)


def test_layers_that_are_quantized_already_are_stored_as_they_are() -> None:
    model = shared_model("llama")
    bytes_held = []
    for bits in (None, 4):
        cache = PrefixCache(model, kv_bits=8, stored_bits=bits)
        for prompt in (FIRST, OTHER, [*FIRST, 3]):
            serve(cache, model, prompt)
        bytes_held.append(cache.stats.paged_bytes)
    assert bytes_held[0] == bytes_held[1] > 0
