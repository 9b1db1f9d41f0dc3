"""Grid: run many simulations, in this process, in several processes, or on a Ray cluster.

A job is a SimulationJob (a policy at a capacity) or a ReplicaJob (a router with a number of replicas). Each worker gets
the traces once, since they are large. Rows come in the order of the jobs. Except for `seconds`, they do not depend on
where a job runs. If a job fails or the user interrupts, the finished rows come before the exception.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from typing import Any, Protocol, TypeVar

from runner.simulate.rows import ResultRow
from runner.simulate.simulator import OnProgress
from runner.traces.trace import Trace

#: Seconds between two checks of the progress of other processes.
POLL_S = 0.1

R = TypeVar("R", bound=ResultRow)
R_co = TypeVar("R_co", bound=ResultRow, covariant=True)


class AnyJob(Protocol[R_co]):
    """One simulation; `trace` is the index of the trace that it runs on."""

    @property
    def trace(self) -> int: ...

    def run(self, trace: Trace, on_progress: OnProgress | None = None) -> R_co:
        """Run it. PolicyError: a policy of the user failed."""


def run_locally(
    traces: Sequence[Trace], jobs: Sequence[AnyJob[R]], processes: int = 1, on_progress: OnProgress | None = None
) -> Iterator[R]:
    """Yield a row per job, from this process or from several."""
    processes = min(processes, len(jobs))
    if processes <= 1:
        for job in jobs:
            yield job.run(traces[job.trace], on_progress)
        return
    # Fresh processes: MLX, which the cache imports, does not survive a fork.
    context = get_context("spawn")
    served, stop = context.Value("q", 0), context.Event()
    reported = 0

    def report_progress() -> None:
        nonlocal reported
        now = served.value
        if on_progress is not None:
            on_progress(now - reported)
        reported = now

    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start_worker, initargs=(traces, served, stop)
    ) as pool:
        try:
            with _without_interrupts():
                futures = [pool.submit(_run_in_worker, job) for job in jobs]
            yield from in_order(futures, report_progress)
        finally:
            stop.set()
            # Wait: a worker that starts after this function returns would miss `context`'s locks.
            pool.shutdown(cancel_futures=True)


def run_on_ray(
    traces: Sequence[Trace], jobs: Sequence[AnyJob[R]], address: str, on_progress: OnProgress | None = None
) -> Iterator[R]:
    """Yield a row per job from a Ray cluster at `address`; "auto" finds one or starts one here.

    The cluster needs the module of a user's own policy. ConnectionError: no cluster answers.
    """
    import ray

    started_here = not ray.is_initialized()
    try:
        if started_here:
            # "auto" also finds a private cluster of another process, and then fails after 20 s. Without an address, Ray
            # joins the cluster of `ray start`.
            ray.init(address=None if address == "auto" else address, log_to_driver=False)
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(str(error)) from error
    try:
        remote: Any = ray.remote(lambda trace, job: job.run(trace))
        stored = [ray.put(trace) for trace in traces]
        futures: list[Future[R]] = [remote.remote(stored[job.trace], job).future() for job in jobs]
        for row in in_order(futures):
            if on_progress is not None:
                on_progress(row.requests)
            yield row
    finally:
        if started_here:
            ray.shutdown()


def in_order(futures: Sequence[Future[R]], report_progress: Callable[[], None] = lambda: None) -> Iterator[R]:
    """Yield the rows in order; before an exception, yield all rows that have finished."""
    count = 0
    try:
        for future in futures:
            while not wait([future], timeout=POLL_S).done:
                report_progress()
            report_progress()
            row = future.result()
            count += 1
            yield row
    except (Exception, KeyboardInterrupt):
        for future in futures[count:]:
            if future.done() and future.exception() is None:
                yield future.result()
        raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Delay Ctrl-C. Processes that start in this context ignore Ctrl-C for good; this process stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: The state of a worker process.
_traces: Sequence[Trace] = ()
_served: Any = None
_stop: Any = None


def _start_worker(traces: Sequence[Trace], served: Any, stop: Any) -> None:
    global _traces, _served, _stop
    _traces, _served, _stop = traces, served, stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the parent ends, even if the parent is killed."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_in_worker(job: AnyJob[R]) -> R:
    return job.run(_traces[job.trace], _count)


def _count(requests: int) -> None:
    if _stop.is_set():
        raise KeyboardInterrupt
    with _served.get_lock():
        _served.value += requests
