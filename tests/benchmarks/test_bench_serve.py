"""bench_serve asks both servers the same, and its figures hang together; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_serve
from benchmarks.bench_serve import OURS, THEIRS, Load, Run
from benchmarks.harness.chat_client import Reply


def row(
    server: str, load: str = "shared", speed: float = 1.0, prefilled: int = 100, most: float | None = None
) -> dict[str, Any]:
    return {
        "model": "m",
        "load": load,
        "users": 16,
        "server": server,
        "by theirs": speed,
        "least": speed,
        "most": most or speed,
        "prefilled tokens": prefilled,
    }


@pytest.mark.slow
def test_the_quick_run_has_a_row_for_each_server_with_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_serve.main(["--quick", "--results", str(tmp_path)])
    document = json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))
    ours, theirs = document["rows"]
    assert [ours["server"], theirs["server"]] == [OURS, THEIRS]
    assert ours["prompt tokens"] == theirs["prompt tokens"] > 2 * 220
    for each in (ours, theirs):
        assert 0 < each["prefilled tokens"] <= each["prompt tokens"]
        assert 0 < each["TTFT ms p50"] <= each["TTFT ms p95"]
        assert each["tokens/s"] > 0
        assert each["peak MB"] >= 0
    assert document["conclusion"] in capsys.readouterr().out


def test_a_run_counts_what_was_not_cached_and_generated_tokens_by_its_seconds() -> None:
    run = Run([Reply(0.1, 100, 60, 8), Reply(0.2, 50, 0, 4)], total_s=3.0, peak_bytes=0)
    assert (run.prefilled_tokens, run.tokens_per_s) == (90, 4.0)


def test_the_conclusion_names_every_load_that_is_slower_and_what_is_prefilled_where_it_is_tight() -> None:
    rows = [row(OURS, speed=3.0), row(THEIRS), row(OURS, "tight", 0.9, 30), row(THEIRS, "tight")]
    said = bench_serve.conclusion(rows)
    assert "slower than mlx_lm.server: m, tight, 16 users (0.90)" in said
    assert "faster in some" not in said
    alike = bench_serve.conclusion([row(OURS, "own", 0.98, most=1.01), row(THEIRS, "own")])
    assert alike.startswith("slower in the median, faster in some turns: m, own, 16 users (0.98; 0.98 to 1.01)")
    assert "m, shared, 16 users: 3.00 times" in said
    assert "m, tight, 16 users: 0.30 of its prefilled tokens" in said
    assert "never slower" in bench_serve.conclusion(rows[:2])


def test_users_share_the_system_prompt_alone_and_say_the_same_to_both_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[dict[str, str]]] = []

    def ask(url: str, messages: list[dict[str, str]], max_tokens: int) -> Reply:
        asked.append([dict(message) for message in messages])
        return Reply(0.0, 1, 0, max_tokens)

    monkeypatch.setattr(bench_serve, "ask", ask)
    load = Load("llama", "growing", 2, system=40, own=30, turns=2)
    for url in ("one", "other"):
        for user in range(2):
            assert len(bench_serve._talk(url, load, user)) == 2
    assert asked[:4] == asked[4:]
    assert [len(messages) for messages in asked[:4]] == [2, 4, 2, 4]
    assert asked[1][:2] == asked[0]
    assert {messages[0]["content"] for messages in asked} == {asked[0][0]["content"]}
    texts = {messages[-1]["content"] for messages in asked[:4]}
    assert len(texts) == 4
    assert {len(text) for text in texts} == {30}
