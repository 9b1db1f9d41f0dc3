"""docs/many-machines.md: its commands run, and its figures are those of the benchmark and of the models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from radixcache.paging.rates import SURE
from runner.models.sizes import model_bytes
from tests.simulate.made import mooncake_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "many-machines.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    radixcache (.+)$", PAGE, re.MULTILINE)
#: SmolLM2-135M.
SMALL = {
    "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 1000, "rms_norm_eps": 1e-5, "num_hidden_layers": 30,
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip


def table(heading: str) -> list[list[str]]:
    """The first table below a heading, without its header."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def published(name: str) -> list[dict[str, Any]]:
    document = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def percent(ratio: float) -> str:
    return f"{ratio:.1%}".replace("%", " %")


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    mooncake_file(tmp_path / "trace.jsonl", [[1, 2]] * 4)
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code, out, _ = command(*line.replace("--jobs 2", "--jobs 1").split())
    assert (code, "prefix" in out) == (0, True)
    assert len(COMMANDS) >= 3


def test_what_routers_find_is_what_the_benchmark_published() -> None:
    found = {(row["trace"], row["router"], row["replicas"]): row["hits / infinite"] for row in published("routing")}
    rows = table("## What a router finds")
    assert len(rows) * 6 == len(found)
    for trace, router, *cells in rows:
        assert cells == [percent(found[trace, router, count]) for count in (1, 2, 4, 8, 16, 64)]


def test_waiting_and_load_at_eight_replicas_are_what_the_benchmark_published() -> None:
    found = {(row["trace"], row["router"]): row for row in published("routing") if row["replicas"] == 8}
    rows = table("### Waiting and load at 8 replicas")
    assert {(trace, router) for trace, router, *_ in rows} == found.keys()
    for trace, router, share, *waits, p95, most in rows:
        row = found[trace, router]
        assert [share, p95, most] == [
            percent(row["hits / infinite"]),
            f"{row['load p95']:.2f}",
            f"{row['load max']:.2f}",
        ]
        for shown, exact in zip(waits, (row["TTFT s p50"], row["TTFT s p95"], row["TTFT s p99"]), strict=True):
            assert float(shown.removesuffix(" s").replace(",", "")) == pytest.approx(exact, rel=0.02, abs=0.05)


def test_what_a_tier_behind_all_brings_is_what_the_benchmark_published() -> None:
    rows = table("### A shared tier behind 8 replicas")
    found = published("routing-shared")
    assert [cells[:1] + cells[2:3] for cells in rows] == [
        [each["router"], percent(each["hits / infinite"])] for each in found
    ]
    read_gib = [each["GiB read"] for each in found]
    assert [cells[5] for cells in rows] == ["" if each is None else f"{each:,.0f}" for each in read_gib]


def test_the_prefill_up_to_which_a_link_is_worth_it_follows_from_the_bytes_of_a_token() -> None:
    for name, token_bytes, *cells in table("## Fetch or prefill?"):
        nbytes = int(token_bytes.replace(",", ""))
        worth = [SURE * gbit_per_s * 1e9 / 8 / nbytes for gbit_per_s in (1, 10, 25, 100)]
        assert cells == [f"{round(each):,}" for each in worth]
        assert name != "SmolLM2-135M" or nbytes == model_bytes(SMALL).token_bytes
