"""StatsSnapshot: what a metrics endpoint needs, taken at one moment, as metrics with a kind, a unit and an explanation.

Names are Prometheus': `radixcache_` and the field, its unit last, `_total` behind what only ever grows. The fields of
CacheStats become metrics by themselves, explained by its docstring; what the tree, the pins and the slots hold comes
beside them. No MLX here, and no clock: whoever scrapes has one.
"""

from __future__ import annotations

import heapq
import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from radixcache.watch.stats import CacheStats

if TYPE_CHECKING:
    from radixcache.paging.live_path import LivePath
    from radixcache.tree.state_tree import StateNode

Number = int | float

#: Fields of CacheStats that may fall as well as grow. Largest and peak values, too, are gauges.
GAUGES = frozenset(
    (
        "live_bytes",
        "paged_bytes",
        "checkpoint_bytes",
        "duplicate_bytes",
        "spare_bytes",
        "pinned_bytes",
        "nodes",
        "tokens",
        "budget_bytes",
        "verify_bytes",
        "quarantined",
    )
)
#: Units that a field's last word does not say.
UNITS = {
    "dropped_events": "events",
    "event_failures": "calls",
    "quarantined": "prefixes",
    "verify_largest_error": "",
    "verify_mismatches": "requests",
    "verify_skipped": "requests",
}
_GAUGE_WORDS = re.compile(r"(^|_)(max|largest|peak|error|ratio)(_|$)")
#: Nodes that `largest_nodes` lists.
LISTED_NODES = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """A number, and the labels that tell it from the others of its metric."""

    value: Number
    labels: tuple[tuple[str, str], ...] = ()


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
    samples: tuple[Sample, ...]


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
        metrics = {
            metric.name: {
                "kind": metric.kind,
                "unit": metric.unit,
                "help": metric.help,
                "samples": [
                    {"labels": dict(sample.labels), "value": _shown(sample.value)} for sample in metric.samples
                ],
            }
            for metric in self.metrics
        }
        return {"metrics": metrics, "largest_nodes": [dict(node) for node in self.largest_nodes]}

    def exposition(self, labels: Mapping[str, str] | None = None) -> str:
        """The metrics in Prometheus' text format, version 0.0.4, with `labels` on every sample."""
        lines = []
        for metric in self.metrics:
            help_text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {metric.name} {help_text}", f"# TYPE {metric.name} {metric.kind}"]
            for sample in metric.samples:
                shown = ",".join(
                    f'{name}="{_escaped(text)}"' for name, text in (*(labels or {}).items(), *sample.labels)
                )
                value = _shown(sample.value)
                lines.append(f"{metric.name}{{{shown}}} {value}" if shown else f"{metric.name} {value}")
        return "\n".join(lines) + "\n"


def snapshot(
    stats: CacheStats | None,
    roots: Sequence[StateNode],
    nodes: Iterable[StateNode],
    paths: Sequence[LivePath],
    *,
    token_bytes: int,
    shared_bytes: int,
    pins: int,
    named_pins: int,
    policy: str,
) -> StatsSnapshot:
    """Put a snapshot together; the lock is held. O(nodes).

    Args:
        stats: None: only what the nodes hold, since the rest is not theirs alone.
        nodes: the nodes below `roots`, parents first.
    """
    metrics: list[Metric] = []
    if stats is not None:
        metrics += [_info(policy, stats.budget_source), *_of_stats(stats), _hit_ratio(stats)]
        metrics.append(
            _one("ledger_bytes", "bytes", "Live, paged and verify bytes of all caches on the budget.", shared_bytes)
        )
        metrics.append(_one("namespaces", "namespaces", "Namespaces that hold anything.", len(roots)))
        metrics += _of_slots(paths)
    held = _Held(token_bytes, roots)
    held.add(nodes)
    metrics += held.metrics()
    metrics.append(_one("pins", "pins", "Pins that have not ended.", pins))
    metrics.append(_one("named_pins", "pins", "Pins with a name.", named_pins))
    return StatsSnapshot(tuple(metrics), held.largest())


class _Held:
    """What nodes hold, added up."""

    def __init__(self, token_bytes: int, roots: Sequence[StateNode]) -> None:
        self._token_bytes = token_bytes
        self._depth = {id(root): 0 for root in roots}
        self._sums: dict[str, list[int]] = {place: [0, 0, 0] for place in ("live", "paged", "both")}
        self._checkpoints: dict[str, list[int]] = {}
        self._sizes: list[tuple[int, int, int, str]] = []

    def add(self, nodes: Iterable[StateNode]) -> None:
        """Add nodes up, parents first; all sessions wait for this, so it does little for each."""
        depths, sizes, token_bytes = self._depth, self._sizes, self._token_bytes
        for node in nodes:
            state = node.payload
            assert state is not None, node
            depths[id(node)] = depths[id(node.parent)] + 1
            start, tokens, spans, checkpoint = node.start, len(node.edge), state.spans, state.checkpoint
            if spans is None:
                place, nbytes = "live", token_bytes * tokens
            else:
                place, nbytes = "both" if state.live_mask else "paged", spans.nbytes
            sums = self._sums[place]
            sums[0] += 1
            sums[1] += tokens
            sums[2] += nbytes
            if checkpoint is not None:
                found = self._checkpoints.setdefault(checkpoint.kind, [0, 0])
                found[0] += 1
                found[1] += checkpoint.nbytes
                nbytes += checkpoint.nbytes
            sizes.append((-nbytes, start, start + tokens, place))

    def largest(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"start": start, "end": end, "tokens": end - start, "bytes": -nbytes, "residency": place}
            for nbytes, start, end, place in heapq.nsmallest(LISTED_NODES, self._sizes)
        )

    def metrics(self) -> list[Metric]:
        def by_place(name: str, unit: str, text: str, position: int) -> Metric:
            samples = (Sample(sums[position], (("residency", place),)) for place, sums in self._sums.items())
            return Metric(f"radixcache_{name}", "gauge", unit, text, tuple(samples))

        def by_kind(name: str, unit: str, text: str, position: int) -> Metric:
            samples = (Sample(sums[position], (("kind", kind),)) for kind, sums in sorted(self._checkpoints.items()))
            return Metric(f"radixcache_{name}", "gauge", unit, text, tuple(samples))

        deepest = max(self._depth.values(), default=0)
        longest = max((end for _, _, end, _ in self._sizes), default=0)
        largest_bytes = -min((size[0] for size in self._sizes), default=0)
        return [
            by_place("resident_nodes", "nodes", "Tree nodes by where their spans are.", 0),
            by_place("resident_tokens", "tokens", "Distinct tokens by where their spans are.", 1),
            by_place("resident_bytes", "bytes", "Bytes of spans by where they are; both are counted once.", 2),
            by_kind("node_checkpoints", "checkpoints", "Checkpoints in the tree by why they were taken.", 0),
            by_kind("node_checkpoint_bytes", "bytes", "Bytes of the checkpoints in the tree.", 1),
            _one("depth_nodes", "nodes", "Nodes on the path with the most of them.", deepest),
            _one("longest_path_tokens", "tokens", "Tokens of the longest stored sequence.", longest),
            _one("largest_node_bytes", "bytes", "Spans and checkpoint of the node that holds most.", largest_bytes),
        ]


def _of_stats(stats: CacheStats) -> list[Metric]:
    """A metric for each field that holds numbers; what is text is not one."""
    texts = _field_texts()
    metrics = []
    for field in fields(stats):
        value = getattr(stats, field.name)
        is_gauge = field.name in GAUGES or _GAUGE_WORDS.search(field.name) is not None
        name = f"radixcache_{field.name}" + ("" if is_gauge else "_total")
        unit = UNITS.get(field.name, field.name.rpartition("_")[2])
        if isinstance(value, Mapping):
            label, unit = ("reason", "requests") if field.name == "short_reasons" else ("key", unit)
            pairs = [(str(key), number) for key, number in value.items() if isinstance(number, Number)]
            samples = tuple(Sample(number, ((label, key),)) for key, number in sorted(pairs))
        elif isinstance(value, Number):
            samples = (Sample(int(value) if isinstance(value, bool) else value),)
        else:
            continue
        text = texts.get(field.name, field.name.replace("_", " "))
        metrics.append(Metric(name, "gauge" if is_gauge else "counter", unit, text, samples))
    return metrics


def _field_texts() -> dict[str, str]:
    """What the docstring of CacheStats says of each of its attributes."""
    _, _, attributes = (inspect.getdoc(CacheStats) or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", attributes):
        names, _, text = entry.strip().partition(": ")
        sentence = " ".join(text.split())
        for name in names.split(", "):
            texts[name] = sentence[:1].upper() + sentence[1:]
    return texts


def _of_slots(paths: Sequence[LivePath]) -> list[Metric]:
    states = {"open": 0, "idle": 0, "empty": 0}
    for path in paths:
        states["open" if path.is_open else "idle" if path.offset else "empty"] += 1
    slots = [(("slot", str(path.slot)),) for path in paths]
    offsets = tuple(Sample(path.offset, slot) for path, slot in zip(paths, slots, strict=True))
    buffers = tuple(Sample(path.nbytes, slot) for path, slot in zip(paths, slots, strict=True))
    counted = tuple(Sample(count, (("state", state),)) for state, count in states.items())
    return [
        Metric(
            "radixcache_slots", "gauge", "slots", "Live slots: with an open session, idle on a path, empty.", counted
        ),
        Metric("radixcache_slot_offset_tokens", "gauge", "tokens", "Stored tokens on each slot's path.", offsets),
        Metric("radixcache_slot_bytes", "gauge", "bytes", "Buffers of each slot, spare room included.", buffers),
    ]


def _info(policy: str, budget_source: str) -> Metric:
    labels = (("budget_source", budget_source), ("policy", policy))
    return Metric("radixcache_info", "gauge", "", "Settings, as labels; always 1.", (Sample(1, labels),))


def _hit_ratio(stats: CacheStats) -> Metric:
    prompt_tokens = stats.hit_tokens + stats.miss_tokens
    ratio = stats.hit_tokens / prompt_tokens if prompt_tokens else 0.0
    return _one("hit_ratio", "", "Prompt tokens restored, as a share of all; 0 before the first request.", ratio)


def _one(name: str, unit: str, text: str, value: Number) -> Metric:
    return Metric(f"radixcache_{name}", "gauge", unit, text, (Sample(value),))


def _shown(value: Number) -> Number | str:
    return "+Inf" if value == math.inf else value


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
