"""A grid of simulations as a command runs it: under a bar, and with what goes wrong said in a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, TypeVar

import typer
from rich.console import Console

from runner.commands.usage import EXIT_INTERRUPTED, UsageError, say
from runner.files.progress_lines import ProgressLines

if TYPE_CHECKING:
    from runner.simulate.grid import AnyJob, Row
    from runner.simulate.simulator import OnProgress
    from runner.traces.request import Trace

R = TypeVar("R", bound="Row")


def run_or_raise(
    traces: Sequence[Trace], grid: Sequence[AnyJob[R]], jobs: int, ray: str | None
) -> tuple[list[R], Exception | None]:
    """What finished of a grid, and what to raise if that is not all; raised at once where nothing has.

    Raises:
        UsageError: nothing could be simulated.
    """
    rows, stop = run_grid(traces, grid, jobs, ray)
    if isinstance(stop, UsageError) and not rows:
        raise stop
    if stop is not None:
        say(f"interrupted: {len(rows)} of {len(grid)} simulations had finished.")
    return rows, stop


def run_grid(
    traces: Sequence[Trace], grid: Sequence[AnyJob[R]], jobs: int, ray: str | None = None
) -> tuple[list[R], Exception | None]:
    """Run a grid under a bar; returns what finished, and if that is not all, what to raise once it has been shown."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not grid:
        return [], None
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,} requests"))
    total = sum(len(traces[job.trace].requests) for job in grid)
    rows: list[R] = []
    lines = ProgressLines()
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            task = progress.add_task("simulating", total=total)

            def advance(requests: int) -> None:
                progress.advance(task, requests)
                done = progress.tasks[0].completed
                lines.tell(lambda: f"simulating: {done:,.0f} of {total:,} requests")

            for row in _rows(traces, grid, jobs, ray, advance):
                rows.append(row)
    except KeyboardInterrupt:
        return rows, typer.Exit(EXIT_INTERRUPTED)
    except UsageError as error:
        return rows, error
    return rows, None


def _rows(
    traces: Sequence[Trace], grid: Sequence[AnyJob[R]], jobs: int, ray: str | None, on_progress: OnProgress
) -> Iterator[R]:
    from radixcache.errors import PolicyError
    from runner.simulate.grid import run_locally, run_on_ray

    try:
        if ray is None:
            yield from run_locally(traces, grid, jobs, on_progress)
        else:
            yield from run_on_ray(traces, grid, ray, on_progress)
    except PolicyError as error:
        # Ray's own exceptions tell a story around the first cause.
        cause = getattr(error, "cause", error)
        raise UsageError(f"--policy: policy {cause.policy}: {cause.hook}() {cause.reason}.") from error
    except BrokenProcessPool as error:
        raise UsageError("a process of --jobs was killed, perhaps for its memory; take fewer of them.") from error
    except ConnectionError as error:
        raise UsageError(f"--ray {ray}: no cluster answers ({error}).") from error
