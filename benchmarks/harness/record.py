"""Record: repeats, medians and spread of one benchmark, its table on stdout and its JSON in benchmarks/results/.

What is compared is measured in turns (`in_turns`), so that whatever else the machine does meets both sides. A figure is
the median of its repeats; `Spread` keeps the least and the most beside it.
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

from runner.files import write_json
from runner.origin import machine, versions

A = TypeVar("A")
B = TypeVar("B")

RESULTS = Path(__file__).parents[1] / "results"
REPEATS = 5
TABLE_WIDTH = 160
PATH_OPTIONS = ("--conversations", "--json", "--results", "--traces", "--venvs")


@dataclass(frozen=True)
class Spread:
    """Median, least and most of repeated measurements, all in the unit of the measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])

    @property
    def range(self) -> str:
        """The least and the most, as a cell of a table."""
        return f"{_number(self.least)} to {_number(self.most)}"


def arguments(
    description: str | None,
    given: Sequence[str] | None = None,
    *,
    add: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """Read what every benchmark takes: --quick, and where the JSON goes; `add` adds options of its own.

    The published figures are only replaced when --publish says so, and never by quick ones.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats; figures of no use")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--publish", action="store_true", help=f"replace the figures in {RESULTS.parent.name}/results")
    where.add_argument("--results", type=Path, metavar="FOLDER", help="where the JSON goes; a temporary folder if not")
    if add is not None:
        add(parser)
    options = parser.parse_args(given)
    if options.publish and options.quick:
        parser.error("--publish with --quick: quick figures are of no use to others.")
    if options.results is None:
        options.results = RESULTS if options.publish else Path(tempfile.mkdtemp(prefix="radixcache-results-"))
    return options


def elapsed_ms(run: Callable[[], Any]) -> float:
    """Wall time of one call in ms."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def in_turns(first: Callable[[], A], second: Callable[[], B], repeats: int) -> list[tuple[A, B]]:
    """What two measurements give, `repeats` times each and by turns, after one of each that does not count.

    Which of them goes first changes every time: neither always finds the caches as the other left them.
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
    """The items from another one on each time, so that none is always measured first."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def say(text: str) -> None:
    """Tell how far the benchmark is: progress goes to stderr."""
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
    """Print the rows as a table, a column per key, and write them to FOLDER/NAME.json with what they depend on.

    Args:
        name: name of the file, without its ending.
        question: the table's title.
        rows: all with the same keys; units are in the keys. None is an empty cell.
        repeats: how often each figure was measured; None where the rows have a column for it.
        conclusion: a sentence computed from the rows: printed below the table, and kept with them.
        more: goes into the file as it is.
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
    """Machine, versions, date, commit and command."""
    return {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": _command(),
    }


def _commit() -> str | None:
    """The commit that was measured, with a plus when files differ from it; None outside of a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}+" if _git("status", "--porcelain", "--untracked-files=no", "--", "*.py") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    folder = Path(__file__).parents[2]
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _command() -> str:
    """How the benchmark was started, without paths of this machine; from within a program nobody can say."""
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
