"""Watch: what the server reports about itself: a log line per request, `GET /metrics`, and figures for its page.

The tables below have each metric of the server. A scrape adds those of each cache, from PrefixCache.snapshot_stats(),
with labels for the model, and those of the stores (disk, Redis), which begin with `radixcache_store_`.

Any thread may call this. Never imports MLX. It reads only counters of caches and holds their lock briefly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixcache.counters import families, metrics_of
from radixcache.errors import CacheClosedError
from radixcache.tree.history import Event, EventKind
from runner.serve.request import ModelNames, RequestRecord
from runner.text import cut

if TYPE_CHECKING:
    from radixcache import PrefixCache
    from runner.serve.scheduler import Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
#: Requests that the page lists, and requests for which it shows what the caches held at their end.
LISTED_REQUESTS, LISTED_REFUSALS, POINTS = 50, 20, 500

#: Counters: radixcache_serve_NAME_total, help, labels.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "http_requests": ("HTTP requests by route and status.", ("route", "status")),
    "replies": ("Requests that have ended, by outcome.", ("outcome",)),
    "prompt_tokens": ("Prompt tokens.", ()),
    "cached_tokens": ("Prompt tokens that were restored.", ()),
    "shortfall_tokens": (
        "Prompt tokens that were prefilled, by the reason that PrefixCache.explain gives.",
        ("reason",),
    ),
    "generated_tokens": ("Generated tokens.", ()),
    "proposed_tokens": ("Drafted tokens that were checked, by source.", ("source",)),
    "accepted_tokens": (
        "Drafted tokens that became part of a reply, by source: each saved its reply a forward pass.",
        ("source",),
    ),
    "draft_passes": ("Forward passes that checked drafted tokens of a reply, by source.", ("source",)),
    "evictions": ("Evictions and drops, by kind of state and cause.", ("state", "cause")),
}
#: Histograms: radixcache_serve_NAME_seconds, help, buckets.
HISTOGRAMS = {
    "queue": ("Seconds from arrival until the request starts.", SECONDS),
    "time_to_first_token": ("Seconds from arrival to the first token of the reply.", SECONDS),
    "inter_token": ("Seconds between two tokens of a reply.", TOKEN_SECONDS),
}

# No gauges with the creation time of each counter.
disable_created_metrics()  # type: ignore[no-untyped-call]


def read_caches(watched: Scheduler, read: Callable[[PrefixCache], T]) -> list[tuple[ModelNames, T]]:
    """Return the result of `read` for each open cache, the current one last."""
    found = []
    for names, cache in watched.caches():
        with suppress(CacheClosedError):
            found.append((names, read(cache)))
    return found


class Point(NamedTuple):
    time_s: float  # since 1970, at the end of a request; bytes are those of all caches then
    prompt_tokens: int
    cached_tokens: int
    live_bytes: int
    paged_bytes: int
    budget_bytes: int
    saved_s: float


class RefusedRequest(NamedTuple):
    time_s: float
    route: str  # the path if there is no such route
    status: int
    reason: str  # may quote what the client sent


class PrefillSpeed:
    """The time of prefill as a straight line over its tokens: the slope of the least squares over all requests."""

    def __init__(self) -> None:
        self._sums: NDArray[np.float64] = np.zeros(5)  # of 1, tokens, seconds, tokens squared, tokens times seconds

    def add(self, tokens: int, elapsed_s: float) -> None:
        self._sums += (1, tokens, elapsed_s, tokens * tokens, tokens * elapsed_s)

    @property
    def s_per_token(self) -> float:
        """Seconds that one token more takes; 0: not known yet."""
        count, tokens, elapsed_s, squared, product = self._sums.tolist()
        spread = count * squared - tokens * tokens
        return max(0.0, (count * product - tokens * elapsed_s) / spread) if spread else 0.0


class Watch(Collector):
    """Counts what the generation thread and the HTTP middleware report. `clock`: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._registry = registry = CollectorRegistry()
        about: dict[str, Any] = {"namespace": "radixcache_serve", "registry": registry}
        self._counters = {name: Counter(name, help, labels, **about) for name, (help, labels) in COUNTERS.items()}
        self._histograms = {
            name: Histogram(name, help, buckets=buckets, unit="seconds", **about)
            for name, (help, buckets) in HISTOGRAMS.items()
        }
        self._clock = clock
        self._watched: Scheduler | None = None
        self._lock = threading.Lock()
        self._ended: deque[tuple[float, RequestRecord]] = deque(maxlen=LISTED_REQUESTS)
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._refused: deque[RefusedRequest] = deque(maxlen=LISTED_REFUSALS)
        self._speeds: dict[ModelNames, PrefillSpeed] = {}
        self._cause = "pressure"

    def attach(self, watched: Scheduler) -> None:
        self._watched = watched
        self._registry.register(self)

    def on_http(self, route: str, status: int, refusal: str, shown: str) -> None:
        """Count a request; `refusal` says why it was refused, and is empty if it was not. The page has `shown`."""
        self._counters["http_requests"].labels(route, str(status)).inc()
        if refusal:
            with self._lock:
                self._refused.append(RefusedRequest(self._clock(), shown, status, refusal))

    def on_event(self, event: Event) -> None:
        """Count an eviction, and log what verification found wrong; the listener of every cache."""
        if event.kind is EventKind.EVICTED:
            cause = "mismatch" if event.detail.get("was_wrong") else self._cause
            self._counters["evictions"].labels(event.detail["state"], cause).inc()
        elif event.kind is EventKind.QUARANTINED:
            logger.warning("verify: %s; quarantined from token %d on", event.detail["mismatch"], event.start)

    def on_record(self, record: RequestRecord) -> None:
        if record.naming is None:
            logger.info("%s", in_a_line(record))
        else:
            record.naming.add_done_callback(lambda _: logger.info("%s", in_a_line(record)))
        self._counters["replies"].labels(record.outcome).inc()
        self._counters["prompt_tokens"].inc(record.prompt_tokens)
        self._counters["cached_tokens"].inc(record.cached_tokens)
        self._counters["generated_tokens"].inc(record.completion_tokens)
        for source, drafted in record.drafted.items():
            self._counters["proposed_tokens"].labels(source).inc(drafted.proposed)
            self._counters["accepted_tokens"].labels(source).inc(drafted.accepted)
            self._counters["draft_passes"].labels(source).inc(drafted.passes)
        for reason, tokens in record.short_tokens.items():
            self._counters["shortfall_tokens"].labels(reason).inc(tokens)
        timed = [("queue", record.queue_ms), ("time_to_first_token", record.ttft_ms)]
        for name, value_ms in (*timed, *(("inter_token", gap_ms) for gap_ms in record.gaps_ms)):
            if value_ms is not None:
                self._histograms[name].observe(value_ms / 1e3)
        record.saved_s = self._saved_s(record)
        held = [stats for _, stats in read_caches(self._watched, lambda cache: cache.stats)] if self._watched else []
        live_bytes, paged_bytes = sum(each.live_bytes for each in held), sum(each.paged_bytes for each in held)
        budget_bytes, now_s = max((each.budget_bytes for each in held), default=0), self._clock()
        of_prompt = (record.prompt_tokens, record.cached_tokens)
        point = Point(now_s, *of_prompt, live_bytes, paged_bytes, budget_bytes, record.saved_s)
        with self._lock:
            self._ended.append((now_s, record))
            self._points.append(point)

    def _saved_s(self, record: RequestRecord) -> float:
        """The time that the prefill of the cached tokens would have taken, at the speed of this model so far."""
        if record.queue_ms is None or record.ttft_ms is None:
            return 0.0
        with self._lock:
            speed = self._speeds.setdefault(record.names, PrefillSpeed())
            speed.add(record.prompt_tokens - record.cached_tokens, (record.ttft_ms - record.queue_ms) / 1e3)
            return record.cached_tokens * speed.s_per_token

    @contextmanager
    def evicting(self, cause: str) -> Iterator[None]:
        """Count evictions of the generation thread under this cause instead of "pressure"."""
        self._cause = cause
        try:
            yield
        finally:
            self._cause = "pressure"

    def last_requests(self) -> list[tuple[float, RequestRecord]]:
        with self._lock:
            return list(reversed(self._ended))

    def last_with(self, keys: Sequence[int], namespace: str) -> tuple[float, RequestRecord] | None:
        """The last request that had this prompt, and when it ended; None: it is not among those listed."""
        found = (
            (at, each) for at, each in self.last_requests() if each.namespace == namespace and each.keys is not None
        )
        return next(((at, each) for at, each in found if each.keys.tolist() == [*keys]), None)

    def refusals(self) -> list[RefusedRequest]:
        """The last refused requests, newest first."""
        with self._lock:
            return list(reversed(self._refused))

    def points(self) -> list[Point]:
        with self._lock:
            return list(self._points)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        watched = self._watched
        assert watched is not None, "attach registers it"
        yield GaugeMetricFamily("radixcache_serve_waiting_requests", "Requests that wait for room.", watched.waiting)
        yield GaugeMetricFamily("radixcache_serve_running_requests", "Requests being evaluated.", watched.running)
        caches = [
            ({"model": names.model, "adapter": names.adapter or "", "draft": names.draft or ""}, snapshot.metrics)
            for names, snapshot in read_caches(watched, lambda cache: cache.snapshot_stats())
        ]
        stores = watched.store_stats().items()
        yield from families(caches)
        yield from families(({"tier": tier}, metrics_of(stats, "radixcache_store_")) for tier, stats in stores)


def in_a_line(record: RequestRecord) -> str:
    whose = f" of {record.namespace}" if record.namespace else ""
    short = ", ".join(f"{tokens:,} {reason}" for reason, tokens in record.short_tokens.items())
    why = f" (not: {short})" if short else ""
    where = f", {record.fork_words}" if record.fork_words else ""
    where += f" ({record.movable_tokens:,} more with --move-volatile)" if record.movable_tokens else ""
    proposed = record.accepted_tokens + record.rejected_tokens
    drafted = f" ({record.accepted_tokens:,} of {proposed:,} drafted)" if proposed else ""
    line = (
        f"{record.id[:8]}{whose} on {cut(record.names.model)!r}: {record.prompt_tokens:,} prompt tokens, "
        f"{record.cached_tokens:,} cached{why}{where}, {record.completion_tokens:,} generated{drafted}, "
        f"{record.outcome}"
    )
    shown = ("queued {:,.1f} ms", "TTFT {:,.1f} ms", "{:,.1f} tokens/s")
    for form, value in zip(shown, (record.queue_ms, record.ttft_ms, record.tokens_per_s), strict=True):
        line += "" if value is None else f"; {form.format(value)}"
    return f"{line}; {cut(record.note)}" if record.note else line
