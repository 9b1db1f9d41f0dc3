"""Record a benchmark: repeats, medians and spread, a table on stdout and JSON in benchmarks/results/.

Measurements to compare run in turns (`in_turns`), so that other load on the machine affects both. A result is the
median of the repeats; `Spread` also keeps the minimum and the maximum.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from runner.commands.outputs import machine, versions
from runner.files import write_json

A = TypeVar("A")
B = TypeVar("B")

RESULTS = Path(__file__).parents[1] / "results"
REPEATS = 5
TABLE_WIDTH = 170
PATH_OPTIONS = ("--conversations", "--json", "--results", "--traces", "--venvs")


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of repeated measurements, in their unit."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])

    @property
    def range(self) -> str:
        return f"{_number(self.least)} to {_number(self.most)}"


def arguments(
    description: str | None,
    given: Sequence[str] | None = None,
    *,
    add: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """Parse the common options: --quick, --publish and --results. `add` adds more options.

    Only --publish replaces the published results. --publish and --quick exclude each other.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats; the results mean nothing")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--publish", action="store_true", help=f"replace the results in {RESULTS.parent.name}/results")
    where.add_argument("--results", type=Path, metavar="FOLDER", help="folder for the JSON (default: temporary)")
    if add is not None:
        add(parser)
    options = parser.parse_args(given)
    if options.publish and options.quick:
        parser.error("--publish with --quick: quick results mean nothing. Leave out one of them.")
    if options.results is None:
        options.results = RESULTS if options.publish else Path(tempfile.mkdtemp(prefix="radixcache-results-"))
    return options


def elapsed_ms(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def in_turns(first: Callable[[], A], second: Callable[[], B], repeats: int) -> list[tuple[A, B]]:
    """Run two measurements by turns, `repeats` times after a warm-up; return their results in pairs.

    The order changes every time, so that neither always runs after the other.
    """
    pairs = []
    for index in range(repeats + 1):
        if index % 2:
            theirs = second()
            pairs.append((first(), theirs))
        else:
            ours = first()
            pairs.append((ours, second()))
    return pairs[1:]


def rotated(items: Sequence[A], by: int) -> list[A]:
    """Rotate the items by `by` places, so that no item is always first."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def publish(
    name: str,
    question: str,
    rows: list[dict[str, Any]],
    *,
    folder: Path,
    repeats: int | None = REPEATS,
    conclusion: str | None = None,
    **more: Any,
) -> None:
    """Print the rows as a table, a column per key, and write them to FOLDER/NAME.json with their origin.

    Args:
        name: file name without extension.
        question: title of the table.
        rows: all with the same keys; units are in the keys. None is an empty cell.
        repeats: repeats of each measurement; None if the rows have a column for it.
        conclusion: a sentence computed from the rows; printed below the table and written to the file.
        more: further entries of the file.
    """
    Console(width=TABLE_WIDTH).print(_table(question, rows))
    if conclusion is not None:
        print(conclusion)
    folder.mkdir(exist_ok=True, parents=True)
    document: dict[str, Any] = {"benchmark": name, "question": question, "repeats": repeats, "rows": rows, **more}
    if conclusion is not None:
        document["conclusion"] = conclusion
    write_json(folder / f"{name}.json", {**document, **_origin()})
    say(f"written to {folder / name}.json")


def _origin() -> dict[str, Any]:
    return {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": _command(),
    }


def _commit() -> str | None:
    """Return the measured commit, with a plus if files differ from it; None outside a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}+" if _git("status", "--porcelain", "--untracked-files=no", "--", "*.py") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    folder = Path(__file__).parents[2]
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _command() -> str:
    """Return the command line of the benchmark, without local paths."""
    words = []
    given = iter(sys.orig_argv[1:])
    for word in given:
        name, _, value = word.partition("=")
        if name == "--publish":
            continue
        if name not in PATH_OPTIONS:
            words.append(word)
        elif not value:
            next(given, None)
    return " ".join(["python", *words]) if words[:1] == ["-m"] and words[1].startswith("benchmarks.") else "main()"


def _table(question: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=question, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for key, value in rows[0].items():
        table.add_column(key, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
