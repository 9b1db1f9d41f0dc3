"""The benchmarks run in quick mode, write what their readers rely on, and their figures agree. No time is judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import (
    bench_decode,
    bench_disk,
    bench_exact,
    bench_explain,
    bench_growth,
    bench_hops,
    bench_hostile,
    bench_kernels,
    bench_memory,
    bench_overhead,
    bench_parallel,
    bench_policies,
    bench_redis,
    bench_replay,
    bench_restore,
    bench_routing,
    bench_serve,
    bench_speculate,
    bench_stored_bits,
    bench_suffix_index,
    bench_tree,
    bench_verify,
)
from benchmarks.bench_serve import OURS, THEIRS
from benchmarks.harness import record
from benchmarks.harness.record import Spread, in_turns, publish, rotated
from benchmarks.harness.recorded_traces import TRACES, traces_in
from runner.script.conversation import Conversation
from tests.stores.redis_server import program_named

ORIGIN = {"benchmark", "question", "repeats", "rows", "machine", "versions", "date", "commit", "command"}
REQUESTS = {"next turn", "switch", "miss", "full budget"}
HOSTILE = [("nothing", ""), ("tools", "400")]
LOADS = [load.name for load in bench_serve.QUICK]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a benchmark with its smallest sizes; return the rows that it wrote, by name of the file."""

    def running(benchmark: ModuleType, *more: str) -> dict[str, Any]:
        benchmark.main(["--quick", "--results", str(tmp_path), *more])
        written = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
        printed = capsys.readouterr().out
        for document in written.values():
            assert document.keys() >= ORIGIN
            assert document.get("conclusion", "") in printed
        return {name: document["rows"] for name, document in written.items()}

    return running


Running = Callable[..., dict[str, Any]]


def test_a_spread_is_the_median_between_the_least_and_the_most() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(median=3.0, least=1.0, most=10.0)


def test_measurements_in_turns_come_in_pairs_without_the_first_of_each() -> None:
    calls: list[str] = []

    def measurement(name: str) -> Callable[[], int]:
        return lambda: calls.append(name) or len(calls)  # type: ignore[func-returns-value]

    assert in_turns(measurement("a"), measurement("b"), 2) == [(4, 3), (5, 6)]
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert ["".join(rotated("abc", by)) for by in range(4)] == ["abc", "bca", "cab", "abc"]


def test_what_is_published_says_where_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish("some", "How much?", [{"what": "this", "MB": 1.5}], folder=tmp_path / "new", conclusion="This much.", aim=2)
    document = json.loads((tmp_path / "new" / "some.json").read_text(encoding="utf-8"))
    assert document.keys() == ORIGIN | {"conclusion", "aim"}
    assert document["rows"] == [{"what": "this", "MB": 1.5}]
    assert "1.5" in (printed := capsys.readouterr().out)
    assert printed.endswith("This much.\n")


@pytest.mark.parametrize("given", [["--traces", "/some/where"], ["--conversations=/some/where"]])
def test_the_recorded_command_names_no_path(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    words = ["python", "-m", "benchmarks.bench_policies", *given, "--quick", "--results", "/else/where"]
    monkeypatch.setattr(sys, "orig_argv", words)
    assert record._command() == "python -m benchmarks.bench_policies --quick"


def test_recorded_traces_are_read_from_the_given_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_policies.main(["--quick", "--traces", str(tmp_path)])
    assert f"{tmp_path} has no mooncake/conversation_trace.jsonl" in capsys.readouterr().err
    mooncake, agents = (tmp_path / path for path in TRACES.values())
    mooncake.parent.mkdir()
    agents.mkdir(parents=True)
    mooncake.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')
    session = {"block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}
    (agents / "one.json").write_text(json.dumps(session))
    traces = traces_in(tmp_path, quick=False)
    assert [(trace.name, len(trace.requests)) for trace in traces] == [("mooncake", 1), ("coding agents", 1)]


Rows = list[dict[str, Any]]


def _shared(rows: Rows) -> bool:
    """The tree holds a common beginning once; mlx-lm holds it for each user."""
    held = {(row["prompt"], row["way"]): row["held MB"] for row in rows if row["users"] > 1}
    return held["shared", "tree"] < held["own", "tree"] and held["shared", "mlx-lm"] == held["own", "mlx-lm"]


def _kernels(rows: Rows) -> bool:
    """A segment takes two products, a maximum, a difference, an exponential and a sum; the rest joins the parts."""
    found = {row["way"]: row["kernels"] for row in rows}
    two, one, none = found["two levels"], found["one level"], found["nothing shared"]
    return two - one == one - none == 9 and found["four groups"] > two and found["one row alone, one level"] < one


def _rises(row: dict[str, Any]) -> bool:
    """Fewer bits at rest never cost cached tokens."""
    shares = [value for name, value in row.items() if name.endswith("cached tokens %")]
    return shares == sorted(shares)


#: A benchmark, a file that it writes, and what holds of the rows in it.
HOLDS: list[tuple[ModuleType, str, Callable[[Rows], bool]]] = [
    (bench_restore, "restore", lambda rows: all(row["hit ms"] > row["begin ms"] > 0 for row in rows)),
    (bench_restore, "restore", lambda rows: all((r["paged in MB"] > 0) == (r["request"] == "switch") for r in rows)),
    (bench_explain, "explain", lambda rows: all((row["resumable"] == 0) == (row["prompt"] == "hint") for row in rows)),
    (bench_explain, "explain-keeping", lambda rows: {row["request"] for row in rows} == REQUESTS),
    (bench_overhead, "overhead", lambda rows: {row["request"] for row in rows} == REQUESTS),
    (
        bench_overhead,
        "overhead",
        lambda rows: all(r["tokens evaluated"] == 1 for r in rows if r["request"] == "switch"),
    ),
    (bench_parallel, "parallel", _shared),
    (bench_stored_bits, "stored-bits", lambda rows: [round(row["times"], 1) for row in rows[:1]] == [1.0]),
    (bench_stored_bits, "stored-bits", lambda rows: 1.5 < rows[1]["times"] < 1.9 < 2.5 < rows[2]["times"] < 3.6),
    (bench_stored_bits, "stored-bits-hits", lambda rows: all(_rises(row) for row in rows)),
    (bench_stored_bits, "stored-bits-error-tiny", lambda rows: 0 < rows[0]["error max"] < 0.2 and len(rows) == 4),
    (bench_stored_bits, "stored-bits-times", lambda rows: all(row["TTFT of the hit ms"] > 0 for row in rows)),
    (bench_stored_bits, "stored-bits-reads", lambda rows: all(row["codes, times plain"] > 0 for row in rows)),
    (bench_speculate, "speculate", lambda rows: all(row["tokens per pass"] >= 1 for row in rows)),
    (bench_speculate, "speculate-counted", lambda rows: all(1 < row["tokens per pass"] < 2 for row in rows)),
    (bench_speculate, "speculate-nothing", lambda rows: {row["proposed per pass"] for row in rows} == {0}),
    (bench_decode, "decode", lambda rows: all(row["step ms"] > 0 < row["mlx-lm MB"] for row in rows)),
    (bench_kernels, "kernels", _kernels),
    (bench_growth, "growth", lambda rows: [r["growths"] for r in rows if r["what"] == "decode"][-1] == 0),
    (bench_memory, "memory", lambda rows: all(row["radix MB"] >= row["least MB"] for row in rows)),
    (bench_memory, "memory", lambda rows: all(abs(r["radix MB"] / r["radix reported MB"] - 1) < 0.1 for r in rows)),
    (bench_suffix_index, "suffix_index", lambda rows: all(30 < row["bytes per token"] <= 40 for row in rows)),
    (bench_suffix_index, "suffix_index", lambda rows: all(0 < r["propose us"] <= r["propose p99 us"] for r in rows)),
    (bench_tree, "tree", lambda rows: all(row["trie bytes per token"] > row["bytes per token"] for row in rows)),
    (bench_serve, "serve", lambda rows: [(r["load"], r["server"]) for r in rows] == [*product(LOADS, (OURS, THEIRS))]),
    (bench_serve, "serve", lambda rows: len({(row["load"], row["prompt tokens"]) for row in rows}) == len(LOADS)),
    (bench_hostile, "hostile", lambda rows: [(r["request"], r["status"]) for r in rows] == HOSTILE),
    # What stalls a stream was sent before, and a stream of many tokens has a gap.
    (bench_serve, "serve", lambda rows: all(r["prefilled tokens"] < 50 for r in rows if r["load"] == "stall")),
    (bench_serve, "serve", lambda rows: all(row["gap ms max"] > 0 for row in rows)),
]
SLOW = (bench_growth, bench_hostile, bench_memory, bench_tree, bench_serve, bench_speculate)
MODULES = list(dict.fromkeys(benchmark for benchmark, _, _ in HOLDS))


@pytest.mark.parametrize(
    "benchmark", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW), id=each.__name__) for each in MODULES]
)
def test_a_benchmark_writes_rows_that_agree(run: Running, benchmark: ModuleType) -> None:
    written = run(benchmark)
    for each, name, holds in HOLDS:
        if each is benchmark:
            assert written[name], name
            assert holds(written[name]), (name, written[name])


@pytest.mark.slow
def test_every_resumed_request_of_the_checked_side_is_checked(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_verify, "SYSTEM_TOKENS", 60)
    monkeypatch.setattr(bench_verify, "MESSAGE_TOKENS", 20)
    rows = run(bench_verify)["verify"]
    assert {(row["requests"], row["way"]) for row in rows} == set(product(bench_verify.REPLIES, bench_verify.WAYS))
    for row in rows:
        resumed = bench_verify.USERS * bench_verify.TURNS - (row["way"] == "session")
        assert row["checked"] == 2 * resumed, row
        assert 0 < row["error"] < 1e-3, row
        assert row["checked request ms"] > 0, row


def test_the_exact_benchmark_caches_less_the_wider_the_grid_and_never_more_than_without(run: Running) -> None:
    rows = run(bench_exact)["exact"]
    assert [row["exact, step_size"] for row in rows] == ["no", *map(str, bench_exact.STEP_SIZES)]
    cached = [row["cached tokens"] for row in rows]
    assert cached == sorted(cached, reverse=True)
    assert cached[0] > cached[-1] > 0
    assert all(row["cached tokens"] % step == 0 for step, row in zip(bench_exact.STEP_SIZES, rows[1:], strict=True))


def test_the_hops_benchmark_counts_every_passage_and_the_same_ones_each_time(run: Running) -> None:
    first = run(bench_hops)["hops"]
    assert first == run(bench_hops)["hops"]
    assert [row["call"] for row in first] == list(bench_hops.BEFORE)
    assert all((row["hops"] or row["files"]) >= row["files"] > 1 for row in first)


# Replay and simulation


def conversation(user: int) -> Conversation:
    messages = [{"role": "system", "content": "You answer questions about trains, politely and briefly."}]
    for turn in range(3):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": f"{role} {user} says something in turn {turn}, and a bit more."})
    return Conversation(str(user), str(user), tuple(messages))


@pytest.mark.slow
def test_no_cache_of_a_replay_beats_the_bound(run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = [conversation(user) for user in range(4)]
    monkeypatch.setattr(bench_replay, "_conversations", lambda path: (conversations, "short ones"))
    rows = run(bench_replay)["budgets"]
    bounds = {row["part"]: row["prefilled tokens"] for row in rows if row["cache"] == "bound"}
    assert set(bounds) == {"counted", "timed"}
    assert all(row["prefilled tokens"] >= bounds[row["part"]] for row in rows)
    unlimited = next(row for row in rows if row["cache"] == "radix" and row["budget %"] == "no limit")
    assert unlimited["prefilled tokens"] == bounds["counted"]


def test_the_policy_benchmark_puts_no_online_policy_above_the_optimum(run: Running, tmp_path: Path) -> None:
    assert {row["unit"] for row in run(bench_policies)["policies-speed"]} == {"block references/s", "s", "us"}
    document = json.loads((tmp_path / "policies.json").read_text())
    found = {(row["policy"], row["capacity_blocks"]): row["block_hit_ratio"] for row in document["grid"]}
    assert all(found["lru", blocks] <= found["belady", blocks] for name, blocks in found if name == "lru")
    assert max(found.values()) <= max(document["infinite_block_hit_ratio"].values())


def test_no_router_finds_more_than_the_bounds_and_one_replica_is_the_pooled_cache(run: Running) -> None:
    written = run(bench_routing)
    rows = written["routing"]
    assert len(rows) == 3 * 4
    for row in rows:
        assert row["hits / infinite"] <= 1.0 + 1e-9
        assert row["hits / pooled"] == 1.0 if row["replicas"] == 1 else row["hits / pooled"] > 0.2
    by_router = {row["router"]: row["token hits"] for row in rows if row["replicas"] == 8}
    assert by_router["prefix"] > by_router["hash"] > by_router["random"]
    # A tier behind all replicas finds what other replicas computed.
    alone, together = (row for row in written["routing-shared"] if row["router"] == "random")
    assert together["token hits"] > alone["token hits"]


# Stores


@pytest.mark.slow
def test_the_disk_benchmark_has_a_row_for_each_copy_speed_and_request(run: Running, tmp_path: Path) -> None:
    written = run(bench_disk, "--folder", str(tmp_path))
    assert [(row["model"], row["tokens"]) for row in written["disk"]] == list(bench_disk.QUICK_SIZES)
    assert all(row["begin ms"] > 0 < row["prefill ms"] for row in written["disk"])
    for row in written["disk-choices"]:
        assert row["wrong"] <= row["were read"] <= row["requests"] - row["missed"]
    assert [(row["write on"], row["request"]) for row in written["disk-requests"]] == [
        (write_on, request) for write_on in ("close", "eviction") for request in ("turn", "hit", "miss", "misses")
    ]


def test_the_redis_benchmark_has_a_row_for_each_size_question_and_link(run: Running) -> None:
    program_named("redis-server")
    written = run(bench_redis)
    assert [row["blocks"] for row in written["redis"]] == [4]
    assert [row["number"] for row in written["redis-keys"]] == [1000, 1000, 200, 200]
    even = written["redis-break-even"]
    assert len(even) == len(bench_redis.TOKEN_BYTES) * len(bench_redis.LINKS_GBIT)
    for row in even:
        assert row["tokens/s"] * row["KiB/token"] <= row["link Gbit/s"] * 1e9 / 8 / 1024 + 1e-6


# Conclusions
