"""The simulator: its figures, its footnotes and pictures, its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from policies import OFFLINE_POLICIES, POLICIES, Entry, make_policy
from runner.models import ModelBytes
from runner.simulate.rows import FIFO_NOTE, infinite_ratio, infinite_token_ratio, policy_notes
from runner.simulate.simulator import BlockSizes, Simulation, simulate
from runner.traces.synthesis import Synth, synthesize
from tests.simulate.made import made, mooncake_file, rows_in, words

Command = Callable[..., tuple[int, str, str]]
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


def test_fewer_bits_at_rest_find_more_in_the_same_bytes() -> None:
    trace = synthesize(Synth(requests=60), seed=0)
    found = []
    for stored_bytes in (None, 53, 28):
        sizes = BlockSizes.of(ModelBytes("llama", 100, 0, (), "bfloat16", stored_bytes), trace.block_tokens)
        found.append(simulate(trace, "lru", 200 * sizes.span_bytes, sizes).token_hit_ratio)
    assert found == sorted(set(found))


@given(paths=words, capacity=st.integers(6, 20))
@settings(max_examples=20, deadline=None)
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


@pytest.mark.parametrize("name", sorted(name for name, its in POLICIES.items() if hasattr(its, "pass_over")))
def test_what_a_policy_passes_over_would_have_gone_as_well_one_by_one(name: str) -> None:
    trace = synthesize(Synth(requests=250), seed=150)
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
        simulation = Simulation(trace, policy, 150, BlockSizes())
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
    row = simulate(made([[0, 1], [0, 1]], lacks=BLOCK_TOKENS - 4), "lru", 100)
    assert (row.block_hit_ratio, row.token_hit_ratio, row.prefill_tokens) == (0.5, 0.5, BLOCK_TOKENS + 4)


def test_a_model_with_recurrent_layers_resumes_at_checkpoints_alone() -> None:
    trace = made([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 8, 9]])
    with_points = BlockSizes(span_bytes=100, checkpoint_bytes=50, is_counting=False)
    spans = simulate(trace, "lru", 1 << 30, BlockSizes(span_bytes=100, is_counting=False))
    points = simulate(trace, "lru", 1 << 30, with_points)
    assert (spans.block_hits, points.block_hits) == (6, 3)  # the second request makes the branch's checkpoint
    assert (spans.has_checkpoints, points.has_checkpoints) == (False, True)
    # 16 tokens in front of a prompt's end are a block in front of it.
    assert simulate(made([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]), "lru", 1 << 30, with_points).block_hits == 4


def test_fifo_beside_lru_carries_its_footnote_where_they_are_alike() -> None:
    trace = made([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]])
    rows = [simulate(trace, policy, 100) for policy in ("lru", "fifo")]
    assert FIFO_NOTE in policy_notes([trace], rows)
    assert FIFO_NOTE not in policy_notes([trace], rows[:1])


# The command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return mooncake_file(tmp_path / "trace.jsonl", [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3]])


def test_the_command_writes_a_row_per_policy_and_capacity(command: Command, trace_file: Path, tmp_path: Path) -> None:
    json_file, plot_file = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ("simulate", trace_file, "--policy", "lru,belady", "--capacity-blocks", "2,100")
    code, out, _ = command(*arguments, "--json", json_file, "--plot", plot_file)
    assert (code, "Block hits: " in out) == (0, True)
    rows = rows_in(json_file)
    wanted = {"trace", "policy", "capacity_blocks", "capacity_bytes", "requests", "block_refs", "block_hits"}
    wanted |= {"block_hit_ratio", "token_hit_ratio", "prefill_tokens", "evictions", "seconds"}
    assert all(wanted <= row.keys() for row in rows)
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        ("lru", 2), ("lru", 100), ("belady", 2), ("belady", 100),
    ]  # fmt: skip
    assert (rows[1]["block_hit_ratio"], rows[0]["capacity_bytes"]) == (0.5, None)
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    sizes = ("--bytes-per-token", "1000", "--budget-gib", "0.5,2")
    assert command("simulate", trace_file, "--policy", "lru", *sizes, "--json", json_file)[0] == 0
    assert [row["capacity_bytes"] for row in rows_in(json_file)] == [1 << 29, 1 << 31]


def test_all_names_every_policy_and_the_bounds(command: Command, trace_file: Path, tmp_path: Path) -> None:
    json_file = tmp_path / "rows.json"
    every = ("simulate", trace_file, "--policy", "all", "--capacity-blocks", "3", "--json", json_file)
    for more, bounds in (((), sorted(OFFLINE_POLICIES)), (("--bytes-per-token", "9", "--disk-gib", "1"), ["belady"])):
        assert command(*every, *more)[0] == 0
        assert [row["policy"] for row in rows_in(json_file)] == [*sorted(POLICIES), *bounds]


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


def test_rows_come_before_the_error(command: Command, trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trace_file.parent / "broken.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.chdir(trace_file.parent)
    code, out, err = command("simulate", "trace.jsonl", "--capacity-blocks", "2", "--policy", "lru,broken:Broken")
    assert (code, "lru" in out) == (2, True)
    assert err.splitlines()[-2:] == [
        "interrupted: 1 of 2 simulations had finished.",
        "error: --policy: policy Broken: inserted() raised ZeroDivisionError('division by zero')"
        f" ({trace_file.parent / 'broken.py'}:5).",
    ]
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_address_that_is_none_is_one_line(command: Command, trace_file: Path) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    code, _, err = command("simulate", trace_file, "--capacity-blocks", "5", "--ray", "nonsense")
    assert code == 2
    assert "error: --ray nonsense: no cluster answers (Invalid address format: nonsense)." in err


@pytest.mark.slow
def test_ctrl_c_shows_what_other_processes_have_finished(trace_file: Path) -> None:
    """The command as it is installed, which has no current folder in Python's path, in a process group of its own."""
    folder = trace_file.parent
    (folder / "mine.py").write_text(WAITING, encoding="utf-8")
    arguments = ["simulate", "trace.jsonl", "--capacity-blocks", "2", "--policy", "mine:Slow,lru,mine:Mark"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "from runner.cli import main; main()", *arguments, "--jobs", "2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # Two processes: while the first row is waited for, the second is computed and the third begun.
    while process.poll() is None and not (folder / "reached").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, "lru" in out, "Traceback" in err) == (130, True, False)
    assert err.splitlines()[-1] == "interrupted: 1 of 3 simulations had finished."
