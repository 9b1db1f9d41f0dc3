"""compare_states: every class of cache, at the same state laid out in another way, and at a wrong one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

import radixcache.verify
from benchmarks.architectures.temporal import places, stand_in
from radixcache.layers.layout import Layout
from radixcache.layers.trials import TOLERANCES, tolerance_of
from radixcache.verify import Difference, Part, compare_logits, compare_states
from runner.models.tiny import VOCABULARY_LENGTH, tiny_model

LENGTH = 60
KINDS = ["llama_sliding", "mamba2", "deepseek_v41"]

_random = np.random.default_rng(7)
PROMPT, OTHER = (_random.integers(0, VOCABULARY_LENGTH, LENGTH).tolist() for _ in range(2))


def filled(model: Any, layout: Layout, prompt: list[int], step_size: int) -> list[Any]:
    """Caches after a prompt in forward passes of that many tokens."""
    caches = layout.fresh()
    for start in range(0, len(prompt), step_size):
        model(mx.array([prompt[start : start + step_size]]), cache=caches)
        layout.own(caches)
    layout.learn(caches)
    return caches


def compared(layout: Layout, restored: list[Any], cold: list[Any], end: int = LENGTH) -> list[Difference]:
    offsets = [adapter.offset(cache) for cache, adapter in layout.leaves(restored)]
    return compare_states(layout, restored, cold, end, offsets)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_state_agrees_however_it_is_laid_out_and_another_prompts_in_any_one_place_is_far_off(kind: str) -> None:
    model: Any = tiny_model(kind)
    layout = Layout(lambda: make_prompt_cache(model), None, 64)
    cold = filled(model, layout, PROMPT, LENGTH)
    found = compared(layout, filled(model, layout, PROMPT, 7), cold)
    assert found
    assert max(each.error for each in found) < 1e-5
    assert tolerance_of(layout, cold, mx.float32) == TOLERANCES[mx.float32]
    for place in places(cold):
        restored = filled(model, layout, PROMPT, LENGTH)
        stand_in(restored, filled(model, layout, OTHER, LENGTH), place)
        assert max(each.error for each in compared(layout, restored, cold)) > 0.1, place


def test_rows_are_compared_some_at_a_time_and_the_first_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radixcache.verify, "ROWS", 16)
    layout = Layout(lambda: [KVCache()], None, 64)
    rows = mx.random.normal((1, 2, 50, 8), key=mx.random.key(1))
    wrong = mx.array(rows)
    wrong[0, 1, 33, 4] = mx.nan
    wrong[0, 0, 47, 0] = 99.0
    right, left = KVCache(), KVCache()
    right.update_and_fetch(rows, rows)
    left.update_and_fetch(rows, wrong)
    # What lies beyond the offset is nobody's.
    right.update_and_fetch(rows[..., :1, :], rows[..., :1, :])
    right.trim(1)
    keys, values = compared(layout, [left], [right], 50)
    assert (keys.error, keys.first_wrong_row(1e-3)) == (0, None)
    assert (values.error, values.first_wrong_row(1e-3), values.array) == (float("inf"), 33, 1)
    assert values.row_errors is not None
    assert np.flatnonzero(values.row_errors).tolist() == [33, 47]


def test_equal_infinities_agree_and_other_shapes_and_offsets_do_not() -> None:
    layout = Layout(lambda: [KVCache()], None, 64)

    def cache(rows: mx.array) -> Any:
        one = KVCache()
        one.update_and_fetch(rows, rows)
        return one

    rows = mx.ones((1, 1, 4, 8))
    rows[0, 0, 2, 3] = mx.inf
    assert {each.error for each in compared(layout, [cache(rows)], [cache(mx.array(rows))], 4)} == {0.0}
    (narrow,) = compared(layout, [cache(rows[..., :4])], [cache(rows)], 4)
    assert (narrow.part, narrow.error) == (Part.SHAPE, float("inf"))
    (short,) = compared(layout, [cache(rows[..., :3, :])], [cache(rows)], 3)
    assert (short.part, short.error) == (Part.OFFSET, float("inf"))
    layout.learn([cache(rows)])
    (lost,) = compared(layout, [KVCache()], [cache(rows)], 4)
    assert (lost.part, lost.error) == (Part.SHAPE, float("inf"))
    assert compared(layout, [cache(rows)], [KVCache()], 4) == []


def test_a_code_at_the_border_of_a_quantized_cache_is_tolerated_and_a_wrong_high_bit_is_not() -> None:
    rows = mx.random.normal((1, 1, 40, 64), key=mx.random.key(2))
    for bits in (8, 4):
        layout = Layout(lambda: [KVCache()], bits, 64)
        right, flipped, wrong = (layout.fresh() for _ in range(3))
        for caches in (right, flipped, wrong):
            caches[0].update_and_fetch(rows, rows)
        for cache, change in ((flipped[0], 1), (wrong[0], 1 << (bits - 1))):
            assert isinstance(cache, QuantizedKVCache)
            codes = np.array(cache.keys[0])
            codes[0, 0, 7, 0] ^= change
            cache.keys = (mx.array(codes), *cache.keys[1:])
        layout.learn(right)
        tolerance = tolerance_of(layout, right, mx.float32)
        near, far = (max(each.error for each in compared(layout, c, right, 40)) for c in (flipped, wrong))
        assert 0 < near <= tolerance < far, (bits, near, tolerance, far)


def test_the_coarsest_dtype_decides_the_tolerance() -> None:
    layout = Layout(lambda: [KVCache()], None, 64)

    def of(dtype: Any, logits: Any) -> float:
        cache = KVCache()
        cache.update_and_fetch(*[mx.ones((1, 1, 2, 4), dtype)] * 2)
        return tolerance_of(layout, [cache], logits)

    full, half, brain = (TOLERANCES[each] for each in (mx.float32, mx.float16, mx.bfloat16))
    assert full < half < brain
    assert (of(mx.float32, mx.float32), of(mx.float32, mx.bfloat16), of(mx.bfloat16, mx.float32)) == (
        full,
        brain,
        brain,
    )
    assert of(mx.float16, mx.float32) == half


def test_logits_of_another_width_or_far_off_do_not_agree() -> None:
    logits = mx.arange(10).astype(mx.float32)
    assert compare_logits(logits, logits).error == 0
    assert compare_logits(logits + 0.9, logits).error == pytest.approx(0.1)
    assert compare_logits(logits[:5], logits).error == float("inf")
    assert compare_logits(logits * mx.nan, logits).error == float("inf")
