"""both_models: a model and its draft model as one, over the caches of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def both_models(model: Any, draft_model: Any, cache_count: int) -> Callable[..., Any]:
    """A callable that runs both models over a list of the model's caches and then the draft model's.

    Raises:
        ValueError: that list would not have `cache_count` caches.
    """
    layers = len(model.layers)
    wanted = layers + len(draft_model.layers)
    if cache_count != wanted:
        raise ValueError(
            f"the PrefixCache has {cache_count} layer caches; draft_model needs both models' {wanted}, in order."
        )

    def both(tokens: Any, cache: list[Any]) -> Any:
        draft_model(tokens, cache=cache[layers:])
        return model(tokens, cache=cache[:layers])

    return both
