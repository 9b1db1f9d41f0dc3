"""Grid: every policy at every capacity over every trace, in this process, in several, or on a Ray cluster.

A job is small (names and numbers), a trace is large: a worker is given the traces once and keeps them. Rows come back
in the order of the jobs wherever they were computed, and are the same but for `seconds`. When the grid is interrupted
or a job fails, the rows that have finished out of their turn come before the exception.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context, parent_process
from typing import Any

from runner.models.footprint import ModelBytes
from runner.simulate.disk import DiskPlan
from runner.simulate.row import SimulationRow
from runner.simulate.simulator import BlockSizes, simulate
from runner.traces.request import Trace

OnProgress = Callable[[int], None]

#: How often progress in other processes is asked for.
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation of a grid.

    Attributes:
        trace: index of the trace.
        capacity_blocks: budget in blocks, of span state where a model is given; None: `budget_bytes` says it.
        budget_bytes: budget in bytes, for which a model's bytes are known.
        model: the model's bytes; None: blocks are counted.
        disk: beside memory; None: there is none.
    """

    trace: int
    policy: str
    capacity_blocks: int | None
    budget_bytes: int | None
    model: ModelBytes | None
    disk: DiskPlan | None = None


def run_job(trace: Trace, job: Job, on_progress: OnProgress | None = None) -> SimulationRow:
    """Run one simulation of a grid.

    Raises:
        PolicyError: the policy is a "module:Class" and failed.
    """
    sizes = BlockSizes.of(job.model, trace.block_tokens)
    if job.capacity_blocks is not None:
        budget_bytes = job.capacity_blocks * sizes.span_bytes
    else:
        assert job.budget_bytes is not None, job
        budget_bytes = job.budget_bytes
    return simulate(trace, job.policy, budget_bytes, sizes, on_progress, job.disk)


def run_locally(
    traces: Sequence[Trace], jobs: Sequence[Job], processes: int = 1, on_progress: OnProgress | None = None
) -> Iterator[SimulationRow]:
    """Yield a row per job, in order, from this process or from several."""
    processes = min(processes, len(jobs))
    if processes <= 1:
        for job in jobs:
            yield run_job(traces[job.trace], job, on_progress)
        return
    # Fresh processes: MLX, which the cache imports, is not made for a fork.
    context = get_context("spawn")
    served, stop = context.Value("q", 0), context.Event()
    told = 0

    def tell() -> None:
        nonlocal told
        now = served.value
        if on_progress is not None:
            on_progress(now - told)
        told = now

    with ProcessPoolExecutor(processes, mp_context=context, initializer=_keep, initargs=(traces, served, stop)) as pool:
        try:
            with _interrupts_held():
                futures = [pool.submit(_run_kept, job) for job in jobs]
            yield from in_order(futures, tell)
        finally:
            stop.set()
            # It waits: what is not started yet would miss the locks that go with this call.
            pool.shutdown(cancel_futures=True)


def run_on_ray(
    traces: Sequence[Trace], jobs: Sequence[Job], address: str, on_progress: OnProgress | None = None
) -> Iterator[SimulationRow]:
    """Yield a row per job, in order, from a Ray cluster at `address`; "auto" finds one or starts one here.

    The traces travel to the cluster once: no file needs to be there but the module of a policy of one's own.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: no cluster answers at the address, or it is none.
    """
    import ray

    started_here = not ray.is_initialized()
    _connect(ray, address)
    try:
        remote = ray.remote(run_job)
        stored = [ray.put(trace) for trace in traces]
        futures = [remote.remote(stored[job.trace], job).future() for job in jobs]
        for row in in_order(futures):
            if on_progress is not None:
                on_progress(row.requests)
            yield row
    finally:
        if started_here:
            ray.shutdown()


def shortened(row: SimulationRow) -> SimulationRow:
    """A row without what differs from run to run."""
    return replace(row, seconds=0.0)


def in_order(
    futures: Sequence[Future[SimulationRow]], tell: Callable[[], None] = lambda: None
) -> Iterator[SimulationRow]:
    """Yield the rows in order; before an exception those that have finished out of their turn."""
    count = 0
    try:
        for future in futures:
            while not wait([future], timeout=POLL_S).done:
                tell()
            tell()
            row = future.result()
            count += 1
            yield row
    except (Exception, KeyboardInterrupt):
        for future in futures[count:]:
            if future.done() and future.exception() is None:
                yield future.result()
        raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back for a moment. Processes started meanwhile never see it: who started them stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker process

_traces: Sequence[Trace] = ()
_served: Any = None
_stop: Any = None


def _keep(traces: Sequence[Trace], served: Any, stop: Any) -> None:
    global _traces, _served, _stop
    _traces, _served, _stop = traces, served, stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Who started this process may be killed, and could not say so then."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_kept(job: Job) -> SimulationRow:
    return run_job(_traces[job.trace], job, _count)


def _count(requests: int) -> None:
    if _stop.is_set():
        raise KeyboardInterrupt
    with _served.get_lock():
        _served.value += requests


def _connect(ray: Any, address: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        if address != "auto":
            raise
        ray.init(log_to_driver=False)
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(str(error)) from error
