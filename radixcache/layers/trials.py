"""Trials: the error that a short run of a model may have; facts about a model. BothModels: a model and a draft model.

Restored state and cold state come from forward passes of different lengths: the same sums in another order, rounded
differently. The coarsest dtype of logits and caches sets the error. The largest errors of tiny random models on a CPU
(prompts of 40 to 200 tokens, in one pass, in chunks, token by token) were 7e-6 in float32, 6e-3 in float16 and 4e-2 in
bfloat16. State of a wrong token gives an error of about 1. A quantized cache may round a value to either of two codes;
with 2 bits, this error is as large as that of a fault.

A tolerance wide enough for a deep bfloat16 model lets wrong positions pass in a short trial. So trials measure the
rounding: how much logits change if the model's own caches are filled in other chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from radixcache.layers.layout import Layout
from radixcache.tokens import vocabulary_size

#: Largest relative error by dtype: about 100, 8 and 5 times the measured ones.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 5e-2, mx.bfloat16: 2e-1}
#: Added for a quantized cache: this many steps of its grid.
GRID_STEPS = 2
#: Added for state that was stored in this many bits. Later layers and tokens add to the grid's error. On tiny random
#: models, the error was at most 0.16 with 8 bits and 0.86 with 4 bits; with 4 bits, only gross faults are found.
#: Attention that picks keys by an index (deepseek_v32) picks other keys after rounding, and has larger errors.
STORED_TOLERANCES = {8: 0.2, 4: 1.0}
#: After rounding, a model with experts picks other experts for some tokens. So this share of a layer's rows may be
#: wrong. State without rows may have this error. Tiny random models had 1 wrong row of 128, and an error of 0.5.
PICKED_ROWS = 1 / 20
PICKED_TOLERANCE = 1.0
#: The allowed error is this many times the measured rounding, and at least this part of the dtype's tolerance.
MARGIN = 5
LEAST_PART = 1 / 8
#: Modules of mlx-lm whose attention depends on where in a buffer a token stands; a short trial would not show it.
BY_SLOT = {"minimax_m3_vl": "its attention works on blocks of neighbouring slots of the cache"}

T = TypeVar("T")
Rows = Sequence[Sequence[int]]


class BothModels(nn.Module):
    """A model and its draft model as one module. Its caches are the model's, then the draft model's.

    Attributes:
        first: the index of the draft model's first cache.
    """

    def __init__(self, model: Any, draft_model: Any, cache_count: int) -> None:
        """ValueError: the two models do not need `cache_count` caches in all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.draft_model = model, draft_model
        # Not the number of layers: a model may have layers without state.
        self.first, more = len(make_prompt_cache(model)), len(make_prompt_cache(draft_model))
        if cache_count != self.first + more:
            raise ValueError(
                f"the PrefixCache has {cache_count} layer caches; draft_model needs the {self.first + more} of both "
                "models, in order."
            )

    def __call__(self, tokens: Any, cache: Sequence[Any]) -> Any:
        self.draft_model(tokens, cache=cache[self.first :])
        return self.model(tokens, cache=cache[: self.first])

    def drafted(
        self, tokens: mx.array, count: int, forward: Callable[[mx.array], mx.array]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draft `count` tokens after the tokens (N, T) of each row. Returns tokens and their probabilities, by row.

        `forward` runs the draft model over its caches: from tokens (N, T) to logits (N, T, V).
        """
        said: list[mx.array] = []
        chances: list[mx.array] = []
        for _ in range(count):
            logits = forward(tokens)[:, -1, : vocabulary_size(self.model)].astype(mx.float32)
            tokens = mx.argmax(logits, axis=-1, keepdims=True)
            said.append(tokens)
            chance = mx.exp(logits.max(axis=-1, keepdims=True) - mx.logsumexp(logits, axis=-1, keepdims=True))
            chances.append(mx.nan_to_num(chance))  # NaN is harmless: the model checks each draft
            mx.async_eval(tokens, chances[-1])
        its: Any = [np.asarray(mx.concatenate(each, axis=1)).tolist() for each in (said, chances)]
        return its[0], its[1]


def tolerance_of(layout: Layout, caches: Sequence[Any], logits: mx.Dtype) -> float:
    """The relative error that counts as rounding, for a model that wrote `caches` and gave logits of that dtype."""
    dtypes = {logits, *(array.dtype for array in layout.arrays(caches))}
    bits = [cache.bits for cache, _ in layout.leaves(caches) if isinstance(cache, QuantizedKVCache)]
    # The 2**bits codes of a group go at most from -1 to 1 times the largest magnitude.
    live = max((GRID_STEPS * 2 / (2**each - 1) for each in bits), default=0.0)
    return of_dtypes(*dtypes) + max(live, STORED_TOLERANCES.get(layout.stored_bits or 0, 0.0))


def of_dtypes(*dtypes: mx.Dtype) -> float:
    """The relative error that counts as rounding, for values computed in these dtypes."""
    known = {*dtypes}
    if mx.float32 in known and mx.cuda.is_available():
        known.add(mx.float16)  # on CUDA, MLX multiplies in TF32, with a mantissa as short as float16's
    return max((TOLERANCES[dtype] for dtype in known if dtype in TOLERANCES), default=TOLERANCES[mx.float32])


def allowed_error(rounding: float, *dtypes: mx.Dtype) -> float:
    """The allowed error of logits computed in these dtypes, if other chunks changed them by `rounding`."""
    tolerance = of_dtypes(*dtypes)
    return min(max(MARGIN * rounding, LEAST_PART * tolerance), tolerance)


def error_of(found: mx.array, wanted: mx.array) -> float:
    """The largest difference, relative to the largest value."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(mx.max(mx.abs(found - wanted)) / mx.maximum(mx.max(mx.abs(wanted)), 1e-9))


def logits_alone(model: Any, fresh: Callable[[], Sequence[Any]], rows: Rows, steps: Rows, last: int) -> mx.array:
    """Logits (R, N, V) of R rows, each in its own caches, for N steps of one token after each prompt.

    Args:
        fresh: makes the model's caches.
        last: how many of a prompt's last tokens go through a second pass.
    """
    found = []
    for row, tokens in zip(rows, zip(*steps, strict=True), strict=True):
        caches = fresh()
        for chunk in (row[:-last], row[-last:]):
            model(mx.array([chunk]), cache=caches)
        found.append(mx.concatenate([model(mx.array([[token]]), cache=caches) for token in tokens], axis=1))
    return mx.concatenate(found)


def once_per_model(known: dict[int, T], model: Any, find: Callable[[], T]) -> T:
    """Call `find` once for each model object; `known` keeps the results by id(model)."""
    if not isinstance(model, nn.Module):
        return find()  # a function, which may call a different model every time
    if id(model) not in known:
        known[id(model)] = find()
        weakref.finalize(model, known.pop, id(model), None)
    return known[id(model)]


def has_experts(model: Any) -> bool:
    """Whether a model picks experts for each token, as far as is known."""
    return any(isinstance(each, SwitchLinear | QuantizedSwitchLinear) for each in getattr(model, "modules", list)())


def by_slot(model: Any) -> str:
    """Why a model's attention depends on where in a buffer a token stands; "" if it does not, as far as is known."""
    modules = {type(each).__module__.rpartition(".")[2] for each in (model, *getattr(model, "layers", ()))}
    return "; ".join(f"{name}: {BY_SLOT[name]}" for name in sorted(modules & set(BY_SLOT)))
