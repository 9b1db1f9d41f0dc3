"""bench_redis measures what it says; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_redis
from tests.stores.redis_server import program_named


def test_the_quick_run_has_a_row_for_each_size_question_and_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program_named("redis-server")
    bench_redis.main(["--quick", "--results", str(tmp_path)])
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    assert [row["blocks"] for row in found["redis"]["rows"]] == [4]
    assert [row["number"] for row in found["redis-keys"]["rows"]] == [1000, 1000, 200, 200]
    even = found["redis-break-even"]["rows"]
    assert len(even) == len(bench_redis.TOKEN_BYTES) * len(bench_redis.LINKS_GBIT)
    for row in even:
        assert row["tokens/s"] * row["KiB/token"] <= row["link Gbit/s"] * 1e9 / 8 / 1024 + 1e-6
    assert found["redis-break-even"]["conclusion"] in capsys.readouterr().out
