"""Routes of the cache with replicas: each replica is asked, and the replies are combined. Never imports MLX.

    GET  /metrics        of all replicas, each sample with its replica's name, and counters of the router
    GET  /cache          the page; it shows the models of all replicas
    GET  /cache/state    of the model and replica that is shown; requests and counts of all
    GET  /cache/requests/{id}    of the replica that has it
    other routes         of ?replica=NAME, or of all: {"replicas": {NAME: the reply}}

`runner.serve.middleware` decides who may ask.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Protocol
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from runner.serve.admin import EXPLAIN, cache_page
from runner.serve.metrics import CONTENT_TYPE, LISTED_REQUESTS
from runner.serve.replicas.switchboard import AdminReply, AdminRequest, ReplicaCounts
from runner.serve.request import ApiError
from runner.serve.responses import ResponseMemory
from runner.serve.service import read_json, to_json

BETWEEN = ": "  # between the names of a replica and of a model
#: The router's metrics: a field of ReplicaCounts, help and kind.
ROUTER_METRICS: tuple[tuple[str, str, type[CounterMetricFamily | GaugeMetricFamily]], ...] = (
    ("requests", "Requests that were sent to a replica.", CounterMetricFamily),
    ("matched_tokens", "Tokens of their prompts that it probably stored.", CounterMetricFamily),
    ("known_digests", "Block borders that it probably stores.", GaugeMetricFamily),
    ("open_requests", "Requests that it has now.", GaugeMetricFamily),
)


class Scrape:
    """The text of `GET /metrics`: metrics of the application, of the router and of the replicas."""

    def __init__(self, counts: Callable[[], Mapping[str, ReplicaCounts]]) -> None:
        self._counts = counts
        self._own = CollectorRegistry()
        name, about = "radixcache_serve_http_requests", "HTTP requests by route and status."
        self._http = Counter(name, about, ["route", "status"], registry=self._own)

    def on_http(self, route: str, status: int, refusal: str, shown: str) -> None:
        self._http.labels(route, str(status)).inc()

    def exposition(self, texts: Mapping[str, str]) -> bytes:
        """All metrics in Prometheus' text format; `texts` are those of the replicas, by their names."""
        families = SimpleNamespace(collect=lambda: [*self._of_router(), *label_by_replica(texts)])
        return generate_latest(self._own) + generate_latest(families)

    def _of_router(self) -> Iterator[Metric]:
        counts = self._counts()
        for field, help, kind in ROUTER_METRICS:
            family = kind(f"radixcache_router_{field}", help, labels=["replica"])
            for name, each in counts.items():
                family.add_metric([name], getattr(each, field))
            yield family


def label_by_replica(texts: Mapping[str, str]) -> list[Metric]:
    """The metrics in these texts, each sample with the label `replica`."""
    found: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                one = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                one.add_sample(sample.name, {"replica": replica, **sample.labels}, sample.value)
    return list(found.values())


class AdminTarget(Protocol):
    @property
    def names(self) -> list[str]: ...

    def admin(self, name: str, request: AdminRequest) -> AdminReply:
        """The reply of one replica. ApiError: there is none (503)."""


def replica_routes(fleet: AdminTarget, scrape: Scrape, memory: ResponseMemory) -> APIRouter:
    """Return the routes; `memory` has the conversations that bodies may go on with. ApiError: a request is wrong.

    To clear the caches of all replicas clears the memory, too.
    """
    router = APIRouter()

    @router.get("/metrics")
    def metrics() -> Response:
        found = _ask_all(fleet, lambda name: AdminRequest("GET", "/metrics"))
        texts = {name: reply.body.decode() for name, reply in found.items()}
        return Response(scrape.exposition(texts), media_type=CONTENT_TYPE)

    @router.get("/cache")
    async def page() -> Response:
        content, headers = cache_page()
        return Response(content, headers=headers, media_type="text/html")

    @router.get("/cache/state")
    def state(model: str = "", seen: str = "") -> Response:
        shown, _, its_model = model.partition(BETWEEN)
        shown = shown if shown in fleet.names else min(fleet.names, default="")

        def request_of(name: str) -> AdminRequest:
            about = {"model": its_model, "seen": seen, "tree": name == shown}
            return AdminRequest("GET", "/cache/state", urlencode(about))

        found = {name: json.loads(reply.body) for name, reply in _ask_all(fleet, request_of).items()}
        return to_json(one_state(found, shown if shown in found else min(found)))

    @router.get("/cache/requests/{id}")
    def requested(id: str) -> Response:
        found = _ask_all(fleet, lambda name: AdminRequest("GET", f"/cache/requests/{id}"))
        reply = min(found.values(), key=lambda each: each.status)  # of the replica that has it
        return Response(reply.body, reply.status, media_type=reply.media_type)

    @router.delete("/cache")
    @router.get("/cache/{what}")
    @router.post("/cache/{what}")
    async def other(request: Request, replica: str = "") -> Response:
        url, body = request.url, await request.body()
        if (request.method, url.path) == ("POST", EXPLAIN):
            body = json.dumps(memory.join(await read_json(request, lambda given: given), "")).encode()
        if request.method == "DELETE" and not replica:
            memory.clear(request.query_params.get("namespace"))
        forwarded = AdminRequest(request.method, url.path, url.query, body)
        if replica:
            names = fleet.names
            if replica not in names:
                known = ", ".join(names) or "none"
                raise ApiError(404, f"no replica {replica!r:.80}; there are: {known}.", param="replica")
            reply = await asyncio.to_thread(fleet.admin, replica, forwarded)
            return Response(reply.body, reply.status, media_type=reply.media_type)
        found = await asyncio.to_thread(_ask_all, fleet, lambda name: forwarded)
        said = {name: json.loads(reply.body) for name, reply in found.items()}
        return to_json({"replicas": said}, max(reply.status for reply in found.values()))

    return router


def one_state(states: Mapping[str, dict[str, Any]], shown: str) -> dict[str, Any]:
    """The states of several replicas as one, for the page; a model's name begins with its replica's."""

    def both(name: str, model: str) -> str:
        return f"{name}{BETWEEN}{model}"

    rows = [{**row, "model": both(name, row["model"])} for name, state in states.items() for row in state["requests"]]
    return {
        **states[shown],
        "models": [both(name, model) for name, state in states.items() for model in state["models"]],
        "model": both(shown, states[shown]["model"]),
        "stats": {both(name, model): of for name, state in states.items() for model, of in state["stats"].items()},
        "running": sum(state["running"] for state in states.values()),
        "waiting": sum(state["waiting"] for state in states.values()),
        "requests": sorted(rows, key=lambda row: row["time_s"], reverse=True)[:LISTED_REQUESTS],
    }


def _ask_all(fleet: AdminTarget, request_of: Callable[[str], AdminRequest]) -> dict[str, AdminReply]:
    """The reply of each replica that answers; all are asked at the same time."""
    names = fleet.names

    def ask(name: str) -> AdminReply | None:
        with suppress(ApiError):
            return fleet.admin(name, request_of(name))
        return None

    with ThreadPoolExecutor(max(1, len(names))) as together:
        found = {name: reply for name, reply in zip(names, together.map(ask, names), strict=True) if reply is not None}
    if not found:
        raise ApiError(503, "no replica answers.")
    return found
