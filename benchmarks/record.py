"""Record: repeats, medians and spread of one benchmark, its table on stdout and its JSON in benchmarks/results/."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runner.report import machine, versions, write_json

RESULTS = Path(__file__).parent / "results"
REPEATS = 5


def median_ms(run: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float, float]:
    """Median, smallest and largest wall time of `run` in ms, after one run that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times), min(times), max(times)


def publish(name: str, question: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table, a column per key, and write them with machine and versions to results/NAME.json."""
    table = Table(title=question, title_justify="left")
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)
    RESULTS.mkdir(exist_ok=True)
    document = {"benchmark": name, "question": question, "repeats": REPEATS, "rows": rows}
    write_json(RESULTS / f"{name}.json", {**document, "machine": machine(), "versions": versions()})
