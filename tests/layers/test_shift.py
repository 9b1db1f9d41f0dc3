"""Shift: every RoPE variant rotates on, layers of real models find theirs, and what cannot be shifted is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import internlm3
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope

from benchmarks.architectures.catalogue import cache_classes, distinct_models
from benchmarks.architectures.kinds import kind_of
from radixcache import ShiftError
from radixcache.layers import shift
from radixcache.layers.shift import Rotation, rotation_of
from runner.models.tiny import build

HEADS, TOKENS, HEAD_WIDTH = 2, 12, 32
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + index / 4 for index in range(16)],
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}


def rotations(model: Any, caches: Sequence[Any] | None = None) -> list[Rotation | None]:
    """The rotations of the keys in a model's own caches, or in others."""
    return shift.rotations(model, make_prompt_cache(model) if caches is None else caches)


def rope(config: dict[str, Any] | None, dims: int = HEAD_WIDTH, traditional: bool = False) -> Any:
    return initialize_rope(dims, 10_000.0, traditional, config, max_position_embeddings=8192)


VARIANTS: dict[str, Callable[[], Any]] = {
    "default": lambda: rope(None),
    "traditional": lambda: rope(None, traditional=True),
    "partial": lambda: rope(None, dims=12),
    "partial, traditional": lambda: rope(None, dims=12, traditional=True),
    "linear": lambda: rope({"rope_type": "linear", "factor": 4.0}),
    "llama3": lambda: rope(LLAMA3),
    "llama3, traditional": lambda: rope(LLAMA3, traditional=True),
    "yarn": lambda: rope(YARN),
    "yarn, traditional, mscale": lambda: rope({**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}, traditional=True),
    "longrope": lambda: rope(LONGROPE),
    "proportional": lambda: rope(PROPORTIONAL),
    "proportional, traditional": lambda: rope(PROPORTIONAL, traditional=True),
    "mrope": lambda: rope({"rope_type": "mrope", "mrope_section": [8, 4, 4]}, dims=16),
}


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def largest(difference: mx.array) -> float:
    return float(mx.abs(difference.astype(mx.float32)).max().item())


def relative(found: mx.array, wanted: mx.array) -> float:
    """Norm of the difference over the norm of what was wanted."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float((mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)).item())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("begin", "delta"), [(40, -40), (0, 1), (17, 0), (3, 500), (900, -123)])
def test_shifted_keys_are_those_made_at_the_new_position(name: str, begin: int, delta: int) -> None:
    module = VARIANTS[name]()
    unrotated = draw(1, HEADS, TOKENS, HEAD_WIDTH)
    found = rotation_of(module).shift(module(unrotated, offset=begin), delta)
    assert found.dtype == mx.float32
    assert largest(found - module(unrotated, offset=begin + delta)) < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_every_move_in_half_precision_costs_one_rounding(name: str, dtype: mx.Dtype) -> None:
    rotation = rotation_of(VARIANTS[name]())
    keys = draw(1, HEADS, TOKENS, HEAD_WIDTH).astype(dtype)
    moved = keys
    for _ in range(20):
        moved = rotation.shift(moved, -3)
    assert relative(moved, rotation.shift(keys.astype(mx.float32), -60)) <= 20 * mx.finfo(dtype).eps / 2


class CacheFrom:
    """A cache whose first token is at position `start`."""

    def __init__(self, start: int) -> None:
        self.offset = self.start_position = self.start = start
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        self.offset = self.start + keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return create_causal_mask(N, self.offset - self.start, window_size=window_size)

    def maybe_trim_front(self) -> None:
        pass


def prefilled(model: Any, start: int) -> list[CacheFrom]:
    """The caches after a prompt of `TOKENS` tokens from position `start`: within one window, and one chunk."""
    caches = [CacheFrom(start) for _ in make_prompt_cache(model)]
    mx.eval(model(mx.arange(20, 20 + TOKENS)[None], cache=caches))
    return caches


def worst_error(model: Any, found: list[Rotation | None], begin: int = 300, delta: int = -299) -> float:
    """Largest relative difference, over layers, between shifted keys and those made at the new positions."""
    errors = [0.0]
    for rotation, before, after in zip(found, prefilled(model, begin), prefilled(model, begin + delta), strict=True):
        if before.keys is None or after.keys is None:
            assert rotation is None
            continue
        errors.append(relative(before.keys if rotation is None else rotation.shift(before.keys, delta), after.keys))
    return max(errors)


def test_a_base_that_depends_on_the_length_is_refused_by_name() -> None:
    module = initialize_rope(16, 1e4, False, {"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    with pytest.raises(ShiftError, match=r"rope_utils\.DynamicNTKScalingRoPE: its base depends on the length"):
        rotation_of(module)
    with pytest.raises(ShiftError, match=r"internlm3\.DynamicNTKScalingRoPE: its base depends on the length"):
        rotation_of(internlm3.DynamicNTKScalingRoPE(16))


class OwnRoPE(nn.RoPE):
    """Could rotate in any way."""


@pytest.mark.parametrize("module", [OwnRoPE(16), nn.ALiBi(), nn.SinusoidalPositionalEncoding(16), nn.Linear(4, 4)])
def test_an_unknown_class_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(ShiftError, match=rf"{type(module).__name__} is not known\. Known: mlx\.nn\.RoPE, "):
        rotation_of(module)


RECURRENT = r"layer 0: ArraysCache holds recurrent state, which cannot forget"
LATENT = r"layer 0 \(KVCache\): values are rotated, as in latent attention \(MLA\)"
LEARNED = r"layer 0 \(KVCache\): values depend on the position, as with learned position embeddings"
ROTATED_OTHERWISE = r"layer 0 \(KVCache\): keys depend on the position, but no known RoPE .* RoPEs: "
REFUSALS = {
    "deepseek_v3": LATENT,
    "deepseek_v32": r"layer 0: CacheList\(KVCache, KVCache\) is not known",
    "gpt2": LEARNED,
    "mamba": RECURRENT,
    # Latent attention that stores whole heads: rotated at their end.
    "minicpm3": ROTATED_OTHERWISE + r".*SuScaledRoPE",
    "deepseek_v2": ROTATED_OTHERWISE + r".*DeepseekV2YarnRotaryEmbedding is not known",
    # Rotated, and then each dimension scaled by a weight of its own.
    "afm7": ROTATED_OTHERWISE + r".*RoPE",
    "hunyuan_v1_dense": ROTATED_OTHERWISE + r".*DynamicNTKAlphaRoPE",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_cannot_be_shifted_is_refused_with_the_layer_and_the_reason(name: str) -> None:
    with pytest.raises(ShiftError, match=REFUSALS[name]):
        rotations(build(kind_of(name)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_a_model_that_rotates_otherwise_than_its_modules_say_is_refused(dtype: mx.Dtype) -> None:
    model = build(kind_of("llama"))
    model.layers[2].self_attn.rope = OwnRoPE(64, base=20_000.0)
    # Squares of these keys are beyond what float16 holds.
    model.layers[2].self_attn.k_proj.weight *= 200.0
    model.set_dtype(dtype)
    with pytest.raises(ShiftError, match=r"layer 2 \(KVCache\): keys depend .*OwnRoPE is not known"):
        rotations(model)


def test_keys_that_are_zero_tell_nothing() -> None:
    model = build(kind_of("llama"))
    model.layers[1].self_attn.k_proj.weight *= 0
    with pytest.raises(ShiftError, match=r"layer 1 \(KVCache\): keys of token 100 are zero"):
        rotations(model)


#: Types with one rotation, with two, with layers that have none or no cache, and with recurrent state.
FAST = {"llama", "gemma4_text", "cohere2", "nemotron-nas", "llama4", "mamba"}
#: Types that are refused although no layer of theirs holds recurrent state.
OTHERS_REFUSED = {
    "afm7", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe_lite", "gpt2", "gpt_bigcode",
    "hunyuan_v1_dense", "iquestloopcoder", "longcat_flash", "minicpm3", "minimax_m3_vl", "mistral4", "youtu_llm",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in distinct_models()]
)
def test_every_architecture_is_shifted_rightly_or_refused(name: str) -> None:
    model = build(kind_of(name))
    if name in OTHERS_REFUSED or any("ArraysCache" in each for each in cache_classes(model)):
        with pytest.raises(ShiftError, match=r"^layer \d+"):
            rotations(model)
    else:
        assert worst_error(model, rotations(model)) < 1e-4
