"""Write the generated pages and blocks: `python docs/generate.py`.

options.md       every command with its options, and every metric, from the code
benchmarks.md    three blocks: the summary, where other servers are better, and every published result
README.md        one block: the table of servers
replay.md        one block: the forms of conversations, from the code

A block lies between `<!-- made: NAME -->` and `<!-- end -->`. Its figures come from benchmarks/results.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

import runner  # noqa: F401  loads OpenBLAS before MLX
from radixcache import PrefixCache
from radixcache.counters import Metric, metrics_of
from radixcache.stores.block_store import StoreStats
from runner.cli import app
from runner.models.tiny import tiny_model
from runner.script.conversation_formats import FORMS
from runner.serve.metrics import COUNTERS, HISTOGRAMS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
#: Longer tables stay in their JSON.
MOST_ROWS = 16
#: Results whose conclusion stands in another block; and tables that are shown whole, however long.
BEHIND = {"peers"}
WHOLE = {*BEHIND, "guests"}

Row = tuple[str, ...]


def pages() -> dict[Path, str]:
    paths = (DOCS.parent / "README.md", DOCS / "benchmarks.md", DOCS / "replay.md")
    with_blocks = {path: path.read_text(encoding="utf-8") for path in paths}
    made = {
        path: BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]().strip()}\n\n{found[3]}", text)
        for path, text in with_blocks.items()
    }
    return {DOCS / "options.md": options(), **made}


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
    given = option.default
    default = "" if given is None or given is False or given in ("", (), []) or callable(given) else f"`{given}`"
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


#: Scenarios of bench_peers, as the README names them.
SCENARIOS = {
    "shared": "8 users with one system prompt, one by one",
    "at once": "8 users with one system prompt, at once",
    "growing": "two growing conversations",
    "edit": "an edited conversation",
    "regenerate": "the same request again",
    "decode": "one user, long replies",
    "restart": "after a restart (with a disk if the server has one)",
    "window": "a sliding-window model",
    "hybrid": "a hybrid model",
}


def peers() -> str:
    """The TTFT of each server in each scenario, the best in bold; how many answers equal those of a cold run."""
    result = _published("peers")
    ttft_ms: dict[str, dict[str, float]] = {}
    equal: dict[str, list[int]] = {}
    for row in result["rows"]:
        server = row["server"].removesuffix(" serve")
        if row["TTFT ms p50"] is not None:
            ttft_ms.setdefault(row["scenario"], {})[server] = row["TTFT ms p50"]
        counts = map(int, (row["equal"] or "0 of 0").split(" of "))
        equal[server] = [sum(pair) for pair in zip(equal.get(server, (0, 0)), counts, strict=True)]
    rows = []
    for scenario, found in ttft_ms.items():
        shown = {server: f"{value:,.0f}" for server, value in found.items()}
        best = min(found, key=found.__getitem__)
        shown[best] = f"**{shown[best]}**"
        rows.append((SCENARIOS[scenario], *(shown.get(server, "-") for server in equal)))
    weights = "random weights" if result["model"].startswith("random") else result["model"]
    machine = result["machine"]
    same = [f"{count} of {of} from {server}" for server, (count, of) in equal.items()]
    if len({tuple(each) for each in equal.values()}) == 1:
        same = ["{} of {} from each server".format(*next(iter(equal.values())))]
    won = [
        f"{of} by {figure}" for figure, of in re.findall(r"^(.+): .* best in (\d+ of \d+)", result["conclusion"], re.M)
    ]
    lines = [
        *_table(("", *equal), rows),
        "",
        f"Command: `{result['command']}`, {weights}, one run on {machine['logical_cores']} shared cores of an",
        f"{machine['processor']}, {result['date'][:10]}. Answers that equal those of a cold run: {', '.join(same)}.",
        "",
        f"Scenarios in which radixcache is the best server: {', '.join(won[:2])},",
        f"{', '.join(won[2:])}.",
    ]
    return "\n".join(lines) + "\n"


def _published(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


#: What is compared; the result and its benchmark; the rows; and the row and the columns of mlx-lm and of radixcache.
Side = tuple[dict[str, Any], tuple[str, ...]]
SERVED = ({"server": "mlx_lm.server"}, {"server": "radixcache serve"})
SUMMARY: tuple[tuple[str, str, dict[str, Any], Side, Side], ...] = (
    (
        "state of 50 users who share a system prompt of 2,000 tokens",
        "memory",
        {"model": "kv", "users": 50},
        ({}, ("mlx-lm MB",)),
        ({}, ("radix MB",)),
    ),
    (
        "the same with sliding windows in five layers of six",
        "memory",
        {"model": "sliding", "users": 50},
        ({}, ("mlx-lm MB",)),
        ({}, ("radix MB",)),
    ),
    (
        "search for the longest stored prefix of a prompt of 50,000 tokens",
        "tree",
        {"shape": "part", "prompt tokens": 50_000, "nodes": 10},
        ({}, ("trie branch ms",)),
        ({}, ("branch ms",)),
    ),
    (
        "prefill of 8,000 tokens: copies made while buffers grow",
        "growth",
        {"what": "prefill", "new": 8000},
        ({"buffers": "mlx-lm"}, ("copied MB",)),
        ({"buffers": "session"}, ("copied MB",)),
    ),
    (
        "8 users at a time who share 300 tokens, demo model (mlx-lm's `BatchGenerator`)",
        "parallel",
        {"model": "demo", "prompt": "shared"},
        ({"way": "mlx-lm"}, ("tokens/s", "held MB")),
        ({"way": "tree"}, ("tokens/s", "held MB")),
    ),
    (
        "16 users of a server who share 2,000 tokens (`mlx_lm.server`)",
        "serve",
        {"model": "kv", "load": "shared", "users": 16},
        (SERVED[0], ("tokens/s", "peak MB")),
        (SERVED[1], ("tokens/s", "peak MB")),
    ),
    (
        "8 users with three turns each, a budget for a quarter of them: prompt tokens evaluated",
        "serve",
        {"load": "tight"},
        (SERVED[0], ("prefilled tokens",)),
        (SERVED[1], ("prefilled tokens",)),
    ),
)


def summary() -> str:
    rows = []
    for text, name, where, *sides in SUMMARY:
        result = _published(name)
        cells = []
        for more, columns in sides:
            (row,) = [row for row in result["rows"] if (where | more).items() <= row.items()]
            cells.append(", ".join(f"{_cell(row[each])} {each.split()[-1]}" for each in columns))
        rows.append((text, *cells, f"`{_module(result)}`"))
    return "\n".join(_table(("", "mlx-lm", "radixcache", "command"), rows)) + "\n"


def behind() -> str:
    """Where mlx_lm.server generates more tokens per second, and where another server is better in any figure."""
    slow = [
        f"{row['model']}, {row['load']}, {row['users']} users: {row['tokens/s ratio']:.2f} times the tokens/s"
        f" ({row['ratio min']:.2f} to {row['ratio max']:.2f})"
        for row in _published("serve")["rows"]
        if row["tokens/s ratio"] < 1
    ]
    lines = [f"- **mlx_lm.server** (`bench_serve`): {'; '.join(slow) or 'no row with fewer tokens/s'}."]
    lines += ["- **Six servers** (`bench_peers`):", ""]
    lines += [f"    - {line}" for line in _published("peers")["conclusion"].splitlines()]
    return "\n".join(lines) + "\n"


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
    said = [] if path.stem in BEHIND else result.get("conclusion", "").splitlines()
    return lines + (said if len(said) < 2 else [f"- {line}" for line in said])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def forms() -> str:
    rows = ((form.name, f"`{form.keys.replace(' ', '`, `').replace('|', '` or `')}`", form.about) for form in FORMS)
    return "\n".join(_table(("form", "keys of a record", "what it is"), rows)) + "\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "peers": peers, "summary": summary, "behind": behind, "results": figures, "forms": forms,
}  # fmt: skip


def main() -> None:
    """Write the pages; with --check, exit with 1 where one is not what the code makes."""
    stale = [path for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit("".join(f"{path} is stale: run python docs/generate.py\n" for path in stale) or None)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
