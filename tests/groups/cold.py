"""What a model answers cold, through mlx-lm's own caches; of models that tests share each text is evaluated once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache
from runner.models.tiny import tiny_model

#: Relative error of logits: rounding, and what no rounding explains.
ROUNDING, WRONG = 1e-4, 1e-2

#: By the id of a shared model: answers by text and count.
_answers: dict[int, dict[tuple[tuple[int, ...], int], mx.array]] = {}


@cache
def shared_model(kind: str) -> Any:
    """The tiny model of a kind, for tests that do not change it."""
    model = tiny_model(kind)
    _answers[id(model)] = {}
    return model


def opened(kind: str, **more: Any) -> tuple[Any, PrefixCache]:
    """The shared model of a kind, and a cache for it."""
    model = shared_model(kind)
    return model, PrefixCache(model, **more)


def resumed(cache: PrefixCache, model: Any, prompt: Sequence[int]) -> int:
    """Where a session resumes on a prompt; its answer is a cold run's."""
    with cache.begin(prompt) as session:
        session.prefill(model)
        assert error(session.step(model, prompt[-1:])[0, -1], cold(model, prompt)) < ROUNDING
    return session.cached_tokens


def cold(model: Any, prompt: Sequence[int]) -> mx.array:
    """Logits (V,) of the prompt's last token."""
    return cold_last(model, prompt, 1)[0]


def cold_last(model: Any, prompt: Sequence[int], count: int) -> mx.array:
    """Logits (count, V) of the prompt's last tokens."""
    known, key = _answers.get(id(model), {}), (tuple(prompt), count)
    if key not in known:
        logits = model(mx.array(prompt)[None], cache=make_prompt_cache(model))[0, -count:]
        known[key] = mx.array(np.array(logits.astype(mx.float32)))  # and not the logits of all tokens with them
    return known[key]


def error(found: mx.array, wanted: mx.array) -> float:
    return float(mx.max(mx.abs(found - wanted)) / mx.max(mx.abs(wanted)))
