"""A grid as a picture: hit rate over capacity, a line per policy; the optimum above, the infinite cache dotted.

Matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.report import write_atomically
from runner.simulate.row import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120
PANEL_INCHES = (9.0, 5.0)
OFFLINE = ("belady", "belady-bypass")


def plot_rows(path: Path, rows: Sequence[Row], infinite: Mapping[str, float]) -> None:
    """Write a PNG with a panel per trace, atomically.

    Args:
        infinite: by trace, the block hit ratio without any limit.
    """
    write_atomically(path, picture(rows, infinite))


def picture(rows: Sequence[Row], infinite: Mapping[str, float], kind: str = "png") -> bytes:
    """The picture itself, as PNG or SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(PANEL_INCHES[0], PANEL_INCHES[1] * len(traces)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(traces), 1, squeeze=False)
    for axes, trace in zip(panels[:, 0], traces, strict=True):
        _draw(axes, [row for row in rows if row.trace == trace], infinite.get(trace))
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=DPI)
    return image.getvalue()


def _draw(axes: Axes, rows: Sequence[Row], infinite: float | None) -> None:
    in_bytes = all(row.capacity_bytes is not None for row in rows)
    for policy in dict.fromkeys(row.policy for row in rows):
        of_policy = sorted((row for row in rows if row.policy == policy), key=_capacity)
        axes.plot(
            [_capacity(row) / (1 << 30 if in_bytes else 1) for row in of_policy],
            [row.block_hit_ratio for row in of_policy],
            label=policy,
            **_style(policy),
        )
    if infinite is not None:
        axes.axhline(infinite, linestyle=":", color="black", label="infinite cache")
    synthetic = " (arrival times are synthetic)" if rows[0].is_timing_synthetic else ""
    axes.set_title(f"{rows[0].trace}{synthetic}")
    axes.set_xscale("log")
    axes.set_xlabel("capacity, GiB" if in_bytes else "capacity, blocks")
    axes.set_ylabel("block hit ratio: blocks found / blocks asked for")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _capacity(row: Row) -> int:
    return row.capacity_bytes if row.capacity_bytes is not None else row.capacity_blocks or 0


def _style(policy: str) -> dict[str, Any]:
    if policy in OFFLINE:
        return {"color": "black", "linestyle": "-" if policy == "belady" else "--", "linewidth": 2.0}
    return {"marker": "o", "markersize": 3.0, "linewidth": 1.2}
