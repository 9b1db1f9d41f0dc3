"""The border to Ray, and the way of a request through it. Never imports MLX.

Ray Serve's request router is alpha. So every name of it that is used stands in this file, and
`tests/serve/test_replicas_border.py` pins each. Source: ray 2.60.0.

    choose_replicas(candidates, pending)     asks the switchboard of this process for one of them
    update_replicas, on_replica_actor_died   tell the switchboard which replicas there are

The argument `to` of a call is the name of a replica, or a RoutedRequest, for which the switchboard chooses.

Invariants of a Relay, which works on the event loop:

  RE1  Every request gets exactly one RequestRecord or ApiError, even if its replica dies.
  RE2  If a replica dies, a request without a token is sent to another one, RETRIES times at most.
  RE3  The request is no longer booked as work of a replica when its last event is put.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from runner.engine.token import Token
from runner.routing import Ask
from runner.serve.replicas.switchboard import RoutedRequest, Switchboard, switchboard_of
from runner.serve.request import ApiError, OpenRequest, Request, RequestRecord

# Ray sends no usage statistics, and logs to its own files.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

GONE = (RayError, RayServeException)  # the errors of a call whose replica is gone or cannot be reached
OBJECT_STORE_BYTES = 80 << 20  # of a local Ray, where replies are small
DEPLOYMENT = "replica"  # name of all replicas in Ray Serve
CONNECT_S = 10  # seconds to wait for a connection to a cluster's address
RETRIES = 2

logger = logging.getLogger(__name__)


class SwitchboardRouter(RequestRouter):
    def initialize_state(self, **kwargs: str) -> None:
        self._switchboard = switchboard_of(kwargs["switchboard"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._switchboard.set_names({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._switchboard.set_names({known.unique_id for known in self.curr_replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        to = pending_request.kwargs["to"]
        name = self._switchboard.place(to, set(named))
        if name is None and isinstance(to, str):
            pending_request.future.cancel()  # otherwise Ray would retry without end
            return [candidate_replicas]
        return [[named[name]]] if name is not None else []


def connect(address: str | None, cpus: int) -> None:
    """Join the cluster at an address, or start Ray with so many CPUs for this process. ConnectionError: no cluster."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        try:
            _require_listener(address)
            ray.init(address=address, **quiet)
        except (RuntimeError, ValueError, OSError) as error:
            raise ConnectionError(f"--ray {address}: no cluster answers ({error}).") from error
    else:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        quiet |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        ray.init(address="local", num_cpus=cpus, num_gpus=0, **quiet)
    # The server logs what a user has to know.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})


def _require_listener(address: str) -> None:
    """Raise OSError or ValueError if nobody listens: Ray itself would try for many minutes."""
    if address.startswith("ray://"):
        raise ValueError("Ray's client cannot stream; serve on a machine of the cluster, and leave ray:// out")
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), CONNECT_S).close()


def deploy(kind: type, arguments: tuple[Any, ...], *, name: str, count: int, cpus: int, max_calls: int) -> Any:
    """Start replicas of a class with so many CPUs each, wait until all run, and return the handle.

    Application and switchboard have this name. ValueError: the replicas cannot be started.
    """
    about: dict[str, Any] = {"request_router_class": SwitchboardRouter, "request_router_kwargs": {"switchboard": name}}
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=count,
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=max_calls,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig(**about),
    )(kind)
    try:
        return serve.run(deployment.bind(*arguments), name=name, route_prefix=None)
    except RuntimeError as error:
        message = serve.status().applications[name].deployments[DEPLOYMENT].message
        cause = (message.strip() or str(error)).splitlines()[-1]  # of a traceback
        raise ValueError(f"the replicas could not be started: {cause}") from error


def disconnect(name: str, *, is_local: bool) -> None:
    """End the replicas, and Ray if it was started for them."""
    if ray.is_initialized():
        if not is_local:
            serve.delete(name)
        ray.shutdown()


class Relay:
    """Sends requests to replicas, and puts their events.

    `call(request, to=RoutedRequest)` returns an async iterator of lists of events, which has `cancel()`.
    """

    def __init__(
        self, call: Callable[..., Any], ask_of: Callable[[Request], Awaitable[Ask]], switchboard: Switchboard
    ) -> None:
        self._call, self._ask_of, self._switchboard = call, ask_of, switchboard

    async def answer(self, opened: OpenRequest) -> None:
        """Put all events of a request. If it is cancelled, the replica stops."""
        try:
            last = await self._last_event(opened, RoutedRequest(opened.id, await self._ask_of(opened.request)))
        except asyncio.CancelledError:
            last = ApiError(504, "the request was cancelled: it took too long, or nobody waits for it.")
        except Exception:
            logger.exception("a request could not be sent to a replica")
            last = ApiError(500, "the server failed at this request; its log says where.")
        self._switchboard.end(opened.id, last.record if isinstance(last, ApiError) else last)
        opened.put(last)

    async def _last_event(self, opened: OpenRequest, routed: RoutedRequest) -> RequestRecord | ApiError:
        """Put all events but the last one; returns that."""
        for retries in reversed(range(1 + RETRIES)):
            stream, has_tokens = self._call(opened.request, to=routed), False
            try:
                async for events in stream:
                    for event in events:
                        if isinstance(event, RequestRecord | ApiError):
                            return event
                        has_tokens |= isinstance(event, Token)
                        opened.put(event)
            except GONE as error:
                logger.warning("%s: its replica has ended: %s", opened.id[:8], type(error).__name__)
            except asyncio.CancelledError:
                stream.cancel()
                raise
            if has_tokens or not retries:
                break
        return ApiError(503, "the replica that answered has ended; ask again.")
