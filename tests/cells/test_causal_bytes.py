"""What a CausalCache holds in memory: each distinct token once, nothing copied in a step, nothing kept after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.architectures.kinds import kind_of
from radixcache.cells.causal import CausalCache
from runner.models.tiny import build
from tests.cells.causal_rows import words
from tests.memory import active_bytes

# A buffer that is used again may be larger than what is asked for.
pytestmark = pytest.mark.usefixtures("exact_allocations")

USERS = 8
COMMON = 900
OWN = 24
TOKENS = COMMON + USERS * OWN


def held_bytes(make: Callable[[], Any]) -> tuple[int, Any]:
    """What is in memory because of what `make` returns, which is evaluated, and that."""
    before = active_bytes()
    made = make()
    return active_bytes() - before, made


def common_prompt(model: Any, capacity: int) -> CausalCache:
    """All users with their own tokens behind the common ones: half in a prefill each, half in steps of all."""
    causal = CausalCache(model, capacity=capacity)
    for user in range(USERS):
        causal.add(user)
    for start in range(0, COMMON, 300):
        causal.prefill(model, 0, words(start, 300))
        mx.eval(causal.state)
    for user in range(1, USERS):
        causal.copy_prefix(0, user, COMMON)
    for user in range(USERS):
        causal.prefill(model, user, words(user, OWN // 2))
        mx.eval(causal.state)
    for token in range(OWN // 2):
        causal.step(model, range(USERS), [token] * USERS)
        mx.eval(causal.state)
    return causal


def test_a_common_prefix_is_in_memory_once_whatever_the_capacity() -> None:
    model = build(kind_of("llama"))
    mx.eval(CausalCache(model, capacity=8).steps_together(model))
    memory, causal = held_bytes(lambda: common_prompt(model, capacity=20_000))
    ideal = TOKENS * causal.token_bytes
    assert causal.table.used == TOKENS
    assert ideal <= causal.nbytes <= 1.05 * ideal
    assert ideal <= memory <= 1.05 * ideal


WIDE = {
    "llama": {"head_dim": 128, "num_key_value_heads": 2, "num_attention_heads": 4},
    "deepseek_v3": {"kv_lora_rank": 512},
}


@pytest.mark.parametrize("kind", WIDE)
def test_steps_write_in_place_fetch_views_and_hold_no_second_buffer_however_lazy(kind: str) -> None:
    model = build(replace(kind_of(kind), overrides={**kind_of(kind).overrides, **WIDE[kind]}))
    mx.eval(CausalCache(model, capacity=64).steps_together(model), model.parameters())
    before = active_bytes()
    causal = CausalCache(model, capacity=4_000)
    for row in range(2):
        causal.add(row)
        for start in range(0, 500, 250):
            mx.eval(causal.prefill(model, row, words(start, 250)))
        mx.eval(causal.state)
    tokens = mx.array([1, 2])
    for _ in range(3):
        mx.eval(causal.step(model, [0, 1], tokens), causal.state)
    buffer = min(layer.nbytes for layer in causal._cells)
    for lazy_steps in (1, 8):
        mx.reset_peak_memory()
        for step in range(8):
            tokens = mx.argmax(causal.step(model, [0, 1], tokens)[:, -1], axis=-1)
            if (step + 1) % lazy_steps == 0:
                mx.eval(tokens)
        peak = mx.get_peak_memory() - before - causal.nbytes
        assert peak < buffer / 2, (lazy_steps, peak, buffer)


def test_buffers_grow_by_a_twentieth_so_that_each_cell_is_copied_twenty_times_at_most() -> None:
    model = build(kind_of("llama"))
    causal = CausalCache(model, capacity=10_000)
    causal.add(1)
    copied = held = 0
    for start in range(50):
        causal.prefill(model, 1, words(start, 20))
        cells = causal._cells[0].keys.shape[2]
        copied += held if cells != held else 0
        held = cells
        mx.eval(causal.state)
        assert held <= max(1.05 * causal.table.used, causal.table.used + 64)
    assert copied <= 20 * held


@pytest.mark.parametrize(("kind", "chunks", "rows"), [("mamba", (256,), 1), ("lfm2", (6, 1), 16)])
def test_recurrent_state_is_no_view_of_the_activations_of_a_chunk(kind: str, chunks: list[int], rows: int) -> None:
    model = build(kind_of(kind))

    def prefilled() -> CausalCache:
        causal = CausalCache(model, capacity=rows * sum(chunks))
        for row in range(rows):
            causal.add(row)
            for length in chunks:
                mx.eval(causal.prefill(model, row, words(row, length)), causal.state)
        return causal

    prefilled()
    memory, causal = held_bytes(prefilled)
    assert memory <= 1.05 * causal.nbytes + 16_384 // rows, (memory, causal.nbytes)


def test_who_leaves_a_batch_of_recurrent_rows_keeps_one_rows_state() -> None:
    model = build(kind_of("mamba"))
    CausalCache(model, capacity=64).steps_together(model)
    at_first = active_bytes()
    causal = CausalCache(model, capacity=64)
    for row in range(8):
        causal.add(row)
        causal.prefill(model, row, words(row, 2))
    mx.eval(causal.step(model, range(8), [1] * 8), causal.state)
    joined = causal.nbytes
    memory, _ = held_bytes(lambda: mx.eval(causal.step(model, range(8), [1] * 8), causal.state))
    assert memory <= 1_024
    assert mx.get_active_memory() - at_first <= 1.1 * joined

    def last_one() -> CausalCache:
        for row in range(1, 8):
            causal.free(row)
        mx.eval(causal.state)
        return causal

    freed, _ = held_bytes(last_one)
    assert freed <= -0.8 * 7 * causal.nbytes, (freed, causal.nbytes)


def test_the_trial_leaves_nothing_behind() -> None:
    model = build(kind_of("llama"))
    mx.eval(model.parameters())
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(7)
    memory, _ = held_bytes(lambda: CausalCache(model, capacity=64).steps_together(model))
    assert abs(memory) < 1_024
    assert mx.random.uniform(shape=(4,)).tolist() == expected
