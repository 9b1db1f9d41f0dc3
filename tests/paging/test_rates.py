"""What is read from disk and what is prefilled again, by what either has taken; the clock is the test's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from policies import CostModel
from radixcache import DiskStore, PrefixCache
from radixcache.paging import tier
from radixcache.paging.rates import StoreRates
from radixcache.stores.block import Block, Kind
from tests.prompts import tokens
from tests.restarts import is_close, serve


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rates_of(cost: CostModel, chunks: dict[tuple[int, int], float], clock: Clock | None = None) -> StoreRates:
    """Rates that saw these chunks of prefill take so many seconds."""
    clock = clock or Clock()
    rates = StoreRates(cost, clock)
    for (start, end), seconds in chunks.items():
        with rates.timing_prefill(start, end):
            clock.now_s += seconds
    return rates


PLAIN, DEEP = CostModel(), CostModel(per_token=1, per_pair=1)
CHUNK = {(0, 100): 1.0}  # 10 ms a token


@pytest.mark.parametrize(
    ("cost", "chunks", "reads_s", "asked", "is_worth_it"),
    [
        # Before either was measured it is read.
        (PLAIN, {}, [], (1 << 40, 0, 1), True),
        (PLAIN, CHUNK, [], (1 << 40, 0, 1), True),
        (PLAIN, {}, [1e9], (1 << 40, 0, 1), True),
        # Reading has to be faster than prefill by a fifth.
        (PLAIN, CHUNK, [1.0], (1000, 0, 126), True),
        (PLAIN, CHUNK, [1.0], (1000, 0, 124), False),
        # Tokens deep in a prompt count for what they cost.
        (DEEP, CHUNK, [1.0], (1000, 0, 50), False),
        (DEEP, CHUNK, [1.0], (1000, 1000, 1050), True),
        # What was measured of late counts for more.
        (PLAIN, CHUNK, [10.0, *[0.1] * 40], (1000, 0, 50), True),
    ],
)
def test_what_is_read_is_what_reading_is_faster_for_as_measured(
    cost: CostModel, chunks: Any, reads_s: list[float], asked: tuple[int, int, int], is_worth_it: bool
) -> None:
    """Each read was of 1,000 bytes."""
    rates = rates_of(cost, chunks)
    for seconds in reads_s:
        rates.count_read({0: 1000}, {0: seconds})
    nbytes, start, end = asked
    assert rates.is_worth_reading({0: nbytes}, start, end) is is_worth_it


def test_a_disk_that_was_slow_is_tried_again_for_a_hundredth_of_what_prefill_took_instead() -> None:
    rates = rates_of(CostModel(), CHUNK)
    rates.count_read({0: 1000}, {0: 2.0})
    decisions = []
    for _ in range(130):
        decisions.append(rates.is_worth_reading({0: 1000}, 0, 100))
        rates.count_refused([0], 0, 100)
    assert decisions == sorted(decisions)
    assert sum(decisions) in (9, 10, 11)
    rates.count_read({0: 1000}, {0: 2.0})
    assert not rates.is_worth_reading({0: 1000}, 0, 100)
    rates.count_refused([0], 0, 100)
    rates.count_read({0: 10}, {0: 0.001})  # what came before is forgotten
    assert rates.is_worth_reading({0: 1000}, 0, 100)


@pytest.mark.parametrize(
    ("chunks", "asked", "seconds"),
    [
        # A depth counts for what was measured nearest to it.
        ({(0, 512): 1.0, (2048, 2560): 4.0}, (0, 512), 1.0),
        ({(0, 512): 1.0, (2048, 2560): 4.0}, (2048, 4096), 16.0),
        ({(0, 512): 1.0, (2048, 2560): 4.0}, (1 << 16, (1 << 16) + 512), 4.0),
        ({(0, 512): 1.0, (2048, 2560): 4.0}, (256, 640), 0.75),
        ({(0, 512): 1.0, (2048, 2560): 4.0}, (512, 512), 0),
        # A pass over few tokens counts where no longer one came for long.
        ({(0, 10): 1.0}, (0, 100), 10.0),
        ({(0, 10): 1.0, (0, 100): 2.0, (100, 110): 1.0}, (0, 100), 2.0),
        ({(0, 100): 2.0} | {(at, at + 10): 1.0 for at in range(100, 5100, 10)}, (4000, 4100), 10.0),
    ],
)
def test_prefill_takes_what_it_took_at_that_depth(chunks: Any, asked: tuple[int, int], seconds: float) -> None:
    assert rates_of(CostModel(), chunks).prefill_seconds(*asked) == pytest.approx(seconds)


def test_reading_takes_as_long_as_it_takes_to_get_into_live_caches() -> None:
    clock = Clock()
    rates = rates_of(CostModel(), CHUNK, clock)
    rates.count_read({0: 1000}, {0: 0.7})
    assert rates.is_worth_reading({0: 1000}, 0, 100)
    with rates.timing_move():
        clock.now_s += 0.2
    assert not rates.is_worth_reading({0: 1000}, 0, 100)


def test_a_chunk_that_broke_off_is_not_measured() -> None:
    rates = StoreRates(CostModel())
    with pytest.raises(KeyboardInterrupt), rates.timing_prefill(0, 10):
        raise KeyboardInterrupt
    assert rates.prefill_seconds(0, 10) == 0


def test_each_store_is_weighed_by_what_it_took_itself() -> None:
    rates = rates_of(CostModel(), CHUNK)
    rates.count_read({0: 1000, 1: 1000}, {0: 0.1, 1: 2.0})
    assert rates.is_worth_reading({0: 1000}, 0, 100)
    assert not rates.is_worth_reading({1: 1000}, 0, 100)
    assert not rates.is_worth_reading({0: 1000, 1: 500}, 0, 100)
    for _ in range(300):
        rates.count_refused([1], 0, 100)
    assert rates.is_worth_reading({1: 1000}, 0, 100)  # due
    rates.count_read({0: 1000}, {0: 0.1})
    assert rates.is_worth_reading({1: 1000}, 0, 100)  # still: it was the other one that was read
    rates.count_read({1: 1000}, {1: 2.0})
    assert not rates.is_worth_reading({1: 1000}, 0, 100)


def test_the_way_into_live_caches_is_shared_out_among_the_stores_by_their_bytes() -> None:
    clock = Clock()
    rates = rates_of(CostModel(), CHUNK, clock)
    rates.count_read({0: 1000, 1: 3000}, {0: 0.5, 1: 0.5})
    with rates.timing_move():
        clock.now_s += 0.8
    assert rates.is_worth_reading({0: 1000}, 0, 90)  # 0.7 s
    assert not rates.is_worth_reading({0: 1000}, 0, 86)
    assert not rates.is_worth_reading({1: 3000}, 0, 130)  # 1.1 s


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
