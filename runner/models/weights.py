"""Random weights for tiny models, under which a wrong state shows.

A model as its constructor leaves it hardly looks at its own state: weights are small, gates and kernels are zero, and a
wrong cache would go unnoticed. Here every weight is drawn so that the signal keeps its size through the layers
(`TinyKind.weight_scale` where that is not enough): the state of another prompt, put into any one layer, moves the next
logits far beyond rounding. tests/models/ holds every kind to that.

The weights come from the seed alone, not from MLX's global state, so that the same seed gives the same model wherever
it is built.
"""

from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from runner.models.configuration import architecture
from runner.models.exceptions import TinyKind

# What the architectures call their matrices and kernels; `fn` mixes the streams of deepseek_v41, `conv_k` and `conv_v`
# join neighbouring keys and values in baichuan_m1.
MATRIX_NAMES = ("weight", "input_gate_weight", "recurrent_gate_weight", "fn", "conv_k", "conv_v")


def build(kind: TinyKind, seed: int = 0) -> nn.Module:
    """Build the tiny model of `kind` in float32, ready for inference; the same seed gives the same weights."""
    module = architecture(kind.module)
    # Some architectures draw the values that they start from, and `_draw_weights` adds to those.
    mx.random.seed(seed)
    # Some fill in what their configuration lacks.
    model: nn.Module = module.Model(module.ModelArgs.from_dict(deepcopy(kind.config)))
    _draw_weights(model, kind.weight_scale, np.random.default_rng(seed))
    model.eval()
    mx.eval(model.parameters())
    return model


def _draw_weights(model: nn.Module, scale: float, random: np.random.Generator) -> None:
    """Replace every parameter of `model` by a random one, in the order of their names."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    model.load_weights([(name, mx.array(_draw(name, parameters[name], scale, random))) for name in sorted(parameters)])


def _draw(name: str, value: mx.array, scale: float, random: np.random.Generator) -> NDArray[Any]:
    """Draw one parameter of the shape of `value`, in float32 unless it is packed bits.

    Matrices get `scale` over the square root of what they sum over, so that the signal keeps its size. The rest (norms,
    biases, gates, skips) keeps the value its architecture starts from and gets some noise, since many start from zero
    and would switch their layer off.
    """
    if value.dtype == mx.uint32:
        return random.integers(0, 1 << 32, value.shape, dtype=np.uint32)
    noise: NDArray[np.float32] = random.standard_normal(value.shape, dtype=np.float32)
    leaf = name.rsplit(".", maxsplit=1)[-1]
    if leaf == "A_log":
        # How fast a state-space layer forgets: slowly here, so that the whole prompt stays in the state.
        return np.asarray(np.log(random.uniform(0.02, 0.5, value.shape)), dtype=np.float32)
    if leaf == "recurrent_param":
        return np.float32(-4.0) + np.float32(0.3) * noise
    if leaf in MATRIX_NAMES and value.ndim >= 2:
        summed = int(np.prod(value.shape[1:])) if leaf == "weight" and "conv" in name else value.shape[-1]
        return noise * np.float32(scale / np.sqrt(summed))
    return np.asarray(value.astype(mx.float32), dtype=np.float32) + np.float32(0.3) * noise
