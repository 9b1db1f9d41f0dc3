"""Logits to the bit: of requests through a cache, and of a plain loop over mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from radixcache import PrefixCache, Session

STEP = 16
REPLY = (5, 77, 130, 9, 201)

Logits = dict[int, NDArray[Any]]


def exact_cache(model: Any, **more: Any) -> PrefixCache:
    return PrefixCache(model, **{"exact": True, "step_size": STEP, "checkpoint_interval": 64, **more})


class Recorded:
    """A model that keeps the logits it returned, by the offset of each token."""

    def __init__(self, model: Any, start: int) -> None:
        self.model = model
        self.offset = start
        self.logits: Logits = {}

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.model(ids, cache=cache)
        mx.eval(logits)
        for index, row in enumerate(np.array(logits[0].astype(mx.float32))):  # loses nothing
            self.logits[self.offset + index] = row
        self.offset += ids.shape[1]
        return logits


def run(session: Session, model: Any, reply: Sequence[int] = REPLY) -> Logits:
    """Prefill, then step through the prompt's last token and the reply; the logits of all tokens not restored."""
    recorded = Recorded(model, session.cached_tokens)
    session.prefill(recorded)
    for token in (int(session.prompt[-1]), *reply):
        session.step(recorded, [token])
    return recorded.logits


def serve(cache: PrefixCache, model: Any, prompt: list[int], reply: Sequence[int] = REPLY, **begin: Any) -> Logits:
    with cache.begin(prompt, **begin) as session:
        logits = run(session, model, reply)
    cache.check()
    return logits


def plain(model: Any, prompt: list[int], reply: Sequence[int] = REPLY) -> Logits:
    """The same by mlx-lm's own caches, as its generate_step prefills them."""
    caches = make_prompt_cache(model)
    recorded = Recorded(model, 0)
    last = len(prompt) - 1
    for start in range(0, last, STEP):
        recorded(mx.array(prompt[start : min(start + STEP, last)])[None], cache=caches)
    for token in (prompt[-1], *reply):
        recorded(mx.array([[token]]), cache=caches)
    return recorded.logits


def differing(warm: Logits, cold: Logits) -> list[int]:
    """Offsets at which the logits are not the same to the bit."""
    assert warm.keys() <= cold.keys()
    return [offset for offset, row in warm.items() if not np.array_equal(row, cold[offset])]
