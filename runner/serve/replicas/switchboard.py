"""Switchboard: the Dispatcher of a server, under a lock and with a clock. Never imports MLX.

    Ray's router    ── set_names, place ──▶ ┐
    Fleet           ── end, learn ────────▶ ┘ Dispatcher: the decision, as in simulations

Replicas send news: how requests ended, and which prefixes they stored and evicted, by digests at block borders. At most
MAX_DIGESTS of a replica are known, parents before children. Also an HTTP request of an admin as plain data, and a call
of an application with it. Any thread may use a Switchboard; the other classes belong to one thread.
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
from runner.routing import BLOCK_TOKENS, MAX_DIGESTS, Ask, Dispatcher, chain_digests, make_router, root_digest
from runner.serve.request import RequestRecord


@dataclass(frozen=True)
class ReplicaNews:
    """What changed since the last news of a replica. `added` has shorter prefixes before longer ones."""

    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    records: Sequence[RequestRecord] = ()


@dataclass
class DigestChanges:
    """The digests that one listener knows, for `model` and `secret`."""

    model: str
    secret: bytes
    max_digests: int = MAX_DIGESTS
    _known: dict[int, None] = field(default_factory=dict)

    def update(self, edges: Iterable[Edge]) -> tuple[list[int], list[int]]:
        """The digests added and removed since the last call, given all edges of the tree now."""
        found = dict.fromkeys(islice(self._digests(edges), self.max_digests))
        added = [digest for digest in found if digest not in self._known]
        removed = [digest for digest in self._known if digest not in found]
        self._known = found
        return added, removed

    def _digests(self, edges: Iterable[Edge]) -> Iterable[int]:
        ends: list[tuple[int, np.ndarray]] = []  # of each edge: the digest at its last border, and the keys behind it
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


@dataclass(frozen=True)
class RoutedRequest:
    """A request for which the switchboard chooses the replica."""

    id: str
    ask: Ask


class ReplicaCounts(NamedTuple):
    requests: int
    matched_tokens: int
    known_digests: int
    open_requests: int


class Switchboard:
    """Which replicas there are, and where requests go. When the names change, `on_names` gets all of them."""

    def __init__(
        self, router: str, on_names: Callable[[set[str]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dispatcher = Dispatcher(make_router(router))
        self._on_names, self._clock = on_names, clock
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._open: dict[str, str] = {}
        # Of each replica: how many requests were sent there, and their matched tokens.
        self._sent: dict[str, tuple[int, int]] = {}

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._names)

    def set_names(self, names: set[str]) -> None:
        """Set which replicas there are; all others are forgotten."""
        with self._lock:
            before, self._names = self._names, set(names)
            for name in names:
                self._dispatcher.join(name)
            for name in before - names:
                self._dispatcher.forget(name)
        if before != names:
            self._on_names(set(names))

    def place(self, to: str | RoutedRequest, names: set[str]) -> str | None:
        """The name of the replica that a call goes to, or None. A request is booked there, and nowhere else."""
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
        """End a request, with its record if there is one; a request that is not open is ignored."""
        with self._lock:
            work_s = None
            if record is not None:
                prefilled_tokens = record.prompt_tokens - record.cached_tokens
                work_s = self._dispatcher.rates.now.work_s(prefilled_tokens, record.completion_tokens)
            self._end(request, self._clock(), work_s)

    def learn(self, name: str, news: ReplicaNews) -> None:
        """Learn the news of a replica; if it is gone, only the records."""
        with self._lock:
            if name in self._names:
                self._dispatcher.tell(name, news.added, news.removed)
            together = 1 + sum(where == name for where in self._open.values())
            for record in news.records:
                self._measure(record, together)

    def counts(self) -> dict[str, ReplicaCounts]:
        with self._lock:
            where = list(self._open.values())
            digests = self._dispatcher.directory.count
            return {
                name: ReplicaCounts(*self._sent.get(name, (0, 0)), digests(name), where.count(name))
                for name in sorted(self._names)
            }

    def _end(self, request: str, now_s: float, work_s: float | None = None) -> None:
        self._open.pop(request, None)
        self._dispatcher.end(request, now_s, work_s)

    def _measure(self, record: RequestRecord, together: int) -> None:
        """Measure the cost of tokens; requests that decode together share each step."""
        if record.ttft_ms is not None and record.queue_ms is not None:
            tokens = record.prompt_tokens - record.cached_tokens
            self._dispatcher.rates.prefilled(tokens, (record.ttft_ms - record.queue_ms) / 1e3)
        if record.outcome in ("stop", "length"):
            self._dispatcher.rates.decoded(record.completion_tokens, sum(record.gaps_ms) / 1e3 / together)


#: By the name of the application. Ray makes routers itself, and passes only names to them.
SWITCHBOARDS: dict[str, Switchboard] = {}


def switchboard_of(name: str) -> Switchboard:
    """The switchboard of an application. Classes that Ray pickles by value call this: they would copy the dict."""
    return SWITCHBOARDS[name]


class AdminRequest(NamedTuple):
    """An admin's request, which is authorized; the body is JSON."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""


class AdminReply(NamedTuple):
    status: int
    media_type: str
    body: bytes


async def call_app(app: ASGIApp, request: AdminRequest) -> AdminReply:
    """The reply of an application to a request from this machine."""
    address = ("127.0.0.1", 0)
    headers = {"host": address[0], "content-type": "application/json", "content-length": str(len(request.body))}
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "client": address,
        "server": address,
        "method": request.method,
        "path": request.path,
        "query_string": request.query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    media_type = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
    return AdminReply(sent[0]["status"], media_type, b"".join(message.get("body", b"") for message in sent[1:]))
