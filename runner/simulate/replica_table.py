"""Simulations of replicas as text: a table with a row each, and the footnotes without which its figures mislead."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from runner.files.units import GIB, plural
from runner.simulate.replica_row import ReplicaRow
from runner.simulate.replicas import Speeds
from runner.traces.request import Trace

#: Of one second of the trace a replica has at most one to work in.
FULL = 0.95
COUNTS = (
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
    notes.append(COUNTS)
    if any(row.busy >= FULL for row in rows):
        notes.append(FULL_NOTE.format(FULL))
    shared = next((row.shared for row in rows), None)
    if shared is not None:
        plan = shared.plan
        notes.append(SHARED_NOTE.format(plan.budget_bytes / GIB, plan.read_bytes_per_s * 8 / 1e9))
    return notes
