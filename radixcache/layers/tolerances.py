"""tolerance_of: the relative error between restored and cold state that is put down to rounding.

Restored state was made by forward passes of other lengths than the cold state: the same sums in another order, and
where a model rounds to a short mantissa after every layer, other roundings that later layers carry on. The coarsest
dtype that a model computes in decides: that of its logits or of any of its caches. Measured over the tiny random models
on a CPU (prompts of 40 to 200 tokens, in one pass, in chunks, token by token) the largest were 7e-6 in float32, 6e-3 in
float16 and 4e-2 in bfloat16; a wrong sign or exponent of a large value, or state of another token, comes to about 1.

A quantized cache stores steps of its grid: a value at the border between two codes may fall to either side, and what
attends to it moves along. With 2 bits a step is as large as a fault, and only logits and shapes tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from radixcache.layers.arrays import ArrayLayout

#: Largest relative error by dtype: about 100, 8 and 5 times what was measured.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 5e-2, mx.bfloat16: 2e-1}
#: Steps of a quantized grid that come on top.
GRID_STEPS = 2


def tolerance_of(layout: ArrayLayout, caches: Sequence[Any], logits: mx.Dtype) -> float:
    """The tolerance for a model whose forward pass wrote `caches` and gave logits of that dtype."""
    dtypes = {logits, *(array.dtype for array in layout.arrays(caches))}
    bits = [cache.bits for cache, _ in layout.leaves(caches) if isinstance(cache, QuantizedKVCache)]
    # A group of 2**bits codes goes from -1 to 1 times the largest magnitude at most.
    return of_dtypes(*dtypes) + max((GRID_STEPS * 2 / (2**each - 1) for each in bits), default=0.0)


def of_dtypes(*dtypes: mx.Dtype) -> float:
    """How far apart values may be that were computed in these."""
    known = {*dtypes}
    if mx.float32 in known and mx.cuda.is_available():
        known.add(mx.float16)  # MLX multiplies in TF32 there, whose mantissa is as short
    return max((TOLERANCES[dtype] for dtype in known if dtype in TOLERANCES), default=TOLERANCES[mx.float32])
