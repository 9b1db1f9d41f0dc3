"""The benchmarks of index, overhead and replay run in quick mode and their figures hang together; no time is judged."""

import json
import sys

import numpy as np
import pytest

from benchmarks import bench_exact, bench_hops, bench_overhead, bench_policies, bench_replay, bench_tree, bench_windows
from benchmarks.harness import record
from benchmarks.harness.hollow_model import KINDS, HollowModel
from benchmarks.harness.recorded_traces import TRACES, traces_in
from radixcache import RadixTree
from radixcache.tokens import common_length
from runner.script.conversation import Conversation

#: Of four users under one system prompt, three turns each.
SHORT_CONVERSATIONS = [
    Conversation(
        str(user),
        str(user),
        (
            {"role": "system", "content": "You answer questions about trains, politely and briefly."},
            *(
                {"role": role, "content": f"{role} {user} says something in turn {turn}, and a little more."}
                for turn in range(3)
                for role in ("user", "assistant")
            ),
        ),
    )
    for user in range(4)
]


def rows_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text())["rows"]


def test_the_tree_benchmark_reports_every_shape_with_the_nodes_it_was_asked_for(tmp_path, capsys):
    bench_tree.main(["--quick", "--results", str(tmp_path)])
    rows = rows_of(tmp_path, "tree")
    assert {row["shape"] for row in rows} == {"part", "chain", "short"}
    assert {row["nodes"] for row in rows if row["shape"] == "part"} <= {10, 11, 100, 101}
    assert all(row["match ms"] > 0 and row["trie bytes per token"] > row["bytes per token"] for row in rows)
    assert bench_tree.conclusion(rows) in capsys.readouterr().out


@pytest.mark.parametrize("make", [bench_tree.part, bench_tree.chain, bench_tree.short])
def test_a_shape_looks_up_prompts_that_are_stored_as_far_as_it_says(make):
    shape = make(1_000)
    tree = RadixTree()
    bench_tree._grow(tree, shape.sequences, 20)
    tree.check()
    matched = [tree.match(prompt).offset for prompt in shape.following]
    stored = [max(node.end for node in tree.match(prompt).node.path()) for prompt in shape.following]
    assert matched == stored
    assert all(0 < offset < len(prompt) for offset, prompt in zip(matched, shape.following, strict=True))
    parted = tree.match(shape.parted)
    assert parted.offset == parted.node.end < matched[0]
    assert not parted.node.is_leaf


def test_the_trie_is_left_out_where_it_would_take_too_much(monkeypatch):
    monkeypatch.setattr(bench_tree, "TRIE_BYTES", 1)
    row = bench_tree._measure(bench_tree.part, 500, 10)
    assert row["trie match ms"] is None
    assert row["match ms"] > 0


def test_the_conclusion_says_when_the_aim_is_missed():
    row = bench_tree._measure(bench_tree.part, 500, 10)
    slow = {**row, "match ms": bench_tree.AIM_MS + 1}
    assert "NOT under" in bench_tree.conclusion([slow, slow])
    assert "NOT under" not in bench_tree.conclusion([row, row])


def test_the_overhead_benchmark_evaluates_one_token_where_it_says_so(tmp_path, capsys):
    bench_overhead.main(["--quick", "--results", str(tmp_path)])
    rows = rows_of(tmp_path, "overhead")
    assert {row["request"] for row in rows} == {"next turn", "switch", "miss", "full budget"}
    assert all(row["tokens evaluated"] == 1 for row in rows if row["request"] in ("next turn", "switch"))
    assert all((row["evictions/request"] > 0) == (row["request"] == "full budget") for row in rows)
    assert {row["model"] for row in rows_of(tmp_path, "overhead-tokens")} == {"kv x 2", "hybrid x 4", "tiny:llama"}
    assert "A decoded token costs" in capsys.readouterr().out


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_hollow_model_moves_its_caches_as_far_as_it_was_given_tokens(kind):
    model = HollowModel(kind, 4)
    caches = model.make_cache()
    for tokens in (5, 1):
        logits = model(np.zeros((1, tokens), np.int32), cache=caches)
        assert logits.shape[:2] == (1, tokens)
    offsets = {cache.offset for cache in caches if hasattr(cache, "offset")}
    assert offsets == {6}


def test_the_replay_benchmark_counts_no_fewer_tokens_than_the_infinite_cache_prefills(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_replay, "_conversations", lambda path: (SHORT_CONVERSATIONS, "short ones"))
    bench_replay.main(["--quick", "--results", str(tmp_path)])
    rows = rows_of(tmp_path, "budgets")
    bounds = {row["part"]: row["prefilled tokens"] for row in rows if row["cache"] == "bound"}
    assert set(bounds) == {"counted", "timed"}
    assert all(row["prefilled tokens"] >= bounds[row["part"]] for row in rows)
    unlimited = next(row for row in rows if row["cache"] == "radix" and row["budget %"] == "no limit")
    assert unlimited["prefilled tokens"] == bounds["counted"]
    assert (tmp_path / "budgets.png").stat().st_size > 0
    assert bench_replay.conclusion(rows, 2) in capsys.readouterr().out


def test_the_bound_of_a_script_is_what_no_earlier_request_held():
    conversations, _ = bench_replay._conversations(None)
    workload = bench_replay._workload("counted", bench_replay.load_model("tiny"), conversations, 5, 2, is_timed=False)
    held, bound = [], 0
    for request in (workload.script[index] for index in range(5)):
        prompt = request.prompt.tokens
        shared = max((common_length(prompt, earlier) for earlier in held), default=0)
        bound += len(prompt) - min(shared, len(prompt) - 1)
        held.append(np.concatenate([prompt, request.reply]))
    assert workload.bound_tokens == bound < workload.prompt_tokens


def test_the_exact_benchmark_caches_less_the_wider_the_grid_and_never_more_than_without(tmp_path):
    bench_exact.main(["--quick", "--results", str(tmp_path)])
    rows = rows_of(tmp_path, "exact")
    assert [row["exact, step_size"] for row in rows] == ["no", *map(str, bench_exact.STEP_SIZES)]
    cached = [row["cached tokens"] for row in rows]
    assert cached == sorted(cached, reverse=True)
    assert cached[0] > cached[-1] > 0
    assert all(row["cached tokens"] % step == 0 for step, row in zip(bench_exact.STEP_SIZES, rows[1:], strict=True))


def test_the_hops_benchmark_counts_every_passage_and_the_same_ones_each_time(tmp_path):
    for folder in ("first", "second"):
        bench_hops.main(["--quick", "--results", str(tmp_path / folder)])
    first, second = rows_of(tmp_path / "first", "hops"), rows_of(tmp_path / "second", "hops")
    assert first == second
    assert [row["call"] for row in first] == list(bench_hops.BEFORE)
    assert all(row["hops"] >= row["files"] > 1 for row in first)


def test_the_policy_benchmark_puts_no_online_policy_above_the_optimum(tmp_path, capsys):
    bench_policies.main(["--quick", "--results", str(tmp_path)])
    document = json.loads((tmp_path / "policies.json").read_text())
    found = {(row["policy"], row["capacity_blocks"]): row["block_hit_ratio"] for row in document["grid"]}
    assert all(found["lru", blocks] <= found["belady", blocks] for name, blocks in found if name == "lru")
    assert max(found.values()) <= max(document["infinite_block_hit_ratio"].values())
    assert document["conclusion"] in capsys.readouterr().out
    assert (tmp_path / "policies.png").stat().st_size > 0
    assert {row["unit"] for row in rows_of(tmp_path, "policies-speed")} == {"block references/s", "s", "us"}


def test_the_windows_benchmark_finds_no_less_by_token_and_no_more_than_without_windows(tmp_path, capsys):
    bench_windows.main(["--quick", "--results", str(tmp_path)])
    rows = rows_of(tmp_path, "windows")
    assert len(rows) == 4
    assert {row["model"] for row in rows} == set(bench_windows.MODELS)
    assert all(row["all %"] <= row["whole %"] <= row["now %"] <= row["bound %"] for row in rows)
    assert rows[-1]["now %"] > 0
    assert bench_windows.conclusion(rows) in capsys.readouterr().out


def test_recorded_traces_are_read_from_the_folder_that_is_given(tmp_path):
    mooncake, agents = (tmp_path / path for path in TRACES.values())
    mooncake.parent.mkdir()
    agents.mkdir(parents=True)
    mooncake.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')
    session = {"block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}
    (agents / "one.json").write_text(json.dumps(session))
    traces = traces_in(tmp_path, quick=False)
    assert [(trace.name, len(trace.requests)) for trace in traces] == [("mooncake", 1), ("coding agents", 1)]


def test_a_folder_without_the_traces_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_policies.main(["--quick", "--traces", str(tmp_path)])
    assert ended.value.code == 2
    assert f"{tmp_path} has no mooncake/conversation_trace.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--traces", "/some/where"], ["--conversations=/some/where"]])
def test_the_recorded_command_names_no_path(monkeypatch, given):
    words = ["python", "-m", "benchmarks.bench_policies", *given, "--quick", "--results", "/else/where"]
    monkeypatch.setattr(sys, "orig_argv", words)
    assert record._command() == "python -m benchmarks.bench_policies --quick"
