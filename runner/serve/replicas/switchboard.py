"""Switchboard: the Dispatcher of a server: under a lock, with a clock, told by the replicas. Never imports MLX.

    Ray's router    ── present, place ──▶ ┐
    Fleet           ── end, learn ──────▶ ┘ Dispatcher: the decision, which simulations run too

Any thread may call it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from runner.routing.dispatcher import Dispatcher
from runner.routing.routers import Ask, make_router
from runner.serve.asked import Record
from runner.serve.replicas.told import Told


@dataclass(frozen=True)
class Routed:
    """A request that goes where the switchboard decides."""

    id: str
    ask: Ask


class Line(NamedTuple):
    """What went to one replica, and what is known of it."""

    requests: int
    matched_tokens: int
    known_digests: int
    open_requests: int


class Switchboard:
    """Which replicas there are, and where requests go.

    Args:
        router: one of `runner.routing.routers.ROUTERS`.
        on_present: told the names of all replicas whenever they are others than before.
        clock: seconds.

    Raises:
        ValueError: there is no such router.
    """

    def __init__(
        self, router: str, on_present: Callable[[set[str]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dispatcher = Dispatcher(make_router(router))
        self._on_present, self._clock = on_present, clock
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._open: dict[str, str] = {}
        self._sent: dict[str, tuple[int, int]] = {}

    @property
    def names(self) -> list[str]:
        """The replicas that are there."""
        with self._lock:
            return sorted(self._names)

    def present(self, names: set[str]) -> None:
        """These are there, and no others: what was known of others is forgotten."""
        with self._lock:
            gone, is_new = self._names - names, self._names != names
            self._names = set(names)
            for name in names:
                self._dispatcher.join(name)
            for name in gone:
                self._dispatcher.forget(name)
        if is_new:
            self._on_present(set(names))

    def place(self, to: str | Routed, names: set[str]) -> str | None:
        """Where a call goes; a request is booked there, and no longer where it may have been before. None: nowhere."""
        if isinstance(to, str):
            return to if to in names else None
        with self._lock:
            now_s = self._clock()
            self._end(to.id, now_s)
            among = names & self._names
            if not among:
                return None
            choice = self._dispatcher.choose(to.ask, now_s, among)
            self._dispatcher.send(to.id, choice, now_s)
            requests, matched_tokens = self._sent.get(choice.replica, (0, 0))
            self._sent[choice.replica] = requests + 1, matched_tokens + choice.matched_tokens
            self._open[to.id] = choice.replica
            return choice.replica

    def end(self, request: str, record: Record | None = None) -> None:
        """A request is over, and this is what it came to; one that is not open is passed over."""
        with self._lock:
            work_s = None
            if record is not None:
                prefilled_tokens = record.prompt_tokens - record.cached_tokens
                work_s = self._dispatcher.rates.now.work_s(prefilled_tokens, record.completion_tokens)
            self._end(request, self._clock(), work_s)

    def learn(self, name: str, told: Told) -> None:
        """A replica has told this; nothing is learnt of one that is gone."""
        with self._lock:
            if name in self._names:
                self._dispatcher.tell(name, told.added, told.removed)
            together = 1 + sum(where == name for where in self._open.values())
            for record in told.records:
                self._measure(record, together)

    def lines(self) -> dict[str, Line]:
        """What is known of each replica that is there."""
        with self._lock:
            where = list(self._open.values())
            count = self._dispatcher.directory.count
            return {
                name: Line(*self._sent.get(name, (0, 0)), count(name), where.count(name))
                for name in sorted(self._names)
            }

    def _end(self, request: str, now_s: float, work_s: float | None = None) -> None:
        self._open.pop(request, None)
        self._dispatcher.end(request, now_s, work_s)

    def _measure(self, record: Record, together: int) -> None:
        """Learn what tokens cost; of those that are decoded together each has its share of a step."""
        if record.ttft_ms is not None and record.queue_ms is not None:
            tokens = record.prompt_tokens - record.cached_tokens
            self._dispatcher.rates.prefilled(tokens, (record.ttft_ms - record.queue_ms) / 1e3)
        if record.outcome in ("stop", "length"):
            self._dispatcher.rates.decoded(record.completion_tokens, sum(record.gaps_ms) / 1e3 / together)


_SWITCHBOARDS: dict[str, Switchboard] = {}


def put_up(name: str, switchboard: Switchboard) -> None:
    """Have it found by the name of its application: Ray makes routers itself, and knows names alone."""
    _SWITCHBOARDS[name] = switchboard


def switchboard_of(name: str) -> Switchboard:
    """The one of this process that was put up under a name."""
    return _SWITCHBOARDS[name]
