"""The LRU curve equals a slow simulation at every capacity, the reference figures, and its own error estimate."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.simulate.curve import lru_curve, needed_blocks, references_of
from runner.simulate.simulator import simulate
from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace import Trace, TraceRequest
from runner.traces.trace_reader import read_trace
from tests.simulate.made import made

BLOCK_TOKENS = 4
REFERENCE_LRU = {1_000: 0.0445, 3_000: 0.0653, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637}

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=30)


def trace_of(paths: Sequence[Sequence[int]], tail_tokens: int = BLOCK_TOKENS) -> Trace:
    return made(paths, BLOCK_TOKENS, lacks=BLOCK_TOKENS - tail_tokens)


@given(PATHS, st.integers(1, BLOCK_TOKENS))
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


def test_sampled_curve_is_within_four_standard_errors_of_the_exact_one() -> None:
    trace = synthesize(Synth(requests=3000), seed=1)
    exact = lru_curve(trace)
    for seed in range(2):
        sampled = lru_curve(trace, sample_rate=0.2, seed=seed)
        for capacity in (500, 1000, 2000, 5000, 20_000):
            error = sampled.block_error_at(capacity)
            assert error is not None
            assert 0 < error < 0.1
            assert abs(sampled.block_hit_ratio_at(capacity) - exact.block_hit_ratio_at(capacity)) < 4 * error + 0.005


def test_a_block_that_all_prompts_share_does_not_spoil_the_sample_that_lacks_it() -> None:
    # Half of all references are to one block, which a sample either has or has not.
    trace = trace_of([[0, 1 + index % 300] for index in range(3000)])
    exact = lru_curve(trace)
    for seed in range(10):
        sampled = lru_curve(trace, sample_rate=0.3, seed=seed)
        assert sampled.block_hit_ratio_at(1000) == pytest.approx(exact.block_hit_ratio_at(1000), abs=0.05)
        assert sampled.token_hit_ratio_at(1000) == pytest.approx(exact.token_hit_ratio_at(1000), abs=0.05)


def test_sample_does_not_depend_on_what_the_blocks_are_called() -> None:
    trace = synthesize(Synth(requests=300), seed=3)
    renamed = [
        TraceRequest(each.keys * 7 + 5, each.tokens, each.output_tokens, each.time_ms) for each in trace.requests
    ]
    other = Trace("u", trace.block_tokens, renamed, True, "u")
    first, second = (lru_curve(each, sample_rate=0.1, seed=4) for each in (trace, other))
    assert np.array_equal(first.block_hit_ratio, second.block_hit_ratio)
    assert np.array_equal(first.capacity_blocks, second.capacity_blocks)


def test_sample_too_small_for_an_error_says_so() -> None:
    sampled = lru_curve(trace_of([[0, 1, 2], [0, 1, 2], [0, 1]]), sample_rate=0.9)
    assert math.isnan(sampled.block_error_at(10) or 0.0)


def test_knee_is_where_the_curve_stops_rising() -> None:
    # Ten blocks in a circle: below ten nothing hits, from ten on everything does.
    curve = lru_curve(trace_of([[index % 10, index % 10] for index in range(5)] * 20))
    assert curve.capacity_for(0.99) == curve.knee_blocks() == 10


@pytest.mark.parametrize(
    ("trace", "rate", "message"),
    [
        *((trace_of([[0]]), rate, "wanted more than 0 and at most 1") for rate in (0.0, 1.5, math.nan)),
        (trace_of([[0, 1, 2]] * 100), 1e-9, "a sample of 1e-09 has none of the 3 blocks; wanted a larger sample"),
        (trace_of([]), 1.0, "no request"),
    ],
)
def test_a_curve_that_cannot_be_made_is_refused(trace: Trace, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lru_curve(trace, sample_rate=rate)
