"""What ray_border.py uses of Ray, whose request router is alpha: each name is there, as it is used."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields
from typing import Any

import pytest

serve = pytest.importorskip("ray.serve", reason="Ray has no build for this Python")

import ray  # noqa: E402
from ray import cloudpickle  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402
from ray.serve.exceptions import RayServeException, RequestCancelledError  # noqa: E402
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator  # noqa: E402
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica  # noqa: E402
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus  # noqa: E402

from runner.serve.replicas import ray_border  # noqa: E402
from runner.serve.replicas.switchboard import SWITCHBOARDS, Switchboard  # noqa: E402


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_router_has_the_hooks_that_are_overridden() -> None:
    assert parameters(RequestRouter.choose_replicas) == {"self", "candidate_replicas", "pending_request"}
    assert inspect.iscoroutinefunction(RequestRouter.choose_replicas)
    assert parameters(RequestRouter.update_replicas) == {"self", "replicas"}
    assert parameters(RequestRouter.on_replica_actor_died) == {"self", "replica_id"}
    assert parameters(RequestRouter.initialize_state) == {"self", "kwargs"}
    assert isinstance(RequestRouter.curr_replicas, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert "unique_id" in {field.name for field in fields(ReplicaID)}
    assert {"kwargs", "future"} <= {field.name for field in fields(PendingRequest)}


def test_the_options_of_ray_and_serve_are_there() -> None:
    assert {"address", "num_cpus", "num_gpus", "object_store_memory", "include_dashboard", "log_to_driver",
            "logging_level"} <= parameters(ray.init)  # fmt: skip
    assert {"proxy_location", "logging_config"} <= parameters(serve.start)
    assert {"name", "num_replicas", "ray_actor_options", "max_ongoing_requests", "graceful_shutdown_timeout_s",
            "graceful_shutdown_wait_loop_s", "max_constructor_retry_count",
            "request_router_config"} <= parameters(serve.deployment)  # fmt: skip
    assert {"name", "route_prefix"} <= parameters(serve.run)
    assert parameters(serve.delete) >= {"name"}
    assert "applications" in inspect.get_annotations(ServeStatus)
    assert "deployments" in inspect.get_annotations(ApplicationStatusOverview)
    assert "message" in inspect.get_annotations(DeploymentStatusOverview)


def test_handles_stream_wait_and_cancel_as_they_are_used() -> None:
    assert "stream" in parameters(DeploymentHandle.options)
    assert "timeout_s" in parameters(DeploymentResponse.result)
    for name in ("__aiter__", "__anext__", "__iter__", "cancel"):
        assert hasattr(DeploymentResponseGenerator, name)
    assert issubclass(RequestCancelledError, ray_border.GONE)
    assert issubclass(RayServeException, ray_border.GONE)
    assert issubclass(ray.exceptions.ActorDiedError, ray_border.GONE)
    assert issubclass(ray.exceptions.ActorUnavailableError, ray_border.GONE)


def test_a_router_that_was_pickled_by_value_asks_the_switchboard_of_this_process() -> None:
    board = Switchboard("prefix", lambda names: None)
    SWITCHBOARDS["an application"] = board
    about: Any = {
        "request_router_class": ray_border.SwitchboardRouter,
        "request_router_kwargs": {"switchboard": "an application"},
    }
    config = RequestRouterConfig(**about)
    kind = cloudpickle.loads(config.get_serialized_request_router_cls())
    router = kind.__new__(kind)
    router.initialize_state(**config.request_router_kwargs)

    class Replica:
        def __init__(self, name: str) -> None:
            self.replica_id = ReplicaID(unique_id=name, deployment_id=None)  # type: ignore[arg-type]

    here, there = Replica("here"), Replica("there")
    board.set_names({"here", "there"})

    async def chosen(to: str) -> tuple[Any, bool]:
        pending = PendingRequest(args=[], kwargs={"to": to}, metadata=None)  # type: ignore[arg-type]
        return await router.choose_replicas([here, there], pending), pending.future.cancelled()

    assert asyncio.run(chosen("there")) == ([[there]], False)
    # Whoever calls a replica that is gone does not wait for ever.
    assert asyncio.run(chosen("gone"))[1]
