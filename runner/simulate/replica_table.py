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
    "Token hits: prompt tokens that were stored where they were asked for / prompt tokens; of infinite: the same, by"
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
    """One row per simulation."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("trace", "router"):
        table.add_column(heading)
    sizes = ("GiB each",) if any(row.capacity_bytes is not None for row in rows) else ("blocks each",)
    shared = ("from there", "GiB read", "GiB written") if any(row.shared is not None for row in rows) else ()
    waits = ("TTFT s p50", "p95", "p99")
    for heading in ("replicas", *sizes, "token hits", "of infinite", *shared, *waits, "busy", "load p95", "max", "s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            Text(row.trace),
            Text(row.router),
            f"{row.replicas:,}",
            f"{row.capacity_blocks:,}" if row.capacity_bytes is None else f"{row.capacity_bytes / GIB:.4g}",
            f"{row.token_hit_ratio:.4f}",
            f"{row.share_of_infinite:.3f}",
            *_shared_cells(row),
            *(f"{each:,.3g}" for each in (row.ttft_s_p50, row.ttft_s_p95, row.ttft_s_p99)),
            f"{row.busy:.2f}",
            f"{row.load_p95:.2f}",
            f"{row.load_max:.2f}",
            f"{row.seconds:.1f}",
        )
    return table


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
