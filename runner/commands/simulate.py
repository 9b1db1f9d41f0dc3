"""`radixcache simulate`: traces through eviction policies at several capacities."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from runner.commands.trace_options import (
    BlockTokens,
    BytesPerCheckpoint,
    BytesPerToken,
    KvBits,
    KvGroupSize,
    ModelConfig,
    Seed,
    SessionsPerHour,
    SkipBad,
    Tokenizer,
    TracePaths,
    load_model_bytes,
    load_trace,
)
from runner.commands.usage import (
    EXIT_INTERRUPTED,
    PIPE_COLUMNS,
    UsageError,
    require,
    require_writable_files,
    say,
)

if TYPE_CHECKING:
    from runner.model_config import ModelBytes
    from runner.simulate.grid import Job, OnProgress
    from runner.simulate.row import Row
    from runner.traces import Trace

GIB = 1 << 30


def simulate(
    context: typer.Context,
    trace: TracePaths,
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
    separate: Annotated[
        bool, typer.Option("--separate", help="Take each file or folder for a trace of its own.")
    ] = False,
    model_config: ModelConfig = None,
    bytes_per_token: BytesPerToken = None,
    bytes_per_checkpoint: BytesPerCheckpoint = 0.0,
    kv_bits: KvBits = None,
    kv_group_size: KvGroupSize = 64,
    skip_bad: SkipBad = False,
    seed: Seed = 0,
    sessions_per_hour: SessionsPerHour = 30.0,
    model: Tokenizer = None,
    block_tokens: BlockTokens = None,
    jobs: Annotated[int, typer.Option(help="Processes to simulate in.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Simulate on a Ray cluster; auto finds or starts one."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw hit ratio over capacity, a line per policy, to this PNG.")
    ] = None,
) -> None:
    """Simulate eviction policies on traces, with the cache that a server would use.

    The tree, the budget and the policies are the deployed ones; only state is replaced by its size. `belady` and
    `belady-bypass` know the future: no policy can do better where all blocks weigh the same.
    """
    require(jobs >= 1, f"--jobs is {jobs}; wanted at least 1.")
    require_writable_files(json_file, plot_file)
    policies = _policies(policy)
    sizes = load_model_bytes(model_config, bytes_per_token, bytes_per_checkpoint, kv_bits, kv_group_size)
    capacities = _capacities(capacity_blocks, budget_gib, sizes)
    traces = [
        load_trace(
            paths,
            skip_bad=skip_bad,
            seed=seed,
            sessions_per_hour=sessions_per_hour,
            model=model,
            block_tokens=block_tokens,
        )
        for paths in ([[path] for path in trace] if separate else [trace])
    ]
    from runner.simulate.grid import Job

    grid = [
        Job(index, name, blocks, nbytes, sizes)
        for index in range(len(traces))
        for name in policies
        for blocks, nbytes in capacities
    ]
    rows, was_interrupted = _run(traces, grid, jobs, ray)
    _print(traces, rows)
    command = shlex.join(["radixcache", *context.obj])
    _write(traces, rows, json_file, plot_file, command=command, interrupted=was_interrupted)
    if was_interrupted:
        say(f"interrupted: {len(rows)} of {len(grid)} simulations had finished.")
        raise typer.Exit(EXIT_INTERRUPTED)


def _policies(listed: str) -> list[str]:
    from policies import OFFLINE_POLICIES, POLICIES, make_policy

    names = [name.strip() for name in listed.split(",") if name.strip()]
    require(bool(names), "--policy names no policy.")
    if "all" in names:
        names = [*(name for name in names if name != "all"), *sorted(POLICIES), *sorted(OFFLINE_POLICIES)]
    for name in names:
        if name not in OFFLINE_POLICIES:
            try:
                make_policy(name)
            except ValueError as error:
                raise UsageError(f"--policy: {error}") from error
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
        return [(int(each), None) for each in blocks]
    assert budget_gib is not None
    require(sizes is not None, "--budget-gib needs --model-config or --bytes-per-token.")
    return [(None, max(1, int(_number(each, "--budget-gib") * GIB))) for each in budget_gib.split(",")]


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    require(0 < value < float("inf"), f"{option} has {text.strip()!r}; wanted numbers above 0.")
    return value


def _run(traces: "Sequence[Trace]", grid: "Sequence[Job]", jobs: int, ray: str | None) -> "tuple[list[Row], bool]":
    """Run the grid under a bar; returns what finished, and whether Ctrl-C came before the rest."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,} requests"))
    total = sum(len(traces[job.trace].requests) for job in grid)
    rows: list[Row] = []
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            task = progress.add_task("simulating", total=total)
            for row in _rows(traces, grid, jobs, ray, lambda done: progress.advance(task, done)):
                rows.append(row)
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def _rows(
    traces: "Sequence[Trace]", grid: "Sequence[Job]", jobs: int, ray: str | None, on_progress: "OnProgress"
) -> "Iterator[Row]":
    from runner.simulate.grid import run_locally, run_on_ray

    if ray is None:
        yield from run_locally(traces, grid, jobs, on_progress)
        return
    try:
        yield from run_on_ray(traces, grid, ray, on_progress)
    except ModuleNotFoundError as error:
        raise UsageError("--ray needs the package ray: pip install 'radixcache[ray]'.") from error
    except ConnectionError as error:
        raise UsageError(f"--ray {ray}: no cluster answers ({error}).") from error


def _print(traces: "Sequence[Trace]", rows: "Sequence[Row]") -> None:
    from runner.simulate.table import footnotes, rows_table

    stdout = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    if rows:
        stdout.print(rows_table(rows))
    for line in footnotes(traces, rows):
        stdout.print(line, markup=False, soft_wrap=True)


def _write(
    traces: "Sequence[Trace]",
    rows: "Sequence[Row]",
    json_file: Path | None,
    plot_file: Path | None,
    **about: object,
) -> None:
    from runner.report import machine, versions, write_json
    from runner.simulate.picture import plot_rows
    from runner.simulate.simulator import infinite_ratio

    if not rows:
        return
    infinite = {trace.name: infinite_ratio(trace) for trace in traces}
    document = {
        "rows": [row.as_dict() for row in rows],
        "infinite_block_hit_ratio": infinite,
        "sources": [trace.source for trace in traces],
        **about,
        "machine": machine(),
        "versions": versions(),
    }
    try:
        if json_file is not None:
            write_json(json_file, document)
        if plot_file is not None:
            plot_rows(plot_file, rows, infinite)
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written ({error.strerror}).") from error
