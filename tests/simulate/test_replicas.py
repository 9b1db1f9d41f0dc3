"""Replicas behind a router, simulated: one is the plain simulator, several serve each request once, none looks on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from runner.models import ModelBytes
from runner.routing import ROUTERS
from runner.simulate.replicas import ReplicaJob, Replicas
from runner.simulate.rows import DiskPlan, Speeds, infinite_ratio, infinite_token_ratio
from runner.simulate.simulator import SimulationJob, simulate
from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace import Trace
from tests.simulate import made as traces
from tests.simulate.made import mooncake_file, rows_in

Command = Callable[..., tuple[int, str, str]]
#: A block takes 4 s to prefill, and a generated token 1 s.
BLOCK_TOKENS, SPEEDS = 256, Speeds(64.0, 1.0)
#: A block is a MiB.
MODEL = ModelBytes("given", 4096, 0, (), "given")
#: A block is read in a quarter of the time of its prefill.
SHARED = DiskPlan(1 << 40, 1 << 20, 64.0, "close")

arrivals = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 20_000), st.integers(0, 9)),
    min_size=1,
    max_size=25,
)
routers = st.sampled_from(list(ROUTERS))


def made(requests: Sequence[tuple[Sequence[int], int, int]], block_tokens: int = BLOCK_TOKENS) -> Trace:
    """A trace from (word, ms since the last one, generated tokens)."""
    paths, gaps_ms, outputs = zip(*requests, strict=True)
    return traces.made(paths, block_tokens, gaps_ms=gaps_ms, outputs=outputs)


def job(router: str = "prefix", count: int = 3, blocks: int = 8, policy: str = "lru", **more: Any) -> ReplicaJob:
    return ReplicaJob(SimulationJob(0, policy, blocks, **more), router, count, SPEEDS)


@given(arrivals, routers, st.sampled_from(["lru", "ttl", "s3fifo", "turn"]), st.integers(5, 12))
@settings(max_examples=30, deadline=None)
def test_one_replica_finds_what_the_simulator_finds(requests: list[Any], router: str, policy: str, blocks: int) -> None:
    trace = made(requests)
    row = job(router, 1, blocks, policy).run(trace)
    plain = simulate(trace, policy, blocks)
    for figure in ("block_refs", "block_hits", "token_hit_ratio", "prefill_tokens", "evictions", "capacity_blocks"):
        assert getattr(row, figure) == getattr(plain, figure), figure


@given(arrivals, routers, st.integers(1, 4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_each_request_is_served_once_in_its_turn(requests: list[Any], router: str, count: int, is_shared: bool) -> None:
    trace = made(requests)
    run = Replicas(trace, job(router, count, model=MODEL, disk=SHARED if is_shared else None))
    run.run()
    assert sorted(run.served) == list(range(len(trace.requests)))
    assert len(run.went) == len(trace.requests)
    for replica in run.replicas:
        ends_s = 0.0
        for index in (index for index, name in enumerate(run.went) if name == replica.name):
            served, came_s = run.served[index], trace.requests[index].time_ms / 1e3
            began_s = served.first_s - served.prefill_s  # and reading before that
            assert began_s >= max(came_s, ends_s) - 1e-9
            assert is_shared or began_s == pytest.approx(max(came_s, ends_s))
            ends_s = served.end_s
        replica.simulation.cache.check()
        assert not replica.queue
        assert not replica.coming
    read_s = 0.0 if run.machine is None else run.machine.read_s
    work_s = sum(served.prefill_s + served.decode_s for served in run.served.values()) + read_s
    assert sum(replica.busy_s for replica in run.replicas) == pytest.approx(work_s)
    assert sum(replica.simulation.block_refs for replica in run.replicas) == trace.block_refs
    run.dispatcher.check()
    assert [len(backlog) for backlog in run.dispatcher._backlogs.values()] == [0] * count


@given(arrivals, routers, st.integers(1, 4), st.integers(5, 20), st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_router_beats_the_bound(requests: list[Any], router: str, count: int, blocks: int, is_shared: bool) -> None:
    trace = made(requests)
    row = job(router, count, blocks, model=MODEL, disk=SHARED if is_shared else None).run(trace)
    assert row.block_hit_ratio <= infinite_ratio(trace) + 1e-9
    assert row.token_hit_ratio <= row.infinite_token_hit_ratio + 1e-9
    assert (
        row.infinite_token_hit_ratio == infinite_token_ratio(trace) == simulate(trace, "lru", 1 << 40).token_hit_ratio
    )
    assert row.load_max >= 1.0 - 1e-9 >= row.busy - 2e-9
    assert 0.0 <= row.ttft_s_p50 <= row.ttft_s_p95 <= row.ttft_s_p99


@given(arrivals, routers, st.integers(1, 24))
@settings(max_examples=20, deadline=None)
def test_where_a_request_goes_does_not_depend_on_what_comes_later(requests: list[Any], router: str, first: int) -> None:
    whole, start = made(requests), made(requests[:first])
    both = [Replicas(trace, job(router)) for trace in (whole, start)]
    for run in both:
        run.run()
    assert both[0].went[:first] == both[1].went


def test_time_to_the_first_token_is_waiting_reading_and_prefill() -> None:
    trace = made([([1, 2], 0, 3), ([1, 2], 1_000, 5), ([9], 1_000, 1)])
    run = Replicas(trace, job(count=1))
    run.run()
    # 8 s of prefill and 3 of decoding; a hit that waits until 11 and decodes until 16; 4 s of prefill.
    assert [run.served[index].first_s for index in range(3)] == [8.0, 11.0, 20.0]
    row = job(count=1).run(trace)
    assert (row.ttft_s_p50, row.ttft_s_p99) == (10.0, pytest.approx(18.0, abs=0.2))
    assert (row.busy, row.load_p95, row.load_max) == (1.0, 1.0, 1.0)


def test_what_a_replica_has_lost_draws_no_request() -> None:
    # Each of two replicas has room for 4 blocks; 1234 is driven out by 5678 where it was, once both have something.
    words = [[1, 2, 3, 4], [5, 6, 7, 8], [6, 6, 6, 6], [7, 7, 7, 7]]
    trace = made([*((word, 100_000, 1) for word in words), ([1, 2, 3, 4], 100_000, 1)])
    run = Replicas(trace, job(count=2, blocks=4))
    run.run()
    assert run.matched_tokens == 0
    assert run.served[4].left_tokens == 4 * BLOCK_TOKENS


def test_the_prefix_router_keeps_conversations_where_they_are_and_random_does_not() -> None:
    trace = synthesize(Synth(requests=400), seed=0)
    fast = Speeds(20_000.0, 1_000.0)
    rows = {router: replace(job(router, 4, 4_000), speeds=fast).run(trace) for router in ROUTERS}
    one = replace(job("prefix", 1, 16_000), speeds=fast).run(trace)
    assert rows["prefix"].token_hit_ratio > 0.9 * one.token_hit_ratio
    assert rows["random"].token_hit_ratio < 0.85 * one.token_hit_ratio
    assert rows["prefix"].ttft_s_p95 < rows["random"].ttft_s_p95


def test_a_digest_stands_for_as_many_tokens_as_the_deployed_ones_however_short_blocks_are() -> None:
    run = Replicas(made([([1, 2, 1, 2, 1, 2, 1, 2, 1], 0, 1)], block_tokens=64), job())
    request = run.trace.requests[0]
    assert run.ask(request).digests == [int(request.keys[3]), int(request.keys[7])]
    assert run.dispatcher.block_tokens == 256
    # A last block that is not full has none.
    assert run.ask(replace(request, tokens=request.tokens - 100)).digests == [int(request.keys[3])]


def test_what_one_replica_computed_another_reads_from_the_shared_tier() -> None:
    words = [[1, 2, 3], [1, 2, 3], [1, 2, 4]]
    trace = made([(word, 100_000, 1) for word in words])
    alone = job("round-robin", model=MODEL).run(trace)
    row = job("round-robin", model=MODEL, disk=SHARED).run(trace)
    assert (alone.token_hit_ratio, alone.shared) == (0.0, None)
    assert row.shared is not None
    # Of the last one 4 is new. 4 s of prefill for each block that is not read, and about 1 s for one that is.
    assert (row.shared.hit_tokens, row.block_hits) == (5 * BLOCK_TOKENS, 5)
    assert row.shared.token_hit_ratio == row.token_hit_ratio == 5 / 9
    assert row.shared.written_bytes == pytest.approx(4 * (1 << 20), rel=0.01)
    assert row.shared.read_bytes == pytest.approx(5 * (1 << 20), rel=0.01)
    assert row.ttft_s_p50 == pytest.approx(2 + 4, rel=0.01)


# The command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    words = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 6], [4, 5, 8]]
    return mooncake_file(tmp_path / "trace.jsonl", words, gap_ms=9_000)


def test_the_command_shows_a_row_for_each_router_and_number_of_replicas(command: Command, trace_file: Path) -> None:
    json_file = trace_file.with_name("rows.json")
    simulated = ("simulate", trace_file, "--capacity-blocks", "20", "--json", json_file)
    more = ("--prefill-tokens-per-s", "512", "--decode-tokens-per-s", "5")
    code, out, _ = command(*simulated, "--replicas", "1,2", "--router", "prefix,round-robin", *more)
    assert code == 0
    assert "512 tokens/s of prefill and 5 tokens/s of decoding" in " ".join(out.split())
    rows = rows_in(json_file)
    assert [(row["replicas"], row["router"]) for row in rows] == [
        (1, "prefix"), (1, "round-robin"), (2, "prefix"), (2, "round-robin")
    ]  # fmt: skip
    # Two conversations alternate, as round-robin does, but for the last request.
    assert [row["token_hit_ratio"] for row in rows] == [7 / 15, 7 / 15, 7 / 15, 5 / 15]
    assert [row["share_of_infinite"] for row in rows] == [1.0, 1.0, 1.0, pytest.approx(5 / 7)]
    more = ("--replicas", "2", "--router", "round-robin", "--bytes-per-token", "2048", "--shared-gib", "1")
    code, out, _ = command(*simulated, *more)
    assert code == 0
    shown = "All replicas share a store of 1.00 GiB. Each reads and writes it at 10.0 Gbit/s"
    assert shown in " ".join(out.split())
    (row,) = rows_in(json_file)
    assert (row["token_hit_ratio"], row["shared"]["hit_tokens"]) == (7 / 15, 2 * 512)
