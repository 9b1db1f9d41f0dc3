"""Watch: what the server tells of itself. A line of the log per request, metrics, and what its page shows.

Any thread may call it; it never imports MLX. Of caches it reads the counters, whose lock is held briefly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from radixcache.tree.events import Event, EventKind
from runner.serve.asked import Record
from runner.serve.metrics import ServerMetrics, Watched, read_caches

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
    record: Record


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

    def on_record(self, record: Record) -> None:
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


def in_a_line(record: Record) -> str:
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
