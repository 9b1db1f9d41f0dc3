"""CacheStats: the counters and gauges of a PrefixCache. StatsSnapshot: all metrics of one moment.

A snapshot has the fields of CacheStats and the contents of the tree, pins and slots, under the names of Prometheus
(`radixcache.counters`). It has no clock, as scrapers have one. Never imports MLX.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from radixcache.counters import Metric, Number, Sample, counter, exposition, fact, gauge, json_value, metrics_of
from radixcache.observe.tree_view import NodeView

#: Nodes that `largest_nodes` lists.
LISTED_NODES = 10
PREFIX = "radixcache_"
PLACES = ("live", "paged", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters since the cache was made, and gauges: what it holds now. `dataclasses.fields` has the help texts."""

    requests: int = counter("requests", "begin() and fetch() calls, and rows of begin_many().")
    hit_tokens: int = counter("tokens", "Restored prompt tokens, also from state that verify later finds wrong.")
    miss_tokens: int = counter("tokens", "Prompt tokens that were left to prefill.")
    off_grid_tokens: int = counter(
        "tokens", "Exact mode: known prompt tokens prefilled again, after the last stored multiple of step_size."
    )
    short_reasons: dict[str, int] = counter(
        "requests", "Requests that resumed before the end of their match.", label="reason"
    )
    evictions: int = counter("evictions", "Entries evicted.")
    evicted_bytes: int = counter("bytes", "Bytes that evictions freed.")
    copied_bytes: int = counter("bytes", "Spans paged in and out, window tokens, and state cut or joined.")
    paged_in_bytes: int = counter("bytes", "Part of copied_bytes: paged in.")
    paged_out_bytes: int = counter("bytes", "Part of copied_bytes: paged out.")
    brought_tokens: int = counter("tokens", "Tokens read from stores instead of prefilled.")
    kept_blocks: int = counter("blocks", "Blocks and checkpoints given to stores.")
    brought_bytes: dict[str, int] = counter("bytes", "Bytes read for requests, by store.", label="tier")
    store_decisions: dict[str, int] = counter(
        "decisions", "Prompts of which a store has more than memory, by outcome.", label="decision"
    )
    live_bytes: int = gauge("bytes", "Buffers of live caches and of rows in open groups, with spare capacity.")
    paged_bytes: int = gauge("bytes", "Snapshot arrays, with checkpoints.")
    checkpoint_bytes: int = gauge("bytes", "Part of paged_bytes: checkpoints, with windows.")
    window_bytes: int = gauge("bytes", "Part of checkpoint_bytes: keys and values of sliding windows in the tree.")
    duplicate_bytes: int = gauge("bytes", "Part of paged_bytes: spans that are also live.")
    spare_bytes: int = gauge("bytes", "Part of live_bytes: buffer capacity of live caches beyond the live state.")
    pinned_bytes: int = gauge("bytes", "Bytes that pins keep.")
    nodes: int = gauge("nodes", "Nodes of the tree.")
    tokens: int = gauge("tokens", "Distinct tokens on the edges of the tree.")
    budget_bytes: int = gauge("bytes", "Byte budget.")
    over_budget_bytes: int = gauge(
        "bytes", "Bytes beyond the budget, of all caches that share it, while requests that are larger than it run."
    )
    held_bytes: dict[str, int] = gauge(
        "bytes", "What eviction cannot free, by what holds it: the reason for over_budget_bytes.", label="holder"
    )
    budget_source: str = fact("Where the budget comes from.")
    peak_bytes: int = gauge("bytes", "Peak of live, paged and verify bytes of all caches that share the budget.")
    verified_requests: int = counter(
        "requests", "Resumed sessions, and rows, whose state was compared with that of a cold prefill."
    )
    verify_skipped: int = counter(
        "requests",
        "Requests drawn for verify but not compared: the second state did not fit the budget, the caller's own loop "
        "had moved on, the model was given more than tokens, the cold run failed, or an error closed the group. Also "
        "drawn calls of fetch(), which are never compared.",
    )
    verify_mismatches: int = counter("requests", "Verified requests with wrong state or wrong logits.")
    verify_largest_error: float = gauge(
        "", "Largest error of all comparisons, relative to the largest magnitude in the array."
    )
    verify_bytes: int = gauge("bytes", "Second states of running checks; they count against the budget.")
    suffix_index_tokens: int = gauge("tokens", "Tokens in the index from which replies are drafted.")
    suffix_index_bytes: int = gauge("bytes", "Bytes of that index, beside the budget; 0: no request asked for drafts.")
    quarantined: int = gauge("prefixes", "Prefixes in quarantine.")
    event_failures: int = counter("calls", "Calls of on_event that raised.")
    dropped_events: int = counter("events", "Events dropped because too many waited for the listener.")


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """All metrics of one moment.

    Attributes:
        largest_nodes: the nodes with most bytes, as dicts of start, end, tokens, bytes and residency.
    """

    metrics: tuple[Metric, ...]
    largest_nodes: tuple[dict[str, Any], ...] = ()

    def value(self, name: str, **labels: str) -> Number:
        """The number of one sample. KeyError: there is no such metric, or none with these labels."""
        samples = (sample for metric in self.metrics if metric.name == name for sample in metric.samples)
        for sample in samples:
            if dict(sample.labels) == labels:
                return sample.value
        raise KeyError(f"{name} {labels}" if labels else name)

    def as_dict(self) -> dict[str, Any]:
        """JSON values: {"metrics": {name: {kind, unit, help, samples: [{labels, value}]}}, "largest_nodes": [...]}.

        An infinite error is the text "+Inf", as in the JSON of Prometheus.
        """
        metrics = {}
        for metric in self.metrics:
            samples = [{"labels": dict(sample.labels), "value": json_value(sample.value)} for sample in metric.samples]
            about = {"kind": metric.kind, "unit": metric.unit, "help": metric.help}
            metrics[metric.name] = {**about, "samples": samples}
        return {"metrics": metrics, "largest_nodes": [dict(node) for node in self.largest_nodes]}

    def exposition(self, labels: Mapping[str, str] | None = None) -> str:
        """The metrics in Prometheus' text format, version 0.0.4, with `labels` on every sample."""
        return exposition(self.metrics, labels or {})


def metrics_of_cache(
    stats: CacheStats, slots: Sequence[tuple[bool, int, int]], policy: str, ledger_bytes: int, namespaces: int
) -> list[Metric]:
    """The metrics that belong to no single namespace. `slots`: whether a session is open, offset, bytes."""
    labels = (("budget_source", stats.budget_source), ("policy", policy))
    states = {"open": 0, "idle": 0, "empty": 0}
    for is_open, offset, _ in slots:
        states["open" if is_open else "idle" if offset else "empty"] += 1
    offsets = {str(number): offset for number, (_, offset, _) in enumerate(slots)}
    sizes = {str(number): nbytes for number, (*_, nbytes) in enumerate(slots)}
    ratio = stats.hit_tokens / max(1, stats.hit_tokens + stats.miss_tokens)
    return [
        Metric("radixcache_info", "gauge", "", "Settings, as labels; always 1.", (Sample(1, labels),)),
        *metrics_of(stats, PREFIX),
        _gauge("hit_ratio", "", "Share of prompt tokens that were restored; 0 before the first request.", ratio),
        _gauge("ledger_bytes", "bytes", "Live, paged and verify bytes of all caches with this budget.", ledger_bytes),
        _gauge("namespaces", "namespaces", "Namespaces that hold state.", namespaces),
        _gauge("slots", "slots", "Live slots: open (in a session), idle (with a path) or empty.", states, "state"),
        _gauge("slot_offset_tokens", "tokens", "Stored tokens on the path of each slot.", offsets, "slot"),
        _gauge("slot_bytes", "bytes", "Buffers of each slot, with spare capacity.", sizes, "slot"),
    ]


def snapshot(
    nodes: Sequence[NodeView], *, pins: int, named_pins: int, of_cache: Sequence[Metric] = ()
) -> StatsSnapshot:
    """A snapshot from values of one moment. `of_cache`: from `metrics_of_cache`, or empty for a single namespace."""
    kinds = sorted({node.checkpoint for node in nodes} - {""})
    by_place = {place: [node for node in nodes if node.residency == place] for place in PLACES}
    by_kind = {kind: [node for node in nodes if node.checkpoint == kind] for kind in kinds}
    depths: list[int] = []
    for node in nodes:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)

    def places(name: str, unit: str, help: str, value: Callable[[NodeView], int]) -> Metric:
        sums = {place: sum(map(value, group)) for place, group in by_place.items()}
        return _gauge(f"resident_{name}", unit, help, sums, "residency")

    counts = {kind: len(group) for kind, group in by_kind.items()}
    sizes = {kind: sum(node.checkpoint_bytes for node in group) for kind, group in by_kind.items()}
    longest, largest_bytes = (max(map(attrgetter(name), nodes), default=0) for name in ("end", "nbytes"))
    metrics = (
        places("nodes", "nodes", "Tree nodes, by where their spans are.", lambda node: 1),
        places("tokens", "tokens", "Distinct tokens, by where their spans are.", lambda node: node.tokens),
        places("bytes", "bytes", "Bytes of spans, by where they are; counted once.", lambda n: n.span_bytes),
        _gauge("node_checkpoints", "checkpoints", "Checkpoints in the tree, by why they were taken.", counts, "kind"),
        _gauge("node_checkpoint_bytes", "bytes", "Bytes of the checkpoints in the tree.", sizes, "kind"),
        _gauge("depth_nodes", "nodes", "Largest number of nodes on a path.", max(depths, default=0)),
        _gauge("longest_path_tokens", "tokens", "Tokens of the longest stored sequence.", longest),
        _gauge("largest_node_bytes", "bytes", "Spans and checkpoint of the largest node.", largest_bytes),
        _gauge("pins", "pins", "Open pins.", pins),
        _gauge("named_pins", "pins", "Open pins with a name.", named_pins),
    )
    largest = heapq.nsmallest(LISTED_NODES, nodes, key=lambda node: (-node.nbytes, node.start, node.end))
    columns = {"start": "start", "end": "end", "tokens": "tokens", "bytes": "nbytes", "residency": "residency"}
    listed = ({name: getattr(node, field) for name, field in columns.items()} for node in largest)
    return StatsSnapshot((*of_cache, *metrics), tuple(listed))


def _gauge(name: str, unit: str, help: str, value: Any, label: str = "") -> Metric:
    """A gauge with one sample, or with a label for each item of a dict."""
    samples = tuple(Sample(n, ((label, key),)) for key, n in value.items()) if label else (Sample(value),)
    return Metric(PREFIX + name, "gauge", unit, help, samples)
