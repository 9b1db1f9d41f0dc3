"""Switchboard: the Dispatcher of a server: under a lock, with a clock, told by the replicas. Never imports MLX.

    Ray's router    ── present, place ──▶ ┐
    Fleet           ── end, learn ──────▶ ┘ Dispatcher: the decision, which simulations run too

Any thread may call it.

What a replica tells: how requests ended, and which prefixes it stores, by digests at block borders, changes alone.

    edges of the tree ──▶ digests, the shorter prefix before the longer ──▶ added, removed since the last time

At most MAX_DIGESTS are told of, parents before children; who listens anew is told all of them. Never imports MLX.

An HTTP request as plain data, and an application called with it. Never imports MLX.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from starlette.types import ASGIApp, Message, Scope

from radixcache.observe.hints import Edge
from runner.routing.dispatcher import BLOCK_TOKENS, MAX_DIGESTS, Dispatcher, chain_digests, root_digest
from runner.routing.routers import Ask, make_router
from runner.serve.request import RequestRecord


@dataclass(frozen=True)
class Told:
    """Since the last time. `added` has shorter prefixes before longer ones."""

    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    records: Sequence[RequestRecord] = ()


@dataclass
class Telling:
    """What one listener was told so far.

    Attributes:
        model: the name that digests are made with; `secret` too.
    """

    model: str
    secret: bytes
    max_digests: int = MAX_DIGESTS
    _told: dict[int, None] = field(default_factory=dict)

    def changes(self, edges: Iterable[Edge]) -> tuple[list[int], list[int]]:
        """What was added and removed, given all that is stored now."""
        found = dict.fromkeys(islice(self._digests(edges), self.max_digests))
        added = [digest for digest in found if digest not in self._told]
        removed = [digest for digest in self._told if digest not in found]
        self._told = found
        return added, removed

    def _digests(self, edges: Iterable[Edge]) -> Iterable[int]:
        # Of each edge: the digest at its last border, and the keys behind that.
        ends: list[tuple[int, np.ndarray]] = []
        for edge in edges:
            if edge.parent < 0:
                digest, keys = root_digest(self.model, edge.namespace, self.secret), edge.keys
            else:
                digest, before = ends[edge.parent]
                keys = np.concatenate([before, edge.keys])
            digests = chain_digests(keys, digest)
            yield from digests
            rest = keys[len(digests) * BLOCK_TOKENS :]
            ends.append((digests[-1] if digests else digest, rest))


class AdminRequest(NamedTuple):
    """What the admin asked, once it was let in; the body is JSON."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""


class AdminReply(NamedTuple):
    """What came of it."""

    status: int
    media_type: str
    body: bytes


async def called(app: ASGIApp, request: AdminRequest) -> AdminReply:
    """Have an application answer, as one that asks from this machine."""
    headers = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(request.body))}
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "query_string": request.query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    media_type = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
    return AdminReply(sent[0]["status"], media_type, b"".join(message.get("body", b"") for message in sent[1:]))


@dataclass(frozen=True)
class Routed:
    """A request that goes where the switchboard decides."""

    id: str
    ask: Ask


class ReplicaLine(NamedTuple):
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

    def end(self, request: str, record: RequestRecord | None = None) -> None:
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

    def lines(self) -> dict[str, ReplicaLine]:
        """What is known of each replica that is there."""
        with self._lock:
            where = list(self._open.values())
            count = self._dispatcher.directory.count
            return {
                name: ReplicaLine(*self._sent.get(name, (0, 0)), count(name), where.count(name))
                for name in sorted(self._names)
            }

    def _end(self, request: str, now_s: float, work_s: float | None = None) -> None:
        self._open.pop(request, None)
        self._dispatcher.end(request, now_s, work_s)

    def _measure(self, record: RequestRecord, together: int) -> None:
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
