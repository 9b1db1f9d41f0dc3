"""Layers that are faster on MLX's CPU back end, with the results of mlx.nn's layers.

Products. OpenBLAS copies a weight before it multiplies it, even by one row, and the copy takes longer than the product.
The copy of a block is cheaper, because it stays in the CPU's cache. On CPUs with AVX-512, OpenBLAS has kernels for
small products, which copy nothing. A decode step multiplies by one row for each user, so a weight (O, I) is multiplied
in blocks, up to rounding with the same result:

    (M, I) @ (O, I).T     ->     (blocks, O / blocks, I) @ (1, I, M)

Attention. On x86, most of the time of MLX's attention goes into its exponential (24 ns a value). Cascade attention,
here without segments, takes a power in its place (7 ns), and leaves out what a block of a long pass does not see.

Rotations. MLX has one kernel for RoPE on Metal and CUDA. On the CPU it computes cosines and sines in each pass and
layer, for queries and for keys. SharedRoPE computes them once for all passes and layers, and gives the same bits.
"""

import math
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from radixcache.groups.attention import (
    BLOCK_TOKENS,
    Attention,
    Readers,
    cascade,
    handed_out,
    has_slow_exp,
    replace_attention,
)
from runner.blas import blas_kernel

#: The CPUs for which OpenBLAS has kernels for small products.
SMALL_KERNELS = frozenset(("SkylakeX", "Cooperlake", "SapphireRapids"))
#: On these CPUs, the largest product of one block, in multiplications: half of what OpenBLAS takes as small.
BLOCK_PRODUCT = 500_000
#: On the others, the most numbers of one block of a weight, which is 4 MB.
BLOCK_WEIGHT = 1_000_000
#: Products with more rows are as fast in one piece.
MOST_ROWS = 8
#: Positions with cosines and sines. Behind them, mlx.nn's layer computes its own.
POSITIONS = 16_384
NO_SEGMENTS = Readers(1, [])


class BlockLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        found = product(x, self.weight)
        return found + self.bias if "bias" in self else found


class BlockEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self.weight)


class Angles:
    """Cosines and sines (POSITIONS, D), for all layers that rotate alike. They are part of the model's memory."""

    def __init__(self, dims: int, base: float, scale: float) -> None:
        positions = mx.arange(POSITIONS, dtype=mx.float32) * scale
        steps = mx.arange(0, -(dims // 2), -1, dtype=mx.float32)
        angles = positions[:, None] * mx.exp(steps * (math.log(base) / (dims // 2)))
        cosines, sines = mx.cos(angles), mx.sin(angles)
        self.known = mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)
        mx.eval(self.known)  # for all threads


class SharedRoPE(nn.RoPE):
    stands_for = nn.RoPE  # so that a context shift knows how it rotates
    angles: Angles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        # An array of offsets may be changed in place after this call.
        is_plain = type(offset) is int and x.dtype == mx.float32 and x.shape[-1] == self.dims
        if not is_plain or offset + x.shape[-2] > POSITIONS:
            return super().__call__(x, offset)  # type: ignore[no-any-return]
        cosines, sines = (table[offset : offset + x.shape[-2]] for table in self.angles.known)
        low, high = mx.split(x, 2, axis=-1)
        return x * cosines + mx.concatenate([high, low], axis=-1) * sines


def use_cpu_layers(model: nn.Module) -> None:
    """Replace layers of a model by faster ones, if it runs on the CPU."""
    if mx.default_device() != mx.cpu:
        return
    if has_slow_exp():
        replace_attention(model, with_powers, "has_powers")
    has_openblas = blas_kernel() != ""
    angles: dict[tuple[int, float, float], Angles] = {}
    for module in model.modules():
        kind = type(module)
        if kind is nn.RoPE and not module.traditional:
            module.__class__ = SharedRoPE
            key = module.dims, module.base, module.scale
            module.angles = angles[key] = angles.get(key) or Angles(*key)
        elif has_openblas and kind in (nn.Linear, nn.Embedding) and module.weight.dtype == mx.float32:
            module.__class__ = BlockLinear if kind is nn.Linear else BlockEmbedding


def with_powers(stock: Attention) -> Attention:
    """mlx-lm's attention function, up to rounding; what cascade attention cannot compute goes to `stock`."""

    def attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if not _is_for_cascade(queries.shape[2], keys, mask) or id(keys) in handed_out.by_keys:
            return stock(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        if isinstance(mask, str):
            mask = create_causal_mask(queries.shape[2], keys.shape[2] - queries.shape[2])
        return cascade(queries, keys, values, NO_SEGMENTS, [], scale=scale, mask=mask, sinks=sinks)

    return attention


def _is_for_cascade(tokens: int, keys: Any, mask: Any) -> bool:
    """Whether cascade attention gives the same: for float32 keys of one array, and a mask of its kinds."""
    if not isinstance(keys, mx.array) or keys.dtype != mx.float32:
        return False
    if isinstance(mask, mx.array):  # it may see later tokens, which a block of more tokens would leave out
        return bool(mask.dtype == mx.bool_ and mask.ndim in (2, 4) and tokens <= BLOCK_TOKENS)
    return tokens == 1 or mask == "causal"


def product(x: mx.array, weight: mx.array) -> mx.array:
    """Return x @ weight.T, for x (..., I) and weight (O, I)."""
    outputs, inputs = weight.shape
    rows = x.size // inputs
    blocks = block_count(outputs, inputs, rows)
    if blocks == 1 or x.dtype != weight.dtype:
        return x @ weight.T
    found = weight.reshape(blocks, outputs // blocks, inputs) @ x.reshape(1, rows, inputs).swapaxes(1, 2)
    return found.reshape(outputs, rows).T.reshape(*x.shape[:-1], outputs)


@cache
def block_count(outputs: int, inputs: int, rows: int) -> int:
    """Return how many equal blocks of a weight to multiply; 1: all of it at once."""
    if not 1 <= rows <= MOST_ROWS:
        return 1
    largest = BLOCK_PRODUCT // rows if blas_kernel() in SMALL_KERNELS else BLOCK_WEIGHT
    counts = (count for count in range(1, outputs + 1) if outputs % count == 0)
    return next((count for count in counts if outputs // count * inputs <= largest), 1)
