"""A grid as text: a table with a row per simulation, and the footnotes without which its figures mislead."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from runner.files.units import GIB, plural
from runner.simulate.disk import DiskUse
from runner.simulate.row import SimulationRow
from runner.simulate.simulator import infinite_ratio
from runner.traces.request import Trace

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
