"""Scrape: what `GET /metrics` shows of replicas, by their names, and of the router. Never imports MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from runner.serve.replicas.switchboard import Line


class Scrape:
    """The metrics of the application and, as texts, those of its replicas.

    Args:
        lines: what is known of each replica.
    """

    def __init__(self, lines: Callable[[], Mapping[str, Line]]) -> None:
        self._lines = lines
        self._own = CollectorRegistry()
        name, about = "radixcache_serve_http_requests", "HTTP requests by route and status."
        self._http = Counter(name, about, ["route", "status"], registry=self._own)

    def on_http(self, route: str, status: int) -> None:
        """A request was answered."""
        self._http.labels(route, str(status)).inc()

    def exposition(self, texts: Mapping[str, str]) -> bytes:
        """All of it in Prometheus' text format; `texts` are those of the replicas, by their names."""
        registry = CollectorRegistry()
        registry.register(_Families([*_of_lines(self._lines()), *labelled(texts)]))
        return generate_latest(self._own) + generate_latest(registry)


def labelled(texts: Mapping[str, str]) -> list[Metric]:
    """The families of several expositions, each sample with the label `replica`."""
    found: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                one = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                one.add_sample(sample.name, {"replica": replica, **sample.labels}, sample.value)
    return list(found.values())


def _of_lines(lines: Mapping[str, Line]) -> Iterator[Metric]:
    kinds: dict[str, tuple[str, type[CounterMetricFamily | GaugeMetricFamily]]] = {
        "requests": ("Requests that were sent to a replica.", CounterMetricFamily),
        "matched_tokens": ("Tokens of their prompts that it was thought to store.", CounterMetricFamily),
        "known_digests": ("Block borders that it is thought to store.", GaugeMetricFamily),
        "open_requests": ("Requests that are there now.", GaugeMetricFamily),
    }
    for field, (help, kind) in kinds.items():
        family = kind(f"radixcache_router_{field}", help, labels=["replica"])
        for name, line in lines.items():
            family.add_metric([name], getattr(line, field))
        yield family


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
