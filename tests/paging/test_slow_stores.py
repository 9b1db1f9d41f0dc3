"""A store that is slower than prefill, where all prompts are there to be read; the clock is the test's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from radixcache import DiskStore, PrefixCache
from radixcache.paging import tier
from radixcache.paging.rates import StoreRates
from radixcache.stores.block import Block, Kind
from tests.paging.served import Clock
from tests.prompts import tokens
from tests.restarts import is_close, serve

LENGTH = 1300


class Slow(DiskStore):
    """Takes 100 seconds a block."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path, budget_bytes=1 << 30, write_on="close", min_free_bytes=0)
        self._clock = clock

    def read(self, wanted: Sequence[tuple[bytes, Kind]]) -> Iterator[Block | None]:
        for block in super().read(wanted):
            self._clock.now_s += 100
            yield block


class Timed:
    """A model that takes a second for each pass."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self._model, self._clock = model, clock

    def __call__(self, ids: mx.array, **named: Any) -> Any:
        self._clock.now_s += 1
        return self._model(ids, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_what_prefill_takes_is_learnt_at_the_start_and_then_a_slow_store_is_read_once(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(tier, "StoreRates", lambda cost, _: StoreRates(cost, clock))
    model = llama
    prompts = [[*tokens(number, LENGTH, first=number), 1] for number in range(3)]
    with Slow(tmp_path, clock) as store, PrefixCache(model, store=store) as cache:
        answers = [serve(cache, model, prompt)[1] for prompt in prompts]
    with Slow(tmp_path, clock) as store, PrefixCache(model, store=store) as cache:
        before = cache.stats
        cache.learn(Timed(model, clock))
        cache.check()
        assert cache.stats == before
        cached = []
        for prompt, answer in zip(prompts, answers, strict=True):
            found, logits = serve(cache, Timed(model, clock), prompt)
            assert is_close(logits, answer)
            cached.append(found)
            cache.check()
    assert cached == [LENGTH, 0, 0]


def test_no_prompt_is_prefilled_to_learn_how_fast_that_is(llama: Any, tmp_path: Path) -> None:
    prompts = [[*tokens(number, LENGTH, first=number), 1] for number in range(3)]
    for _ in range(2):
        store = DiskStore(tmp_path, budget_bytes=1 << 30, write_on="close", min_free_bytes=0)
        with store, PrefixCache(llama, store=store) as cache:
            cached = [serve(cache, llama, prompt)[0] for prompt in prompts]
    assert cached == [LENGTH] * 3
