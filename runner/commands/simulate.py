"""`radixcache simulate`: traces through eviction policies at several capacities, or through routers and replicas."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from runner.commands.outputs import Outputs
from runner.commands.replicas import (
    DECODE_TOKENS_PER_S,
    ROUTERS,
    SHARED_GBIT_PER_S,
    ReplicaPlan,
    replica_document,
    replica_plan,
    require_routable,
)
from runner.commands.simulating import run_or_raise
from runner.commands.trace_options import TraceOptions, with_trace_options
from runner.commands.usage import about, is_given, require, require_policy
from runner.files.units import GIB, MIB

if TYPE_CHECKING:
    from runner.models.footprint import ModelBytes
    from runner.simulate.disk import DiskPlan
    from runner.simulate.grid import Job
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
        float, typer.Option(help="How fast the model prefills: where a disk or a network is slower, nothing is read.")
    ] = PREFILL_TOKENS_PER_S,
    replicas: Annotated[
        str | None,
        typer.Option(help="Numbers of replicas, separated by commas, each with the capacity or budget to itself."),
    ] = None,
    router: Annotated[
        str, typer.Option(help="With --replicas: what sends requests to them, separated by commas.")
    ] = ROUTERS,
    shared_gib: Annotated[
        float | None,
        typer.Option(help="With --replicas: a tier behind all of them, in GiB; needs the bytes of a model."),
    ] = None,
    shared_gbit_per_s: Annotated[
        float, typer.Option(help="With --shared-gib: how fast a replica reads it.")
    ] = SHARED_GBIT_PER_S,
    decode_tokens_per_s: Annotated[
        float, typer.Option(help="With --replicas: how fast the model generates.")
    ] = DECODE_TOKENS_PER_S,
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
    """Simulate eviction policies on traces, or routers before several replicas.

    It is the cache that a server would use: tree, budget and policies are the deployed ones, and only state is replaced
    by its size. `belady` and `belady-bypass` know the future: no policy can do better where all blocks weigh the same.
    With --replicas requests come by their arrival times, the deployed router decides, and --policy is lru by default.
    """
    require(jobs >= 1, f"--jobs is {jobs}; wanted at least 1.")
    require(ray is None or find_spec("ray") is not None, "--ray needs the package ray: pip install 'radixcache[ray]'.")
    outputs = Outputs({"--json": json_file, "--plot": plot_file}, options.inputs)
    speeds = (prefill_tokens_per_s, decode_tokens_per_s)
    many = replica_plan(context, options, replicas, router, shared_gib, shared_gbit_per_s, *speeds)
    if many is not None:
        policy = policy if is_given(context, "policy") else "lru"
        disk = many.shared
    else:
        disk = disk_plan(disk_gib, disk_mib_per_s, prefill_tokens_per_s, options.model_bytes, disk_write_on)
    policies = _policies(policy, options.model_bytes, disk)
    if many is not None:
        require_routable(policies)
    capacities = _capacities(capacity_blocks, budget_gib, options.model_bytes)
    from runner.simulate.grid import Job

    traces = _separate(options) if separate else [options.read()]
    grid = [
        Job(index, name, blocks, nbytes, options.model_bytes, disk)
        for index in range(len(traces))
        for name in policies
        for blocks, nbytes in capacities
    ]
    if many is None:
        stop = _simulate_policies(context, traces, grid, jobs, ray, outputs, plot_file)
    else:
        stop = _simulate_replicas(context, traces, many, grid, jobs, ray, outputs)
    if stop is not None:
        raise stop
    outputs.finish()


def _simulate_policies(
    context: typer.Context,
    traces: "Sequence[Trace]",
    grid: "Sequence[Job]",
    jobs: int,
    ray: str | None,
    outputs: Outputs,
    plot_file: Path | None,
) -> Exception | None:
    """Run, show and write; returns what to raise if not all has finished."""
    rows, stop = run_or_raise(traces, grid, jobs, ray)
    from runner.simulate.table import footnotes, rows_table

    outputs.show(*([rows_table(rows)] if rows else []), *footnotes(traces, rows))
    if rows:
        _write(context, traces, rows, outputs, plot_file, interrupted=stop is not None)
    return stop


def _simulate_replicas(
    context: typer.Context,
    traces: "Sequence[Trace]",
    many: ReplicaPlan,
    grid: "Sequence[Job]",
    jobs: int,
    ray: str | None,
    outputs: Outputs,
) -> Exception | None:
    """Run, show and write; returns what to raise if not all has finished."""
    rows, stop = run_or_raise(traces, many.grid(grid), jobs, ray)
    outputs.show(*many.shown(traces, rows))
    if rows:
        _write_json(context, outputs, replica_document(traces, rows), interrupted=stop is not None)
    return stop


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
    }
    _write_json(context, outputs, document, interrupted=interrupted)
    if plot_file is not None:
        form = picture_format(plot_file)
        outputs.write("--plot", lambda: picture(rows, infinite, form))


def _write_json(context: typer.Context, outputs: Outputs, document: dict[str, Any], *, interrupted: bool) -> None:
    from runner.files.json_file import json_bytes

    outputs.write("--json", lambda: json_bytes({**document, "interrupted": interrupted, **about(context)}))
