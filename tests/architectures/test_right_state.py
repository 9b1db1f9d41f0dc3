"""What a request is handed is the state that its own prompt would have produced, in every layer of every tiny kind.

The procedure is in benchmarks/architectures/right_state.py; here it is held to its bounds, for every tiny kind and for
caches of the classes that no tiny kind has. The last test is the control: the state of another prompt in any one place
moves the same logits far beyond what the others accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from mlx_lm.models.cache import ConcatenateKVCache, QuantizedKVCache, RotatingKVCache

from benchmarks.architectures.catalogue import subject_of
from benchmarks.architectures.kinds import kind_of
from benchmarks.architectures.right_state import (
    BRANCH_OFFSET,
    PROMPT_A,
    PROMPT_LENGTH,
    ROUNDING,
    SHARED_LENGTH,
    STEP_SIZE,
    WRONG_STATE,
    Subject,
    control,
    fetched_error,
    timeline,
)
from benchmarks.architectures.temporal import largest_error, temporal_state
from radixcache import PrefixCache
from runner.models.tiny import TINY_KINDS, build


@dataclass(frozen=True)
class Variant:
    """Two layers of the tiny llama with caches of a class that no tiny kind has.

    Attributes:
        fresh: makes the cache of one layer.
        step_size: tokens per forward pass.
    """

    fresh: Callable[[], Any]
    step_size: int = STEP_SIZE


VARIANTS = {
    # Between two bit patterns lies far more than rounding: forward passes of other lengths do not give the same state.
    "llama in 8 bits": Variant(lambda: QuantizedKVCache(group_size=64, bits=8), step_size=1),
    # What a window with `keep` lets a token see depends on how mlx-lm was fed; one token at a time is the same for all.
    "llama in a window that keeps its first 4": Variant(lambda: RotatingKVCache(max_size=24, keep=4), step_size=1),
    "llama in a window too large to wrap": Variant(lambda: RotatingKVCache(max_size=512, keep=4)),
    "llama in joined arrays": Variant(ConcatenateKVCache),
}
#: Full attention, a sliding window, recurrent layers beside attention, a class of its own, and quantized.
FAST = {"llama", "gemma4_text", "falcon_h1", "deepseek_v41", "llama in 8 bits"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=[pytest.mark.slow] * (k not in FAST)) for k in (*sorted(TINY_KINDS), *VARIANTS)],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param not in VARIANTS:
        return subject_of(request.param)
    kind = kind_of("llama")
    llama: Any = build(replace(kind, overrides={**kind.overrides, "num_hidden_layers": 2}))
    variant = VARIANTS[request.param]

    def fresh() -> list[Any]:
        return [variant.fresh() for _ in llama.layers]

    def open_cache() -> PrefixCache:
        in_bits = isinstance(variant.fresh(), QuantizedKVCache)
        return PrefixCache(llama, kv_bits=8) if in_bits else PrefixCache(llama, caches=fresh)

    return Subject(llama, open_cache, fresh, variant.step_size)


def test_every_request_of_a_branching_conversation_gets_the_state_of_a_cold_run(subject: Subject) -> None:
    found = timeline(subject)
    assert found.state_error < ROUNDING
    assert found.logits_error < ROUNDING
    assert not found.other_replies
    # Agreeing is worth something only where state was taken up.
    resumed = found.resumed_tokens
    assert min(resumed["A grown"], resumed["B again"], resumed["A again"]) >= PROMPT_LENGTH - 16, resumed
    if found.is_token_exact:
        assert (resumed["B"], resumed["branch"]) == (SHARED_LENGTH, BRANCH_OFFSET), resumed


@pytest.mark.parametrize("subject", sorted(FAST), indirect=True)
def test_fetched_caches_hold_the_state_of_a_cold_run(subject: Subject) -> None:
    assert fetched_error(subject) < ROUNDING


@pytest.mark.parametrize("subject", ["llama in 8 bits", "llama in joined arrays"], indirect=True)
def test_the_state_of_another_prompt_in_any_one_place_would_have_been_noticed(subject: Subject) -> None:
    # Of the tiny kinds in their own caches tests/architectures/test_tiny_models.py shows it.
    moved = control(subject)
    assert moved
    assert min(moved.values()) > WRONG_STATE, moved


def test_two_states_with_other_arrays_or_other_shapes_are_infinitely_far_apart() -> None:
    llama = subject_of("llama")
    right, shorter = (temporal_state(llama.cold_caches(tokens)) for tokens in (PROMPT_A, PROMPT_A[:-1]))
    assert largest_error(right, right) == 0
    assert largest_error(right, shorter) == float("inf")
    assert largest_error(right, {}) == float("inf")
    assert largest_error({}, {}) == float("inf"), "no layer holds any state"
