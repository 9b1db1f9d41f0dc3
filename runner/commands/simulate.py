"""`radixcache simulate`: traces through eviction policies at several capacities, or through routers and replicas.

A grid of simulations as a command runs it: under a bar, and with what goes wrong said in a line.

What `radixcache simulate --replicas` takes beyond `radixcache simulate`: routers, speeds, a tier behind all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console

from runner.commands.inputs import TraceOptions, with_trace_options
from runner.commands.outputs import EXIT_INTERRUPTED, Outputs, UsageError, about, is_given, require, require_policy, say
from runner.text import GIB, MIB, ProgressLines

if TYPE_CHECKING:
    from runner.simulate.grid import AnyJob, GridRow
    from runner.simulate.simulator import OnProgress
    from runner.traces.trace import Trace

R = TypeVar("R", bound="GridRow")


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


if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from runner.commands.inputs import TraceOptions
    from runner.simulate.grid import ReplicaJob, SimulationJob
    from runner.simulate.replicas import Speeds
    from runner.simulate.rows import DiskPlan, ReplicaRow
    from runner.traces.trace import Trace

ROUTERS = "random,round-robin,hash,prefix"
#: A common network within a building; a model of 8 billion parameters on a laptop.
SHARED_GBIT_PER_S, DECODE_TOKENS_PER_S = 10.0, 40.0
MOST_REPLICAS = 1024
#: Options that say something of replicas, and of nothing else.
ALONE = {
    "router": "--router",
    "shared_gib": "--shared-gib",
    "shared_gbit_per_s": "--shared-gbit-per-s",
    "decode_tokens_per_s": "--decode-tokens-per-s",
}


@dataclass(frozen=True)
class ReplicaPlan:
    """What the options describe.

    Attributes:
        shared: the tier behind all replicas; None: there is none.
    """

    counts: list[int]
    routers: list[str]
    speeds: Speeds
    shared: DiskPlan | None
    seed: int

    def grid(self, jobs: Sequence[SimulationJob]) -> list[ReplicaJob]:
        """A job for each router before each number of replicas, for each of these."""
        from runner.simulate.grid import ReplicaJob

        return [
            ReplicaJob(each, router, count, self.speeds, self.seed)
            for each in jobs
            for count in self.counts
            for router in self.routers
        ]

    def shown(self, traces: Sequence[Trace], rows: Sequence[ReplicaRow]) -> list[Table | str]:
        """A table, and what has to be said beside it."""
        from runner.simulate.tables import replica_footnotes, replicas_table

        return [*([replicas_table(rows)] if rows else []), *replica_footnotes(traces, rows, self.speeds)]


def replica_plan(
    context: typer.Context,
    options: TraceOptions,
    replicas: str | None,
    router: str,
    shared_gib: float | None,
    shared_gbit_per_s: float,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
) -> ReplicaPlan | None:
    """The replicas that these options describe; None: none."""
    if replicas is None:
        for name, option in ALONE.items():
            require(not is_given(context, name), f"{option} is for replicas; say how many with --replicas.")
        return None
    for name, option in (("disk_gib", "--disk-gib"), ("plot_file", "--plot")):
        require(not is_given(context, name), f"{option} is for one cache; wanted it without --replicas.")
    from runner.simulate.replicas import Speeds
    from runner.simulate.rows import DiskPlan

    for option, value in (
        ("--shared-gib", shared_gib),
        ("--shared-gbit-per-s", shared_gbit_per_s),
        ("--prefill-tokens-per-s", prefill_tokens_per_s),
        ("--decode-tokens-per-s", decode_tokens_per_s),
    ):
        require(value is None or 0 < value <= 1e15, f"{option} is {value}; wanted more than 0.")
    shared = None
    if shared_gib is not None:
        require(options.model_bytes is not None, "--shared-gib needs --model-config or --bytes-per-token.")
        read_bytes_per_s = shared_gbit_per_s * 1e9 / 8
        shared = DiskPlan(max(1, int(shared_gib * GIB)), read_bytes_per_s, prefill_tokens_per_s, "close")
    speeds = Speeds(prefill_tokens_per_s, decode_tokens_per_s)
    return ReplicaPlan(_counts(replicas), _routers(router), speeds, shared, options.seed)


def require_routable(policies: Sequence[str]) -> None:
    """Refuse policies that no server could have."""
    from policies import OFFLINE_POLICIES

    for name in policies:
        require(name not in OFFLINE_POLICIES, f"--policy: {name} knows the future of one cache; not with --replicas.")


def replica_document(traces: Sequence[Trace], rows: Sequence[ReplicaRow]) -> dict[str, Any]:
    """The same figures for programs."""
    from runner.simulate.tables import REPLICA_COUNTS

    return {
        "rows": [{**asdict(row), "share_of_infinite": row.share_of_infinite} for row in rows],
        "sources": [trace.source for trace in traces],
        "skipped": [len(trace.skipped) for trace in traces],
        "counts": REPLICA_COUNTS,
    }


def _counts(listed: str) -> list[int]:
    words = [word.strip() for word in listed.split(",")]
    for word in words:
        is_count = word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_REPLICAS
        require(is_count, f"--replicas has {word!r}; wanted whole numbers from 1 to {MOST_REPLICAS:,}.")
    return list(dict.fromkeys(map(int, words)))


def _routers(listed: str) -> list[str]:
    from runner.routing.routers import ROUTERS

    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    require(bool(names), "--router names no router.")
    for name in names:
        require(name in ROUTERS, f"--router: no router {name!r}; known: {', '.join(ROUTERS)}.")
    return names


if TYPE_CHECKING:
    from runner.models.footprint import ModelBytes
    from runner.simulate.grid import SimulationJob
    from runner.simulate.rows import DiskPlan, SimulationRow
    from runner.traces.trace import Trace

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
    from runner.simulate.grid import SimulationJob

    traces = _separate(options) if separate else [options.read()]
    grid = [
        SimulationJob(index, name, blocks, nbytes, options.model_bytes, disk)
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
    traces: Sequence[Trace],
    grid: Sequence[SimulationJob],
    jobs: int,
    ray: str | None,
    outputs: Outputs,
    plot_file: Path | None,
) -> Exception | None:
    """Run, show and write; returns what to raise if not all has finished."""
    rows, stop = run_or_raise(traces, grid, jobs, ray)
    from runner.simulate.tables import footnotes, rows_table

    outputs.show(*([rows_table(rows)] if rows else []), *footnotes(traces, rows))
    if rows:
        _write(context, traces, rows, outputs, plot_file, interrupted=stop is not None)
    return stop


def _simulate_replicas(
    context: typer.Context,
    traces: Sequence[Trace],
    many: ReplicaPlan,
    grid: Sequence[SimulationJob],
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


def _separate(options: TraceOptions) -> list[Trace]:
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
    sizes: ModelBytes | None,
    write_on: Literal["eviction", "second_use", "close"] = "eviction",
) -> DiskPlan | None:
    """The disk that these options describe; None: none."""
    from runner.simulate.rows import DiskPlan

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


def _policies(listed: str, sizes: ModelBytes | None, disk: DiskPlan | None) -> list[str]:
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
    capacity_blocks: str | None, budget_gib: str | None, sizes: ModelBytes | None
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
    traces: Sequence[Trace],
    rows: Sequence[SimulationRow],
    outputs: Outputs,
    plot_file: Path | None,
    *,
    interrupted: bool,
) -> None:
    from runner.picture import picture_format
    from runner.simulate.simulator import infinite_ratio
    from runner.simulate.tables import COUNTS, picture

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
    from runner.files import json_bytes

    outputs.write("--json", lambda: json_bytes({**document, "interrupted": interrupted, **about(context)}))
