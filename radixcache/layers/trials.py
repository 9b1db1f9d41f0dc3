"""Trials: what short runs of a model beside its own caches have in common, which tell what it can do on other ones.

They tell with random weights as well, and what one found is kept as long as the model lives. What counts as rounding is
measured: how far the same logits move when the model's own caches are filled in other chunks. A fixed tolerance wide
enough for a deep bfloat16 model would let wrong positions in a short trial pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from radixcache.layers.tolerances import of_dtypes

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
