"""bench_peers: its parts without a server, and one run with mlx_lm.server and ours."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_peers
from benchmarks.bench_peers import OURS, THEIRS, Bench, Run, conclusion, row_of, scenarios
from benchmarks.harness.chat_stream import Answer, ask_stream, cached_tokens, read_stream
from benchmarks.harness.peer_servers import PEERS, PeerError, PeerProcess


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n"


def piece(**delta: str) -> bytes:
    return event(choices=[{"delta": delta}])


def test_a_stream_is_read_from_its_first_text_to_its_usage() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}}
    began_s = time.perf_counter()

    def lines() -> Any:
        yield from (b": keep-alive\n", piece(role="assistant", content=""))
        time.sleep(0.05)
        yield from (piece(reasoning_content="a"), b"\n", piece(content="b"))
        yield from (event(choices=[], usage=usage), b"data: [DONE]\n")

    answer = read_stream(lines(), began_s)
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == ("ab", 9, 7, 2)
    assert 0.05 <= answer.ttft_s <= answer.total_s
    assert answer.error is None


def test_an_error_in_a_stream_and_a_server_that_is_not_there_are_answers_with_an_error() -> None:
    assert read_stream([event(error="no room")], 0.0).error == "no room"
    assert "connection" in str(ask_stream("http://127.0.0.1:9", "m", [], 1).error)


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 3}}, 3),
        ({"prompt_tokens_details": None, "cached_tokens": 4}, 4),
        ({"input_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens": 9}, None),
    ],
)
def test_cached_tokens_are_found_wherever_a_server_puts_them(usage: dict[str, Any], found: int | None) -> None:
    assert cached_tokens(usage) == found


def test_no_two_scenarios_share_a_prefix_and_users_of_one_do() -> None:
    made = scenarios(0.1)
    starts = [scenario.users[0][0][0]["content"] for scenario in made]
    assert len(set(starts)) == len(made) == len(bench_peers.NAMES)
    by_name = {scenario.name: scenario for scenario in made}
    assert {prompts[0][0]["content"] for prompts in by_name["shared"].users} == {starts[0]}
    growing = by_name["growing"].users[0]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(growing))
    first, edited, _ = by_name["edit"].users[0]
    assert [a == b for a, b in zip(first, edited, strict=True)] == [True] * 4 + [False] + [True] * 3
    assert by_name["restart"].before[0] == by_name["restart"].users[0][0]


def test_a_row_counts_what_the_server_reports_and_leaves_empty_what_it_does_not() -> None:
    answers = [
        Answer(0.1, 0.2, "a", 100, None, 8),
        Answer(0.3, 0.4, "b", 100, 90, 8),
        Answer(error="HTTP 500"),
    ]
    run = Run([answers], total_s=2.0, peak_bytes=5_000_000)
    row = row_of("shared", "some", run, reports=True, equal="1 of 2")
    assert (row["requests"], row["failed"], row["prompt tokens"], row["evaluated tokens"]) == (3, 1, 200, 110)
    assert (row["TTFT ms p50"], row["tokens/s"], row["peak MB"]) == (pytest.approx(200), 8.0, 5.0)
    assert row_of("shared", "some", run, reports=False, equal=None)["evaluated tokens"] is None


def test_the_conclusion_names_the_scenarios_that_another_server_wins() -> None:
    def row(server: str, ttft_ms: float, evaluated: int | None) -> dict[str, Any]:
        return {
            **{"scenario": "edit", "server": server, "TTFT ms p50": ttft_ms, "evaluated tokens": evaluated},
            **{"tokens/s": 1.0, "peak MB": 1.0},
        }

    said = conclusion([row(OURS, 9.0, 5), row(THEIRS, 4.0, None)])
    assert "TTFT ms p50: best in 0 of 1; not in edit (mlx_lm.server 4, ours 9)" in said
    assert "tokens/s: best in 1 of 1" in said
    assert "evaluated" not in said


def test_a_server_that_does_not_start_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PeerProcess) -> PeerProcess:
        raise PeerError("it does not load this model")

    monkeypatch.setattr(PeerProcess, "__enter__", broken)
    bench = Bench({"vmlx": (PEERS["vmlx"], Path("python"))}, "tiny", tmp_path)
    assert bench.measure(scenarios(0.01)[:1]) == []
    assert bench.left_out == [
        {"server": "vmlx", "scenarios": "all on the main model", "reason": "it does not load this model"}
    ]


def test_every_server_has_its_cache_on_or_off_and_its_disk_only_where_asked() -> None:
    values = {"model": "M", "port": "1", "disk": "D", "bytes": "2", "mib": "3"}
    for peer in PEERS.values():
        states = {"on": (True, False), "off": (False, False), "disk": (True, True)}
        started = {
            name: (
                peer.words(Path("venv/bin/python"), values, is_cached=is_cached, is_on_disk=is_on_disk),
                peer.environment(values, is_cached=is_cached, is_on_disk=is_on_disk),
            )
            for name, (is_cached, is_on_disk) in states.items()
        }
        assert started["on"] != started["off"] or peer.clear, peer.name
        assert all("D" not in (*words, *environment.values()) for words, environment in (started["on"],)), peer.name
        assert started["on"][0][0].startswith("venv/bin/"), peer.name


@pytest.mark.slow
def test_the_peers_benchmark_asks_mlx_lm_server_and_ours_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_peers.main(["--quick", "--results", str(tmp_path), "--json", str(tmp_path / "copy.json")])
    document = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))
    assert document == json.loads((tmp_path / "copy.json").read_text(encoding="utf-8"))
    ours, theirs = document["rows"]
    assert (ours["server"], theirs["server"]) == (OURS, THEIRS)
    for row in (ours, theirs):
        assert (row["scenario"], row["requests"], row["failed"], row["equal"]) == ("shared", 8, 0, "2 of 2")
        assert 0 < row["evaluated tokens"] < row["prompt tokens"]
        assert row["peak MB"] > 0 < row["tokens/s"]
    assert (ours["prompt tokens"], document["left_out"]) == (theirs["prompt tokens"], [])
    assert document["servers"][THEIRS].keys() >= {"mlx", "mlx-lm"}
    assert document["conclusion"] in capsys.readouterr().out
