"""The benchmark of routers runs in quick mode, and its figures hang together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_routing


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("routing")
    bench_routing.main(["--quick", "--results", str(folder)])
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}


def test_no_router_finds_more_than_the_bounds_and_one_replica_is_the_pooled_cache(
    written: dict[str, dict[str, Any]],
) -> None:
    rows = written["routing"]["rows"]
    assert len(rows) == 3 * 4
    for row in rows:
        assert row["of infinite"] <= 1.0 + 1e-9
        assert row["of pooled"] == 1.0 if row["replicas"] == 1 else row["of pooled"] > 0.2
    by_router = {row["router"]: row["token hits"] for row in rows if row["replicas"] == 8}
    assert by_router["prefix"] > by_router["hash"] > by_router["random"]


def test_the_conclusion_is_computed_from_the_rows(written: dict[str, dict[str, Any]]) -> None:
    (row,) = (row for row in written["routing"]["rows"] if (row["router"], row["replicas"]) == ("prefix", 8))
    assert f"finds {row['of infinite']:.1%} of what one cache without limit does" in written["routing"]["conclusion"]
    is_met = row["of infinite"] >= 0.9 and row["load p95"] <= 1.3
    assert f"({'within' if is_met else 'outside'} the aim" in written["routing"]["conclusion"]


def test_the_parts_of_the_prefix_router_change_where_requests_go(written: dict[str, dict[str, Any]]) -> None:
    rows = {row["parts"]: row["token hits"] for row in written["routing-parts"]["rows"]}
    assert rows["no evening"] >= rows["all"]
    assert len(set(rows.values())) > 1


def test_a_tier_behind_all_replicas_finds_what_was_computed_elsewhere(written: dict[str, dict[str, Any]]) -> None:
    rows = written["routing-shared"]["rows"]
    alone, together = (row for row in rows if row["router"] == "random")
    assert (alone["Gbit/s"], alone["from there"]) == (None, None)
    assert together["token hits"] > alone["token hits"]
    assert together["GiB read"] > 0.0
