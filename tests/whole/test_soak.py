"""A long run: six thousand requests of random sizes through one small cache, and memory stays where it was.

Whatever grows with the number of requests served (tree nodes, policy entries, objects of Python, arrays of MLX, memory
of the process) would show: the cache is full after the first thousands and only changes its contents from then on.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from benchmarks.architectures.kinds import kind_of
from radixcache import PrefixCache
from runner.models.tiny import VOCABULARY_LENGTH, build

REQUESTS = 6_000
SAMPLES = 10
#: Of what is measured, the first samples are the cache filling up and the allocators settling.
WARM_UP_SAMPLES = 4


@dataclass(frozen=True)
class Sample:
    """What is held at one moment of the run."""

    cache_bytes: int
    active_bytes: int
    resident_bytes: int
    python_objects: int
    nodes: int


class Traffic:
    """Requests of users who share a few system prompts, grow, branch, break off and come back."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.systems = [self.tokens(length) for length in (40, 90, 160)]
        self.users = [self.fresh() for _ in range(12)]

    def tokens(self, length: int) -> list[int]:
        drawn: list[int] = self.numbers.integers(0, VOCABULARY_LENGTH, length).tolist()
        return drawn

    def fresh(self) -> list[int]:
        return [*self.random.choice(self.systems), *self.tokens(self.random.randint(1, 40))]

    def next_prompt(self) -> tuple[int, list[int]]:
        """A user's number and history, now and then started anew or cut back to a branch."""
        user = self.random.randrange(len(self.users))
        history = self.users[user]
        if len(history) > 300 or self.random.random() < 0.1:
            history = self.fresh()
        elif self.random.random() < 0.1:
            history = history[: self.random.randint(1, len(history))]
        self.users[user] = [*history, *self.tokens(self.random.randint(1, 25))]
        return user, self.users[user]


def request(cache: PrefixCache, model: Any, traffic: Traffic) -> None:
    user, prompt = traffic.next_prompt()
    reply = traffic.tokens(traffic.random.randint(0, 3))
    fate = traffic.random.random()
    if fate < 0.03:
        cache.fetch(prompt)
        return
    with cache.begin(prompt, reserve=traffic.random.choice([0, 8, 64]), marks=[min(40, len(prompt))]) as session:
        if fate < 0.06:
            return  # the client went away
        session.prefill(model, step_size=256)
        for token in (prompt[-1], *reply):
            logits = session.step(model, [token])
        mx.eval(logits)
    traffic.users[user] = [*prompt, *reply]
    if fate > 0.999:
        cache.reclaim(cache.stats.budget_bytes // 4)


def sample(cache: PrefixCache, process: psutil.Process) -> Sample:
    gc.collect()
    stats = cache.stats
    return Sample(
        stats.live_bytes + stats.paged_bytes,
        mx.get_active_memory(),
        process.memory_info().rss,
        len(gc.get_objects()),
        stats.nodes,
    )


#: As little of a model as there can be, a layer of each sort: what is looked at is the cache.
FEWEST_LAYERS = {
    "llama": {"num_hidden_layers": 1, "layer_types": None},
    "nemotron_h": {"num_hidden_layers": 2, "hybrid_override_pattern": ["M", "*"]},
}


def small_model(name: str) -> Any:
    kind = kind_of(name)
    return build(replace(kind, overrides={**kind.overrides, **FEWEST_LAYERS[name]}))


def soaked(kind: str, requests: int, slots: int, budget_bytes: int) -> list[Sample]:
    model = small_model(kind)
    gc.collect()
    weights_bytes = mx.get_active_memory()
    cache = PrefixCache(model, budget_bytes=budget_bytes, live_slots=slots, checkpoint_interval=64)
    traffic, process = Traffic(seed=5), psutil.Process()
    samples = []
    for served in range(1, requests + 1):
        request(cache, model, traffic)
        if served % (requests // SAMPLES) == 0:
            cache.check()
            samples.append(sample(cache, process))
            held = samples[-1].active_bytes - weights_bytes
            assert held == pytest.approx(samples[-1].cache_bytes, rel=0.01)
            assert samples[-1].cache_bytes <= budget_bytes
    assert cache.stats.evictions > requests // 20
    return samples


def spread(values: Sequence[int]) -> int:
    return max(values) - min(values)


@pytest.mark.usefixtures("exact_allocations")
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "requests", "slots", "budget_bytes"),
    [("llama", REQUESTS, 1, 1 << 20), ("llama", 2_000, 3, 2 << 20), ("nemotron_h", 1_400, 2, 3 << 19)],
    ids=["llama, 6,000 requests", "llama in three slots", "nemotron_h in two slots"],
)
def test_nothing_grows_after_the_cache_is_full(kind: str, requests: int, slots: int, budget_bytes: int) -> None:
    settled = soaked(kind, requests, slots, budget_bytes)[WARM_UP_SAMPLES:]
    # What MLX holds beside the cache's own bytes, which a reclaim may just have cut: the weights, and nothing new.
    assert spread([each.active_bytes - each.cache_bytes for each in settled]) <= budget_bytes // 100
    # What changes is which prefixes are held, and with them how many nodes: not how much after how many requests.
    assert max(each.nodes for each in settled[3:]) <= 2 * max(each.nodes for each in settled[:3])
    assert settled[-1].python_objects <= settled[0].python_objects * 1.05 + 2_000
    assert settled[-1].resident_bytes - settled[0].resident_bytes <= 8 << 20
