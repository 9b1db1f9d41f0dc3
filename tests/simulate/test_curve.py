"""The LRU curve equals a slow simulation at every capacity, and the reference figures."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.simulate.curve import curve_rows, lru_curve, needed_blocks, references_of
from runner.simulate.simulator import simulate
from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace import Trace
from runner.traces.trace_reader import read_trace
from tests.simulate.made import made, words

BLOCK_TOKENS = 4
REFERENCE_LRU = {1_000: 0.0445, 3_000: 0.0653, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637}


def trace_of(paths: Sequence[Sequence[int]], tail_tokens: int = BLOCK_TOKENS) -> Trace:
    return made(paths, BLOCK_TOKENS, lacks=BLOCK_TOKENS - tail_tokens)


@given(words, st.integers(1, BLOCK_TOKENS))
@settings(max_examples=25, deadline=None)
def test_curve_equals_the_simulator_at_every_capacity(paths: list[list[int]], tail_tokens: int) -> None:
    trace = trace_of(paths, tail_tokens)
    curve = lru_curve(trace)
    for capacity in range(1, curve.unique_blocks + 2, 2):
        row = simulate(trace, "lru", capacity)
        assert round(curve.block_hit_ratio_at(capacity) * curve.block_refs) == row.block_hits
        assert curve.token_hit_ratio_at(capacity) == pytest.approx(row.token_hit_ratio, abs=1e-12)


def test_distance_is_settled_before_the_request_touches_anything() -> None:
    # The path of three comes back after one other block: 3 + 1 blocks are enough for all of it, and 1 + 1 for its root.
    trace = trace_of([[0, 0, 0], [1], [0, 0, 0]])
    assert needed_blocks(references_of(trace)).tolist()[-3:] == [2, 3, 4]


def test_reference_figures_come_out_to_four_digits(shared_data) -> None:
    curve = lru_curve(read_trace(shared_data / "mooncake" / "conversation_trace.jsonl"))
    assert (curve.block_refs, curve.unique_blocks) == (288_500, 182_790)
    assert {c: round(curve.block_hit_ratio_at(c), 4) for c in REFERENCE_LRU} == REFERENCE_LRU
    assert round(curve.infinite_block_hit_ratio, 4) == 0.3664
    assert round(curve.infinite_token_hit_ratio, 4) == 0.3736


def test_knee_is_where_the_curve_stops_rising() -> None:
    # Ten blocks in a circle: below ten nothing hits, from ten on everything does.
    curve = lru_curve(trace_of([[index % 10, index % 10] for index in range(5)] * 20))
    assert curve.capacity_for(0.99) == curve.knee_blocks() == 10


def test_a_curve_has_at_most_some_hundred_points_with_the_named_budgets_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = synthesize(Synth(requests=200), seed=1)
    curve = lru_curve(trace)
    monkeypatch.setattr("runner.simulate.curve.MOST_POINTS", 20)
    rows = curve_rows(curve)
    capacities = [row["capacity_blocks"] for row in rows]
    assert len(curve.capacity_blocks) > 100 > 25 >= len(rows)
    assert {1, curve.knee_blocks(), curve.capacity_for(0.9), curve.capacity_for(0.99)} <= set(capacities)
    assert (capacities, capacities[-1]) == (sorted(capacities), curve.unique_blocks)
    assert rows[-1]["block_hit_ratio"] == curve.infinite_block_hit_ratio
    assert [row["token_hit_ratio"] for row in rows] == [curve.token_hit_ratio_at(each) for each in capacities]


def test_an_empty_trace_has_no_curve() -> None:
    with pytest.raises(ValueError, match="no requests; wanted at least one"):
        lru_curve(trace_of([]))
