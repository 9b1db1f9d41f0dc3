"""Grid: every policy at every capacity over every trace, in this process, in several, or on a Ray cluster.

A job is small (names and numbers), a trace is large: a worker is given the traces once and keeps them. Rows come back
in the order of the jobs wherever they were computed, and are the same but for `seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from runner.model_config import ModelBytes
from runner.simulate.row import Row
from runner.simulate.simulator import BlockSizes, simulate
from runner.traces.request import Trace

OnProgress = Callable[[int], None]

#: The traces of a worker process.
_traces: Sequence[Trace] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation of a grid.

    Attributes:
        trace: index of the trace.
        capacity_blocks: budget in blocks; None: `budget_bytes` says it.
        budget_bytes: budget in bytes, for which a model's bytes are known.
        model: the model's bytes; None: blocks are counted.
    """

    trace: int
    policy: str
    capacity_blocks: int | None
    budget_bytes: int | None
    model: ModelBytes | None


def run_job(trace: Trace, job: Job, on_progress: OnProgress | None = None) -> Row:
    """Run one simulation of a grid."""
    sizes = BlockSizes.of(job.model, trace.block_tokens)
    if job.capacity_blocks is not None:
        budget_bytes = job.capacity_blocks * max(1, sizes.span_bytes)
    else:
        assert job.budget_bytes is not None, job
        budget_bytes = job.budget_bytes
    return simulate(trace, job.policy, budget_bytes, sizes, on_progress)


def run_locally(
    traces: Sequence[Trace], jobs: Sequence[Job], processes: int = 1, on_progress: OnProgress | None = None
) -> Iterator[Row]:
    """Yield a row per job, in order, from this process or from several."""
    if processes == 1:
        for job in jobs:
            yield run_job(traces[job.trace], job, on_progress)
        return
    # Fresh processes: MLX, which the cache imports, is not made for a fork.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_keep, initargs=(traces,)) as pool:
        try:
            for row in pool.map(_run_kept, jobs):
                if on_progress is not None:
                    on_progress(row.requests)
                yield row
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_on_ray(
    traces: Sequence[Trace], jobs: Sequence[Job], address: str, on_progress: OnProgress | None = None
) -> Iterator[Row]:
    """Yield a row per job, in order, from a Ray cluster at `address`; "auto" finds one or starts one here.

    The traces travel to the cluster once: no file needs to be there.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    import ray

    started_here = not ray.is_initialized()
    _connect(ray, address)
    try:
        remote = ray.remote(run_job)
        stored = [ray.put(trace) for trace in traces]
        pending = [remote.remote(stored[job.trace], job) for job in jobs]
        for reference in pending:
            row: Row = ray.get(reference)
            if on_progress is not None:
                on_progress(row.requests)
            yield row
    finally:
        if started_here:
            ray.shutdown()


def shortened(row: Row) -> Row:
    """A row without what differs from run to run."""
    return replace(row, seconds=0.0)


def _keep(traces: Sequence[Trace]) -> None:
    global _traces
    _traces = traces


def _run_kept(job: Job) -> Row:
    return run_job(_traces[job.trace], job)


def _connect(ray: Any, address: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        if address != "auto":
            raise
        ray.init(log_to_driver=False)
