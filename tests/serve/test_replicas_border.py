"""What ray_border.py uses of Ray, whose request router is alpha: each name is there, as it is used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

serve = pytest.importorskip("ray.serve", reason="Ray has no build for this Python")

from ray import cloudpickle  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402
from ray.serve.request_router import PendingRequest, ReplicaID  # noqa: E402

from runner.serve.replicas import ray_border  # noqa: E402
from runner.serve.replicas.switchboard import SWITCHBOARDS, Switchboard  # noqa: E402


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
