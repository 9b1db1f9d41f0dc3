"""The simulator and a live cache evict the same, in the same order: the policy that is simulated is the one deployed.

The same conversations run through a tiny real model and through sizes alone, in tokens, under the same budget. A
recorder between cache and policy notes what is given up.
"""

# ruff: noqa: F811

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from policies import POLICIES, CostModel, Entry, make_policy
from radixcache import PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.paging.tier import Disk
from radixcache.sized_cache import serve_spans, sized_cache
from radixcache.stores.block import Identity
from radixcache.stores.block_store import WriteOn
from radixcache.stores.sized_store import SizedStore
from runner.models.tiny import VOCABULARY_LENGTH, WINDOW_LENGTH, tiny_model
from tests import inside
from tests.restarts import Open, opened, reading  # noqa: F401

QUICK = {("llama", "s3fifo"), ("nemotron_h", "lru"), ("mamba2", "lru")}
#: Spans and checkpoints with every policy; spans alone, and checkpoints alone, with one policy of each kind of key.
CASES = [("nemotron_h", policy) for policy in sorted(POLICIES)]
CASES += [("llama", "s3fifo"), ("llama", "turn"), ("mamba2", "gdsf"), ("mamba2", "lru")]
DISKS = [("llama", "eviction"), ("nemotron_h", "close"), ("mamba2", "second_use")]
#: Step in which mlx-lm's KVCache grows.
GROW_TOKENS = 256


class Recorder:
    """Passes everything on to a policy, and notes each entry that it is told has gone."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.ranks_whole_edges = getattr(policy, "ranks_whole_edges", True)
        self.gone: list[tuple[str, int, int, bytes]] = []
        for hook in ("inserted", "touched", "split", "merged", "evictable_changed", "victim"):
            setattr(self, hook, getattr(policy, hook))

    def evicted(self, entry: Entry) -> None:
        self.gone.append((entry.state, entry.start, entry.end, entry.digest))
        self.policy.evicted(entry)


def conversations(count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and replies of users who share two system prompts, grow turn by turn, and now and then branch."""
    random = np.random.default_rng(11)

    def tokens(length: int) -> list[int]:
        drawn: list[int] = random.integers(0, VOCABULARY_LENGTH, length).tolist()
        return drawn

    systems = [tokens(120), tokens(60)]
    users = [[*systems[user % 2], *tokens(30)] for user in range(6)]
    requests = []
    for _ in range(count):
        user = int(random.integers(len(users)))
        history = users[user]
        if random.random() < 0.2:
            history = history[: int(random.integers(40, len(history)))]
        if len(history) > 500:
            history = [*systems[user % 2], *tokens(20)]
        prompt, reply = [*history, *tokens(int(random.integers(5, 40)))], tokens(int(random.integers(1, 4)))
        users[user] = [*prompt, *reply]
        requests.append((prompt, reply))
    return requests


def run(cache: PrefixCache, model: Any, requests: list[tuple[list[int], list[int]]], marks: list[int]) -> list[int]:
    cached = []
    for turn, (prompt, reply) in enumerate(requests):
        with cache.begin(
            prompt, reserve=16, marks=[mark for mark in marks if mark <= len(prompt)], turn=turn % 4, priority=turn % 3
        ) as session:
            session.prefill(model, step_size=128)
            for token in (prompt[-1], *reply):
                logits = session.step(model, [token])
                if isinstance(logits, mx.array):
                    mx.eval(logits)
            cached.append(session.cached_tokens)
    cache.check()
    return cached


@pytest.mark.parametrize(
    ("kind", "policy"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES]
)
def test_the_simulator_evicts_what_the_live_cache_evicts(kind: str, policy: str) -> None:
    model: Any = tiny_model(kind)
    requests = conversations(32)
    token_bytes, checkpoint_bytes = measured(model)
    budget_bytes = 600 * token_bytes + 6 * checkpoint_bytes
    live_record, sized_record = (Recorder(make_policy(policy)) for _ in range(2))
    with inside.settings(trim_tokens=32):
        live = PrefixCache(
            model, budget_bytes=budget_bytes, policy=live_record, cost=CostModel(), checkpoint_interval=64
        )
    layout = SizedLayout(token_bytes, checkpoint_bytes, grow_keys=GROW_TOKENS)
    sized = sized_cache(
        layout, budget_bytes=budget_bytes, policy=sized_record, cost=CostModel(), checkpoint_interval=64, trim_tokens=32
    )
    cached = run(live, model, requests, marks=[60])
    assert cached == run(sized, SizedModel(), requests, marks=[60])
    assert len(live_record.gone) > 15
    assert live_record.gone == sized_record.gone
    assert live.dump() == sized.dump()


@pytest.mark.parametrize("policy", ["lru", "gdsf", "s3fifo", "turn"])
def test_a_prompt_that_is_served_without_a_session_leaves_the_same_behind(policy: str) -> None:
    with_sessions, without = (
        sized_cache(SizedLayout(2, stored_token_bytes=1), budget_bytes=900, policy=policy, trim_tokens=1, merges=False)
        for _ in range(2)
    )
    for prompt, reply in conversations(80):
        ids = np.array([*prompt, *reply], np.int32)
        with with_sessions.begin(ids, reserve=0) as session:
            with_sessions.make_room((len(ids) - session.matched_tokens) * 2)
            session.caches[0].advance(len(ids) - session.cached_tokens)
        assert serve_spans(without, ids, ids.astype(np.int64), None, "") == session.matched_tokens
        without.check()
        assert with_sessions.dump() == without.dump()
    assert with_sessions.stats == without.stats
    assert without.stats.evictions > 50


@pytest.mark.parametrize(("kind", "write_on"), DISKS)
def test_the_simulator_finds_on_its_disk_what_the_live_cache_does(opened: Open, kind: str, write_on: WriteOn) -> None:
    model: Any = tiny_model(kind)
    requests = conversations(16)
    token_bytes, checkpoint_bytes = measured(model)
    settings: dict[str, Any] = {"budget_bytes": 1 << 30, "cost": CostModel(), "checkpoint_interval": 64}
    with inside.settings(trim_tokens=32):
        live = PrefixCache(model, store=(store := opened(write_on=write_on)), **settings)
    simulated = SizedStore(budget_bytes=1 << 30, write_on=write_on, on_read=lambda _: None)
    layout = SizedLayout(token_bytes, checkpoint_bytes, grow_keys=GROW_TOKENS)
    sized = sized_cache(layout, trim_tokens=32, disk=Disk(simulated, Identity(b"simulated")), **settings)
    for number, request in enumerate(requests):
        assert run(live, model, [request], marks=[60]) == run(sized, SizedModel(), [request], marks=[60])
        if number % 4 == 3:
            assert live.reclaim(0) == sized.reclaim(0) > 0
        live.flush()  # without files it is there at once
    assert live.dump() == sized.dump()
    of_live, of_sized = (
        (each.brought_tokens, each.kept_blocks, each.store_decisions) for each in (live.stats, sized.stats)
    )
    assert of_live == of_sized
    assert of_live[0] > 0
    counted = [
        (each.blocks, each.checkpoints, each.read_files, each.written_files) for each in (store.stats, simulated.stats)
    ]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_simulator_resumes_a_window_where_the_live_cache_does(more: int) -> None:
    model: Any = tiny_model("llama_sliding")
    prompt = [1 + number % 200 for number in range(WINDOW_LENGTH + more - 1)]
    requests = [(prompt, [7]), ([*prompt[:10], 201, 202], [7])]
    layout = SizedLayout(8, windows=[(WINDOW_LENGTH, 4)])
    sized = sized_cache(layout, budget_bytes=1 << 30, cost=CostModel())
    cached = run(PrefixCache(model, cost=CostModel()), model, requests, marks=[])
    assert cached == [0, 10]
    assert cached == run(sized, SizedModel(), requests, marks=[])


def measured(model: Any) -> tuple[int, int]:
    """Bytes of a token and of a checkpoint, from a cache that has seen one prompt."""
    cache = PrefixCache(model)
    with cache.begin([1, 2, 3, 4]) as session:
        session.prefill(model)
    return inside.layout(cache).token_bytes, cache.stats.checkpoint_bytes
