"""bench_disk measures what it says, and counts right; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import bench_disk
from benchmarks.harness.stored_state import Filler, SlowStore, fill, forget, opened
from radixcache import PrefixCache
from runner.models.tiny import tiny_model
from tests.prompts import tokens


def test_the_quick_run_has_a_row_for_each_copy_speed_and_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_disk.main(["--quick", "--results", str(tmp_path), "--folder", str(tmp_path)])
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    rows = {name: document["rows"] for name, document in found.items()}
    assert [(row["model"], row["tokens"]) for row in rows["disk"]] == list(bench_disk.QUICK_SIZES)
    for row in rows["disk"]:
        assert row["MB"] > 0
        assert row["begin ms"] > 0 < row["prefill ms"]
        assert row["page cache"] in ("cold", "warm")
    assert {row["number"] for row in rows["disk-folder"]} == {200, 20}
    for row in rows["disk-choices"]:
        assert row["wrong"] <= row["were read"] <= row["requests"] - row["missed"]
    assert [(row["write on"], row["request"]) for row in rows["disk-requests"]] == [
        (write_on, request) for write_on in ("close", "eviction") for request in ("turn", "hit", "miss", "misses")
    ]
    assert found["disk-requests"]["conclusion"] in capsys.readouterr().out
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"] * 4


def test_the_conclusion_counts_who_is_at_the_aims_and_names_the_worst() -> None:
    copies = [
        {"model": "kv", "tokens": length, "page cache": "cold", "get of plain": ratio}
        for length, ratio in ((512, 0.6), (32000, 0.9))
    ]
    choices = [{"requests": 10, "wrong": 1, "missed": 2}] * 2
    requests = [
        {"model": "kv", "write on": "close", "request": name, "ratio": ratio}
        for name, ratio in (("hit", 1), ("miss", 1.05))
    ]
    said = bench_disk.conclusion(copies, choices, requests)
    assert "page cache cold: 1 of 2 at least 0.7, at worst 0.60 (kv, 512 tokens)" in said
    assert "Of 20 requests" in said
    assert "2 read what took more than 10% longer, and 4 prefilled it so" in said
    assert "1 of 2 within 1.02, at worst 1.050 (kv, close, miss)" in said


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2"])
def test_noise_is_stored_and_read_as_the_models_own_state(kind: str, tmp_path: Path) -> None:
    model, prompt = tiny_model(kind), tokens(1, 600)
    files = []
    for name, writer in (("model", model), ("noise", Filler(model))):
        with opened(tmp_path / name) as store, PrefixCache(model, store=store) as cache:
            fill(cache, writer, prompt).close()
            cache.flush()
            files.append({path.name: path.stat().st_size for path in (tmp_path / name).glob("??/*")})
            cache.clear()
            forget(sorted((tmp_path / name).glob("??/*")))
            assert len(cache.fetch([*prompt, 1])[1]) == 1
    assert files[0] == files[1]


def test_a_slow_store_gives_what_the_store_has(tmp_path: Path) -> None:
    model, prompt = tiny_model("llama"), tokens(1, 90)
    with opened(tmp_path) as store, PrefixCache(model, store=store) as cache:
        fill(cache, model, prompt).close()
    slow: Any = opened(tmp_path, SlowStore)
    slow.bytes_per_s = 1e9
    with slow, PrefixCache(model, store=slow) as cache, cache.begin(prompt) as session:
        session.prefill(model)
        logits = session.step(model, prompt[-1:])
        assert session.cached_tokens == 89
    cold = model(mx.array(prompt)[None])
    assert np.allclose(np.array(logits[0, -1]), np.array(cold[0, -1]), atol=1e-4)
