"""bench_peers: its parts without a server, and one run with mlx_lm.server and ours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_peers
from benchmarks.bench_peers import OURS, THEIRS, Bench, Run, conclusion, row_of, scenarios
from benchmarks.harness import chat_stream
from benchmarks.harness.chat_stream import Answer, ask_stream, read_stream
from benchmarks.harness.peer_servers import GUESTS, PEERS, ROOT, PeerError, PeerProcess, install
from runner.models.demo import cache_home


@pytest.mark.parametrize(
    ("usage", "cached"),
    [({"prompt_tokens_details": {"cached_tokens": 3}}, 3), ({"cached_tokens": 4}, 4), ({"prompt_tokens": 9}, None)],
)
def test_a_stream_gives_its_text_and_what_the_server_reports(usage: dict[str, Any], cached: int | None) -> None:
    deltas = [{"content": ""}, {"reasoning_content": "a"}, {"content": "b"}]
    events = [*({"choices": [{"delta": delta}]} for delta in deltas), {"choices": [], "usage": usage}]
    lines = [b": keep-alive\n", *(b"data: " + json.dumps(event).encode() for event in events), b"data: [DONE]\n"]
    answer = read_stream(lines, 0.0)
    assert (answer.text, answer.cached_tokens, answer.error) == ("ab", cached, None)
    assert 0 < answer.ttft_s <= answer.total_s


def test_a_reply_lasts_until_its_end_even_if_its_last_tokens_have_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(chat_stream.time, "perf_counter", lambda: now_s)

    def lines() -> Iterator[bytes]:
        nonlocal now_s
        for at_s, delta, reason in ((1.0, "a", None), (2.0, "b", None), (5.0, None, "length"), (6.0, None, None)):
            now_s = at_s
            yield b"data: " + json.dumps({"choices": [{"delta": {"content": delta}, "finish_reason": reason}]}).encode()

    answer = read_stream(lines(), 0.0)
    assert (answer.ttft_s, answer.decode_s, answer.total_s) == (1.0, 4.0, 6.0)


def test_failures_are_answers_with_an_error() -> None:
    assert read_stream([b'data: {"error": "no room"}'], 0.0).error == "no room"
    assert "connection" in str(ask_stream("http://127.0.0.1:9", "m", [], 1).error)


def test_no_two_scenarios_share_a_prefix() -> None:
    starts = [scenario.users[0][0][0]["content"] for scenario in scenarios(0.1)]
    assert len(set(starts)) == len(bench_peers.NAMES)


def test_rows_and_conclusion_say_what_is_reported_and_who_wins() -> None:
    answers = [Answer(0.1, 0.2, "a", 100, None, 8), Answer(0.3, 0.4, "b", 100, 90, 8), Answer(error="HTTP 500")]
    run = Run([answers], total_s=2.0, peak_bytes=5_000_000)
    ours = row_of("edit", OURS, run, reports=True, equal="1 of 2")
    assert (ours["requests"], ours["failed"], ours["evaluated tokens"], ours["tokens/s"]) == (3, 1, 110, 8.0)
    theirs = row_of("edit", THEIRS, run, reports=False, equal=None) | {"TTFT ms p50": 4.0}
    assert theirs["evaluated tokens"] is None
    assert (
        "TTFT ms p50: radixcache is best in 0 of 1 scenarios, but not in edit (mlx_lm.server 4, radixcache 200)."
        in conclusion([ours, theirs])
    )


def test_a_prompt_that_is_reported_as_cached_counts_its_last_token_as_evaluated() -> None:
    run = Run([[Answer(0.1, 0.2, "a", 100, 100, 8), Answer(0.1, 0.2, "a", 100, 99, 8)]], total_s=1.0, peak_bytes=1)
    assert row_of("regenerate", OURS, run, reports=True, equal=None)["evaluated tokens"] == 2


def test_a_server_that_does_not_start_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PeerProcess) -> PeerProcess:
        raise PeerError("no such layer")

    monkeypatch.setattr(PeerProcess, "__enter__", broken)
    bench = Bench({"vmlx": (PEERS["vmlx"], Path("python"))}, "tiny", tmp_path)
    assert bench.measure(scenarios(0.01)[:1]) == []
    assert bench.left_out == [{"server": "vmlx", "scenarios": "all on the main model", "reason": "no such layer"}]


@pytest.mark.nightly
def test_the_peers_benchmark_asks_mlx_lm_server_and_ours_the_same(tmp_path: Path) -> None:
    bench_peers.main(["--quick", "--results", str(tmp_path)])
    ours, theirs = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))["rows"]
    assert (ours["server"], theirs["server"]) == (OURS, THEIRS)
    for row in (ours, theirs):
        assert (row["failed"], row["equal"]) == (0, "2 of 2")
        assert 0 < row["evaluated tokens"] < row["prompt tokens"] == ours["prompt tokens"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", GUESTS)
def test_a_guest_with_a_prefix_cache_answers_as_without_and_evaluates_no_more(name: str, tmp_path: Path) -> None:
    servers = f"{name},{GUESTS[name].name}"
    bench_peers.main(["--quick", "--guests", "--servers", servers, "--results", str(tmp_path)])
    own, ours = json.loads((tmp_path / "guests.json").read_text(encoding="utf-8"))["rows"]
    assert (ours["failed"], ours["equal"]) == (0, "2 of 2")
    if own["evaluated tokens"] is not None:  # vllm-mlx does not report them.
        assert 0 < ours["evaluated tokens"] <= own["evaluated tokens"] < own["prompt tokens"]


@pytest.mark.nightly
def test_the_keys_of_pictures_in_mlx_vlm_tell_layouts_apart() -> None:
    # A blank page upright and the same page lying have equal patches, and as many tokens.
    code = f"""
import importlib.util, mlx.core as mx
spec = importlib.util.spec_from_file_location("guest", {str(ROOT / "examples" / "guests" / "mlx_vlm.py")!r})
guest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guest)
guest.gpu_embed = lambda self, inputs, images, key: key % guest.HASHES
text = {{"input_ids": mx.zeros((1, 9), mx.int32), "attention_mask": mx.ones((1, 9))}}
def key(*grid):
    picture = {{"pixel_values": mx.ones((32, 6)), "image_grid_thw": mx.array([grid])}}
    return guest.embed(None, {{**text, **picture}}, ["page"], 7 * guest.HASHES + 5)
print(key(1, 2, 16) == key(1, 2, 16), key(1, 2, 16) == key(1, 16, 2), guest.embed(None, text, None, 7 * guest.HASHES))
"""
    guest = GUESTS["mlx-vlm"]
    python = install(guest, cache_home() / "peers")
    ended = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["True", "False", "0"], ended.stderr
