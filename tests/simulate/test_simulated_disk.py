"""A disk beside the memory of a simulation: what comes back from it, what goes there, and when it is not worth it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixcache.stores.sized_store import HEAD_BYTES
from runner.simulate import advice
from runner.simulate.advice import Advice, estimated_disk
from runner.simulate.curve import lru_curve
from runner.simulate.rows import DiskPlan, DiskUse, SimulationRow, infinite_ratio
from runner.simulate.simulator import BlockSizes, Simulation, simulate
from runner.traces.trace import Trace
from tests.simulate import made as traces
from tests.simulate.made import mooncake_file, rows_in, words

Command = Callable[..., tuple[int, str, str]]
#: Of a block of the trace, which is one of the store.
BLOCK_TOKENS, BLOCK_BYTES = 512, 1 << 20
SPANS = BlockSizes(BLOCK_BYTES, is_counting=False)
FILE_BYTES = BLOCK_BYTES + HEAD_BYTES
#: Reads a block in a quarter of the time that its prefill takes.
FAST = DiskPlan(1 << 40, 8 * FILE_BYTES, 1024.0)


def made(paths: Any, block_tokens: int = BLOCK_TOKENS, lacks: int = 0) -> Trace:
    return traces.made(paths, block_tokens, lacks=lacks)


def run(trace: Trace, blocks: int, disk: DiskPlan = FAST, policy: str = "lru") -> tuple[SimulationRow, DiskUse]:
    """With room for so many blocks in memory, and for the heads of their files, which are counted as they are read."""
    row = simulate(trace, policy, blocks * BLOCK_BYTES + BLOCK_BYTES // 2, SPANS, disk=disk)
    assert row.disk is not None
    return row, row.disk


TURNS = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 6], [4, 5, 8]]


def test_what_memory_lost_comes_back_from_the_disk() -> None:
    row, disk = run(made(TURNS), 3)
    # 123 goes there for 456, which goes there for 12|7, where 12 comes back; 456 does so for itself, once 7 went there.
    # The last one finds 45 in memory, for 6 goes there no second time.
    assert (row.block_hits, disk.hit_tokens) == (2 + 3 + 2, (2 + 3) * BLOCK_TOKENS)
    assert (disk.read_bytes, disk.written_bytes) == (5 * FILE_BYTES, 7 * FILE_BYTES)
    assert disk.decisions == {"not stored": 3, "brought": 2}
    assert disk.token_hit_ratio == 5 / 15
    assert row.token_hit_ratio == 7 / 15
    assert simulate(made(TURNS), "lru", 3 * BLOCK_BYTES, SPANS).block_hits == 2


def test_a_store_s_block_has_as_many_tokens_as_that_of_a_server_however_short_those_of_the_trace_are() -> None:
    row, disk = run(made(TURNS, block_tokens=64), 3, replace(FAST, prefill_tokens_per_s=128.0))
    # 123 and 456 are a block each: of 123 a part is used, and all is read.
    assert (row.block_hits, disk.hit_tokens) == (7, 5 * 64)
    assert disk.read_bytes == 2 * (3 * BLOCK_BYTES + HEAD_BYTES)
    # Of 127 the 7 is written besides: 12 is inside of 123.
    assert disk.written_bytes == 2 * (3 * BLOCK_BYTES + HEAD_BYTES) + BLOCK_BYTES + HEAD_BYTES


def test_a_partly_filled_last_block_counts_its_tokens() -> None:
    _, disk = run(made([[1, 2], [3, 4], [1, 2]], lacks=500), 2)
    assert disk.hit_tokens == 2 * BLOCK_TOKENS - 500


def test_a_disk_that_is_slower_than_prefill_is_read_once_and_then_no_more() -> None:
    trace = made([[number, 9] for number in (1, 2, 3) * 4])
    _, fast = run(trace, 2)
    _, slow = run(trace, 2, replace(FAST, read_bytes_per_s=FILE_BYTES))
    assert fast.decisions == {"not stored": 3, "brought": 9}
    assert slow.decisions == {"not stored": 3, "brought": 1, "slower than prefill": 8}
    assert (fast.hit_tokens, slow.hit_tokens) == (18 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    # It is their ratio that counts.
    both = replace(FAST, read_bytes_per_s=FILE_BYTES, prefill_tokens_per_s=128.0)
    assert run(trace, 2, both)[1].decisions == fast.decisions


def test_what_is_written_and_when_is_said() -> None:
    trace = made([[1, 2], [1, 2, 3], [4, 5], [1, 2]])
    written = {"close": 5, "second_use": 2, "eviction": 5}
    for write_on, blocks in written.items():
        row, disk = run(trace, 3, replace(FAST, write_on=write_on))
        assert disk.written_bytes == blocks * FILE_BYTES, write_on
        assert (row.block_hits, disk.hit_tokens) == (4, BLOCK_TOKENS), write_on  # memory has lost 2 alone


@given(paths=words, blocks=st.integers(6, 12))
@settings(max_examples=15, deadline=None)
def test_a_disk_that_holds_everything_makes_the_cache_infinite(paths: list[list[int]], blocks: int) -> None:
    trace = made(paths)
    row, disk = run(trace, blocks)
    assert row.block_hit_ratio == pytest.approx(infinite_ratio(trace))
    memory = row.block_hits * BLOCK_TOKENS - disk.hit_tokens
    assert memory >= 0
    assert disk.read_bytes == disk.hit_tokens // BLOCK_TOKENS * FILE_BYTES
    assert disk.written_bytes <= len(np.unique(np.concatenate([each.keys for each in trace.requests]))) * FILE_BYTES


@given(
    paths=words,
    memory=st.integers(2, 12),
    blocks=st.integers(1, 8),
    sizes=st.sampled_from(
        [
            SPANS,
            BlockSizes(0, BLOCK_BYTES, is_counting=False),
            BlockSizes(BLOCK_BYTES, BLOCK_BYTES // 2, is_counting=False),
            BlockSizes(BLOCK_BYTES, 0, ((2, BLOCK_BYTES // 4),), is_counting=False),
            BlockSizes(BLOCK_BYTES, 1000, ((1, 5000), (3, 7000)), is_counting=False),
        ]
    ),
    write_on=st.sampled_from(["eviction", "second_use", "close"]),
)
@settings(max_examples=25, deadline=None)
def test_the_disk_s_budget_holds(
    paths: list[list[int]], memory: int, blocks: int, sizes: BlockSizes, write_on: Any
) -> None:
    plan = DiskPlan(blocks * FILE_BYTES, 1e12, 1.0, write_on)
    simulation = Simulation(made(paths), "lru", memory * BLOCK_BYTES, sizes, plan)
    for request in simulation.trace.requests:
        simulation.serve(request)
        assert simulation.machine is not None
        simulation.machine.store.check()
        simulation.cache.check()
    use = simulation.disk_use()
    assert use is not None
    assert "failed" not in use.decisions
    assert 0 <= use.hit_tokens <= simulation.hit_tokens


# The commands


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return mooncake_file(tmp_path / "trace.jsonl", TURNS)


#: A block is a MiB, and memory has three.
SIZES = ("--bytes-per-token", "2048", "--capacity-blocks", "3")


def test_the_command_says_what_comes_from_a_disk(command: Command, trace_file: Path) -> None:
    json_file, plot_file = trace_file.with_name("rows.json"), trace_file.with_name("rows.svg")
    simulated = ("simulate", trace_file, *SIZES, "--disk-gib", "1", "--policy", "lru,belady", "--json", json_file)
    code, out, _ = command(*simulated, "--plot", plot_file)
    shown = " ".join(out.split())
    assert (code, "A disk of 1.00 GiB stands below memory." in shown) == (0, True)
    assert "With checkpoints or a disk, other policies can be better." in shown
    row, _ = rows_in(json_file)
    plan = {"budget_bytes": 1 << 30, "read_bytes_per_s": 2000 * (1 << 20), "prefill_tokens_per_s": 1000}
    assert row["disk"]["plan"] == {**plan, "write_on": "eviction"}
    # Of 456 the last one is not read: with the heads of their files the three are more than memory has room for.
    assert (row["token_hit_ratio"], row["disk"]["token_hit_ratio"]) == (6 / 15, 4 / 15)
    assert "with a disk of 1.00 GiB" in plot_file.read_text(encoding="utf-8")
    for slow in (("--disk-mib-per-s", "0.5"), ("--prefill-tokens-per-s", "1e12")):
        assert command(*simulated, "--disk-write-on", "close", *slow)[0] == 0
        row, _ = rows_in(json_file)
        assert row["disk"]["decisions"] == {"not stored": 3, "brought": 1, "slower than prefill": 1}


def test_advise_says_what_a_disk_brings(command: Command, trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    json_file = trace_file.with_name("advice.json")
    advised = ("advise", trace_file, *SIZES, "--json", json_file)

    def with_disk() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json_file.read_text(encoding="utf-8"))["with_disk"]
        return found

    sentence = (
        "With a disk of 2.00 GiB, lru saves 40.0% of prefill instead of 13.3%, and writes 0.01 GiB to the disk. This"
        " assumes a disk that reads 2,000 MiB/s and a model that prefills 1,000 tokens/s."
    )
    code, out, _ = command(*advised, "--disk-gib", "2")
    assert (code, sentence in out) == (0, True)
    found = with_disk()
    assert (found["alone"], found["token_hit_ratio"], found["is_estimate"]) == (2 / 15, 6 / 15, False)
    assert command(*advised)[0] == 0
    assert with_disk()["plan"]["budget_bytes"] == 6 * FILE_BYTES
    # Of a long trace the curve says it. The simulation finds less, since the heads of files take room in memory.
    monkeypatch.setattr(advice, "WHOLE_REFS", 1)
    _, out, _ = command(*advised, "--disk-gib", "2")
    assert "lru saves up to 46.7% of prefill instead of 13.3%, and writes 0.00 GiB or more" in out
    assert with_disk()["is_estimate"]
    for more in (("--capacity-blocks", "3"), ("--bytes-per-token", "2048"), (*SIZES[:3], "100")):
        assert "disk" not in command("advise", trace_file, *more)[1]


@pytest.mark.slow
def test_the_curve_bounds_what_a_simulation_with_a_disk_finds() -> None:
    memory_blocks = 20
    random = np.random.default_rng(5)
    trace = made([[int(random.zipf(1.3)) % 20, int(random.zipf(1.2)) % 50] for _ in range(400)])
    curve = lru_curve(trace)
    alone = simulate(trace, "lru", memory_blocks * BLOCK_BYTES, SPANS).token_hit_ratio
    for disk_blocks in (10, 100, 1000):
        plan = replace(FAST, budget_bytes=disk_blocks * FILE_BYTES)
        row, disk = run(trace, memory_blocks, plan)
        found = estimated_disk(curve, plan, memory_blocks, BLOCK_TOKENS, BLOCK_BYTES)
        assert found.alone == pytest.approx(alone)
        assert found.alone < row.token_hit_ratio <= found.token_hit_ratio < row.token_hit_ratio + 0.04, disk_blocks
        assert disk.written_bytes / 2 < found.written_bytes <= disk.written_bytes, disk_blocks


def test_a_disk_that_was_not_named_is_ten_times_the_budget_or_has_room_for_everything() -> None:
    trace = made([[number] for number in range(30)] * 2)
    curve = lru_curve(trace)
    sizes = {"token_bytes": BLOCK_BYTES // BLOCK_TOKENS}
    found = [Advice(trace, curve, budget_blocks=blocks, **sizes).disk_bytes for blocks in (2, 5)]
    assert found == [20 * BLOCK_BYTES, 30 * FILE_BYTES]
    assert Advice(trace, curve, **sizes).disk_bytes is Advice(trace, curve, budget_blocks=5).disk_bytes is None
