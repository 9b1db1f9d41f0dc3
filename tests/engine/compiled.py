"""MLX's compiled mode: whether it is on, and a model that asks for it to be off."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def is_compiling() -> bool:
    """Whether MLX's compiled mode is on: then a compiled function runs its Python only once."""
    traces = []
    compiled = mx.compile(lambda x: traces.append(x) or x + 1)
    compiled(mx.array(1))
    compiled(mx.array(2))
    return len(traces) == 1


class Uncompiled:
    """A model that asks for MLX's compiled mode to be off, and records whether it was on."""

    enable_compile = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self.compiled_calls: list[bool] = []

    def __call__(self, tokens: Any, cache: Any) -> Any:
        self.compiled_calls.append(is_compiling())
        return self._model(tokens, cache=cache)
