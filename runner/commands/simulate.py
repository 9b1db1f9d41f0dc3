"""`radixcache simulate`: traces through eviction policies at several capacities."""

from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from runner.commands.outputs import Outputs
from runner.commands.trace_options import TraceOptions, with_trace_options
from runner.commands.usage import EXIT_INTERRUPTED, UsageError, about, require, require_policy, say
from runner.files.progress_lines import ProgressLines
from runner.files.units import GIB, MIB

if TYPE_CHECKING:
    from runner.models.footprint import ModelBytes
    from runner.simulate.disk import DiskPlan
    from runner.simulate.grid import Job, OnProgress
    from runner.simulate.row import SimulationRow
    from runner.traces.request import Trace

#: Of blocks or GiB; beyond it floats are no longer whole numbers.
MOST_CAPACITY = 1e15
#: A common NVMe disk reads, and a laptop prefills with a model of 8 billion parameters, about so fast.
DISK_MIB_PER_S, PREFILL_TOKENS_PER_S = 2000.0, 1000.0

DiskMibPerS = Annotated[float, typer.Option(help="How fast the disk reads.")]


@with_trace_options
def simulate(
    context: typer.Context,
    options: TraceOptions,
    policy: Annotated[
        str,
        typer.Option(help="Policies separated by commas, my.module:Class among them; all: every one, and bounds."),
    ] = "lru,fifo,belady",
    capacity_blocks: Annotated[
        str | None, typer.Option(help="Capacities in blocks, separated by commas.", show_default=False)
    ] = None,
    budget_gib: Annotated[
        str | None, typer.Option(help="Budgets in GiB, separated by commas; needs the bytes of a model.")
    ] = None,
    disk_gib: Annotated[
        float | None, typer.Option(help="A disk beside the budget, in GiB; needs the bytes of a model.")
    ] = None,
    disk_mib_per_s: DiskMibPerS = DISK_MIB_PER_S,
    disk_write_on: Annotated[
        Literal["eviction", "second_use", "close"], typer.Option(help="When something is written to it.")
    ] = "eviction",
    prefill_tokens_per_s: Annotated[
        float, typer.Option(help="How fast the model prefills: where the disk is slower, nothing is read.")
    ] = PREFILL_TOKENS_PER_S,
    separate: Annotated[
        bool, typer.Option("--separate", help="Take each file or folder for a trace of its own.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes to simulate in.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Simulate on a Ray cluster; auto finds or starts one."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw hit ratio over capacity, a line per policy (.png, .svg or .pdf)."),
    ] = None,
) -> None:
    """Simulate eviction policies on traces.

    It is the cache that a server would use: tree, budget and policies are the deployed ones, and only state is replaced
    by its size. `belady` and `belady-bypass` know the future: no policy can do better where all blocks weigh the same.
    """
    require(jobs >= 1, f"--jobs is {jobs}; wanted at least 1.")
    require(ray is None or find_spec("ray") is not None, "--ray needs the package ray: pip install 'radixcache[ray]'.")
    outputs = Outputs({"--json": json_file, "--plot": plot_file}, options.inputs)
    disk = disk_plan(disk_gib, disk_mib_per_s, prefill_tokens_per_s, options.model_bytes, disk_write_on)
    policies = _policies(policy, options.model_bytes, disk)
    capacities = _capacities(capacity_blocks, budget_gib, options.model_bytes)
    from runner.simulate.grid import Job

    traces = _separate(options) if separate else [options.read()]
    grid = [
        Job(index, name, blocks, nbytes, options.model_bytes, disk)
        for index in range(len(traces))
        for name in policies
        for blocks, nbytes in capacities
    ]
    rows, stop = run_grid(traces, grid, jobs, ray)
    if isinstance(stop, UsageError) and not rows:
        raise stop
    from runner.simulate.table import footnotes, rows_table

    outputs.show(*([rows_table(rows)] if rows else []), *footnotes(traces, rows))
    if rows:
        _write(context, traces, rows, outputs, plot_file, interrupted=stop is not None)
    if stop is not None:
        say(f"interrupted: {len(rows)} of {len(grid)} simulations had finished.")
        raise stop
    outputs.finish()


def run_grid(
    traces: "Sequence[Trace]", grid: "Sequence[Job]", jobs: int, ray: str | None = None
) -> "tuple[list[SimulationRow], Exception | None]":
    """Run a grid under a bar; returns what finished, and if that is not all, what to raise once it has been shown."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,} requests"))
    total = sum(len(traces[job.trace].requests) for job in grid)
    rows: list[SimulationRow] = []
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
    traces: "Sequence[Trace]", grid: "Sequence[Job]", jobs: int, ray: str | None, on_progress: "OnProgress"
) -> "Iterator[SimulationRow]":
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


def _separate(options: TraceOptions) -> "list[Trace]":
    """Each path as a trace, under a name of its own."""
    paths = options.trace
    require(len(set(paths)) == len(paths), "--separate: a path was given twice; wanted each once.")
    traces = [options.read(path) for path in paths]
    names = [trace.name for trace in traces]
    return [
        trace if names.count(trace.name) == 1 else replace(trace, name=str(path))
        for path, trace in zip(paths, traces, strict=True)
    ]


def disk_plan(
    disk_gib: float | None,
    disk_mib_per_s: float,
    prefill_tokens_per_s: float,
    sizes: "ModelBytes | None",
    write_on: Literal["eviction", "second_use", "close"] = "eviction",
) -> "DiskPlan | None":
    """The disk that these options describe; None: none."""
    from runner.simulate.disk import DiskPlan

    for option, value in (
        ("--disk-gib", disk_gib),
        ("--disk-mib-per-s", disk_mib_per_s),
        ("--prefill-tokens-per-s", prefill_tokens_per_s),
    ):
        require(value is None or 0 < value <= MOST_CAPACITY, f"{option} is {value}; wanted more than 0.")
    if disk_gib is None:
        return None
    require(sizes is not None, "--disk-gib needs --model-config or --bytes-per-token.")
    return DiskPlan(max(1, int(disk_gib * GIB)), disk_mib_per_s * MIB, prefill_tokens_per_s, write_on)


def _policies(listed: str, sizes: "ModelBytes | None", disk: "DiskPlan | None") -> list[str]:
    from policies import OFFLINE_POLICIES, POLICIES

    names = [name.strip() for name in listed.split(",") if name.strip()]
    require(bool(names), "--policy names no policy.")
    has_checkpoints = sizes is not None and sizes.checkpoint_bytes > 0
    require(
        not has_checkpoints or "belady-bypass" not in names,
        f"--policy: belady-bypass is defined without checkpoints alone, and there are some ({sizes}).",
    )
    require(
        disk is None or "belady-bypass" not in names,
        "--policy: belady-bypass is defined for memory alone, and there is a disk.",
    )
    if "all" in names:
        bypasses = disk is None and not has_checkpoints
        bounds = [name for name in sorted(OFFLINE_POLICIES) if name != "belady-bypass" or bypasses]
        names = [*(name for name in names if name != "all"), *sorted(POLICIES), *bounds]
    for name in names:
        if name not in OFFLINE_POLICIES:
            require_policy(name)
    return list(dict.fromkeys(names))


def _capacities(
    capacity_blocks: str | None, budget_gib: str | None, sizes: "ModelBytes | None"
) -> list[tuple[int | None, int | None]]:
    """Pairs of blocks and bytes, one of them None."""
    require(capacity_blocks is not None or budget_gib is not None, "give --capacity-blocks or --budget-gib.")
    require(capacity_blocks is None or budget_gib is None, "give --capacity-blocks or --budget-gib; wanted only one.")
    if capacity_blocks is not None:
        blocks = [_number(each, "--capacity-blocks") for each in capacity_blocks.split(",")]
        require(
            all(each == int(each) for each in blocks), f"--capacity-blocks is {capacity_blocks}; wanted whole numbers."
        )
        require(
            sizes is None or sizes.token_bytes > 0, f"{sizes}: blocks have no size of their own; give --budget-gib."
        )
        return [(int(each), None) for each in dict.fromkeys(blocks)]
    assert budget_gib is not None
    require(sizes is not None, "--budget-gib needs --model-config or --bytes-per-token.")
    budgets = [max(1, int(_number(each, "--budget-gib") * GIB)) for each in budget_gib.split(",")]
    return [(None, each) for each in dict.fromkeys(budgets)]


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    require(
        0 < value <= MOST_CAPACITY, f"{option} has {text.strip()!r}; wanted numbers above 0, {MOST_CAPACITY:g} at most."
    )
    return value


def _write(
    context: typer.Context,
    traces: "Sequence[Trace]",
    rows: "Sequence[SimulationRow]",
    outputs: Outputs,
    plot_file: Path | None,
    *,
    interrupted: bool,
) -> None:
    from runner.files.json_file import json_bytes
    from runner.files.picture import picture_format
    from runner.simulate.picture import picture
    from runner.simulate.simulator import infinite_ratio
    from runner.simulate.table import COUNTS

    infinite = {trace.name: infinite_ratio(trace) for trace in traces}
    document = {
        "rows": [asdict(row) for row in rows],
        "infinite_block_hit_ratio": infinite,
        "sources": [trace.source for trace in traces],
        "skipped": [len(trace.skipped) for trace in traces],
        "counts": COUNTS,
        "interrupted": interrupted,
        **about(context),
    }
    outputs.write("--json", lambda: json_bytes(document))
    if plot_file is not None:
        form = picture_format(plot_file)
        outputs.write("--plot", lambda: picture(rows, infinite, form))
