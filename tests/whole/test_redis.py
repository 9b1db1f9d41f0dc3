"""Caches that share prefixes through Redis: what one has computed another one finds, and no failure changes an answer.

What holds of a store on disk and of this one is tested in `test_store.py`.
"""

# ruff: noqa: F811

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from policies import CostModel
from radixcache import DiskStore, PrefixCache, RedisStore
from radixcache.stores.block import Block
from tests import inside
from tests.prompts import tokens
from tests.restarts import cold, conversation, is_close, reading, serve  # noqa: F401
from tests.stores.redis_server import Clock, Server, own_server, redis, store_at  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
#: Of a process: it loads MLX, and makes a model, on a busy machine.
PATIENCE_S = 240


def apart(url: str, *prompts: list[int]) -> list[dict[str, Any]]:
    """What a process of its own makes of these prompts; see `redis_apart.py`."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.whole.redis_apart", url, *map(json.dumps, prompts)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_two_processes_share_prefixes_and_answer_as_a_cold_one(redis: Server, llama: Any) -> None:
    first, second, third, branch = conversation()
    with store_at(redis.url) as store, PrefixCache(llama, store=store) as cache:
        serve(cache, llama, first)
    found = apart(redis.url, second, branch)
    assert [each["cached"] for each in found] == [603, 400]
    for prompt, each in zip((second, branch), found, strict=True):
        assert is_close(np.array(each["logits"]), cold(llama, prompt)[0])
    with store_at(redis.url) as store, PrefixCache(llama, store=store) as cache:
        cached, logits = serve(cache, llama, third)
        assert cached == len(second) + 3
        assert is_close(logits, cold(llama, third))


@pytest.mark.parametrize("stored_bits", [None, 8])
def test_a_server_that_is_killed_and_comes_back_in_mid_replay_costs_prefill_alone(
    own_server: Server, llama: Any, stored_bits: int | None
) -> None:
    clock, found = Clock(), []
    with store_at(own_server.url, clock=clock) as store:
        for turn, prompt in enumerate([*conversation(), *conversation()]):
            if turn == 2:
                own_server.kill()
            if turn == 5:
                own_server.start()
                clock.now_s += 60.0
                with PrefixCache(llama, store=store, stored_bits=stored_bits) as cache:
                    cache.explain(prompt)  # asks, and so has the server tried
                assert store._calls.trial is not None
                store._calls.trial.result(60)
            # As another machine, that has nothing itself.
            with PrefixCache(llama, store=store, stored_bits=stored_bits) as cache:
                cached, logits = serve(cache, llama, prompt)
                assert cache.flush(60)
            assert is_close(logits, cold(llama, prompt), stored_bits=stored_bits), turn
            found.append(cached)
        first, second, *_ = map(len, conversation())
        assert found == [0, first + 3, 0, 0, 0, 0, second + 3, 400]
        assert store.stats.failed_calls["not reached"] == 1
        store.check()


def test_a_prompt_begins_on_the_disk_and_goes_on_in_redis_and_comes_to_be_on_the_disk(
    redis: Server, tmp_path: Path, llama: Any
) -> None:
    first, second, third, _ = conversation()

    def tiers(disk: str) -> list[DiskStore | RedisStore]:
        return [
            DiskStore(tmp_path / disk, budget_bytes=1 << 30, min_free_bytes=0, write_on="close"),
            store_at(redis.url),
        ]

    with PrefixCache(llama, store=tiers("here")) as cache:
        serve(cache, llama, first)
    with PrefixCache(llama, store=tiers("elsewhere")) as cache:
        cached, logits = serve(cache, llama, second)
        assert cached == 603
        assert is_close(logits, cold(llama, second))
        assert cache.stats.brought_bytes.keys() == {"redis"}
    with PrefixCache(llama, store=tiers("here")) as cache:
        explained = cache.explain(third)
        assert explained.tiers == (("disk", 603), ("redis", len(second) + 3))
        assert "stored on disk up to 603, in Redis up to 756: begin() reads the missing tokens" in str(explained)
        cached, logits = serve(cache, llama, third)
        assert cached == len(second) + 3
        assert is_close(logits, cold(llama, third))
        assert cache.stats.brought_bytes.keys() == {"disk", "redis"}
    redis.client.flushall()
    for disk in ("here", "elsewhere"):
        with PrefixCache(llama, store=tiers(disk)[:1]) as cache:
            assert serve(cache, llama, third)[0] == {"here": len(third) - 1, "elsewhere": len(second) + 3}[disk]
    with PrefixCache(llama, store=tiers("here")) as cache:
        serve(cache, llama, third)  # what Redis has lost it gets from the disk
    with PrefixCache(llama, store=tiers("nowhere")[1:]) as cache:
        assert serve(cache, llama, third)[0] == len(third) - 1


class Timed:
    """A store from which a byte takes so many seconds, by a clock of the test's own."""

    def __init__(self, store: DiskStore | RedisStore, clock: Clock, byte_s: float) -> None:
        self._store, self._clock, self._byte_s = store, clock, byte_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, wanted: Any) -> Iterator[Block | None]:
        for block in self._store.read(wanted):
            assert block is not None
            self._clock.now_s += block.nbytes * self._byte_s
            yield block


@pytest.mark.parametrize("slowness", [1.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_of_what_is_slower_to_fetch_than_to_prefill_only_what_a_disk_has_is_read(
    redis: Server, tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    monkeypatch.undo()  # what is read depends on how fast everything is, here by a clock of the test's own
    clock, token_s = Clock(), 1e-3
    prompts = [tokens(seed, 1024, first=seed + 1) for seed in range(4)]
    disk = DiskStore(tmp_path, budget_bytes=1 << 30, min_free_bytes=0, write_on="close")
    shared = store_at(redis.url, write_on="close")
    for store, end in ((shared, 1024), (disk, 512)):
        with PrefixCache(llama, store=store) as cache:
            for prompt in prompts:
                cache.insert(prompt[:end], _prefilled(llama, prompt[:end]))
            byte_s = token_s / inside.layout(cache).token_bytes

    def prefill(ids: Any, **more: Any) -> Any:
        clock.now_s += ids.size * token_s
        return llama(ids, **more)

    disk.write_on = shared.write_on = "second_use"  # nothing more is written
    stores: Any = [Timed(disk, clock, 0.1 * byte_s), Timed(shared, clock, slowness * byte_s)]
    found = []
    with PrefixCache(llama, store=stores, cost=CostModel()) as cache:
        inside.core(cache).tier.rates.clock = clock
        cache.learn(prefill)
        for prompt in prompts:
            with cache.begin([*prompt, 7, 8]) as session:
                session.prefill(prefill)
                found.append(session.cached_tokens)
            cache.clear()
        assert cache.stats.store_decisions == {"brought": len(prompts)}
    # Before the stores were measured all is read; then what is read faster than it is prefilled.
    assert found == [1024] + [1024 if slowness < 0.8 else 512] * (len(prompts) - 1)


def _prefilled(model: Any, prompt: list[int]) -> list[Any]:
    caches = model.make_cache()
    mx.eval(model(mx.array([prompt]), cache=caches))
    return list(caches)
