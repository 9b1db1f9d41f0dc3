"""What a model answers cold, through mlx-lm's own caches; of models that tests share each text is evaluated once.

Sessions whose answers are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache, Session
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


def run(session: Session, model: Any, reply: Sequence[int] = (), step_size: int = 2048) -> None:
    """Prefill and step through a reply; the answer behind it is a cold run's."""
    session.prefill(model, step_size=step_size)
    for token in (int(session.prompt[-1]), *reply):
        logits = session.step(model, [token])
    assert error(logits[0, -1], cold(model, [*session.prompt.tolist(), *reply])) < ROUNDING


def serve(
    cache: PrefixCache,
    model: Any,
    prompt: Sequence[int],
    reply: Sequence[int] = (),
    step_size: int = 2048,
    **begin: Any,
) -> Session:
    """Serve a prompt and a reply in a session; returns it, closed."""
    with cache.begin(prompt, **begin) as session:
        run(session, model, reply, step_size)
    cache.check()
    return session


def resumed(cache: PrefixCache, model: Any, prompt: Sequence[int]) -> int:
    """Where a session resumes on a prompt; its answer is a cold run's."""
    return serve(cache, model, prompt).cached_tokens


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
