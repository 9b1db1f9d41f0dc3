"""CacheStats: a frozen picture of what a PrefixCache has done and holds. Each field has a kind, a unit and a help.

StatsSnapshot: what a metrics endpoint needs, taken at one moment, as metrics with a kind, a unit and an explanation.

Names are Prometheus': `radixcache_` and the field, its unit last, `_total` behind what only ever grows. The fields of
CacheStats become metrics as their metadata says; what the tree, the pins and the slots have comes beside them. No
clock: whoever scrapes has one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from radixcache.observe.tree_view import NodeView, TreeView


def _counter(unit: str, help: str, **more: str) -> Any:
    return field(metadata={"kind": "counter", "unit": unit, "help": help, **more})


def _gauge(unit: str, help: str) -> Any:
    return field(metadata={"kind": "gauge", "unit": unit, "help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters since the cache was made, and gauges: what it holds now. `dataclasses.fields` has the help of each."""

    requests: int = _counter("requests", "begin() and fetch() calls, and rows of begin_many().")
    hit_tokens: int = _counter(
        "tokens", "Prompt tokens that were restored. Hits that turned out wrong when they were verified stay hits."
    )
    miss_tokens: int = _counter("tokens", "Prompt tokens that were left to prefill.")
    off_grid_tokens: int = _counter(
        "tokens",
        "Exact mode: prompt tokens that an earlier request had evaluated and that were prefilled again because they "
        "lie behind the last multiple of step_size that is stored, summed over requests.",
    )
    short_reasons: dict[str, int] = _counter(  # noqa: RUF009
        "requests", "How often a request resumed short of its match, by reason.", label="reason"
    )
    evictions: int = _counter("evictions", "Entries given up under pressure.")
    evicted_bytes: int = _counter("bytes", "What evictions freed.")
    copied_bytes: int = _counter(
        "bytes", "Copied: spans paged in and out, tokens out of windows, and what was cut or joined."
    )
    paged_in_bytes: int = _counter("bytes", "The part of copied_bytes that went in.")
    paged_out_bytes: int = _counter("bytes", "The part of copied_bytes that went out.")
    brought_tokens: int = _counter("tokens", "Tokens that were read from the store and need not be prefilled.")
    kept_blocks: int = _counter("blocks", "Blocks and checkpoints that were given to the store.")
    brought_bytes: dict[str, int] = _counter(  # noqa: RUF009
        "bytes", "What was read from stores for requests, by the store.", label="tier"
    )
    store_decisions: dict[str, int] = _counter(  # noqa: RUF009
        "decisions", "What became of asking the store for more of a prompt than memory had.", label="decision"
    )
    live_bytes: int = _gauge(
        "bytes", "Buffers of the live caches and of the rows of open groups, spare capacity included."
    )
    paged_bytes: int = _gauge("bytes", "Snapshot arrays, checkpoints included.")
    checkpoint_bytes: int = _gauge("bytes", "The part of paged_bytes that is point state, windows included.")
    window_bytes: int = _gauge("bytes", "The part of it that is keys and values of sliding windows, in the tree.")
    duplicate_bytes: int = _gauge("bytes", "The part of paged_bytes whose spans are live as well.")
    spare_bytes: int = _gauge("bytes", "The part of the live caches' bytes beyond what the live state needs.")
    pinned_bytes: int = _gauge("bytes", "What pins keep.")
    nodes: int = _gauge("nodes", "Tree nodes.")
    tokens: int = _gauge("tokens", "Distinct tokens on the edges of the tree.")
    budget_bytes: int = _gauge("bytes", "The budget.")
    budget_source: str = _gauge("", "Where the budget came from.")
    peak_bytes: int = _gauge(
        "bytes", "The most that live, paged and verify bytes came to, over all caches that share the budget."
    )
    verified_requests: int = _counter(
        "requests", "Resumed requests whose restored state was compared with a cold prefill."
    )
    verify_skipped: int = _counter(
        "requests",
        "Requests that were drawn for it and not compared: the second state did not fit the budget, the caller's own "
        "loop had moved on, the tokens do not say all that the model was given, or the cold run broke off; counted at "
        "close. And those of fetch(), which hands its caches over before a model has run, and rows of begin_many(), "
        "whose state lies among that of others; counted at once.",
    )
    verify_mismatches: int = _counter("requests", "Verified requests whose state, or the logits after it, were wrong.")
    verify_largest_error: float = _gauge(
        "", "The largest error of all comparisons, relative to the largest magnitude in the same array."
    )
    verify_bytes: int = _gauge(
        "bytes", "The second states of checks that are under way; counts against the budget beside live and paged."
    )
    quarantined: int = _gauge("prefixes", "Prefixes in quarantine.")
    event_failures: int = _counter("calls", "Calls of on_event that raised.")
    dropped_events: int = _counter("events", "Events that nobody was told of, because too many waited.")


Number = int | float

#: Nodes that `largest_nodes` lists.
LISTED_NODES = 10
PLACES = ("live", "paged", "both")


@dataclass(frozen=True, slots=True)
class Sample:
    """A number, and the labels that tell it from the others of its metric."""

    value: Number
    labels: tuple[tuple[str, str], ...] = ()


Samples = tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """Numbers of one kind.

    Attributes:
        name: as in Prometheus.
        kind: "counter", which only grows, or "gauge".
        unit: of every sample: bytes, tokens, requests ...; "" for ratios and facts.
        help: what it counts, in a sentence.
    """

    name: str
    kind: str
    unit: str
    help: str
    samples: Samples


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """Everything there is to monitor, at one moment.

    Attributes:
        metrics: in the order in which they are listed.
        largest_nodes: the nodes that hold most, as dicts of start, end, tokens, bytes and residency.
    """

    metrics: tuple[Metric, ...]
    largest_nodes: tuple[dict[str, Any], ...] = ()

    def value(self, name: str, **labels: str) -> Number:
        """The number of one sample.

        Raises:
            KeyError: there is no such metric, or none with these labels.
        """
        wanted = tuple(sorted(labels.items()))
        for metric in self.metrics:
            if metric.name == name:
                for sample in metric.samples:
                    if tuple(sorted(sample.labels)) == wanted:
                        return sample.value
        raise KeyError(f"{name} {labels}" if labels else name)

    def as_dict(self) -> dict[str, Any]:
        """All of it as values that JSON has: {name: {kind, unit, help, samples: [{labels, value}]}}.

        An infinite error is the text "+Inf", as in Prometheus' own JSON.
        """
        metrics = {}
        for metric in self.metrics:
            samples = [{"labels": dict(sample.labels), "value": _shown(sample.value)} for sample in metric.samples]
            about = {"kind": metric.kind, "unit": metric.unit, "help": metric.help}
            metrics[metric.name] = {**about, "samples": samples}
        return {"metrics": metrics, "largest_nodes": [dict(node) for node in self.largest_nodes]}

    def exposition(self, labels: Mapping[str, str] | None = None) -> str:
        """The metrics in Prometheus' text format, version 0.0.4, with `labels` on every sample."""
        lines = []
        for metric in self.metrics:
            help_text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {metric.name} {help_text}", f"# TYPE {metric.name} {metric.kind}"]
            for sample in metric.samples:
                given = (*(labels or {}).items(), *sample.labels)
                shown = ",".join(f'{name}="{_escaped(text)}"' for name, text in given)
                lines.append(f"{metric.name}{f'{{{shown}}}' if shown else ''} {_shown(sample.value)}")
        return "\n".join(lines) + "\n"


class SlotState(NamedTuple):
    """A live slot: whether a session is open on it, the stored tokens on its path, the bytes of its buffers."""

    is_open: bool
    offset: int
    nbytes: int


def metrics_of_cache(
    stats: CacheStats, slots: Sequence[SlotState], policy: str, ledger_bytes: int, namespaces: int
) -> list[Metric]:
    """What is not the part of any one namespace."""
    labels = (("budget_source", stats.budget_source), ("policy", policy))
    prompt_tokens = stats.hit_tokens + stats.miss_tokens
    ratio = stats.hit_tokens / prompt_tokens if prompt_tokens else 0.0
    return [
        Metric("radixcache_info", "gauge", "", "Settings, as labels; always 1.", (Sample(1, labels),)),
        *_of_stats(stats),
        _gauge_metric("hit_ratio", "", "Prompt tokens restored, as a share of all; 0 before the first request.", ratio),
        _gauge_metric(
            "ledger_bytes", "bytes", "Live, paged and verify bytes of all caches on the budget.", ledger_bytes
        ),
        _gauge_metric("namespaces", "namespaces", "Namespaces that hold anything.", namespaces),
        *_of_slots(slots),
    ]


def snapshot(of_cache: Sequence[Metric], view: TreeView, pins: int, named_pins: int) -> StatsSnapshot:
    """Put a snapshot together, from what was looked up at one moment.

    Args:
        of_cache: from `metrics_of_cache`; none: only what is in the view.
    """
    of_pins = (
        _gauge_metric("pins", "pins", "Pins that have not ended.", pins),
        _gauge_metric("named_pins", "pins", "Pins with a name.", named_pins),
    )
    largest = heapq.nsmallest(LISTED_NODES, view.nodes, key=lambda node: (-node.nbytes, node.start, node.end))
    return StatsSnapshot((*of_cache, *_of_nodes(view.nodes), *of_pins), tuple(map(_listed, largest)))


def _listed(node: NodeView) -> dict[str, Any]:
    of_node = {"start": node.start, "end": node.end, "tokens": node.tokens}
    return {**of_node, "bytes": node.nbytes, "residency": node.residency}


def _of_nodes(nodes: Sequence[NodeView]) -> list[Metric]:
    places = {place: [node for node in nodes if node.residency == place] for place in PLACES}
    kinds = {kind: [n for n in nodes if n.checkpoint == kind] for kind in sorted({n.checkpoint for n in nodes} - {""})}
    depths: list[int] = []
    for node in nodes:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)

    def by(label: str, value: str = "") -> Samples:
        groups = places if label == "residency" else kinds
        sums = {key: sum(getattr(n, value) if value else 1 for n in group) for key, group in groups.items()}
        return _labelled(label, sums)

    where = "by where their spans are."
    longest, largest = (max((getattr(n, name) for n in nodes), default=0) for name in ("end", "nbytes"))
    span_bytes, checkpoint_bytes = by("residency", "span_bytes"), by("kind", "checkpoint_bytes")
    return [
        _gauge_metric("resident_nodes", "nodes", f"Tree nodes {where}", by("residency")),
        _gauge_metric("resident_tokens", "tokens", f"Distinct tokens {where}", by("residency", "tokens")),
        _gauge_metric(
            "resident_bytes", "bytes", "Bytes of spans by where they are; both are counted once.", span_bytes
        ),
        _gauge_metric("node_checkpoints", "checkpoints", "Checkpoints in the tree by why they were taken.", by("kind")),
        _gauge_metric("node_checkpoint_bytes", "bytes", "Bytes of the checkpoints in the tree.", checkpoint_bytes),
        _gauge_metric("depth_nodes", "nodes", "Nodes on the path with the most of them.", max(depths, default=0)),
        _gauge_metric("longest_path_tokens", "tokens", "Tokens of the longest stored sequence.", longest),
        _gauge_metric("largest_node_bytes", "bytes", "Spans and checkpoint of the node that holds most.", largest),
    ]


def _of_stats(stats: CacheStats) -> Iterator[Metric]:
    """A metric for each field that holds numbers; what is text is not one."""
    for each in fields(stats):
        value, about = getattr(stats, each.name), each.metadata
        if not isinstance(value, str):
            name = f"radixcache_{each.name}" + ("_total" if about["kind"] == "counter" else "")
            by_label = isinstance(value, Mapping)
            samples = _labelled(about["label"], dict(sorted(value.items()))) if by_label else (Sample(value),)
            yield Metric(name, about["kind"], about["unit"], about["help"], samples)


def _of_slots(slots: Sequence[SlotState]) -> list[Metric]:
    states = {"open": 0, "idle": 0, "empty": 0}
    for slot in slots:
        states["open" if slot.is_open else "idle" if slot.offset else "empty"] += 1
    counted = _labelled("state", states)
    offsets = _labelled("slot", {str(number): slot.offset for number, slot in enumerate(slots)})
    buffers = _labelled("slot", {str(number): slot.nbytes for number, slot in enumerate(slots)})
    return [
        _gauge_metric("slots", "slots", "Live slots: with an open session, idle on a path, empty.", counted),
        _gauge_metric("slot_offset_tokens", "tokens", "Stored tokens on each slot's path.", offsets),
        _gauge_metric("slot_bytes", "bytes", "Buffers of each slot, spare room included.", buffers),
    ]


def _gauge_metric(name: str, unit: str, text: str, value: Number | Samples) -> Metric:
    samples = value if isinstance(value, tuple) else (Sample(value),)
    return Metric(f"radixcache_{name}", "gauge", unit, text, samples)


def _labelled(label: str, values: Mapping[str, Number]) -> Samples:
    return tuple(Sample(value, ((label, key),)) for key, value in values.items())


def _shown(value: Number) -> Number | str:
    return "+Inf" if value == math.inf else value


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
