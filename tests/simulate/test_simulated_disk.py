"""A disk beside the memory of a simulation: what comes back from it, what goes there, and when it is not worth it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from policies import POLICIES
from radixcache.stores.sized_store import HEAD_BYTES
from runner.cli import main
from runner.simulate import advice
from runner.simulate.advice import DiskAdvice, advice_of
from runner.simulate.curve import lru_curve
from runner.simulate.report import DiskPlan, DiskUse, SimulationRow, infinite_ratio
from runner.simulate.simulator import BlockSizes, Simulation, simulate
from runner.traces.trace import Trace, TraceRequest

#: Of a block of the trace, which is one of the store.
BLOCK_TOKENS, BLOCK_BYTES = 512, 1 << 20
SPANS = BlockSizes(BLOCK_BYTES, is_counting=False)
FILE_BYTES = BLOCK_BYTES + HEAD_BYTES
#: Reads a block in a quarter of the time that its prefill takes.
FAST = DiskPlan(1 << 40, 8 * FILE_BYTES, 1024.0)

words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30)


def made(paths: Sequence[Sequence[int]], block_tokens: int = BLOCK_TOKENS, last_tokens: int = 0) -> Trace:
    """A trace from words, of which a block's key stands for all up to it; last blocks lack so many tokens."""
    keys: dict[tuple[int, ...], int] = {}
    requests = []
    for index, word in enumerate(paths):
        ids = [keys.setdefault(tuple(word[: end + 1]), len(keys)) for end in range(len(word))]
        tokens = len(ids) * block_tokens - last_tokens
        requests.append(TraceRequest(np.asarray(ids, dtype=np.int64), tokens, 1, index * 10))
    return Trace("made", block_tokens, requests, False, "made")


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
    _, disk = run(made([[1, 2], [3, 4], [1, 2]], last_tokens=500), 2)
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


def test_what_was_read_last_leaves_a_full_disk_last() -> None:
    trace = made([[number] for number in (1, 2, 3, 4, 2, 5, 6, 2, 1)])
    # Room for three: 4 drives 1 out, 2 is read; 5 drives 3 out, 6 drives 4 out, and 2 is read again. 1 is gone.
    _, disk = run(trace, 1, replace(FAST, budget_bytes=3 * FILE_BYTES))
    assert disk.decisions == {"not stored": 7, "brought": 2}
    assert disk.written_bytes == 6 * FILE_BYTES


@given(paths=words, blocks=st.integers(6, 12))
@settings(max_examples=60, deadline=None)
def test_a_disk_that_holds_everything_makes_the_cache_infinite(paths: list[list[int]], blocks: int) -> None:
    trace = made(paths)
    row, disk = run(trace, blocks)
    assert row.block_hit_ratio == pytest.approx(infinite_ratio(trace))
    memory = row.block_hits * BLOCK_TOKENS - disk.hit_tokens
    assert memory >= 0
    assert disk.read_bytes == disk.hit_tokens // BLOCK_TOKENS * FILE_BYTES
    assert disk.written_bytes <= len(np.unique(np.concatenate([each.keys for each in trace.requests]))) * FILE_BYTES


@given(paths=words, blocks=st.integers(6, 12), policy=st.sampled_from(sorted(POLICIES)))
@settings(max_examples=60, deadline=None)
def test_a_disk_without_room_for_a_block_changes_nothing(paths: list[list[int]], blocks: int, policy: str) -> None:
    trace = made(paths)
    row, disk = run(trace, blocks, replace(FAST, budget_bytes=BLOCK_BYTES), policy)
    assert (disk.hit_tokens, disk.written_bytes, disk.decisions) == (0, 0, {"not stored": len(paths)})
    alone = simulate(trace, policy, blocks * BLOCK_BYTES + BLOCK_BYTES // 2, SPANS)
    # With a disk a prompt has one key more, so one eviction may take what are two without.
    same = {"disk": None, "seconds": 0, "evictions": 0}
    assert replace(row, **same) == replace(alone, **same)


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
@settings(max_examples=120, deadline=None)
def test_the_disk_s_budget_holds_with_all_kinds_of_state(
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


def test_a_policy_that_bypasses_has_no_disk() -> None:
    with pytest.raises(ValueError, match="bypassing is defined for memory alone"):
        run(made(TURNS), 3, policy="belady-bypass")


# The commands


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * index, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids}
        for index, ids in enumerate(TURNS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def called(command: str, trace: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main([command, str(trace), *more])
    return int(exit_info.value.code or 0)


#: A block is a MiB, and memory has three.
SIZES = ("--bytes-per-token", "2048", "--capacity-blocks", "3")


def test_the_commands_say_what_comes_from_a_disk(trace_file: Path, capsys: Any) -> None:
    json_file, plot_file = trace_file.with_name("rows.json"), trace_file.with_name("rows.svg")
    more = ["--disk-gib", "1", "--policy", "lru", "--json", str(json_file), "--plot", str(plot_file)]
    assert called("simulate", trace_file, *SIZES, *more) == 0
    assert "from disk" in " ".join(capsys.readouterr().out.split())
    (row,) = json.loads(json_file.read_text(encoding="utf-8"))["rows"]
    plan = {"budget_bytes": 1 << 30, "read_bytes_per_s": 2000 * (1 << 20), "prefill_tokens_per_s": 1000}
    assert row["disk"]["plan"] == {**plan, "write_on": "eviction"}
    # Of 456 the last one is not read: with the heads of their files the three are more than memory has room for.
    assert (row["token_hit_ratio"], row["disk"]["token_hit_ratio"]) == (6 / 15, 4 / 15)
    assert "with a disk of 1.00 GiB" in plot_file.read_text(encoding="utf-8")


def test_slow_options_leave_the_disk_alone(trace_file: Path) -> None:
    json_file = trace_file.with_name("rows.json")
    more = ["--disk-gib", "1", "--disk-write-on", "close", "--policy", "lru", "--json", str(json_file)]
    for slow in (("--disk-mib-per-s", "0.5"), ("--prefill-tokens-per-s", "1e12")):
        assert called("simulate", trace_file, *SIZES, *more, *slow) == 0
        (row,) = json.loads(json_file.read_text(encoding="utf-8"))["rows"]
        assert row["disk"]["decisions"] == {"not stored": 3, "brought": 1, "slower than prefill": 1}


def test_advise_says_what_a_disk_would_bring(trace_file: Path, capsys: Any) -> None:
    json_file, html_file = trace_file.with_name("advice.json"), trace_file.with_name("advice.html")
    outputs = ("--json", str(json_file), "--html", str(html_file))
    assert called("advise", trace_file, *SIZES, "--disk-gib", "2", *outputs) == 0
    sentence = (
        "With a disk of 2.00 GiB besides, lru saves 40.0% of prefill instead of 13.3%, and writes 0.01 GiB to it, if"
        " that reads 2,000 MiB/s and the model prefills 1,000 tokens/s."
    )
    assert sentence in capsys.readouterr().out
    assert sentence in html_file.read_text(encoding="utf-8")
    document = json.loads(json_file.read_text(encoding="utf-8"))
    found = document["with_disk"]
    assert (found["alone"], found["token_hit_ratio"], found["is_estimate"]) == (2 / 15, 6 / 15, False)
    assert document["best_policy"]["token_hit_ratio"] == 2 / 15  # that of memory alone
    assert called("advise", trace_file, *SIZES, *outputs) == 0
    plan = json.loads(json_file.read_text(encoding="utf-8"))["with_disk"]["plan"]
    assert plan["budget_bytes"] == 6 * FILE_BYTES


def test_of_a_long_trace_the_curve_says_what_a_disk_would_bring(
    trace_file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "WHOLE_REFS", 1)
    json_file = trace_file.with_name("advice.json")
    assert called("advise", trace_file, *SIZES, "--disk-gib", "2", "--json", str(json_file)) == 0
    # All that is there to be saved: the simulation finds less, since the heads of files take room in memory.
    assert "lru saves up to 46.7% of prefill instead of 13.3%, and writes 0.00 GiB or more" in capsys.readouterr().out
    assert json.loads(json_file.read_text(encoding="utf-8"))["with_disk"]["is_estimate"]


@pytest.mark.parametrize("memory_blocks", [20, 60])
def test_the_curve_bounds_what_a_simulation_with_a_disk_finds(memory_blocks: int) -> None:
    random = np.random.default_rng(5)
    trace = made([[int(random.zipf(1.3)) % 20, int(random.zipf(1.2)) % 50] for _ in range(700)])
    curve = lru_curve(trace)
    alone = simulate(trace, "lru", memory_blocks * BLOCK_BYTES, SPANS).token_hit_ratio
    for disk_blocks in (10, 30, 100, 1000):
        plan = replace(FAST, budget_bytes=disk_blocks * FILE_BYTES)
        row, disk = run(trace, memory_blocks, plan)
        found = DiskAdvice.estimated(curve, plan, memory_blocks, BLOCK_TOKENS, BLOCK_BYTES)
        assert found.alone == pytest.approx(alone)
        assert found.alone < row.token_hit_ratio <= found.token_hit_ratio < row.token_hit_ratio + 0.04, disk_blocks
        assert disk.written_bytes / 2 < found.written_bytes <= disk.written_bytes, disk_blocks


def test_a_disk_that_is_slower_than_prefill_brings_nothing_by_the_curve_either() -> None:
    curve = lru_curve(made(TURNS))
    slow = replace(FAST, read_bytes_per_s=2 * FILE_BYTES)  # as fast as prefill, and files are not read for that
    found = DiskAdvice.estimated(curve, slow, 3, BLOCK_TOKENS, BLOCK_BYTES)
    assert found.token_hit_ratio == found.alone == curve.token_hit_ratio_at(3)


def test_a_disk_that_was_not_named_is_ten_times_the_budget_or_has_room_for_everything() -> None:
    trace = made([[number] for number in range(30)] * 2)
    curve = lru_curve(trace)
    sizes = {"token_bytes": BLOCK_BYTES // BLOCK_TOKENS}
    found = [advice_of(trace, curve, budget_blocks=blocks, **sizes).disk_bytes for blocks in (2, 5)]
    assert found == [20 * BLOCK_BYTES, 30 * FILE_BYTES]
    assert advice_of(trace, curve, **sizes).disk_bytes is advice_of(trace, curve, budget_blocks=5).disk_bytes is None


def test_advice_without_bytes_or_with_room_for_everything_speaks_of_no_disk(trace_file: Path, capsys: Any) -> None:
    for more in (("--capacity-blocks", "3"), ("--bytes-per-token", "2048"), (*SIZES[:3], "100")):
        assert called("advise", trace_file, *more) == 0
        assert "disk" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("simulate", (*SIZES, "--disk-gib", "0"), "--disk-gib is 0.0; wanted more than 0."),
        ("simulate", (*SIZES, "--disk-gib", "nan"), "--disk-gib is nan; wanted more than 0."),
        ("simulate", (*SIZES, "--disk-mib-per-s", "-1"), "--disk-mib-per-s is -1.0; wanted more than 0."),
        ("simulate", (*SIZES, "--prefill-tokens-per-s", "0"), "--prefill-tokens-per-s is 0.0; wanted more than 0."),
        (
            "simulate",
            ("--capacity-blocks", "3", "--disk-gib", "1"),
            "--disk-gib needs --model-config or --bytes-per-token.",
        ),
        (
            "simulate",
            (*SIZES, "--disk-gib", "1", "--policy", "belady-bypass"),
            "--policy: belady-bypass is defined for memory alone, and there is a disk.",
        ),
        ("advise", ("--capacity-blocks", "3", "--disk-gib", "1"), "--disk-gib needs --model-config or"),
        ("advise", (*SIZES[:2], "--disk-gib", "1"), "--disk-gib goes with --budget-gib or --capacity-blocks, and"),
        ("advise", (*SIZES, "--disk-mib-per-s", "0"), "--disk-mib-per-s is 0.0; wanted more than 0."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    trace_file: Path, command: str, more: tuple[str, ...], message: str, capsys: Any
) -> None:
    assert called(command, trace_file, *more) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_all_leaves_out_the_bound_that_bypasses(trace_file: Path) -> None:
    json_file = trace_file.with_name("rows.json")
    more = ["--disk-gib", "1", "--policy", "all", "--json", str(json_file)]
    assert called("simulate", trace_file, *SIZES, *more) == 0
    rows = json.loads(json_file.read_text(encoding="utf-8"))["rows"]
    assert [row["policy"] for row in rows] == [*sorted(POLICIES), "belady"]
