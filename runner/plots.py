"""A replay as a picture: what each request waited for its first token, and what each cache held meanwhile.

Matplotlib is imported when a picture is asked for: it takes longer to load than most replays to render. This file never
imports MLX.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.report import MIB, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from runner.parallel_replay import ParallelRun
    from runner.replay import CacheRun

    Run = CacheRun | ParallelRun

FIGURE_INCHES = (10.0, 8.0)
DPI = 120
# Distinct in colour, in grey and for colour-blind readers: Okabe and Ito's palette, and a marker each.
STYLES = {
    "none": {"color": "#999999", "marker": "o"},
    "single": {"color": "#E69F00", "marker": "s"},
    "mlx-lm": {"color": "#0072B2", "marker": "^"},
    "radix": {"color": "#D55E00", "marker": "D"},
}


def plot_replay(path: Path, runs: "Sequence[Run]", *, title: str, budget_bytes: int) -> None:
    """Write a PNG with TTFT per request above and bytes held below, atomically."""
    # A figure of its own, not pyplot's: nothing global is set, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title)
    _draw_ttft(upper, runs)
    _draw_bytes(lower, runs, budget_bytes)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    write_atomically(path, image.getvalue())


def _draw_ttft(axes: "Axes", runs: "Sequence[Run]") -> None:
    for run in runs:
        axes.plot(_numbers(run), [row.ttft_ms for row in run.rows], label=run.cache, **_style(run))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("TTFT, ms (log scale)")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(title="cache", loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _draw_bytes(axes: "Axes", runs: "Sequence[Run]", budget_bytes: int) -> None:
    for run in runs:
        axes.plot(_numbers(run), [row.peak_bytes / MIB for row in run.rows], label=run.cache, **_style(run))
    held_bytes = max(row.peak_bytes for run in runs for row in run.rows)
    # A budget far above what was held would flatten everything else.
    if budget_bytes <= 2 * held_bytes:
        axes.axhline(budget_bytes / MIB, color="black", linestyle="--", linewidth=1)
        axes.annotate("budget", (1, budget_bytes / MIB), textcoords="offset points", xytext=(0, 4))
        held_bytes = max(held_bytes, budget_bytes)
    axes.set_ylim(0, 1.12 * held_bytes / MIB)
    axes.set_ylabel("held at most during the request, MiB")
    axes.set_xlabel("request")
    axes.grid(visible=True, alpha=0.25)


def _numbers(run: "Run") -> list[int]:
    return list(range(1, len(run.rows) + 1))


def _style(run: "Run") -> dict[str, Any]:
    return {"linewidth": 1.4, "markersize": 4.5, **STYLES.get(run.cache, {})}
