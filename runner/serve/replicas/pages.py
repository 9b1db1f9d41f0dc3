"""Routes of the cache where there are replicas: each is asked, and what they answer is put together.

    GET  /metrics        of all, each sample with its replica's name, and what the router did
    GET  /cache          the page; what there are models of a server for, there are models of replicas
    GET  /cache/state    of the model and replica that is shown; requests and counts of all
    other routes         ?replica=NAME, or all of them: {"replicas": {NAME: what it answers}}

Who may ask is `runner.serve.middleware`'s to say. Never imports MLX.

Scrape: what `GET /metrics` shows of replicas, by their names, and of the router. Never imports MLX.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from runner.serve.admin import cache_page
from runner.serve.metrics import CONTENT_TYPE, LISTED_REQUESTS
from runner.serve.replicas.switchboard import AdminReply, AdminRequest, ReplicaLine
from runner.serve.request import ApiError
from runner.serve.service import to_json


class Scrape:
    """The metrics of the application and, as texts, those of its replicas.

    Args:
        lines: what is known of each replica.
    """

    def __init__(self, lines: Callable[[], Mapping[str, ReplicaLine]]) -> None:
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


def _of_lines(lines: Mapping[str, ReplicaLine]) -> Iterator[Metric]:
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


#: Between a replica's name and a model's, where people choose.
BETWEEN = ": "


class Asks(Protocol):
    """What the routes need; `runner.serve.replicas.fleet.Fleet` is it."""

    @property
    def names(self) -> list[str]:
        """Of all replicas that are there."""

    def admin(self, name: str, request: AdminRequest) -> AdminReply:
        """What one replica answers. ApiError: nothing (503)."""


def replica_routes(fleet: Asks, scrape: Scrape) -> APIRouter:
    """Return the routes; each raises ApiError for what is wrong with a request."""
    router = APIRouter()

    @router.get("/metrics")
    def metrics() -> Response:
        found = _of_all(fleet, lambda name: AdminRequest("GET", "/metrics"))
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

        def of_one(name: str) -> AdminRequest:
            about = {"model": its_model, "seen": seen, "tree": name == shown}
            return AdminRequest("GET", "/cache/state", urlencode(about))

        found = {name: json.loads(reply.body) for name, reply in _of_all(fleet, of_one).items()}
        return to_json(one_state(found, shown if shown in found else min(found)))

    @router.delete("/cache")
    @router.get("/cache/{what}")
    @router.post("/cache/{what}")
    async def other(request: Request, replica: str = "") -> Response:
        url = request.url
        forwarded = AdminRequest(request.method, url.path, url.query, await request.body())
        if replica:
            return _response(await asyncio.to_thread(_asked, fleet, replica, forwarded))
        found = await asyncio.to_thread(_of_all, fleet, lambda name: forwarded)
        said = {name: json.loads(reply.body) for name, reply in found.items()}
        return to_json({"replicas": said}, max(reply.status for reply in found.values()))

    return router


def one_state(states: Mapping[str, dict[str, Any]], shown: str) -> dict[str, Any]:
    """What the page shows of several replicas, in the form of one: the models are theirs, each by both names."""
    rows = [
        {**row, "model": f"{name}{BETWEEN}{row['model']}"}
        for name, state in states.items()
        for row in state["requests"]
    ]
    return {
        **states[shown],
        "models": [f"{name}{BETWEEN}{model}" for name, state in states.items() for model in state["models"]],
        "model": f"{shown}{BETWEEN}{states[shown]['model']}",
        "stats": {
            f"{name}{BETWEEN}{model}": of for name, state in states.items() for model, of in state["stats"].items()
        },
        "running": sum(state["running"] for state in states.values()),
        "waiting": sum(state["waiting"] for state in states.values()),
        "requests": sorted(rows, key=lambda row: row["time_s"], reverse=True)[:LISTED_REQUESTS],
    }


def _asked(fleet: Asks, name: str, request: AdminRequest) -> AdminReply:
    if name not in fleet.names:
        raise ApiError(404, f"no replica {name!r:.80}; there are: {', '.join(fleet.names) or 'none'}.", param="replica")
    return fleet.admin(name, request)


def _of_all(fleet: Asks, request_of: Callable[[str], AdminRequest]) -> dict[str, AdminReply]:
    """What each answers, asked at the same time; those that do not answer are left out."""
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


def _response(reply: AdminReply) -> Response:
    return Response(reply.body, reply.status, media_type=reply.media_type)
