"""What is read from disk and what is prefilled again, by what either has taken; the clock is the test's own."""

from __future__ import annotations

from policies import CostModel
from radixcache.paging.rates import StoreRates


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rates_of(cost: CostModel, chunks: dict[tuple[int, int], float]) -> StoreRates:
    """Rates that saw these chunks of prefill take so many seconds."""
    clock = Clock()
    rates = StoreRates(cost, clock)
    for (start, end), seconds in chunks.items():
        with rates.timing_prefill(start, end):
            clock.now_s += seconds
    return rates


def test_before_either_was_measured_it_is_read() -> None:
    assert StoreRates(CostModel()).is_worth_reading({0: 1 << 40}, 0, 1)
    assert rates_of(CostModel(), {(0, 100): 1.0}).is_worth_reading({0: 1 << 40}, 0, 1)
    unprefilled = StoreRates(CostModel())
    unprefilled.count_read({0: 1}, {0: 1e9})
    assert unprefilled.is_worth_reading({0: 1 << 40}, 0, 1)


def test_reading_has_to_be_faster_than_prefill_by_a_fifth_as_measured() -> None:
    rates = rates_of(CostModel(), {(0, 100): 1.0})  # 10 ms a token
    rates.count_read({0: 1000}, {0: 1.0})  # 1 ms a byte
    assert rates.is_worth_reading({0: 1000}, 0, 126)
    assert not rates.is_worth_reading({0: 1000}, 0, 124)


def test_tokens_deep_in_a_prompt_count_for_what_they_cost() -> None:
    rates = rates_of(CostModel(per_token=1, per_pair=1), {(0, 100): 1.0})
    rates.count_read({0: 1000}, {0: 1.0})
    assert not rates.is_worth_reading({0: 1000}, 0, 50)
    assert rates.is_worth_reading({0: 1000}, 1000, 1050)


def test_what_was_measured_of_late_counts_for_more() -> None:
    rates = rates_of(CostModel(), {(0, 100): 1.0})
    rates.count_read({0: 1000}, {0: 10.0})
    for _ in range(40):
        rates.count_read({0: 1000}, {0: 0.1})
    assert rates.is_worth_reading({0: 1000}, 0, 50)


def test_a_disk_that_was_slow_is_tried_again_for_a_hundredth_of_what_prefill_took_instead() -> None:
    rates = rates_of(CostModel(), {(0, 100): 1.0})
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


def test_a_depth_counts_for_what_was_measured_nearest_to_it() -> None:
    rates = rates_of(CostModel(), {(0, 512): 1.0, (2048, 2560): 4.0})
    assert rates.prefill_seconds(0, 512) == 1.0
    assert rates.prefill_seconds(2048, 4096) == 16.0
    assert rates.prefill_seconds(1 << 16, (1 << 16) + 512) == 4.0
    assert rates.prefill_seconds(256, 640) == 0.75
    assert rates.prefill_seconds(512, 512) == 0


def test_a_pass_over_few_tokens_counts_where_no_longer_one_came_for_long() -> None:
    rates = rates_of(CostModel(), {(0, 10): 1.0})
    assert rates.prefill_seconds(0, 100) == 10.0
    rates = rates_of(CostModel(), {(0, 10): 1.0, (0, 100): 2.0, (100, 110): 1.0})
    assert rates.prefill_seconds(0, 100) == 2.0
    chunks = {(0, 100): 2.0} | {(start, start + 10): 1.0 for start in range(100, 5100, 10)}
    assert rates_of(CostModel(), chunks).prefill_seconds(4000, 4100) > 9.0


def test_reading_takes_as_long_as_it_takes_to_get_into_live_caches() -> None:
    clock = Clock()
    rates = StoreRates(CostModel(), clock)
    with rates.timing_prefill(0, 100):
        clock.now_s += 1.0
    rates.count_read({0: 1000}, {0: 0.7})
    assert rates.is_worth_reading({0: 1000}, 0, 100)
    with rates.timing_move():
        clock.now_s += 0.2
    assert not rates.is_worth_reading({0: 1000}, 0, 100)


def test_a_chunk_that_broke_off_is_not_measured() -> None:
    rates = StoreRates(CostModel())
    try:
        with rates.timing_prefill(0, 10):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert rates.prefill_seconds(0, 10) == 0


def test_each_store_is_weighed_by_what_it_took_itself() -> None:
    rates = rates_of(CostModel(), {(0, 100): 1.0})  # 10 ms a token
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
    rates = StoreRates(CostModel(), clock)
    with rates.timing_prefill(0, 100):
        clock.now_s += 1.0
    rates.count_read({0: 1000, 1: 3000}, {0: 0.5, 1: 0.5})
    with rates.timing_move():
        clock.now_s += 0.8
    assert rates.is_worth_reading({0: 1000}, 0, 90)  # 0.7 s
    assert not rates.is_worth_reading({0: 1000}, 0, 86)
    assert not rates.is_worth_reading({1: 3000}, 0, 130)  # 1.1 s
