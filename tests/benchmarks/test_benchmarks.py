"""The benchmarks run, and what they write has the shape that readers of it rely on. Figures are not looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    bench_decode,
    bench_explain,
    bench_first_token,
    bench_growth,
    bench_kernels,
    bench_memory,
    bench_paging,
    bench_parallel,
    bench_restore,
    bench_verify,
)
from benchmarks.harness.record import Spread, in_turns, publish, rotated

ORIGIN = {"benchmark", "question", "repeats", "rows", "machine", "versions", "date", "commit", "command"}


def _run(main: Callable[[Sequence[str]], None], folder: Path) -> dict[str, dict[str, Any]]:
    """Run a benchmark with its smallest sizes; returns what it wrote, by name."""
    main(["--quick", "--results", str(folder)])
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}


def test_a_spread_is_the_median_between_the_least_and_the_most() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(median=3.0, least=1.0, most=10.0)


def test_measurements_in_turns_come_in_pairs_without_the_first_of_each() -> None:
    calls: list[str] = []

    def measurement(name: str) -> Callable[[], int]:
        return lambda: calls.append(name) or len(calls)  # type: ignore[func-returns-value]

    pairs = in_turns(measurement("a"), measurement("b"), 2)

    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert pairs == [(4, 3), (5, 6)]


def test_rotated_items_begin_with_another_one_each_time() -> None:
    assert [rotated("abc", by) for by in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_what_is_published_says_where_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish("some", "How much?", [{"what": "this", "MB": 1.5}], folder=tmp_path / "new", conclusion="This much.", aim=2)

    document = json.loads((tmp_path / "new" / "some.json").read_text(encoding="utf-8"))
    assert document.keys() == ORIGIN | {"conclusion", "aim"}
    assert document["rows"] == [{"what": "this", "MB": 1.5}]
    assert "1.5" in (printed := capsys.readouterr().out)
    assert printed.endswith("This much.\n")


def test_restore_has_a_row_for_each_model_size_and_request(tmp_path: Path) -> None:
    found = _run(bench_restore.main, tmp_path)

    rows = found.pop("restore")["rows"]
    assert not found
    assert len(rows) == 3 * 2 * len(bench_restore.QUICK_SIZES)
    assert {row["model"].partition(":")[0] for row in rows} == {"kv", "sliding", "hybrid"}
    for row in rows:
        assert row["hit ms"] > row["begin ms"] > 0, row
        assert (row["paged in MB"] > 0) == (row["request"] == "switch"), row
        assert (row["uncut"] is None) == row["model"].startswith("kv"), row


def test_paging_copies_the_bytes_it_says(tmp_path: Path) -> None:
    found = _run(bench_paging.main, tmp_path)

    rows = found.pop("paging")["rows"]
    assert not found
    assert [(row["page"], row["tokens"]) for row in rows] == [("out", 100), ("in", 100), ("out", 600), ("in", 600)]
    for row in rows:
        assert row["MB"] == pytest.approx(row["tokens"] * bench_paging.TOKEN_BYTES / 1e6), row


@pytest.mark.slow
def test_buffers_that_were_told_the_length_of_the_reply_never_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three layers, each of which counts the same growths as thirty would.
    monkeypatch.setattr(bench_growth, "TOKEN_BYTES", bench_growth.TOKEN_BYTES // bench_growth.LAYERS * 3)
    monkeypatch.setattr(bench_growth, "LAYERS", 3)
    found = _run(bench_growth.main, tmp_path)

    decode = {row["buffers"]: row for row in found.pop("growth")["rows"] if row["what"] == "decode"}
    assert not found
    assert decode["told"]["growths"] == decode["told"]["copied MB"] == 0
    assert decode["mlx-lm"]["growths"] >= decode["session"]["growths"] > 0
    # mlx-lm's buffers: 16 tokens, at 256 and at 512.
    assert decode["mlx-lm"]["copied MB"] == pytest.approx((256 + 512) * bench_growth.TOKEN_BYTES / 1e6)


@pytest.mark.slow
def test_memory_is_what_the_caches_say_and_not_below_the_least(tmp_path: Path) -> None:
    found = _run(bench_memory.main, tmp_path)

    held, kept = found.pop("memory")["rows"], found.pop("memory-pressure")["rows"]
    assert not found
    assert [(row["model"], row["users"]) for row in held] == [(k, u) for k in bench_memory.KINDS for u in (1, 2)]
    for row in held:
        assert row["radix MB"] == pytest.approx(row["radix says MB"], rel=0.1), row
        assert row["radix MB"] >= row["least MB"], row
        assert row["radix index MB"] > 0, row
    for row in kept:
        assert 0 <= row["radix hit"] <= row["possible"], row
        assert 0 <= row["mlx-lm hit"] <= row["possible"], row


def test_explain_has_a_row_for_each_prompt_and_says_what_it_found(tmp_path: Path) -> None:
    found = _run(bench_explain.main, tmp_path)

    rows = found.pop("explain")["rows"]
    kept = found.pop("explain-keeping")["rows"]
    assert not found
    assert {(row["layers"], row["prompt"]) for row in rows} == {
        (layers, prompt) for layers in ("span", "point") for prompt in ("stored", "diverged", "evicted", "hint")
    }
    for row in rows:
        assert row["nodes"] >= 10, row
        assert row["gaps"] >= 1, row
        assert row["evicted pieces"] >= 10, row
        assert row["hints"] > 0 or row["prompt"] != "hint", row
        assert (row["resumable"] == 0) == (row["prompt"] == "hint"), row
    assert {row["request"] for row in kept} == {"next turn", "switch", "miss", "full budget"}
    assert all(row["events/request"] >= 2 for row in kept)
    for row in kept:
        assert row["request us"] >= row["begin and close us"] > 0, row
        assert row["+- us"] > 0, row
        assert row["of request %"] == pytest.approx(100 * row["both add us"] / row["request us"]), row
        assert row["of begin and close %"] == pytest.approx(100 * row["both add us"] / row["begin and close us"]), row


@pytest.mark.parametrize(("explain_ms", "verdict"), [(0.2, "under 1"), (1.5, "NOT under 1")])
def test_the_conclusion_of_explain_says_whether_the_aim_is_met(explain_ms: float, verdict: str) -> None:
    row = {"nodes": 10_000, "prompt": "stored", "layers": "span", "explain ms": explain_ms, "with text ms": 2.0}
    assert f"; {verdict})" in bench_explain.asking([row])


def test_the_conclusion_of_keeping_counts_who_is_under_the_aim_of_each_of_the_two() -> None:
    rows = [
        {
            "model": "kv x 4",
            "request": name,
            "begin and close us": 100.0,
            "request us": 500.0,
            "both add us": us,
            "+- us": 2.0,
            "of request %": us / 5,
            "of begin and close %": us,
        }
        for name, us in (("next turn", 1.0), ("miss", 9.0), ("switch", 12.0))
    ]
    said = bench_explain.keeping(rows)
    assert "are 2.4 % at most (switch with kv x 4), less than 2 % in 2 of 3 kinds of requests, in 1 also" in said
    assert "alone 12.0 % at most (switch with kv x 4), less than 2 % in 1 of 3 kinds of requests, in 0 also" in said


@pytest.mark.slow
def test_every_resumed_request_of_the_checked_side_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_verify, "SYSTEM_TOKENS", 60)
    monkeypatch.setattr(bench_verify, "MESSAGE_TOKENS", 20)
    found = _run(bench_verify.main, tmp_path)

    rows = found.pop("verify")["rows"]
    assert not found
    assert {row["requests"] for row in rows} == set(bench_verify.REPLIES)
    for row in rows:
        assert row["checked"] == 2 * (bench_verify.USERS * bench_verify.TURNS - 1), row
        assert 0 < row["error"] < 1e-3, row
        assert row["checked request ms"] > 0, row
    assert "adds" in capsys.readouterr().out


def test_users_at_a_time_have_a_row_for_each_way_and_hold_a_common_beginning_once(tmp_path: Path) -> None:
    found = _run(bench_parallel.main, tmp_path)

    rows = found.pop("parallel")["rows"]
    assert not found
    (load,) = bench_parallel.QUICK
    assert [(row["prompt"], row["users"], row["way"]) for row in rows] == [
        (prompt, users, way) for prompt in ("shared", "own") for users in load.users for way in bench_parallel.WAYS
    ]
    assert {row["repeats"] for row in rows} == {load.repeats}
    many = max(load.users)
    held = {(row["prompt"], row["way"]): row["held MB"] for row in rows if row["users"] == many}
    assert held["shared", "tree"] < held["own", "tree"]
    assert held["shared", "mlx-lm"] == held["own", "mlx-lm"]


@pytest.mark.parametrize(
    ("speed", "verdict"), [(1.5, "(at least 1.5) and take 0.20 of"), (1.4, "(NOT at least 1.5) and take 0.20 of")]
)
def test_the_conclusion_of_users_at_a_time_says_whether_the_aims_are_met(speed: float, verdict: str) -> None:
    def row(way: str, tokens_s: float, held_mb: float) -> dict[str, Any]:
        return {"model": "tiny", "prompt": "shared", "users": 8, "way": way, "tokens/s": tokens_s, "held MB": held_mb}

    assert verdict in bench_parallel.conclusion([row("tree", speed, 0.2), row("mlx-lm", 1.0, 1.0)])


def test_decoding_together_is_measured_on_both_sides_and_says_which_aims_are_met(tmp_path: Path) -> None:
    found = _run(bench_decode.main, tmp_path)

    (row,) = found.pop("decode")["rows"]
    assert not found
    assert (row["model"], row["shared"], row["users"]) == ("tiny", "1 x 300", 3)
    assert all(
        row[name] > 0 for name in ("decode", "step ms", "join ms", "mlx-lm join ms", "leave ms", "mlx-lm leave ms")
    )
    assert row["mlx-lm MB"] > 0 < row["held MB"]
    for decode, said in (
        (0.96, "1 of 1 at their aim; the closest: tiny, 1 x 300, 3 users: 0.96 of 0.95."),
        (0.9, "not so"),
    ):
        assert said in bench_decode.conclusion([row | {"decode": decode}])


def test_a_first_token_is_held_beside_the_forward_pass_of_what_is_not_in_the_tree(tmp_path: Path) -> None:
    found = _run(bench_first_token.main, tmp_path)

    (row,) = found.pop("first-token")["rows"]
    assert not found
    assert (row["model"], row["cached"], row["uncached"]) == ("tiny", 300, 32)
    assert row["first token ms"] > 0 < row["forward ms"]
    for ratio, said in ((1.04, "1 of 1 within 1.05"), (1.06, "0 of 1 within 1.05")):
        assert said in bench_first_token.conclusion([row | {"by forward": ratio}])


def test_each_segment_takes_kernels_and_views_take_none(tmp_path: Path) -> None:
    rows = _run(bench_kernels.main, tmp_path)["kernels"]["rows"]

    kernels = {row["way"]: row["kernels"] for row in rows}
    # Two products, a maximum, a difference, an exponential and a sum are a segment's; the rest brings parts together.
    assert kernels["two levels"] - kernels["one level"] == kernels["one level"] - kernels["nothing shared"] == 9
    assert kernels["four groups"] > kernels["two levels"]
    assert kernels["one row alone, one level"] < kernels["one level"]
