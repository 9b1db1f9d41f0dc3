"""The simulator: its figures against a plain simulation block by block, its grid, its command."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from policies import OFFLINE_POLICIES, POLICIES, Entry, make_policy
from runner.cli import main
from runner.models.footprint import ModelBytes
from runner.simulate.report import (
    FIFO_NOTE,
    infinite_ratio,
    infinite_token_ratio,
    line_styles,
    policies_picture,
    policy_notes,
)
from runner.simulate.simulator import BlockSizes, Simulation, simulate
from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace import Trace, TraceRequest

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 16
#: A capacity that tells policies distinct, and the block hit ratio of the Mooncake conversation trace there, from an
#: independent simulator (leaf-only tree, path pinned). `make bench-policies` has more of them.
REFERENCE = {
    "lru": (10_000, 0.2116),
    "fifo": (10_000, 0.2109),
    "lfuda": (10_000, 0.2169),
    "lfu": (10_000, 0.1317),
    "belady": (3_000, 0.2916),
    "belady-bypass": (3_000, 0.2945),
}


def made(paths: Sequence[Sequence[int]], name: str = "made", step_ms: int = 10) -> Trace:
    """A trace from words: a block's key stands for the whole word up to it."""
    keys: dict[tuple[int, ...], int] = {}
    requests = []
    for index, word in enumerate(paths):
        ids = [keys.setdefault(tuple(word[: end + 1]), len(keys)) for end in range(len(word))]
        requests.append(TraceRequest(np.asarray(ids, dtype=np.int64), len(ids) * BLOCK_TOKENS, 1, index * step_ms))
    return Trace(name, BLOCK_TOKENS, requests, False, name)


words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def block_by_block(trace: Trace, capacity: int, key: str, bypass: bool = False) -> int:
    """Hits of a plain simulation: a set of blocks, and of the leaves outside the request's path the worst one goes."""
    upcoming = _next_uses(trace)
    held: dict[int, dict[str, float]] = {}
    children: dict[int, int] = {}
    hits = 0
    for tick, request in enumerate(trace.requests):
        keys = request.keys.tolist()
        path = set() if bypass else set(keys)
        found = 0
        while found < len(keys) and keys[found] in held:
            found += 1
        hits += found
        for depth, block in enumerate(keys):
            if depth >= found:
                if depth:
                    children[keys[depth - 1]] = children.get(keys[depth - 1], 0) + 1
                held[block] = {"created": tick, "uses": 0, "depth": depth, "parent": keys[depth - 1] if depth else -1}
            state = held[block]
            state.update(used=tick, next=upcoming[tick][depth], uses=state["uses"] + 1)
        while len(held) > capacity:
            leaves = [block for block in held if not children.get(block) and block not in path]
            if not leaves:
                # The path alone is too long: its own tail goes.
                leaves = [block for block in held if not children.get(block)]
            gone = min(leaves, key=lambda block: _rank(held[block], key))
            parent = held.pop(gone)["parent"]
            if parent >= 0:
                children[int(parent)] -= 1
    return hits


def _rank(state: dict[str, float], key: str) -> tuple[float, ...]:
    if key == "lru":
        return (state["used"], -state["depth"])
    if key == "fifo":
        return (state["created"], -state["depth"])
    if key == "lfu":
        return (state["uses"], state["used"], -state["depth"])
    return (-state["next"], -state["depth"], state["used"])


def _next_uses(trace: Trace) -> list[list[float]]:
    last: dict[int, float] = {}
    found = []
    for tick in range(len(trace.requests) - 1, -1, -1):
        keys = trace.requests[tick].keys.tolist()
        found.append([last.get(key, math.inf) for key in keys])
        last.update(dict.fromkeys(keys, tick))
    return found[::-1]


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "belady", "belady-bypass"])
@given(paths=words, capacity=st.integers(6, 20))
@settings(max_examples=40, deadline=None)
def test_compressed_edges_give_the_hits_of_single_blocks(policy: str, paths: list[list[int]], capacity: int) -> None:
    trace = made(paths)
    expected = block_by_block(trace, capacity, policy, bypass=policy == "belady-bypass")
    assert simulate(trace, policy, capacity).block_hits == expected


@given(paths=words, capacity=st.integers(6, 20))
@settings(max_examples=40, deadline=None)
def test_no_policy_finds_more_than_the_optimum(paths: list[list[int]], capacity: int) -> None:
    trace = made(paths)
    most = simulate(trace, "belady-bypass", capacity).block_hits
    assert simulate(trace, "belady", capacity).block_hits <= most
    for policy in POLICIES:
        assert simulate(trace, policy, capacity).block_hits <= most, policy


@pytest.mark.slow
def test_the_mooncake_trace_gives_the_reference_figures_to_four_digits(shared_data: Path) -> None:
    from runner.traces.trace_reader import read_trace

    trace = read_trace(shared_data / "mooncake" / "conversation_trace.jsonl")
    for policy, (capacity, block_hit_ratio) in REFERENCE.items():
        assert round(simulate(trace, policy, capacity).block_hit_ratio, 4) == block_hit_ratio, policy
    assert round(infinite_ratio(trace), 4) == 0.3664
    assert round(infinite_token_ratio(trace), 4) == 0.3736


def test_windows_take_the_bytes_of_the_model_s_also_where_they_are_not_whole_blocks() -> None:
    model = ModelBytes("given", 10, 7, ((100, 3), (512, 5), (700, 2)), "given")
    sizes = BlockSizes.of(model, 512)
    assert sizes.windows == ((1, 512 * 5), (1, 700 * 2))
    layout = sizes.layout()
    windows = sum(layout.window_bytes(window) * window.size for window in layout.windows)
    full = layout.checkpoint([], 100, "end").nbytes + windows
    assert full == model.checkpoint_bytes == 7 + 100 * 3 + 512 * 5 + 700 * 2
    # Shorter than a block, it is whole at no block's end but where a checkpoint was taken.
    short = BlockSizes.of(ModelBytes("given", 10, 0, ((100, 3),), "given"), 512).layout()
    assert (short.has_states, short.windows) == (True, ())


@pytest.mark.parametrize("capacity", [150, 1_000])
@pytest.mark.parametrize("name", sorted(name for name, its in POLICIES.items() if hasattr(its, "pass_over")))
def test_what_a_policy_passes_over_would_have_gone_as_well_one_by_one(name: str, capacity: int) -> None:
    trace = synthesize(Synth(requests=250), seed=capacity)
    outcomes, passed = [], 0
    for asks_each in (False, True):
        policy: Any = make_policy(name)
        pass_over = policy.pass_over

        def counted(entry: Entry, cuts: Sequence[int], own: Any = pass_over, none: bool = asks_each) -> int:
            nonlocal passed
            count: int = 0 if none else own(entry, cuts)
            passed += count
            return count

        policy.pass_over = counted
        simulation = Simulation(trace, policy, capacity, BlockSizes())
        hits = []
        for request in trace.requests:
            simulation.serve(request)
            hits.append(simulation.block_hits)
        simulation.cache.check()
        outcomes.append((hits, simulation.cache.dump()))
    assert outcomes[0] == outcomes[1]
    assert passed > 500


def test_an_unlimited_cache_finds_what_was_asked_for_before() -> None:
    trace = made([[1, 2, 3], [1, 2, 4], [1, 2, 3], [5]])
    row = simulate(trace, "lru", 1_000)
    assert (row.block_refs, row.block_hits, row.evictions) == (10, 5, 0)
    assert row.block_hit_ratio == infinite_ratio(trace) == 0.5
    assert row.prefill_tokens == 5 * BLOCK_TOKENS


def test_a_partly_filled_last_block_counts_its_tokens() -> None:
    keys = np.asarray([0, 1], dtype=np.int64)
    trace = Trace("half", BLOCK_TOKENS, [TraceRequest(keys, BLOCK_TOKENS + 4, 0, time) for time in (0, 1)], False, "")
    row = simulate(trace, "lru", 100)
    assert (row.block_hit_ratio, row.token_hit_ratio, row.prefill_tokens) == (0.5, 0.5, BLOCK_TOKENS + 4)


def test_a_model_with_recurrent_layers_resumes_at_checkpoints_alone() -> None:
    trace = made([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 8, 9]])
    spans = simulate(trace, "lru", 1 << 30, BlockSizes(span_bytes=100, is_counting=False))
    points = simulate(trace, "lru", 1 << 30, BlockSizes(span_bytes=100, checkpoint_bytes=50, is_counting=False))
    assert (spans.block_hits, points.block_hits) == (6, 3)  # the second request makes the branch's checkpoint
    assert (spans.has_checkpoints, points.has_checkpoints) == (False, True)


def test_a_model_with_recurrent_layers_resumes_in_front_of_a_block_that_was_rewritten() -> None:
    trace = made([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]])
    row = simulate(trace, "lru", 1 << 30, BlockSizes(span_bytes=100, checkpoint_bytes=50, is_counting=False))
    assert row.block_hits == 4  # 16 tokens in front of a prompt's end are a block in front of it


@pytest.mark.slow
def test_an_address_that_is_none_is_one_line(trace_file: Path, capsys: Any) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    assert called(["simulate", str(trace_file), "--capacity-blocks", "5", "--ray", "nonsense"]) == 2
    assert "error: --ray nonsense: no cluster answers (Invalid address format: nonsense)." in capsys.readouterr().err


def test_fifo_beside_lru_carries_its_footnote_where_they_are_alike() -> None:
    trace = made([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]])
    rows = [simulate(trace, policy, 100) for policy in ("lru", "fifo")]
    assert FIFO_NOTE in policy_notes([trace], rows)
    assert FIFO_NOTE not in policy_notes([trace], rows[:1])
    # Equal to the digits that the table shows, wherever both ran.
    lru, fifo = rows
    close = [lru, replace(fifo, block_hit_ratio=lru.block_hit_ratio + 0.0002)]
    assert FIFO_NOTE not in policy_notes([trace], close)
    elsewhere = [
        replace(row, capacity_blocks=5, block_hit_ratio=ratio) for row, ratio in zip(rows, (0.1, 0.2), strict=True)
    ]
    assert FIFO_NOTE not in policy_notes([trace], [*rows, *elsewhere])


def test_every_policy_is_drawn_apart_and_a_single_capacity_too() -> None:
    names = [*POLICIES, *OFFLINE_POLICIES]
    styles = line_styles(names)
    assert all(style["marker"] for style in styles.values())
    assert len({tuple(sorted(style.items())) for style in styles.values()}) == len(names)
    online = [styles[name] for name in POLICIES]
    assert len({style["marker"] for style in online}) == len({style["color"] for style in online}) == len(online)


def test_policies_that_coincide_share_a_line_and_the_legend_goes_by_the_right_edge() -> None:
    trace = made([[1], [2], [3], [1], [2], [3], [1], [4], [1]])
    row = simulate(trace, "lru", 2)
    rows = [
        replace(row, policy=policy, capacity_blocks=blocks, block_hit_ratio=ratio)
        for policy, ratios in {
            "fifo": (0.1, 0.2),
            "lru": (0.1, 0.20004),
            "arc": (0.05, 0.4),
            "belady": (0.3, 0.4),
        }.items()
        for blocks, ratio in zip((2, 4), ratios, strict=True)
    ]
    drawn = policies_picture(rows, {}, "svg").decode()
    texts = re.findall(r"<!-- (.*?) -->", drawn)
    assert [text for text in texts if text in ("arc", "belady", "fifo = lru", "fifo", "lru")] == [
        "arc",
        "belady",
        "fifo = lru",
    ]


def test_a_picture_takes_names_as_they_are() -> None:
    trace = made([[1], [1]], name="cost$_$and <b>")
    assert b"<svg" in policies_picture([simulate(trace, "lru", 3)], {trace.name: 0.5}, "svg")


# The command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * index, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids}
        for index, ids in enumerate([[1, 2, 3], [1, 2, 4], [5], [1, 2, 3]])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def called(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)


def test_the_command_writes_a_row_per_policy_and_capacity(trace_file: Path, tmp_path: Path, capsys: Any) -> None:
    json_file, plot_file = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["simulate", str(trace_file), "--policy", "lru,belady", "--capacity-blocks", "2,100"]
    assert called([*arguments, "--json", str(json_file), "--plot", str(plot_file)]) == 0
    assert "block hits" in capsys.readouterr().out
    document = json.loads(json_file.read_text(encoding="utf-8"))
    wanted = {"trace", "policy", "capacity_blocks", "capacity_bytes", "requests", "block_refs", "block_hits"}
    wanted |= {"block_hit_ratio", "token_hit_ratio", "prefill_tokens", "evictions", "seconds"}
    assert all(wanted <= row.keys() for row in document["rows"])
    assert [(row["policy"], row["capacity_blocks"]) for row in document["rows"]] == [
        ("lru", 2), ("lru", 100), ("belady", 2), ("belady", 100),
    ]  # fmt: skip
    assert document["rows"][1]["block_hit_ratio"] == 0.5
    assert document["rows"][0]["capacity_bytes"] is None
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    plot_file = tmp_path / "rows.svg"
    assert called([*arguments, "--plot", str(plot_file)]) == 0
    assert plot_file.read_bytes().startswith(b"<?xml")


def test_the_command_takes_budgets_with_the_bytes_of_a_model(trace_file: Path, tmp_path: Path) -> None:
    json_file = tmp_path / "rows.json"
    sizes = ["--bytes-per-token", "1000", "--budget-gib", "0.5,2"]
    assert called(["simulate", str(trace_file), "--policy", "lru", *sizes, "--json", str(json_file)]) == 0
    rows = json.loads(json_file.read_text(encoding="utf-8"))["rows"]
    assert [row["capacity_bytes"] for row in rows] == [1 << 29, 1 << 31]


def test_separate_traces_of_one_name_are_told_apart(trace_file: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "[bold]").mkdir()
    other = tmp_path / "[bold]" / trace_file.name
    other.write_bytes(trace_file.read_bytes())
    json_file = tmp_path / "rows.json"
    arguments = ["simulate", str(trace_file), str(other), "--separate", "--policy", "lru", "--capacity-blocks", "3,9,3"]
    assert called([*arguments, "--json", str(json_file)]) == 0
    document = json.loads(json_file.read_text(encoding="utf-8"))
    names = [str(trace_file), str(other)]
    assert [(row["trace"], row["capacity_blocks"]) for row in document["rows"]] == [
        (name, blocks) for name in names for blocks in (3, 9)
    ]
    assert list(document["infinite_block_hit_ratio"]) == names
    assert "[bold]" in capsys.readouterr().out


def test_all_names_every_policy_and_the_bounds(trace_file: Path, tmp_path: Path) -> None:
    json_file = tmp_path / "rows.json"
    arguments = ["simulate", str(trace_file), "--policy", "all", "--capacity-blocks", "3", "--json", str(json_file)]
    assert called(arguments) == 0
    rows = json.loads(json_file.read_text(encoding="utf-8"))["rows"]
    assert [row["policy"] for row in rows] == [*sorted(POLICIES), *sorted(OFFLINE_POLICIES)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "nothing", "--capacity-blocks", "5"], "policy 'nothing' is not known"),
        (["--capacity-blocks", "0"], "--capacity-blocks has '0'; wanted numbers above 0"),
        (["--capacity-blocks", "1.5"], "wanted whole numbers"),
        (["--budget-gib", "1"], "--budget-gib needs --model-config or --bytes-per-token"),
        (["--capacity-blocks", "5", "--bytes-per-token", "0", "--bytes-per-checkpoint", "5"], "no size of their own"),
        (["--budget-gib", "1", "--bytes-per-token", "0"], "0 bytes per token; wanted more than 0"),
        (["--budget-gib", "1e305", "--bytes-per-token", "1"], "--budget-gib has '1e305'; wanted numbers above 0"),
        (
            ["--budget-gib", "1", "--bytes-per-token", "1", "--bytes-per-checkpoint", "1", "--policy", "belady-bypass"],
            "belady-bypass is defined without checkpoints alone",
        ),
        (["--capacity-blocks", "5", "--plot", "x.gif"], "--plot x.gif: wanted .png, .svg, .pdf."),
        (["--capacity-blocks", "5", "--json", "nowhere/x.json"], "nowhere/x.json: cannot be written"),
        (["--capacity-blocks", "5", "--separate", "TRACE"], "--separate: a path was given twice"),
        ([], "give --capacity-blocks or --budget-gib"),
        (["--capacity-blocks", "5", "--jobs", "0"], "--jobs is 0; wanted at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(trace_file: Path, more: list[str], message: str, capsys: Any) -> None:
    more = [str(trace_file) if each == "TRACE" else each for each in more]
    assert called(["simulate", str(trace_file), *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


WAITING = """
import time
from pathlib import Path

from policies import OrderedPolicy


class Slow(OrderedPolicy):
    def key(self, entry):
        time.sleep(0.1)
        return (entry.last_used,)


class Mark(Slow):
    def key(self, entry):
        Path("reached").touch()
        return super().key(entry)
"""
BROKEN = """
from policies import OrderedPolicy


class Broken(OrderedPolicy):
    def key(self, entry):
        return 1 / 0
"""


def started(folder: Path, *more: str) -> subprocess.Popen[str]:
    """The command as it is installed, which has no current folder in Python's path, in a process group of its own."""
    code = "from runner.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, "simulate", "trace.jsonl", "--capacity-blocks", "2", *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_policy_of_one_s_own_that_raises_is_one_line_below_what_finished(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (trace_file.parent / "broken.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.chdir(trace_file.parent)
    options = ["--capacity-blocks", "2", "--policy", "lru,broken:Broken", "--jobs", "2"]
    assert called(["simulate", "trace.jsonl", *options]) == 2
    out, err = capfd.readouterr()
    assert "lru" in out
    assert err.splitlines()[-2:] == [
        "interrupted: 1 of 2 simulations had finished.",
        "error: --policy: policy Broken: inserted() raised ZeroDivisionError('division by zero')"
        f" ({trace_file.parent / 'broken.py'}:7).",
    ]
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_shows_what_other_processes_have_finished(trace_file: Path) -> None:
    (trace_file.parent / "mine.py").write_text(WAITING, encoding="utf-8")
    process = started(trace_file.parent, "--policy", "mine:Slow,lru,mine:Mark", "--jobs", "2", "--json", "rows.json")
    # Two processes: while the first row is waited for, the second is computed and the third begun.
    while process.poll() is None and not (trace_file.parent / "reached").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "lru" in out
    assert err.splitlines()[-1] == "interrupted: 1 of 3 simulations had finished."
    assert "Traceback" not in err
    rows = json.loads((trace_file.parent / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [row["policy"] for row in rows] == ["lru"]
