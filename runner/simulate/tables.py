"""A grid as text: a table with a row per simulation, and the footnotes without which its figures mislead.

Simulations of replicas as text: a table with a row each, and the footnotes without which its figures mislead.

A grid as a picture: hit rate over capacity, a line per policy or for those that coincide to the digits shown.

The optimum is black, the infinite cache dotted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from colorsys import hsv_to_rgb
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from runner.picture import new_figure, picture_bytes
from runner.simulate.replicas import Speeds
from runner.simulate.rows import DiskUse, ReplicaRow, SimulationRow
from runner.simulate.simulator import infinite_ratio
from runner.text import GIB, plural
from runner.traces.trace import Trace

COUNTS = (
    "Block hit ratio: blocks of prompts that were stored / blocks of prompts. Token hit ratio: prompt tokens in them / "
    "prompt tokens; a block is found whole or not at all."
)
FIFO_NOTE = (
    "FIFO equals LRU here because a conversation's newest blocks are always its youngest as well: each turn adds a "
    "leaf, and only leaves can go. It says nothing about FIFO on other data."
)
SAME_NOTE = "The same in every row, so nothing here tells them apart: {}."
DISK_NOTE = (
    "Beside memory there is a disk of {:,.2f} GiB. Hits are of both; from disk: the prompt tokens that were read from"
    " it / prompt tokens. What is written to it is there at once."
)
BELADY_NOTE = (
    "belady is the optimum only where all blocks weigh the same; with checkpoints or a disk it is a rule that knows the"
    " future."
)


def rows_table(rows: Sequence[SimulationRow]) -> Table:
    """One row per simulation."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("trace", "policy"):
        table.add_column(heading)
    in_bytes = any(row.capacity_bytes is not None for row in rows)
    sizes = ("blocks", "GiB") if in_bytes else ("blocks",)
    of_disk = ("from disk", "GiB read", "GiB written") if any(row.disk is not None for row in rows) else ()
    for heading in (*sizes, "block hits", "token hits", *of_disk, "prefill tokens", "evictions", "s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            Text(row.trace),
            Text(row.policy),
            "-" if row.capacity_blocks is None else f"{row.capacity_blocks:,}",
            *([] if row.capacity_bytes is None else [f"{row.capacity_bytes / GIB:.4g}"]),
            f"{row.block_hit_ratio:.4f}",
            f"{row.token_hit_ratio:.4f}",
            *([] if row.disk is None else _disk_cells(row.disk)),
            f"{row.prefill_tokens:,}",
            f"{row.evictions:,}",
            f"{row.seconds:.1f}",
        )
    return table


def _disk_cells(disk: DiskUse) -> list[str]:
    nbytes = (f"{each / GIB:,.2f}" for each in (disk.read_bytes, disk.written_bytes))
    return [f"{disk.token_hit_ratio:.4f}", *nbytes]


def footnotes(traces: Sequence[Trace], rows: Sequence[SimulationRow]) -> list[str]:
    """What has to be said beside the table."""
    notes = [
        f"{trace.name}: {plural(len(trace.requests), 'request')}, {trace.block_refs:,} block references; a cache"
        f" without limit finds {infinite_ratio(trace):.4f} of them."
        + (" Arrival times are synthetic." if trace.is_timing_synthetic else "")
        for trace in traces
    ]
    notes.append(COUNTS)
    disk = next((row.disk for row in rows), None)
    if disk is not None:
        notes.append(DISK_NOTE.format(disk.plan.budget_bytes / GIB))
    if _fifo_is_lru(rows):
        notes.append(FIFO_NOTE)
    same = _same(rows)
    if same:
        notes.append(SAME_NOTE.format("; ".join(", ".join(group) for group in same)))
    if any(row.policy.startswith("belady") for row in rows) and any(row.has_checkpoints or row.disk for row in rows):
        notes.append(BELADY_NOTE)
    return notes


def _fifo_is_lru(rows: Sequence[SimulationRow]) -> bool:
    lru, fifo = (
        {(row.trace, row.capacity_blocks, row.capacity_bytes): row.block_hit_ratio for row in of_policy}
        for of_policy in ([row for row in rows if row.policy == policy] for policy in ("lru", "fifo"))
    )
    pairs = [(ratio, lru[where]) for where, ratio in fifo.items() if where in lru]
    return bool(pairs) and all(f"{one:.4f}" == f"{other:.4f}" for one, other in pairs)


def _same(rows: Sequence[SimulationRow]) -> list[list[str]]:
    """Groups of policies that found exactly as much wherever they ran, where that was at two places or more."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for row in rows:
        where = (row.trace, row.capacity_blocks, row.capacity_bytes, row.block_hits)
        found.setdefault(row.policy, []).append(where)
    groups: dict[frozenset[tuple[object, ...]], list[str]] = {}
    for policy, hits in found.items():
        groups.setdefault(frozenset(hits), []).append(policy)
    return [group for hits, group in groups.items() if len(group) > 1 and len(hits) > 1]


#: Of one second of the trace a replica has at most one to work in.
FULL = 0.95
REPLICA_COUNTS = (
    "Token hits: prompt tokens that were stored where they were asked for / prompt tokens; of best: the same, by"
    " those that one cache without limit has. TTFT: from arrival to the end of prefill, waiting included. Busy: of the"
    " time until all is done, what the replicas worked. Load: the 95th percentile and the most of the replicas' seconds"
    " of work, by their mean."
)
FULL_NOTE = (
    "Where replicas are busy for {:.0%} of the time and more, they cannot keep up: the wait grows with the trace, and"
    " TTFT says little but how long that is."
)
SHARED_NOTE = (
    "Behind the replicas there is a tier of {:,.2f} GiB that all of them write to and read from, each at {:,.1f}"
    " Gbit/s. From there: the prompt tokens that were read from it / prompt tokens. What is written is there at once."
)


def replicas_table(rows: Sequence[ReplicaRow]) -> Table:
    """One row per simulation, in 80 columns where there is one trace and no tier; no figure is ever cut."""
    traces = ("trace",) if len({row.trace for row in rows}) > 1 else ()
    sizes = ("GiB each",) if any(row.capacity_bytes is not None for row in rows) else ("blocks each",)
    shared = ("from there", "GiB read", "GiB written") if any(row.shared is not None for row in rows) else ()
    waits = ("TTFT s p50", "p95", "p99")
    names = (*traces, "router")
    headings = (*names, "replicas", *sizes, "token hits", "of best", *shared, *waits, "busy", "load p95", "max")
    cells = [_cells(row, has_trace=bool(traces)) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading, column in zip(headings, zip(*cells, strict=True), strict=True):
        table.add_column(
            heading,
            justify="left" if heading in names else "right",
            overflow="fold",
            min_width=max(map(len, [*heading.split(), *(column if heading != "trace" else ())])),
        )
    for each in cells:
        table.add_row(*map(Text, each))
    return table


def _cells(row: ReplicaRow, *, has_trace: bool) -> list[str]:
    return [
        *([row.trace] if has_trace else []),
        row.router,
        f"{row.replicas:,}",
        f"{row.capacity_blocks:,}" if row.capacity_bytes is None else f"{row.capacity_bytes / GIB:.4g}",
        f"{row.token_hit_ratio:.4f}",
        f"{row.share_of_infinite:.3f}",
        *_shared_cells(row),
        *map(_seconds, (row.ttft_s_p50, row.ttft_s_p95, row.ttft_s_p99)),
        f"{row.busy:.2f}",
        f"{row.load_p95:.2f}",
        f"{row.load_max:.2f}",
    ]


def _seconds(value_s: float) -> str:
    return f"{value_s:,.0f}" if value_s >= 100 else f"{value_s:.3g}"


def _shared_cells(row: ReplicaRow) -> list[str]:
    if row.shared is None:
        return []
    nbytes = (f"{each / GIB:,.2f}" for each in (row.shared.read_bytes, row.shared.written_bytes))
    return [f"{row.shared.token_hit_ratio:.4f}", *nbytes]


def replica_footnotes(traces: Sequence[Trace], rows: Sequence[ReplicaRow], speeds: Speeds) -> list[str]:
    """What has to be said beside the table."""
    infinite = {row.trace: row.infinite_token_hit_ratio for row in rows}
    notes = [
        f"{trace.name}: {plural(len(trace.requests), 'request')}, {trace.prompt_tokens:,} prompt tokens"
        + (f"; a cache without limit finds {infinite[trace.name]:.4f} of them." if trace.name in infinite else ".")
        + (" Arrival times are synthetic." if trace.is_timing_synthetic else "")
        for trace in traces
    ]
    notes.append(
        f"A replica serves one request after the other, and takes a second for {speeds.prefill_tokens_per_s:,.0f}"
        f" tokens of prefill or {speeds.decode_tokens_per_s:,.0f} generated ones."
    )
    notes.append(REPLICA_COUNTS)
    if any(row.busy >= FULL for row in rows):
        notes.append(FULL_NOTE.format(FULL))
    shared = next((row.shared for row in rows), None)
    if shared is not None:
        plan = shared.plan
        notes.append(SHARED_NOTE.format(plan.budget_bytes / GIB, plan.read_bytes_per_s * 8 / 1e9))
    return notes


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
