"""Plot the results of bench_replay by byte budget: tokens to prefill, and TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.files import write_atomically
from runner.replay.report import STYLES
from runner.text import new_figure, picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_INCHES = (11.0, 4.6)

Rows = Sequence[dict[str, Any]]


def plot_budgets(path: Path, rows: Rows, *, title: str) -> None:
    """Write a PNG atomically. Left: prefilled tokens of the counted part; right: TTFT p50 and p95 of the timed part."""
    figure = new_figure(*FIGURE_INCHES)
    figure.suptitle(title)
    tokens, ttft = figure.subplots(1, 2)
    _draw(tokens, [row for row in rows if row["part"] == "counted"], "prefilled tokens", "-", labelled=True)
    tokens.set_ylabel("tokens prefilled (log scale)")
    timed = [row for row in rows if row["part"] == "timed" and row["cache"] != "bound"]
    _draw(ttft, timed, "TTFT p50 ms", "-", labelled=False)
    _draw(ttft, timed, "TTFT p95 ms", ":", labelled=False)
    ttft.set_ylabel("TTFT, ms (log scale); line p50, dotted p95")
    for axes in (tokens, ttft):
        axes.set_xlabel("budget, % of what all conversations need")
        axes.set_yscale("log")
        axes.grid(visible=True, which="both", alpha=0.25)
    figure.legend(loc="outside right upper")
    write_atomically(path, picture_bytes(figure))


def _draw(axes: Axes, rows: Rows, figure: str, line: str, *, labelled: bool) -> None:
    """Draw a curve for each cache with budgets, and a horizontal line for each other cache."""
    for cache in dict.fromkeys(row["cache"] for row in rows):
        own = [row for row in rows if row["cache"] == cache]
        style: dict[str, Any] = {
            "color": "black",
            **STYLES.get(cache, {}),
            "linestyle": line,
            "linewidth": 1.4,
            "markersize": 4.5,
        }
        label = cache if labelled else None
        budgeted = sorted((row["budget %"], row[figure]) for row in own if isinstance(row["budget %"], int))
        if budgeted:
            axes.plot(*zip(*budgeted, strict=True), label=label, **style)
        else:
            axes.axhline(own[0][figure], label=label, **{**style, "marker": None})
