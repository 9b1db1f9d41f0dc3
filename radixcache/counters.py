"""Counters: each is one field of a dataclass, with its kind, unit and help; metrics and their text follow from it.

    hits: int = counter("requests", "Requests with a hit.")      the declaration, in CacheStats or StoreStats
    tally.add(hits=1)                                            where it is counted

A metric has Prometheus' name: a prefix, the name of the field with its unit last, and `_total` if it only grows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

Number = int | float


def counter(unit: str, help: str, *, label: str = "") -> Any:
    """A field that only grows, from 0; with a label, a dict with a number for each value of the label."""
    about = {"kind": "counter", "unit": unit, "help": help, "label": label}
    return field(default_factory=dict, metadata=about) if label else field(default=0, metadata=about)


def gauge(unit: str, help: str, *, label: str = "") -> Any:
    """A field for what there is now. The metric of a text is 1, or 0 if the text is empty."""
    return field(metadata={"kind": "gauge", "unit": unit, "help": help, "label": label})


def fact(help: str) -> Any:
    """A text that is no metric."""
    return field(metadata={"kind": "", "unit": "", "help": help})


class Tally:
    """Counts by the names of fields, and by label where a field has one. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = {}

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def add_to(self, name: str, label: str, count: float = 1) -> None:
        with self._lock:
            counts = self._counts.setdefault(name, {})
            counts[label] = counts.get(label, 0) + count

    def counts(self) -> dict[str, Any]:
        """A copy of all counts, to make the dataclass of."""
        with self._lock:
            return {name: dict(its) if isinstance(its, dict) else its for name, its in self._counts.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    """A number, and the labels that distinguish it from other samples of its metric."""

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


def metrics_of(stats: Any, prefix: str) -> Iterator[Metric]:
    """A metric for each field of a dataclass that is no fact."""
    for each in fields(stats):
        value, about = getattr(stats, each.name), each.metadata
        if not about["kind"]:
            continue
        name = f"{prefix}{each.name}" + ("_total" if about["kind"] == "counter" else "")
        if about["label"]:
            numbers = sorted(value.items()) if about["kind"] == "counter" else value.items()
            samples = tuple(Sample(number, ((about["label"], key),)) for key, number in numbers)
        else:
            samples = (Sample(int(bool(value)) if isinstance(value, str) else value),)
        yield Metric(name, about["kind"], about["unit"], about["help"], samples)


def families(sources: Iterable[tuple[Mapping[str, str], Iterable[Metric]]]) -> list[Any]:
    """Metric families of prometheus-client: equal names of all sources together, with the labels of each source."""
    from prometheus_client.metrics_core import Metric as Family

    found: dict[str, Family] = {}
    for labels, metrics in sources:
        for metric in metrics:
            new = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
            family = found.setdefault(metric.name, new)
            for sample in metric.samples:
                family.add_sample(metric.name, {**labels, **dict(sample.labels)}, sample.value)
    return list(found.values())


def exposition(metrics: Iterable[Metric], labels: Mapping[str, str]) -> str:
    """Prometheus' text format, version 0.0.4, with `labels` on every sample."""
    collected = families([(labels, metrics)])
    from prometheus_client import generate_latest

    source = SimpleNamespace(collect=lambda: collected)
    return generate_latest(source).decode()


def json_value(value: Number) -> Number | str:
    """The number, but "+Inf" for infinity, as in Prometheus' own JSON."""
    return "+Inf" if value == math.inf else value
