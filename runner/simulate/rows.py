"""Results of simulations: rows, their columns, tables, footnotes and pictures. This file never imports MLX.

A row is one simulation; its fields are its JSON. A `Column` shows a field to people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from colorsys import hsv_to_rgb
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from radixcache.stores.block_store import WriteOn
from runner.text import GIB, Column, cells, figures_table, new_figure, picture_bytes, plural
from runner.traces.trace import Trace


class Speeds(NamedTuple):
    """How fast a replica works on a single request."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """A disk, or a tier that replicas share: its size and speed, the speed of the model, and when state is written."""

    budget_bytes: int
    read_bytes_per_s: float
    prefill_tokens_per_s: float
    write_on: WriteOn = "eviction"


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a tier below memory did over a whole trace; `token_hit_ratio` is hit_tokens / all prompt tokens."""

    plan: DiskPlan
    hit_tokens: int
    token_hit_ratio: float
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class DiskUse(TierUse):
    """What a disk did. `decisions` counts reads and reasons not to read, like `CacheStats.store_decisions`."""

    decisions: dict[str, int]


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One trace through one or more caches with one policy and budget.

    Attributes:
        capacity_blocks, capacity_bytes: the budget of each cache; None: the model has no spans, or no model is given.
        block_refs, block_hits: blocks of all prompts, and how many were found in memory or in a tier below.
        token_hit_ratio: tokens of found blocks / prompt tokens; it counts a last token that is evaluated again.
        seconds: wall time of the simulation.
    """

    trace: str
    policy: str
    capacity_blocks: int | None
    capacity_bytes: int | None
    requests: int
    block_refs: int
    block_hits: int
    block_hit_ratio: float
    token_hit_ratio: float
    prefill_tokens: int
    evictions: int
    seconds: float
    is_timing_synthetic: bool


@dataclass(frozen=True, slots=True)
class SimulationRow(ResultRow):
    """One cache; `has_checkpoints`: the model has layers that resume only at checkpoints."""

    has_checkpoints: bool = False
    disk: DiskUse | None = None


@dataclass(frozen=True, slots=True)
class ReplicaRow(ResultRow):
    """Several replicas behind a router, counted together.

    Attributes:
        infinite_token_hit_ratio: token_hit_ratio of one cache without limit that gets all requests.
        share_of_infinite: token_hit_ratio / infinite_token_hit_ratio.
        matched_tokens: prompt tokens that the router expected at the replica it chose.
        ttft_s_p50, ttft_s_p95, ttft_s_p99: from the arrival of a request to the end of its prefill, with waiting.
        busy: seconds of work of all replicas / (replicas x seconds from the first arrival to the last end).
        load_p95, load_max: 95th percentile and maximum of seconds of work over replicas, divided by the mean.
    """

    router: str
    replicas: int
    infinite_token_hit_ratio: float
    share_of_infinite: float
    matched_tokens: int
    ttft_s_p50: float
    ttft_s_p95: float
    ttft_s_p99: float
    busy: float
    load_p95: float
    load_max: float
    shared: TierUse | None = None


def infinite_ratio(trace: Trace) -> float:
    keys = np.concatenate([request.keys for request in trace.requests])
    return 1.0 - len(np.unique(keys)) / len(keys)


def infinite_token_ratio(trace: Trace) -> float:
    seen: set[int] = set()
    hit_tokens = 0
    for request in trace.requests:
        keys = request.keys.tolist()
        # A key stands for a whole prefix, so known keys come first.
        hit_tokens += min(sum(key in seen for key in keys) * trace.block_tokens, request.tokens)
        seen.update(keys)
    return hit_tokens / trace.prompt_tokens if trace.requests else 0.0


def _tier_columns(field: str, origin: str) -> tuple[Column, ...]:
    return (
        Column(f"from {origin}", f"{field}.token_hit_ratio", ".4f", is_optional=True),
        Column("GiB read", f"{field}.read_bytes", ",.2f", GIB, is_optional=True),
        Column("GiB written", f"{field}.written_bytes", ",.2f", GIB, is_optional=True),
    )


POLICY_COLUMNS = (
    Column("policy", "policy"),
    Column("blocks", "capacity_blocks", ","),
    Column("GiB", "capacity_bytes", ".4g", GIB, is_optional=True),
    Column("block hits", "block_hit_ratio", ".4f"),
    Column("token hits", "token_hit_ratio", ".4f"),
    *_tier_columns("disk", "disk"),
    Column("prefill tokens", "prefill_tokens", ","),
    Column("evictions", "evictions", ","),
)


def _wait(value_s: float) -> str:
    return f"{value_s:,.0f}" if value_s >= 100 else f"{value_s:.3g}"


REPLICA_COLUMNS = (
    Column("router", "router"),
    Column("replicas", "replicas", ","),
    Column("GiB each", "capacity_bytes", ".4g", GIB, is_optional=True),
    Column("blocks each", lambda row: None if row.capacity_bytes else row.capacity_blocks, ",", is_optional=True),
    Column("token hits", "token_hit_ratio", ".4f"),
    Column("of best", "share_of_infinite", ".3f"),
    *_tier_columns("shared", "store"),
    Column("TTFT s p50", "ttft_s_p50", _wait),
    Column("TTFT s p95", "ttft_s_p95", _wait),
    Column("TTFT s p99", "ttft_s_p99", _wait),
    Column("busy", "busy", ".2f"),
    Column("load p95", "load_p95", ".2f"),
    Column("load max", "load_max", ".2f"),
)


POLICY_COUNTS = (
    "Block hits: share of prompt blocks that were found in the cache. Token hits: share of prompt tokens in these "
    "blocks. A block is found whole or not at all."
)
FIFO_NOTE = (
    "FIFO equals LRU here. Each turn adds a leaf, and only leaves can be evicted, so blocks are used in the "
    "order in which they were stored. On other data FIFO can differ."
)
SAME_NOTE = "Equal in every row: {}."
DISK_NOTE = (
    "A disk of {:,.2f} GiB stands below memory. Hits count both. From disk: share of prompt tokens that were read from"
    " the disk. Written state can be read at once."
)
BELADY_NOTE = (
    "belady is the optimum only if all blocks have the same size. With checkpoints or a disk, other policies can be"
    " better."
)
REPLICA_COUNTS = (
    "Token hits: share of prompt tokens found on the replica that served the request. Of best: token hits, as a share"
    " of the hits of one cache without limit. TTFT: from arrival to the end of prefill, with waiting. Busy: share of"
    " the time in which the replicas worked. Load: 95th percentile and maximum of the replicas' work, over its mean."
)
#: Replicas that are busy for this share of the time, or more, cannot keep up.
FULL = 0.95
FULL_NOTE = (
    "Replicas that are busy for {:.0%} of the time or more cannot keep up. Their queue grows with the length of the"
    " trace, and TTFT mostly reflects that length."
)
SHARED_NOTE = (
    "All replicas share a store of {:,.2f} GiB. Each reads and writes it at {:,.1f} Gbit/s. From store: share of prompt"
    " tokens that were read from the store. Written state can be read at once."
)


def policy_notes(traces: Sequence[Trace], rows: Sequence[SimulationRow]) -> list[str]:
    notes = [_trace_note(each, f"{each.block_refs:,} block references", infinite_ratio(each)) for each in traces]
    notes.append(POLICY_COUNTS)
    disk = rows[0].disk if rows else None
    if disk is not None:
        notes.append(DISK_NOTE.format(disk.plan.budget_bytes / GIB))
    if _fifo_is_lru(rows):
        notes.append(FIFO_NOTE)
    if same := _same_policies(rows):
        notes.append(SAME_NOTE.format("; ".join(", ".join(group) for group in same)))
    if any(row.policy.startswith("belady") for row in rows) and any(row.has_checkpoints or row.disk for row in rows):
        notes.append(BELADY_NOTE)
    return notes


def replica_notes(trace: Trace, rows: Sequence[ReplicaRow], speeds: Speeds) -> list[str]:
    infinite = rows[0].infinite_token_hit_ratio if rows else None
    notes = [_trace_note(trace, f"{trace.prompt_tokens:,} prompt tokens", infinite)]
    notes.append(
        f"Each replica serves one request at a time: {speeds.prefill_tokens_per_s:,.0f} tokens/s of prefill and"
        f" {speeds.decode_tokens_per_s:,.0f} tokens/s of decoding."
    )
    notes.append(REPLICA_COUNTS)
    if any(row.busy >= FULL for row in rows):
        notes.append(FULL_NOTE.format(FULL))
    if rows and (shared := rows[0].shared) is not None:
        plan = shared.plan
        notes.append(SHARED_NOTE.format(plan.budget_bytes / GIB, plan.read_bytes_per_s * 8 / 1e9))
    return notes


def _trace_note(trace: Trace, length: str, infinite: float | None) -> str:
    found = "." if infinite is None else f"; a cache without limit finds {infinite:.4f} of them."
    synthetic = " Arrival times are synthetic." if trace.is_timing_synthetic else ""
    return f"{trace.name}: {plural(len(trace.requests), 'request')}, {length}{found}{synthetic}"


def _place(row: ResultRow) -> tuple[object, ...]:
    return row.trace, row.capacity_blocks, row.capacity_bytes


def _fifo_is_lru(rows: Sequence[SimulationRow]) -> bool:
    lru, fifo = (
        {_place(row): f"{row.block_hit_ratio:.4f}" for row in rows if row.policy == policy}
        for policy in ("lru", "fifo")
    )
    both = lru.keys() & fifo.keys()
    return bool(both) and all(lru[place] == fifo[place] for place in both)


def _same_policies(rows: Sequence[SimulationRow]) -> list[list[str]]:
    """Groups of policies that ran in the same places, two or more, with equal hits in each. See `_place`."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for row in rows:
        found.setdefault(row.policy, set()).add((*_place(row), row.block_hits))
    groups: dict[frozenset[tuple[object, ...]], list[str]] = {}
    for policy, hits in found.items():
        groups.setdefault(frozenset(hits), []).append(policy)
    return [group for hits, group in groups.items() if len(group) > 1 and len(hits) > 1]


#: Tables and notes for people, and the same figures for JSON.
SimulationReport = tuple[Sequence[Any], dict[str, Any]]


def policies_report(trace: Trace, rows: Sequence[SimulationRow]) -> SimulationReport:
    document = _document(trace, rows, POLICY_COUNTS, infinite_block_hit_ratio={trace.name: infinite_ratio(trace)})
    return _shown(POLICY_COLUMNS, rows, policy_notes([trace], rows)), document


def replicas_report(trace: Trace, rows: Sequence[ReplicaRow], speeds: Speeds) -> SimulationReport:
    return _shown(REPLICA_COLUMNS, rows, replica_notes(trace, rows, speeds)), _document(trace, rows, REPLICA_COUNTS)


def _shown(columns: Sequence[Column], rows: Sequence[ResultRow], notes: Sequence[str]) -> list[Any]:
    return [*([figures_table(cells(columns, rows), names=("policy", "router"))] if rows else []), *notes]


def _document(trace: Trace, rows: Sequence[ResultRow], counts: str, **more: Any) -> dict[str, Any]:
    shown = {"sources": [trace.source], "skipped": [len(trace.skipped)], "counts": counts}
    return {"rows": [asdict(row) for row in rows], **more, **shown}


FIGURE_INCHES = (9.0, 5.0)
OFFLINE_LINES = {"belady": "-", "belady-bypass": "--"}
#: A marker for each policy.
MARKERS = "osD^v<>pPX*hdH8+x1|"
#: A step around the colour wheel that gives distinct hues for any number of policies.
GOLDEN = 0.618
#: The most capacities that fit below the axis.
MOST_TICKS = 8
RATIO_LABEL = "block hit ratio: blocks found / blocks asked for"


def policies_picture(rows: Sequence[SimulationRow], infinite: float, file_format: str) -> bytes:
    """Block hit ratio over capacity; a dotted line: no limit. Policies with equal ratios share a line."""
    figure = new_figure(*FIGURE_INCHES)
    axes = figure.subplots()
    styles = _line_styles(dict.fromkeys(row.policy for row in rows))
    lines: dict[tuple[tuple[float, str], ...], list[str]] = {}
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((_capacity(row), f"{row.block_hit_ratio:.4f}") for row in rows if row.policy == policy)
        lines.setdefault(tuple(points), []).append(policy)
    # Sorted by the right edge, as in the legend.
    for line, policies in sorted(lines.items(), key=lambda each: each[0][-1], reverse=True):
        styled = next((policy for policy in policies if policy in OFFLINE_LINES), policies[0])
        ratios = [float(ratio) for _, ratio in line]
        axes.plot([capacity for capacity, _ in line], ratios, label=" = ".join(policies), **styles[styled])
    axes.axhline(infinite, linestyle=":", color="black", label="infinite cache")
    disk = rows[0].disk
    beside = "" if disk is None else f", with a disk of {disk.plan.budget_bytes / GIB:,.2f} GiB"
    synthetic = " (arrival times are synthetic)" if rows[0].is_timing_synthetic else ""
    # A dollar sign in a name does not begin a formula.
    axes.set_title(f"{rows[0].trace}{beside}{synthetic}", parse_math=False)
    axes.set_xscale("log")
    capacities = sorted({_capacity(row) for row in rows})
    if len(capacities) <= MOST_TICKS:
        axes.set_xticks(capacities, [f"{capacity:,.7g}" for capacity in capacities])
        axes.minorticks_off()
    axes.set_xlabel("capacity, blocks" if rows[0].capacity_bytes is None else "capacity, GiB")
    axes.set_ylabel(RATIO_LABEL)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return picture_bytes(figure, file_format)


def _capacity(row: ResultRow) -> float:
    """In GiB if the bytes are known, else in blocks."""
    return (row.capacity_blocks or 0) if row.capacity_bytes is None else row.capacity_bytes / GIB


def _line_styles(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How each policy is drawn: offline policies in black, each other one with its colour and marker."""
    styles: dict[str, dict[str, Any]] = {}
    for policy in policies:
        index = len(styles.keys() - OFFLINE_LINES.keys())
        if policy in OFFLINE_LINES:
            styles[policy] = {"color": "black", "linestyle": OFFLINE_LINES[policy], "linewidth": 2.0, "marker": "."}
        else:
            color = hsv_to_rgb(index * GOLDEN % 1.0, 0.8, (0.85, 0.55)[index % 2])
            marker = MARKERS[index % len(MARKERS)]
            styles[policy] = {"color": color, "marker": marker, "markersize": 5.0, "linewidth": 1.2}
    return styles
