"""CacheStats: the counters and gauges of a PrefixCache. StatsSnapshot: all metrics of one moment.

A snapshot has the fields of CacheStats and the contents of the tree, pins and slots, under the names of Prometheus
(`radixcache.counters`). It has no clock, as scrapers have one. Never imports MLX.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    hit_tokens: int = counter(
        "tokens", "Prompt tokens that were restored. Hits that turned out wrong when they were verified stay hits."
    )
    miss_tokens: int = counter("tokens", "Prompt tokens that were left to prefill.")
    off_grid_tokens: int = counter(
        "tokens",
        "Exact mode: prompt tokens that an earlier request had evaluated and that were prefilled again because they "
        "lie behind the last multiple of step_size that is stored, summed over requests.",
    )
    short_reasons: dict[str, int] = counter(
        "requests", "How often a request resumed short of its match, by reason.", label="reason"
    )
    evictions: int = counter("evictions", "Entries given up under pressure.")
    evicted_bytes: int = counter("bytes", "What evictions freed.")
    copied_bytes: int = counter(
        "bytes", "Copied: spans paged in and out, tokens out of windows, and what was cut or joined."
    )
    paged_in_bytes: int = counter("bytes", "The part of copied_bytes that went in.")
    paged_out_bytes: int = counter("bytes", "The part of copied_bytes that went out.")
    brought_tokens: int = counter("tokens", "Tokens that were read from the store and need not be prefilled.")
    kept_blocks: int = counter("blocks", "Blocks and checkpoints that were given to the store.")
    brought_bytes: dict[str, int] = counter(
        "bytes", "What was read from stores for requests, by the store.", label="tier"
    )
    store_decisions: dict[str, int] = counter(
        "decisions", "What became of asking the store for more of a prompt than memory had.", label="decision"
    )
    live_bytes: int = gauge(
        "bytes", "Buffers of the live caches and of the rows of open groups, spare capacity included."
    )
    paged_bytes: int = gauge("bytes", "Snapshot arrays, checkpoints included.")
    checkpoint_bytes: int = gauge("bytes", "The part of paged_bytes that is point state, windows included.")
    window_bytes: int = gauge("bytes", "The part of it that is keys and values of sliding windows, in the tree.")
    duplicate_bytes: int = gauge("bytes", "The part of paged_bytes whose spans are live as well.")
    spare_bytes: int = gauge("bytes", "The part of the live caches' bytes beyond what the live state needs.")
    pinned_bytes: int = gauge("bytes", "What pins keep.")
    nodes: int = gauge("nodes", "Tree nodes.")
    tokens: int = gauge("tokens", "Distinct tokens on the edges of the tree.")
    budget_bytes: int = gauge("bytes", "The budget.")
    budget_source: str = fact("Where the budget came from.")
    peak_bytes: int = gauge(
        "bytes", "The most that live, paged and verify bytes came to, over all caches that share the budget."
    )
    verified_requests: int = counter(
        "requests", "Resumed requests whose restored state was compared with a cold prefill."
    )
    verify_skipped: int = counter(
        "requests",
        "Requests that were drawn for it and not compared: the second state did not fit the budget, the caller's own "
        "loop had moved on, the tokens do not say all that the model was given, or the cold run broke off; counted at "
        "close. And those of fetch(), which hands its caches over before a model has run, and rows of begin_many(), "
        "whose state lies among that of others; counted at once.",
    )
    verify_mismatches: int = counter("requests", "Verified requests whose state, or the logits after it, were wrong.")
    verify_largest_error: float = gauge(
        "", "The largest error of all comparisons, relative to the largest magnitude in the same array."
    )
    verify_bytes: int = gauge(
        "bytes", "The second states of checks that are under way; counts against the budget beside live and paged."
    )
    quarantined: int = gauge("prefixes", "Prefixes in quarantine.")
    event_failures: int = counter("calls", "Calls of on_event that raised.")
    dropped_events: int = counter("events", "Events that nobody was told of, because too many waited.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CacheFigures:
    """Gauges besides CacheStats that belong to no single namespace."""

    hit_ratio: float = gauge("", "Prompt tokens restored, as a share of all; 0 before the first request.")
    ledger_bytes: int = gauge("bytes", "Live, paged and verify bytes of all caches on the budget.")
    namespaces: int = gauge("namespaces", "Namespaces that hold anything.")
    slots: dict[str, int] = gauge("slots", "Live slots: with an open session, idle on a path, empty.", label="state")
    slot_offset_tokens: dict[str, int] = gauge("tokens", "Stored tokens on each slot's path.", label="slot")
    slot_bytes: dict[str, int] = gauge("bytes", "Buffers of each slot, spare room included.", label="slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreeFigures:
    """Gauges of the nodes and pins of some namespaces."""

    resident_nodes: dict[str, int] = gauge("nodes", "Tree nodes by where their spans are.", label="residency")
    resident_tokens: dict[str, int] = gauge("tokens", "Distinct tokens by where their spans are.", label="residency")
    resident_bytes: dict[str, int] = gauge(
        "bytes", "Bytes of spans by where they are; both are counted once.", label="residency"
    )
    node_checkpoints: dict[str, int] = gauge(
        "checkpoints", "Checkpoints in the tree by why they were taken.", label="kind"
    )
    node_checkpoint_bytes: dict[str, int] = gauge("bytes", "Bytes of the checkpoints in the tree.", label="kind")
    depth_nodes: int = gauge("nodes", "Nodes on the path with the most of them.")
    longest_path_tokens: int = gauge("tokens", "Tokens of the longest stored sequence.")
    largest_node_bytes: int = gauge("bytes", "Spans and checkpoint of the node that holds most.")
    pins: int = gauge("pins", "Pins that have not ended.")
    named_pins: int = gauge("pins", "Pins with a name.")


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
        """The metrics in Prometheus' text format, version 0.0.4, with `labels` on every sample.

        Raises:
            RadixCacheError: the package `prometheus-client` of the extra `radixcache[serve]` is not installed.
        """
        return exposition(self.metrics, labels or {})


def metrics_of_cache(
    stats: CacheStats, slots: Sequence[tuple[bool, int, int]], policy: str, ledger_bytes: int, namespaces: int
) -> list[Metric]:
    """The metrics that belong to no single namespace. `slots`: whether a session is open, offset, bytes."""
    labels = (("budget_source", stats.budget_source), ("policy", policy))
    states = {"open": 0, "idle": 0, "empty": 0}
    for is_open, offset, _ in slots:
        states["open" if is_open else "idle" if offset else "empty"] += 1
    figures = _CacheFigures(
        hit_ratio=stats.hit_tokens / max(1, stats.hit_tokens + stats.miss_tokens),
        ledger_bytes=ledger_bytes,
        namespaces=namespaces,
        slots=states,
        slot_offset_tokens={str(number): offset for number, (_, offset, _) in enumerate(slots)},
        slot_bytes={str(number): nbytes for number, (*_, nbytes) in enumerate(slots)},
    )
    info = Metric("radixcache_info", "gauge", "", "Settings, as labels; always 1.", (Sample(1, labels),))
    return [info, *metrics_of(stats, PREFIX), *metrics_of(figures, PREFIX)]


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

    def sums(groups: Mapping[str, Sequence[NodeView]], value: str) -> dict[str, int]:
        return {key: sum(getattr(node, value) for node in group) for key, group in groups.items()}

    figures = _TreeFigures(
        resident_nodes={key: len(group) for key, group in by_place.items()},
        resident_tokens=sums(by_place, "tokens"),
        resident_bytes=sums(by_place, "span_bytes"),
        node_checkpoints={key: len(group) for key, group in by_kind.items()},
        node_checkpoint_bytes=sums(by_kind, "checkpoint_bytes"),
        depth_nodes=max(depths, default=0),
        longest_path_tokens=max((node.end for node in nodes), default=0),
        largest_node_bytes=max((node.nbytes for node in nodes), default=0),
        pins=pins,
        named_pins=named_pins,
    )
    largest = heapq.nsmallest(LISTED_NODES, nodes, key=lambda node: (-node.nbytes, node.start, node.end))
    columns = {"start": "start", "end": "end", "tokens": "tokens", "bytes": "nbytes", "residency": "residency"}
    listed = ({name: getattr(node, field) for name, field in columns.items()} for node in largest)
    return StatsSnapshot((*of_cache, *metrics_of(figures, PREFIX)), tuple(listed))
