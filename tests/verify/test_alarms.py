"""verify=1.0 raises no false alarm on random requests where the walks of test_combinations.py do not go.

Those walks verify every kind of layer in float32, sessions and rows. Here are other classes of caches and dtypes.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, RotatingKVCache

from radixcache import PrefixCache
from runner.models.tiny import VOCABULARY_LENGTH, tiny_model

#: Requests per variant.
REQUESTS = 22
#: Rounding stays below this; the tolerance in float32 is 1e-3.
ROUNDING = 1e-4

VARIANTS: dict[str, Any] = {
    "8 bits": {"kv_bits": 8},
    "4 bits": {"kv_bits": 4},
    "joined arrays": {"caches": ConcatenateKVCache},
    "a window": {"caches": lambda: RotatingKVCache(max_size=24)},
    "a window that keeps its first 4": {"caches": lambda: RotatingKVCache(max_size=24, keep=4)},
}
#: Models in a short mantissa, which rows read as well.
CAST = {
    "llama in bfloat16": ("llama", mx.bfloat16),
    "llama_sliding in bfloat16": ("llama_sliding", mx.bfloat16),
    "nemotron_h in bfloat16": ("nemotron_h", mx.bfloat16),
    "gemma3_text in float16": ("gemma3_text", mx.float16),
}
FEW = ["a window", "llama in bfloat16"]
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in [*VARIANTS, *CAST]]


@functools.cache
def subject(name: str) -> tuple[Any, dict[str, Any]]:
    """A model, and how its PrefixCache is made."""
    if name in CAST:
        kind, dtype = CAST[name]
        model: Any = tiny_model(kind)
        model.set_dtype(dtype)
        return model, {}
    llama: Any = tiny_model("llama")
    options = dict(VARIANTS[name])
    if "caches" in options:
        make = options["caches"]
        options["caches"] = lambda: [make() for _ in llama.layers]
    return llama, options


def traffic(name: str, seed: int) -> PrefixCache:
    """Send random requests through a cache under pressure; returns it."""
    draw = random.Random(f"{name} {seed}")
    model, options = subject(name)
    probe = PrefixCache(model, **options)
    with probe.begin(tokens(draw, 40)) as session:
        session.prefill(model)
    held_bytes = probe.stats.live_bytes + probe.stats.paged_bytes
    cache = PrefixCache(
        model,
        budget_bytes=held_bytes * draw.choice([4, 12, 1000]),
        checkpoint_interval=draw.choice([16, 2048]),
        live_slots=draw.choice([1, 1, 2]),
        verify=1.0,
        **options,
    )
    stored: list[list[int]] = []
    for _ in range(REQUESTS):
        prompt, reply = following(draw, stored), tokens(draw, draw.randint(0, 4))
        if name in CAST and draw.random() < 0.4:
            with cache.begin_many([prompt, following(draw, stored)], capacity=500) as group:
                for _ in group.prefill_many(model, group.rows):
                    pass
                for token in reply:
                    group.step(model, group.rows, [token, token])
        else:
            marks = sorted(draw.sample(range(len(prompt)), 2))
            with cache.begin(prompt, marks=marks, reserve=draw.choice([0, 32])) as session:
                if not stored or draw.random() < 0.8:
                    session.prefill(model, step_size=draw.choice([16, 40, 64]))
                session.step(model, prompt[session.position :])
                for token in reply:
                    session.step(model, [token])
        stored.append([*prompt, *reply])
        if draw.random() < 0.03:
            cache.reclaim(draw.choice([0, held_bytes]))
        elif draw.random() < 0.1:
            caches, remaining = cache.fetch(prompt)
            model(mx.array(remaining)[None], cache=caches)
            cache.insert(prompt, caches)
    cache.check()
    return cache


def following(draw: random.Random, stored: list[list[int]]) -> list[int]:
    """A new prompt, or one that goes on from a recent one, from its end or from inside."""
    if not stored or draw.random() < 0.15:
        return tokens(draw, draw.randint(10, 40))
    base = draw.choice(stored[-6:])
    at = len(base) if draw.random() < 0.6 else draw.randint(0, len(base))
    return [*base[: min(at, 44)], *tokens(draw, draw.randint(2, 20))]


def tokens(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCABULARY_LENGTH) for _ in range(length)]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_random_requests_raise_no_alarm(name: str) -> None:
    cache = traffic(name, seed=1)
    stats = cache.stats
    assert (stats.verify_mismatches, cache.mismatches, stats.quarantined) == (0, (), 0), cache.mismatches
    if "bits" not in name and name not in CAST:
        assert stats.verify_largest_error < ROUNDING
    # Windows with `keep` are compared as long as they have not wrapped.
    assert stats.verified_requests >= (0 if "keeps" in name else 5)
