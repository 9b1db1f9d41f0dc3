"""A grid as a picture: hit rate over capacity, a line per policy or for those that coincide to the digits shown.

The optimum is black, the infinite cache dotted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from colorsys import hsv_to_rgb
from typing import TYPE_CHECKING, Any

from runner.files.picture import new_figure, picture_bytes
from runner.files.units import GIB
from runner.simulate.row import SimulationRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (9.0, 5.0)
OFFLINE = {"belady": "-", "belady-bypass": "--"}
#: A marker for each of as many policies as there are.
MARKERS = "osD^v<>pPX*hdH8+x1|"
#: Hues this far apart on the wheel stay apart, however many there are.
GOLDEN = 0.618
#: As many capacities find room below the axis.
MOST_TICKS = 8


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
    lines: dict[tuple[tuple[float, str], ...], list[str]] = {}
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((_capacity(row), f"{row.block_hit_ratio:.4f}") for row in rows if row.policy == policy)
        lines.setdefault(tuple(points), []).append(policy)
    # In the order of the right edge, so that the legend reads as the lines lie.
    for line, policies in sorted(lines.items(), key=lambda each: each[0][-1], reverse=True):
        shown = next((policy for policy in policies if policy in OFFLINE), policies[0])
        ratios = [float(ratio) for _, ratio in line]
        axes.plot([capacity for capacity, _ in line], ratios, label=" = ".join(policies), **styles[shown])
    if infinite is not None:
        axes.axhline(infinite, linestyle=":", color="black", label="infinite cache")
    disk = rows[0].disk
    beside = "" if disk is None else f", with a disk of {disk.plan.budget_bytes / GIB:,.2f} GiB"
    synthetic = " (arrival times are synthetic)" if rows[0].is_timing_synthetic else ""
    # A name may have dollar signs, which would be taken for a formula's.
    axes.set_title(f"{rows[0].trace}{beside}{synthetic}", parse_math=False)
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
            color = hsv_to_rgb(index * GOLDEN % 1.0, 0.8, (0.85, 0.55)[index % 2])
            styles[policy] = {
                "color": color,
                "marker": MARKERS[index % len(MARKERS)],
                "markersize": 5.0,
                "linewidth": 1.2,
            }
    return styles
