"""A store that is slower than prefill, where all prompts are there to be read; the clock is the test's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from radixcache import DiskStore, PrefixCache
from radixcache.paging import tier
from radixcache.paging.rates import TELLING_TOKENS, StoreRates
from radixcache.stores.block import Block, Kind
from tests.paging.test_rates import Clock
from tests.prompts import tokens
from tests.restarts import is_close, serve

LENGTH = 1300
#: Of a prompt in blocks of 512 tokens, the last of which is long enough to tell.
LEFT = LENGTH - 1024


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


def test_what_prefill_takes_is_learnt_by_the_end_of_one_prompt_and_then_nothing_is_read(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(tier, "StoreRates", lambda cost, _: StoreRates(cost, clock))
    model = llama
    prompts = [[*tokens(number, LENGTH, first=number), 1] for number in range(3)]
    with Slow(tmp_path, clock) as store, PrefixCache(model, store=store) as cache:
        answers = [serve(cache, model, prompt)[1] for prompt in prompts]
    with Slow(tmp_path, clock) as store, PrefixCache(model, store=store) as cache:
        cached = []
        for prompt, answer in zip(prompts, answers, strict=True):
            found, logits = serve(cache, Timed(model, clock), prompt)
            assert is_close(logits, answer)
            cached.append(found)
            cache.check()
    assert LEFT >= TELLING_TOKENS
    assert cached == [LENGTH, LENGTH - LEFT, 0]
