"""What the server uses of Ray; `tests/serve/test_replicas_border.py` pins each name. Never imports MLX.

Ray Serve's request router is alpha: what it calls of `Placing`, and what that asks of it, is all here.

    choose_replicas(candidates, pending)     asks the switchboard, which was made in this process, for one of them
    update_replicas, on_replica_actor_died   tell it which there are

Ray pickles this file's `Placing` by value, also for use in this process: what it knows it gets by calls of functions.

A call is addressed by its argument `to`: the name of a replica, or a Routed, for which the switchboard decides.

Source: ray 2.60.0.

Relay: one request's way to a replica and its answers' way back. On the event loop; never imports MLX.

RE1  Every opened gets exactly one Ended or Failed, also where its replica dies.
RE2  A request of whose reply no token was handed on is asked of another replica when its own dies, RETRIES times.
RE3  By its last answer it is no longer booked as work of a replica: who asks next finds nothing of it that waits.
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

from runner.routing.routers import Ask
from runner.serve.replicas.switchboard import Routed, Switchboard, switchboard_of
from runner.serve.request import Ended, Failed, OpenRequest, Request, Token

# Before Ray is imported: nothing is reported to anybody, and its notes go to its own files.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


#: What a call raises whose replica is gone, or cannot be reached.
GONE = (RayError, RayServeException)
#: Of a local Ray: replies are small, and go from hand to hand.
OBJECT_STORE_BYTES = 80 << 20
#: What Ray Serve calls all replicas.
DEPLOYMENT = "replica"
#: How long whoever listens at a cluster's address may take to say so, in seconds.
CONNECT_S = 10


class Placing(RequestRouter):
    """Sends each call where the switchboard says."""

    def initialize_state(self, **kwargs: str) -> None:
        self._switchboard = switchboard_of(kwargs["switchboard"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._switchboard.present({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._switchboard.present({known.unique_id for known in self.curr_replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        to = pending_request.kwargs["to"]
        name = self._switchboard.place(to, set(named))
        if name is None and isinstance(to, str):
            pending_request.future.cancel()  # or it would be tried again for ever
            return [candidate_replicas]
        return [[named[name]]] if name is not None else []


def connect(address: str | None, cpus: int) -> None:
    """Join the cluster at an address, or start a Ray of this machine's own with so many CPUs to its name.

    The latter is for this process alone: from whoever reaches its ports it wants a token that nobody else has.

    Raises:
        ConnectionError: no cluster answers, or it is none.
    """
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
    # What a user has to know the server says itself.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})


def _require_listener(address: str) -> None:
    """Raise OSError or ValueError where nobody listens: Ray itself would try for many minutes."""
    if address.startswith("ray://"):
        raise ValueError(
            "through Ray's client nothing streams; serve on a machine of the cluster, and leave ray:// out"
        )
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), CONNECT_S).close()


def deploy(kind: type, arguments: tuple[Any, ...], *, name: str, count: int, cpus: int, max_calls: int) -> Any:
    """Start replicas of a class, and return the handle that calls them once all of them run.

    Args:
        name: of the application and of the switchboard.
        cpus: of each replica, to Ray's scheduler.
        max_calls: of each replica at a time.

    Raises:
        ValueError: they cannot be started.
    """
    about: dict[str, Any] = {"request_router_class": Placing, "request_router_kwargs": {"switchboard": name}}
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
    """End the replicas: with the Ray that was started for them, or alone, on a cluster that others use."""
    if ray.is_initialized():
        if not is_local:
            serve.delete(name)
        ray.shutdown()


logger = logging.getLogger(__name__)

RETRIES = 2


class Relay:
    """Relays jobs.

    Args:
        call: `call(asked, to=Routed)` has a replica answer: an async iterator of lists of answers, with `cancel()`.
        ask_of: what the switchboard's decision goes by.
    """

    def __init__(
        self, call: Callable[..., Any], ask_of: Callable[[Request], Awaitable[Ask]], switchboard: Switchboard
    ) -> None:
        self._call, self._ask_of, self._switchboard = call, ask_of, switchboard

    async def answer(self, opened: OpenRequest) -> None:
        """Put all answers of a opened. Cancelled, it has the replica stop."""
        try:
            last = await self._last_answer(opened, Routed(opened.id, await self._ask_of(opened.request)))
        except asyncio.CancelledError:
            last = Failed(504, "the request was given up: it took too long, or nobody waits for it.")
        except Exception:
            logger.exception("a request could not be handed to a replica")
            last = Failed(500, "the server failed at this request; its log says where.")
        self._switchboard.end(opened.id, last.record)
        opened.put(last)

    async def _last_answer(self, opened: OpenRequest, routed: Routed) -> Ended | Failed:
        """Put all answers but the last one, which is returned."""
        for retries in reversed(range(1 + RETRIES)):
            stream, has_steps = self._call(opened.request, to=routed), False
            try:
                async for answers in stream:
                    for answer in answers:
                        if isinstance(answer, Ended | Failed):
                            return answer
                        has_steps |= isinstance(answer, Token)
                        opened.put(answer)
            except GONE as error:
                logger.warning("%s: its replica has ended: %s", opened.id[:8], type(error).__name__)
            except asyncio.CancelledError:
                stream.cancel()
                raise
            if has_steps or not retries:
                break
        return Failed(503, "the replica that answered has ended; ask again.")
