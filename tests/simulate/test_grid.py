"""Grids of simulations give the same rows in one process, in several and on a Ray cluster, whatever they simulate."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from radixcache import PolicyError
from runner.models import ModelBytes
from runner.routing import ROUTERS
from runner.simulate.grid import AnyJob, in_order, run_locally, run_on_ray
from runner.simulate.replicas import ReplicaJob
from runner.simulate.rows import DiskPlan, SimulationRow, Speeds
from runner.simulate.simulator import SimulationJob, simulate
from runner.traces.trace import Trace
from tests.simulate.made import made

BLOCK_TOKENS = 256
MODEL = ModelBytes("given", 4096, 0, (), "given")
BLOCK_BYTES = BLOCK_TOKENS * MODEL.token_bytes
#: Reads a block in a quarter of the time that its prefill takes.
DISK = DiskPlan(1 << 40, BLOCK_BYTES, 64.0)
SHARED = replace(DISK, write_on="close")


def timed(words: Sequence[Sequence[int]], name: str) -> Trace:
    outputs = [index % 4 for index in range(len(words))]
    return made(words, BLOCK_TOKENS, name, gaps_ms=[2_000] * len(words), outputs=outputs)


TRACES = [
    timed([[1, 2, 3], [1, 2, 4], [2, 2]] * 6, "one"),
    timed([[number, 9, 8] for number in (1, 2, 3) * 4], "two"),
    timed([[index % 3, index % 5, index % 2] for index in range(40)], "three"),
]
POLICY_JOBS = [
    *(
        SimulationJob(trace, policy, None, 4 * BLOCK_BYTES, MODEL)
        for trace in (0, 1)
        for policy in ("lru", "belady", "random")
    ),
    *(SimulationJob(0, policy, blocks) for policy in ("lru", "gdsf") for blocks in (3, 5)),
]
DISK_JOBS = [SimulationJob(1, policy, 4, None, MODEL, DISK) for policy in ("lru", "belady", "gdsf")]
REPLICA_JOBS = [
    ReplicaJob(SimulationJob(2, "lru", 6, None, MODEL, shared), router, count, Speeds(64.0, 1.0), seed=3)
    for shared in (None, SHARED)
    for router in ROUTERS
    for count in (1, 3)
]
JOBS: list[AnyJob] = [*POLICY_JOBS, *DISK_JOBS, *REPLICA_JOBS]


@pytest.mark.slow
def test_a_grid_gives_the_same_rows_in_one_process_and_in_several() -> None:
    alone = [replace(row, seconds=0) for row in run_locally(TRACES, JOBS)]
    assert [row.trace for row in alone] == [TRACES[job.trace].name for job in JOBS]
    served: list[int] = []
    assert [replace(row, seconds=0) for row in run_locally(TRACES, JOBS, 2, served.append)] == alone
    assert sum(served) == sum(row.requests for row in alone)
    assert len({row.token_hit_ratio for row in alone[-len(REPLICA_JOBS) :]}) > 3


@pytest.mark.slow
def test_a_grid_gives_the_same_rows_on_a_ray_cluster() -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    alone = [replace(row, seconds=0) for row in run_locally(TRACES, JOBS)]
    assert [replace(row, seconds=0) for row in run_on_ray(TRACES, JOBS, "auto")] == alone


def test_rows_that_finished_out_of_their_turn_come_before_the_failure() -> None:
    row = simulate(TRACES[0], "lru", 10)
    futures: list[Future[SimulationRow]] = [Future() for _ in range(4)]
    futures[0].set_result(row)
    futures[1].set_exception(PolicyError("Mine", "victim", "failed"))
    futures[3].set_result(replace(row, policy="fifo"))
    rows = in_order(futures)
    assert [next(rows).policy for _ in range(2)] == ["lru", "fifo"]
    with pytest.raises(PolicyError):
        next(rows)
