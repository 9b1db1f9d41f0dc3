"""Grid: simulations that differ in one thing or another, in this process, in several, or on a Ray cluster.

    Job           a policy at a capacity          ReplicaJob    a router before so many replicas

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
from typing import Any, Protocol, TypeVar

from runner.models.footprint import ModelBytes
from runner.simulate.replicas import Setup, Speeds, simulate_replicas
from runner.simulate.rows import DiskPlan, ReplicaRow, SimulationRow
from runner.simulate.simulator import BlockSizes, OnProgress, simulate
from runner.traces.trace import Trace

#: How often progress in other processes is asked for.
POLL_S = 0.1


class GridRow(Protocol):
    """What a simulation came to."""

    @property
    def requests(self) -> int: ...
    @property
    def seconds(self) -> float: ...


AnyRow = TypeVar("AnyRow", SimulationRow, ReplicaRow)
R = TypeVar("R", bound=GridRow)
R_co = TypeVar("R_co", bound=GridRow, covariant=True)


class AnyJob(Protocol[R_co]):
    """One simulation of a grid."""

    @property
    def trace(self) -> int:
        """Index of the trace."""

    def run(self, trace: Trace, on_progress: OnProgress | None = None) -> R_co:
        """Run it on that trace.

        Raises:
            PolicyError: the policy is a "module:Class" and failed.
        """


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """A policy at a capacity.

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

    def run(self, trace: Trace, on_progress: OnProgress | None = None) -> SimulationRow:
        sizes = BlockSizes.of(self.model, trace.block_tokens)
        return simulate(trace, self.policy, self.bytes_of(sizes), sizes, on_progress, self.disk)

    def bytes_of(self, sizes: BlockSizes) -> int:
        """The budget in bytes."""
        if self.capacity_blocks is not None:
            return self.capacity_blocks * sizes.span_bytes
        assert self.budget_bytes is not None, self
        return self.budget_bytes


@dataclass(frozen=True, slots=True)
class ReplicaJob:
    """A router before so many replicas.

    Attributes:
        each: what each of them is, beside the router; its disk is theirs together.
    """

    each: SimulationJob
    router: str
    replicas: int
    speeds: Speeds
    seed: int = 0

    @property
    def trace(self) -> int:
        return self.each.trace

    def run(self, trace: Trace, on_progress: OnProgress | None = None) -> ReplicaRow:
        sizes = BlockSizes.of(self.each.model, trace.block_tokens)
        cache = (self.each.policy, self.each.bytes_of(sizes), sizes)
        setup = Setup(self.router, self.replicas, *cache, self.speeds, self.each.disk, self.seed)
        return simulate_replicas(trace, setup, on_progress)


def run_locally(
    traces: Sequence[Trace], jobs: Sequence[AnyJob[R]], processes: int = 1, on_progress: OnProgress | None = None
) -> Iterator[R]:
    """Yield a row per job, in order, from this process or from several."""
    processes = min(processes, len(jobs))
    if processes <= 1:
        for job in jobs:
            yield job.run(traces[job.trace], on_progress)
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
    traces: Sequence[Trace], jobs: Sequence[AnyJob[R]], address: str, on_progress: OnProgress | None = None
) -> Iterator[R]:
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
        remote: Any = ray.remote(_run)
        stored = [ray.put(trace) for trace in traces]
        futures: list[Future[R]] = [remote.remote(stored[job.trace], job).future() for job in jobs]
        for row in in_order(futures):
            if on_progress is not None:
                on_progress(row.requests)
            yield row
    finally:
        if started_here:
            ray.shutdown()


def shortened(row: AnyRow) -> AnyRow:
    """A row without what differs from run to run."""
    return replace(row, seconds=0.0)


def in_order(futures: Sequence[Future[R]], tell: Callable[[], None] = lambda: None) -> Iterator[R]:
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


def _run_kept(job: AnyJob[R]) -> R:
    return job.run(_traces[job.trace], _count)


def _run(trace: Trace, job: AnyJob[R]) -> R:
    return job.run(trace)


def _count(requests: int) -> None:
    if _stop.is_set():
        raise KeyboardInterrupt
    with _served.get_lock():
        _served.value += requests


def _connect(ray: Any, address: str) -> None:
    if ray.is_initialized():
        return
    try:
        # To its own "auto" Ray answers with any cluster of this machine, also one that another process has for itself
        # and that refuses all others, after 20 seconds. Without an address it joins what `ray start` has started.
        ray.init(address=None if address == "auto" else address, log_to_driver=False)
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(str(error)) from error
