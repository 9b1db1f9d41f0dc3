"""A grid as a picture: hit rate over capacity, a line per policy; the optimum above, the infinite cache dotted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.files.atomic import write_atomically
from runner.files.picture import new_figure, picture_bytes, picture_format
from runner.files.units import GIB
from runner.simulate.row import SimulationRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (9.0, 5.0)
OFFLINE = {"belady": "-", "belady-bypass": "--"}
#: A marker and a colour for each of as many policies as there are.
MARKERS = "osD^v<>pPX*hd"
#: As many capacities find room below the axis.
MOST_TICKS = 8


def plot_rows(path: Path, rows: Sequence[SimulationRow], infinite: Mapping[str, float]) -> None:
    """Write a picture with a panel per trace, atomically; PNG, SVG or PDF by the file's suffix.

    Args:
        infinite: by trace, the block hit ratio without any limit.

    Raises:
        ValueError: the suffix is that of another format.
    """
    write_atomically(path, picture(rows, infinite, picture_format(path)))


def picture(rows: Sequence[SimulationRow], infinite: Mapping[str, float], file_format: str = "png") -> bytes:
    """The picture itself."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = new_figure(PANEL_INCHES[0], PANEL_INCHES[1] * len(traces))
    panels = figure.subplots(len(traces), 1, squeeze=False)
    styles = line_styles(dict.fromkeys(row.policy for row in rows))
    for axes, trace in zip(panels[:, 0], traces, strict=True):
        _draw(axes, [row for row in rows if row.trace == trace], infinite.get(trace), styles)
    return picture_bytes(figure, file_format)


def _draw(
    axes: Axes, rows: Sequence[SimulationRow], infinite: float | None, styles: Mapping[str, dict[str, Any]]
) -> None:
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((_capacity(row), row.block_hit_ratio) for row in rows if row.policy == policy)
        axes.plot(*zip(*points, strict=True), label=policy, **styles[policy])
    if infinite is not None:
        axes.axhline(infinite, linestyle=":", color="black", label="infinite cache")
    synthetic = " (arrival times are synthetic)" if rows[0].is_timing_synthetic else ""
    # A name may have dollar signs, which would be taken for a formula's.
    axes.set_title(f"{rows[0].trace}{synthetic}", parse_math=False)
    axes.set_xscale("log")
    capacities = sorted({_capacity(row) for row in rows})
    if len(capacities) <= MOST_TICKS:
        axes.set_xticks(capacities, [f"{capacity:,.7g}" for capacity in capacities])
        axes.minorticks_off()
    axes.set_xlabel("capacity, blocks" if rows[0].capacity_bytes is None else "capacity, GiB")
    axes.set_ylabel("block hit ratio: blocks found / blocks asked for")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _capacity(row: SimulationRow) -> float:
    """In GiB where there are bytes, else in blocks."""
    return (row.capacity_blocks or 0) if row.capacity_bytes is None else row.capacity_bytes / GIB


def line_styles(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How each policy is drawn: the bounds in black, the others apart by colour and marker."""
    styles: dict[str, dict[str, Any]] = {}
    for policy in policies:
        index = len(styles.keys() - OFFLINE.keys())
        if policy in OFFLINE:
            styles[policy] = {"color": "black", "linestyle": OFFLINE[policy], "linewidth": 2.0, "marker": "."}
        else:
            marker = MARKERS[index % len(MARKERS)]
            styles[policy] = {"color": f"C{index % 10}", "marker": marker, "markersize": 4.0, "linewidth": 1.2}
    return styles
