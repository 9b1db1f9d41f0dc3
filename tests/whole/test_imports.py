"""The parts that promise to need no MLX are imported in a fresh interpreter that would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = ("fastapi", "llguidance", "prometheus_client", "uvicorn")
HEAVY = ("mlx", "mlx_lm", "transformers", "runner", *SERVER)


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


def test_the_parts_that_need_no_mlx_do_not_import_it() -> None:
    modules = [
        *("tree.radix_tree", "ledger", "cells.table", "stores.files", "observe.page", "observe.stats", "observe.trace"),
        *("errors", "tokens", "chat"),
    ]
    names = "POLICIES, CacheFullError, CacheStats, CostModel, DiskStore, Entry, EvictionPolicy, Ledger, RadixCacheError"
    public = f"from radixcache import {names}, RadixTree, StatsSnapshot, StoreError"
    statements = [*(f"import radixcache.{name}" for name in modules), public]
    assert _loaded_by("; ".join(statements)).isdisjoint(HEAVY)


def test_policies_import_nothing_of_radixcache() -> None:
    assert _loaded_by("import policies").isdisjoint({"radixcache", "runner"})


def test_all_of_radixcache_imports_mlx_and_nothing_of_runner_or_the_server() -> None:
    loaded = _loaded_by("from radixcache import *")
    assert {"mlx", "mlx_lm"} <= loaded
    assert loaded.isdisjoint({"runner", *SERVER})


def test_the_command_line_imports_nothing_of_the_server() -> None:
    assert _loaded_by("import runner.cli").isdisjoint({"mlx", *SERVER})


def test_reading_a_trace_and_its_curve_imports_no_mlx() -> None:
    modules = ("traces.synthesis", "traces.trace_reader", "simulate.curve", "simulate.advice", "models")
    loaded = _loaded_by(f"import {', '.join(f'runner.{name}' for name in modules)}")
    assert loaded.isdisjoint({"mlx", "mlx_lm", "transformers", "matplotlib"})
