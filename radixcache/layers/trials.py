"""Trials: what short runs of a model beside its own caches have in common, which tell what it can do on other ones.

They tell with random weights as well, and what one found is kept as long as the model lives. What counts as rounding is
measured: how far the same logits move when the model's own caches are filled in other chunks. A fixed tolerance wide
enough for a deep bfloat16 model would let wrong positions in a short trial pass.

tolerance_of: the relative error between restored and cold state that is put down to rounding.

Restored state was made by forward passes of other lengths than the cold state: the same sums in another order, and
where a model rounds to a short mantissa after every layer, other roundings that later layers carry on. The coarsest
dtype that a model computes in decides: that of its logits or of any of its caches. Measured over the tiny random models
on a CPU (prompts of 40 to 200 tokens, in one pass, in chunks, token by token) the largest were 7e-6 in float32, 6e-3 in
float16 and 4e-2 in bfloat16; a wrong sign or exponent of a large value, or state of another token, comes to about 1.

A quantized cache stores steps of its grid: a value at the border between two codes may fall to either side, and what
attends to it moves along. With 2 bits a step is as large as a fault, and only logits and shapes tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache

from radixcache.layers.layout import Layout

#: Largest relative error by dtype: about 100, 8 and 5 times what was measured.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 5e-2, mx.bfloat16: 2e-1}
#: Steps of a quantized grid that come on top.
GRID_STEPS = 2


def tolerance_of(layout: Layout, caches: Sequence[Any], logits: mx.Dtype) -> float:
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


T = TypeVar("T")

#: Rounding is up to so many times what was measured, and at least this part of the tolerance of the dtype.
MARGIN = 5
LEAST_PART = 1 / 8
#: Modules of mlx-lm whose attention goes by where in a buffer a token stands: in a few tokens it would not show.
BY_SLOT = {"minimax_m3_vl": "its attention keeps blocks of neighbouring slots of the cache"}


def once_per_model(known: dict[int, T], model: Any, find: Callable[[], T]) -> T:
    """What was found for a model before, by its id, as it is no key itself; or is found now."""
    if not isinstance(model, nn.Module):
        return find()  # a callable: nobody knows what is behind it
    if id(model) not in known:
        known[id(model)] = find()
        weakref.finalize(model, known.pop, id(model), None)
    return known[id(model)]


def by_slot(model: Any) -> str:
    """Why a model's attention depends on where in a buffer a token stands; empty: as far as is known it does not."""
    modules = {type(each).__module__.rpartition(".")[2] for each in (model, *getattr(model, "layers", ()))}
    return "; ".join(f"{name}: {BY_SLOT[name]}" for name in sorted(modules & set(BY_SLOT)))


def allowed_error(rounding: float, *dtypes: mx.Dtype) -> float:
    """How far logits may be off that were computed in these, where other chunks moved them so far."""
    tolerance = of_dtypes(*dtypes)
    return min(max(MARGIN * rounding, LEAST_PART * tolerance), tolerance)


def error_of(found: mx.array, wanted: mx.array) -> float:
    """The largest difference, relative to the largest value."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(mx.max(mx.abs(found - wanted)) / mx.maximum(mx.max(mx.abs(wanted)), 1e-9))


Rows = Sequence[Sequence[int]]


def logits_alone(model: Any, fresh: Callable[[], Sequence[Any]], rows: Rows, steps: Rows, last: int) -> mx.array:
    """Logits (R, N, V) of R rows in their own caches, at N steps of a token for each row after their prompts.

    Args:
        fresh: makes the model's caches.
        last: how many of a prompt's tokens go through a pass of their own.
    """
    found = []
    for row, tokens in zip(rows, zip(*steps, strict=True), strict=True):
        caches = fresh()
        for chunk in (row[:-last], row[-last:]):
            model(mx.array([chunk]), cache=caches)
        found.append(mx.concatenate([model(mx.array([[token]]), cache=caches) for token in tokens], axis=1))
    return mx.concatenate(found)
