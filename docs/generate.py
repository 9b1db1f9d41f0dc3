"""Write the generated pages: `python docs/generate.py`.

options.md       every command with its options, and every metric, from the code
benchmarks.md    behind the marker: every published result, from benchmarks/results, and the docstrings of benchmarks
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

import runner  # noqa: F401  loads OpenBLAS before MLX
from radixcache import PrefixCache
from radixcache.counters import Metric, metrics_of
from radixcache.stores.store import StoreStats
from runner.cli import app
from runner.models.tiny import tiny_model
from runner.serve.metrics import COUNTERS, HISTOGRAMS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
MARKER = "<!-- figures: python docs/generate.py -->\n"
#: Longer tables stay in their JSON.
MOST_ROWS = 16
#: Tables that are shown whole, however long.
WHOLE = {"peers"}

Row = tuple[str, ...]


def pages() -> dict[Path, str]:
    benchmarks = DOCS / "benchmarks.md"
    written, marker, _ = benchmarks.read_text(encoding="utf-8").partition(MARKER)
    return {DOCS / "options.md": options(), benchmarks: written + marker + figures()}


def options() -> str:
    lines = ["# Options and metrics", "", "Made from the code by `python docs/generate.py`.", "", "## Options"]
    for name, command in sorted(_commands(typer.main.get_command(app), "radixcache")):
        summary = inspect.cleandoc(command.help or "").partition("\n\n")[0].replace("\n", " ")
        rows = [row for row in map(_option, command.params) if row]
        table = ["", *_table(("option", "what it does", "default"), rows)] if rows else []
        lines += ["", f"### {name}", "", summary, *table]
    with PrefixCache(tiny_model("llama")) as cache:
        of_cache = cache.snapshot_stats().metrics
    of_stores = metrics_of(
        StoreStats(**{each.name: {} if each.metadata["label"] else 0 for each in fields(StoreStats)}),
        "radixcache_store_",
    )
    lines += ["", "## Metrics", "", "`GET /metrics` has them in Prometheus' text format.", "", "### The server", ""]
    lines += _table(("metric", "what it counts", "labels"), _of_server())
    lines += ["", "### Each cache", "", "Labels `model`, `adapter` and `draft` say which cache.", ""]
    lines += _table(("metric", "what it counts", "unit"), map(_metric, of_cache))
    lines += ["", "### Stores", "", "The label `tier` says which store.", ""]
    lines += _table(("metric", "what it counts", "unit"), map(_metric, of_stores))
    return "\n".join(lines) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Names and commands that have no commands below them."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
        return
    for each, child in below.items():
        yield from _commands(child, f"{name} {each}")


def _option(option: Any) -> Row | None:
    if option.name == "help" or getattr(option, "hidden", False):
        return None
    names = [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else [option.name]
    default = "" if option.default in (None, False, (), []) or callable(option.default) else f"`{option.default}`"
    shown = getattr(option, "show_default", "")
    default = shown if isinstance(shown, str) and shown else default
    about, _, said = (getattr(option, "help", None) or "").partition("  [default: ")
    return ", ".join(f"`{name}`" for name in names), about, said.removesuffix("]") or default


def _of_server() -> Iterator[Row]:
    for name, (about, labels) in COUNTERS.items():
        yield f"`radixcache_serve_{name}_total`", about, ", ".join(labels)
    for name, (about, _) in HISTOGRAMS.items():
        yield f"`radixcache_serve_{name}_seconds`", about, ""


def _metric(metric: Metric) -> Row:
    return f"`{metric.name}`", metric.help, metric.unit


def _table(heading: Row, rows: Iterable[Row]) -> list[str]:
    lines = [heading, tuple("---" for _ in heading), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in line) + " |" for line in lines]


def figures() -> str:
    """A part for each benchmark, with its docstring, and in it a part for each of its results."""
    results = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    shown = {path: result for path, result in results.items() if "question" in result}  # the replay stands above
    lines: list[str] = []
    for module in sorted(set(map(_module, shown.values()))):
        code = (DOCS.parent / "benchmarks" / f"{module}.py").read_text(encoding="utf-8")
        lines += ["", f"### {module}", "", ast.get_docstring(ast.parse(code)) or ""]
        for path, result in shown.items():
            if _module(result) == module:
                lines += _result(path, result)
    return "\n".join(lines) + "\n"


def _module(result: dict[str, Any]) -> str:
    """The benchmark of a result, from `python -m benchmarks.bench_NAME --options`."""
    module: str = result["command"].partition("benchmarks.")[2].partition(" ")[0]
    return module


def _result(path: Path, result: dict[str, Any]) -> list[str]:
    """Title, command, date, machine and versions; the rows of a short table; the conclusion."""
    machine, versions = result["machine"], result["versions"]
    device = machine["device"] or f"{machine['processor']}, {machine['logical_cores']} cores"
    made = [f"`{result['command']}`", result["date"][:10], device, f"MLX {versions['mlx']}", f"`{path.name}`"]
    lines = ["", f"#### {result['question']}", "", ", ".join(made) + ".", ""]
    rows = result["rows"]
    if len(rows) <= MOST_ROWS or path.stem in WHOLE:
        lines += [*_table(tuple(rows[0]), (tuple(map(_cell, row.values())) for row in rows)), ""]
    return lines + result.get("conclusion", "").splitlines()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Write the pages; with --check, exit with 1 where one is not what the code makes."""
    stale = [path for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit("".join(f"{path} is stale: run python docs/generate.py\n" for path in stale) or None)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
