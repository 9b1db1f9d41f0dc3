"""What is read from disk and what is prefilled again, by what either has taken; the clock is the test's own."""

from __future__ import annotations

from policies import CostModel
from radixcache.paging.rates import Rates


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rates_of(cost: CostModel, chunks: dict[tuple[int, int], float]) -> Rates:
    """Rates that saw these chunks of prefill take so many seconds."""
    clock = Clock()
    rates = Rates(cost, clock)
    for (start, end), seconds in chunks.items():
        with rates.timing_prefill(start, end):
            clock.now_s += seconds
    return rates


def test_before_either_was_measured_it_is_read() -> None:
    assert Rates(CostModel()).is_worth_reading(1 << 40, 0, 1)
    assert rates_of(CostModel(), {(0, 100): 1.0}).is_worth_reading(1 << 40, 0, 1)
    unprefilled = Rates(CostModel())
    unprefilled.read.add(1, 1e9)
    assert unprefilled.is_worth_reading(1 << 40, 0, 1)


def test_the_faster_one_is_taken_as_measured() -> None:
    rates = rates_of(CostModel(), {(0, 100): 1.0})  # 10 ms a token
    rates.read.add(1000, 1.0)  # 1 ms a byte
    assert rates.is_worth_reading(1000, 0, 101)
    assert not rates.is_worth_reading(1000, 0, 99)


def test_tokens_deep_in_a_prompt_count_for_what_they_cost() -> None:
    rates = rates_of(CostModel(per_token=1, per_pair=1), {(0, 100): 1.0})
    rates.read.add(1000, 1.0)
    assert not rates.is_worth_reading(1000, 0, 50)
    assert rates.is_worth_reading(1000, 1000, 1050)


def test_what_was_measured_of_late_counts_for_more() -> None:
    rates = rates_of(CostModel(), {(0, 100): 1.0})
    rates.read.add(1000, 10.0)
    for _ in range(40):
        rates.read.add(1000, 0.1)
    assert rates.is_worth_reading(1000, 0, 50)


def test_a_disk_that_was_slow_once_is_tried_again_some_day() -> None:
    rates = rates_of(CostModel(), {(0, 100): 1.0})
    rates.read.add(1000, 2.0)
    decisions = []
    for _ in range(60):
        decisions.append(rates.is_worth_reading(1000, 0, 100))
        rates.doubt_reading()
    assert decisions == sorted(decisions)
    assert decisions[0] is False
    assert decisions[-1] is True


def test_a_chunk_that_broke_off_is_not_measured() -> None:
    rates = Rates(CostModel())
    try:
        with rates.timing_prefill(0, 10):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert rates.prefill.amount == 0
