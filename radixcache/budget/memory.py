"""default_budget_bytes: a byte budget for those who did not name one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten


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
    if working_set:
        spare = working_set - parameter_bytes(model)
        source = "a quarter of MLX's recommended working set beside the model"
    else:
        spare = int(psutil.virtual_memory().available)
        source = "a quarter of the available memory"
    return max(1, spare // 4), source
