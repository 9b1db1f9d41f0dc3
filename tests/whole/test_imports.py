"""The parts that promise to need no MLX are imported in a fresh interpreter that would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("mlx", "mlx_lm", "transformers", "prometheus_client", "runner")


def _loaded_by(statement: str) -> set[str]:
    """Top-level packages in memory after a statement, in an interpreter of its own."""
    code = f"{statement}; import sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    # -P: nothing but the repository on the path, whatever the working directory is.
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import policies, radixcache.tree.radix_tree, radixcache.ledger",
        "import radixcache",
        "import radixcache.cells.table; from radixcache import CacheFullError",
        "from radixcache import POLICIES, CostModel, Entry, EvictionPolicy, Ledger, RadixTree, RadixCacheError",
        "import radixcache.stores.files; from radixcache import DiskStore, StoreError",
        "import radixcache.observe.page, radixcache.observe.stats; from radixcache import CacheStats, StatsSnapshot",
        "import radixcache.errors, radixcache.lock, radixcache.tokens",
    ],
)
def test_the_parts_that_need_no_mlx_do_not_import_it(statement: str) -> None:
    assert _loaded_by(statement).isdisjoint(HEAVY)


def test_policies_import_nothing_of_radixcache() -> None:
    assert _loaded_by("import policies").isdisjoint({"radixcache", "runner"})


def test_all_of_radixcache_imports_mlx_and_nothing_of_runner() -> None:
    loaded = _loaded_by("from radixcache import *")
    assert {"mlx", "mlx_lm"} <= loaded
    assert "runner" not in loaded


def test_reading_a_trace_and_its_curve_imports_no_mlx() -> None:
    modules = (
        "traces.synthesis",
        "traces.trace_reader",
        "simulate.curve",
        "simulate.advice",
        "models.footprint",
    )
    loaded = _loaded_by(f"import radixcache.observe.trace, {', '.join(f'runner.{name}' for name in modules)}")
    assert loaded.isdisjoint({"mlx", "mlx_lm", "transformers", "matplotlib"})
