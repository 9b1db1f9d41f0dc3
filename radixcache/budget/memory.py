"""What a model's size says: a byte budget, and a prefill cost, for those who did not name one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten

from policies import CostModel


def parameter_bytes(model: Any) -> int:
    """Bytes of a model's parameters; 0 for an object without any."""
    parameters = getattr(model, "parameters", None)
    if not callable(parameters):
        return 0
    leaves: list[tuple[str, mx.array]] = tree_flatten(parameters())  # type: ignore[assignment]
    return sum(array.nbytes for _, array in leaves)


def default_budget_bytes(model: Any) -> tuple[int, str]:
    """A quarter of what the device can spare beside the model, in bytes, and a sentence on where that comes from.

    Source: MLX's recommended working set where the device states one (Metal), else the memory that the system calls
    available, which already lacks the model.
    """
    working_set = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if not working_set:
        return max(1, int(psutil.virtual_memory().available) // 4), "a quarter of the available memory"
    spare = working_set - parameter_bytes(model)
    return max(1, spare // 4), "a quarter of MLX's recommended working set beside the model"


def analytic_cost(model: Any) -> CostModel:
    """FLOPs, when the model says how large it is; else tokens."""
    args = getattr(model, "args", None)
    layers, width = getattr(args, "num_hidden_layers", None), getattr(args, "hidden_size", None)
    if not isinstance(layers, int) or not isinstance(width, int):
        return CostModel()
    # Float32 or not changes only the unit's scale, and policies compare costs within one cache.
    return CostModel.analytic(parameters=max(1, parameter_bytes(model) // 4), layers=layers, hidden_size=width)
