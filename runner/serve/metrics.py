"""ServerMetrics: what `GET /metrics` shows, on a registry of its own. Never imports MLX.

Names that begin with `radixcache_serve_` are the server's own. The others are those of PrefixCache.snapshot_stats(),
read where somebody scrapes, with labels that say which model's cache it is; `radixcache_store_` stands before those of
the stores, disk or Redis, which all caches share.

Watch: what the server tells of itself. A line of the log per request, metrics, and what its page shows.

Any thread may call it; it never imports MLX. Of caches it reads the counters, whose lock is held briefly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixcache.errors import CacheClosedError
from radixcache.stores.store import StoreStats
from radixcache.tree.history import Event, EventKind
from runner.serve.request import ModelNames, RequestRecord

if TYPE_CHECKING:
    from radixcache import PrefixCache

T = TypeVar("T")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)

#: Metrics of the store by their fields of StoreStats.
STORE_GAUGES = {
    "blocks": "Files of blocks.",
    "checkpoints": "Files of checkpoints.",
    "stored_bytes": "Files of both.",
    "budget_bytes": "What they may take at most.",
    "waiting_bytes": "State in memory that waits to be written.",
}
STORE_COUNTERS = {
    "read_files": "Files that were read and found right.",
    "read_bytes": "Their bytes.",
    "read_seconds": "What that took, summed over readers.",
    "written_files": "Files that were written.",
    "written_bytes": "Their bytes.",
    "evicted_files": "Files that were removed to keep the budget.",
    "evicted_bytes": "Their bytes.",
    "damaged_files": "Files that were no blocks, or not as they were written, and were set aside.",
    "vanished_files": "Files that were gone when they were to be read.",
    "read_errors": "Files or folders that the system could not read.",
}
STORE_REASONS = {
    "dropped": ("Blocks that were not written, by why.", "reason"),
    "failed_calls": ("Calls of a server that failed, by how.", "kind"),
}

# Else each counter has a gauge beside it that says since when it counts, which is since the process runs.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Watched(Protocol):
    """What is watched; `Running` is it. Any thread may ask, and none waits for a forward pass."""

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""

    @property
    def running(self) -> int:
        """Requests whose prompt or reply is being evaluated."""

    def caches(self) -> list[tuple[ModelNames, PrefixCache]]:
        """The caches of all models that were served, the present one's last."""

    def store_stats(self) -> Mapping[str, StoreStats]:
        """What each store behind the caches has and did, by what it is called."""


def read_caches(watched: Watched, read: Callable[[PrefixCache], T]) -> list[tuple[ModelNames, T]]:
    """What `read` finds in each cache that is open, the present one last."""
    found = []
    for names, cache in watched.caches():
        with suppress(CacheClosedError):  # the server goes on, or stops, meanwhile
            found.append((names, read(cache)))
    return found


class ServerMetrics:
    """Counters and histograms of the server, and the metrics of its caches."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"radixcache_serve_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"radixcache_serve_{name}_seconds", help, buckets=buckets, registry=registry)

        self._http = counter("http_requests", "HTTP requests by route and status.", "route", "status")
        self._replies = counter("replies", "Requests that the generation thread was through with.", "outcome")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_tokens", "The part of them that was restored.")
        self._short = counter(
            "shortfall_tokens",
            "The part of them that was evaluated, by why, as PrefixCache.explain says it.",
            "reason",
        )
        self._generated = counter("generated_tokens", "Tokens of replies.")
        self._evictions = counter("evictions", "State given up: of what, and what for.", "state", "cause")
        self._queue = histogram("queue", "From arrival until the request was let in.", SECONDS)
        self._ttft = histogram("time_to_first_token", "From arrival to the first token of the reply.", SECONDS)
        self._gaps = histogram("inter_token", "From one token of a reply to the next.", TOKEN_SECONDS)

    def attach(self, watched: Watched) -> None:
        """Show these caches and queues too."""
        self._registry.register(_Readings(watched))

    def on_http(self, route: str, status: int) -> None:
        """A request was answered."""
        self._http.labels(route, str(status)).inc()

    def on_eviction(self, cause: str, state: str) -> None:
        """Tokens or a checkpoint went."""
        self._evictions.labels(state, cause).inc()

    def on_record(self, record: RequestRecord) -> None:
        """A request is over."""
        self._replies.labels(record.outcome).inc()
        self._prompt.inc(record.prompt_tokens)
        self._cached.inc(record.cached_tokens)
        self._generated.inc(record.completion_tokens)
        for reason, tokens in record.short_tokens.items():
            self._short.labels(reason).inc(tokens)
        for histogram, value_ms in ((self._queue, record.queue_ms), (self._ttft, record.ttft_ms)):
            if value_ms is not None:
                histogram.observe(value_ms / 1e3)
        for gap_ms in record.gaps_ms:
            self._gaps.observe(gap_ms / 1e3)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format, CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Readings(Collector):
    """What is read at the moment of a scrape: the queues, and all caches, each told apart by its model's names."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "radixcache_serve_waiting_requests", "Requests that wait for room.", self._watched.waiting
        )
        yield GaugeMetricFamily("radixcache_serve_running_requests", "Requests being evaluated.", self._watched.running)
        found: dict[str, Metric] = {}
        for names, snapshot in read_caches(self._watched, lambda cache: cache.snapshot_stats()):
            labels = {"model": names.model, "adapter": names.adapter or "", "draft": names.draft or ""}
            for metric in snapshot.metrics:
                new = Metric(metric.name.removesuffix("_total"), metric.help, metric.kind)
                family = found.setdefault(metric.name, new)
                for sample in metric.samples:
                    family.add_sample(metric.name, {**labels, **dict(sample.labels)}, sample.value)
        yield from found.values()
        yield from _of_stores(self._watched.store_stats())


def _of_stores(stores: Mapping[str, StoreStats]) -> Iterator[Metric]:
    if not stores:
        return
    kinds: list[tuple[type[GaugeMetricFamily | CounterMetricFamily], dict[str, str]]] = [
        (GaugeMetricFamily, STORE_GAUGES),
        (CounterMetricFamily, STORE_COUNTERS),
    ]
    for family, fields in kinds:
        for field, help in fields.items():
            metric = family(f"radixcache_store_{field}", help, labels=["tier"])
            for tier, stats in stores.items():
                metric.add_metric([tier], getattr(stats, field))
            yield metric
    for field, (help, label) in STORE_REASONS.items():
        counter = CounterMetricFamily(f"radixcache_store_{field}", help, labels=["tier", label])
        for tier, stats in stores.items():
            for reason, count in sorted(getattr(stats, field).items()):
                counter.add_metric([tier, reason], count)
        yield counter
    stopped = GaugeMetricFamily("radixcache_store_stopped", "1 while nothing is written.", labels=["tier"])
    for tier, stats in stores.items():
        stopped.add_metric([tier], bool(stats.stopped))
    yield stopped


logger = logging.getLogger(__name__)

#: Requests that the page lists, and requests at whose end it knows what the caches held.
LISTED_REQUESTS = 50
POINTS = 500
#: Characters of a model's name or of an error's message.
LONGEST_TEXT = 200


class Point(NamedTuple):
    """The end of a request, and what all caches held then. `time_s`: since 1970."""

    time_s: float
    prompt_tokens: int
    cached_tokens: int
    live_bytes: int
    paged_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class Seen:
    """A request that ended, and when, in seconds since 1970."""

    time_s: float
    record: RequestRecord


class Watch:
    """Told of what happens, by the generation thread and by whoever counts HTTP requests.

    Args:
        clock: seconds since 1970.

    Attributes:
        metrics: what `GET /metrics` shows.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.metrics = ServerMetrics()
        self._clock = clock
        self._watched: Watched | None = None
        self._lock = threading.Lock()
        self._seen: deque[Seen] = deque(maxlen=LISTED_REQUESTS)
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._cause = "pressure"

    def attach(self, watched: Watched) -> None:
        """Say whose caches and queues these are; once, before the first request."""
        self._watched = watched
        self.metrics.attach(watched)

    def on_record(self, record: RequestRecord) -> None:
        """A request is over."""
        logger.info("%s", in_a_line(record))
        self.metrics.on_record(record)
        held = [stats for _, stats in read_caches(self._watched, lambda cache: cache.stats)] if self._watched else []
        live_bytes, paged_bytes = sum(each.live_bytes for each in held), sum(each.paged_bytes for each in held)
        budget_bytes = max((each.budget_bytes for each in held), default=0)
        now_s = self._clock()
        point = Point(now_s, record.prompt_tokens, record.cached_tokens, live_bytes, paged_bytes, budget_bytes)
        with self._lock:
            self._seen.append(Seen(now_s, record))
            self._points.append(point)

    def on_event(self, event: Event) -> None:
        """Something happened to stored state; the listener of every cache."""
        if event.kind is EventKind.EVICTED:
            cause = "mismatch" if event.detail.get("was_wrong") else self._cause
            self.metrics.on_eviction(cause, event.detail["state"])

    @contextmanager
    def evicting(self, cause: str) -> Iterator[None]:
        """Evictions of the present thread, the generation thread, have this cause and not pressure on the budget."""
        self._cause = cause
        try:
            yield
        finally:
            self._cause = "pressure"

    def http(self, route: str, status: int) -> None:
        """A request was answered."""
        self.metrics.on_http(route, status)

    def seen(self) -> list[Seen]:
        """The last requests that ended, the latest first."""
        with self._lock:
            return list(reversed(self._seen))

    def points(self) -> list[Point]:
        """What there was at the ends of requests, the latest last."""
        with self._lock:
            return list(self._points)


def in_a_line(record: RequestRecord) -> str:
    """What became of a request, for the log."""
    whose = f" of {record.namespace}" if record.namespace else ""
    short = ", ".join(f"{tokens:,} {reason}" for reason, tokens in record.short_tokens.items())
    why = f" (not: {short})" if short else ""
    line = (
        f"{record.id[:8]}{whose} on {cut(record.names.model)!r}: {record.prompt_tokens:,} prompt tokens, "
        f"{record.cached_tokens:,} cached{why}, {record.completion_tokens:,} generated, {record.outcome}"
    )
    for shown, value in (
        ("queued {:,.1f} ms", record.queue_ms),
        ("TTFT {:,.1f} ms", record.ttft_ms),
        ("{:,.1f} tokens/s", record.tokens_per_s),
    ):
        line += "" if value is None else f"; {shown.format(value)}"
    return f"{line}; {cut(record.note)}" if record.note else line


def cut(text: str) -> str:
    """What a client may have made as long as it liked, as much of it as people read, and no line of its own."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:LONGEST_TEXT])
    return shown if len(text) <= LONGEST_TEXT else f"{shown}\u2026"
