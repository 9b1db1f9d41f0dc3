"""`radixcache simulate`: traces through eviction policies at several capacities, or through routers and replicas.

`run_grid` runs any grid of simulations under a progress bar, and turns what goes wrong into one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from typer import Option

from radixcache.errors import PolicyError
from radixcache.settings import STORED_BITS
from runner.commands import outputs
from runner.commands.inputs import TraceOptions, read_chosen, with_options
from runner.commands.outputs import require
from runner.text import GIB, MIB, ProgressLines, plural

if TYPE_CHECKING:
    from runner.models.footprint import ModelBytes
    from runner.simulate.grid import AnyJob
    from runner.simulate.rows import DiskPlan, ResultRow
    from runner.traces.trace import Trace

R = TypeVar("R", bound="ResultRow")
WriteOn = Literal["eviction", "second_use", "close"]

#: Speeds of a common NVMe disk, of a common network, and of a laptop with a model of 8 billion parameters.
DISK_MIB_PER_S, SHARED_GBIT_PER_S, PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 2000.0, 10.0, 1000.0, 40.0
ROUTERS = "random,round-robin,hash,prefix"
MOST_REPLICAS = 1024
#: Options that need --replicas, and options that exclude it.
FOR_REPLICAS = ("router", "shared_gib", "shared_gbit_per_s", "decode_tokens_per_s")
FOR_ONE_CACHE = {"disk_gib": "--disk-gib", "plot_file": "--plot"}

#: What a proposed token costs, as a share of a pass over one token, unless the user says otherwise.
DRAFT_TOKEN_COST = 0.15
Speculate = Annotated[
    bool, Option("--speculate", help="Count what drafting saves on the replies of conversations; needs --model.")
]
DraftTokenCost = Annotated[
    float, Option(help="With --speculate: cost of a proposed token, as a share of a pass over one token.")
]

DiskMibPerS = Annotated[float, Option(help="Read speed of the disk, in MiB/s.")]


@with_options(TraceOptions)
def simulate(
    context: typer.Context,
    options: TraceOptions,
    policy: Annotated[
        str, Option(help="Policies, separated by commas: names or my.module:Class; all: every policy, and belady.")
    ] = "lru,fifo,belady",
    capacity_blocks: Annotated[str | None, Option(help="Capacities in blocks, separated by commas.")] = None,
    budget_gib: Annotated[str | None, Option(help="Budgets in GiB, separated by commas.")] = None,
    stored_bits: Annotated[
        int | None, Option(help="With --model-config: bits of keys and values that are not live, 8 or 4.")
    ] = None,
    disk_gib: Annotated[float | None, Option(help="Disk below memory, in GiB.")] = None,
    disk_mib_per_s: DiskMibPerS = DISK_MIB_PER_S,
    disk_write_on: Annotated[WriteOn, Option(help="When to write state to the disk.")] = "eviction",
    prefill_tokens_per_s: Annotated[
        float, Option(help="Prefill speed; a slower disk or network is not read.")
    ] = PREFILL_TOKENS_PER_S,
    replicas: Annotated[str | None, Option(help="Comma-separated replica counts; each replica has the budget.")] = None,
    router: Annotated[str, Option(help="With --replicas: routers to compare, separated by commas.")] = ROUTERS,
    shared_gib: Annotated[float | None, Option(help="With --replicas: a store that all replicas share.")] = None,
    shared_gbit_per_s: Annotated[float, Option(help="With --shared-gib: link speed of a replica.")] = SHARED_GBIT_PER_S,
    decode_tokens_per_s: Annotated[float, Option(help="With --replicas: decoding speed.")] = DECODE_TOKENS_PER_S,
    separate: Annotated[bool, Option("--separate", help="Treat each file or folder as a separate trace.")] = False,
    speculate: Speculate = False,
    draft_token_cost: DraftTokenCost = DRAFT_TOKEN_COST,
    jobs: Annotated[int, Option(help="Processes to use.")] = 1,
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="Ray cluster to use; auto finds or starts one.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write all rows to this JSON file.")] = None,
    plot_file: Annotated[Path | None, Option("--plot", help="Draw hit ratio by capacity (.png, .svg or .pdf).")] = None,
) -> None:
    """Simulate eviction policies on traces, or routers before several replicas.

    The simulator runs the tree, budget and policies of the server, with sizes in place of layer state. `belady` and
    `belady-bypass` know the future: no policy beats them if all blocks have the same size. With --replicas, requests
    arrive at their recorded times, the router of the server chooses a replica, and --policy is lru by default.
    --budget-gib, --disk-gib and --shared-gib need --model-config or --bytes-per-token. --speculate counts what drafting
    saves on the replies of conversations; without a capacity it counts nothing else.
    """
    outputs.require_counts(jobs=jobs)
    require(ray is None or find_spec("ray") is not None, "--ray needs the package ray: pip install 'radixcache[ray]'.")
    results = outputs.Outputs({"--json": json_file, "--plot": plot_file}, options.inputs)
    for name in FOR_REPLICAS if replicas is None else ():
        option = "--" + name.replace("_", "-")
        require(not outputs.is_given(context, name), f"{option} needs --replicas.")
    for name, option in FOR_ONE_CACHE.items() if replicas is not None else ():
        require(not outputs.is_given(context, name), f"{option} is for one cache. Leave it or --replicas out.")
    outputs.require_positive(disk_gib=disk_gib, disk_mib_per_s=disk_mib_per_s)
    outputs.require_positive(shared_gib=shared_gib, shared_gbit_per_s=shared_gbit_per_s)
    outputs.require_positive(prefill_tokens_per_s=prefill_tokens_per_s, decode_tokens_per_s=decode_tokens_per_s)
    drafting = count_drafts(options, draft_token_cost) if speculate else None
    if drafting is not None:
        results.show(*drafting[0])
    if drafting is not None and capacity_blocks is None and budget_gib is None:
        _write_drafting(results, {**drafting[1], **outputs.about(context)})
        return
    require(stored_bits in STORED_BITS, f"--stored-bits is {stored_bits}; wanted 4 or 8.")
    is_known = options.model_config is not None and options.kv_bits is None
    require(stored_bits is None or is_known, "--stored-bits needs --model-config, without --kv-bits.")
    sizes = options.model_bytes if stored_bits is None else options.load(stored_bits)
    if replicas is None:
        disk = disk_plan("--disk-gib", disk_gib, disk_mib_per_s * MIB, prefill_tokens_per_s, sizes, disk_write_on)
        policies = _policies(policy, sizes, disk)
    else:
        from runner.routing.routers import ROUTERS as KNOWN

        counts, routers = _replica_counts(replicas), list(dict.fromkeys(_words(router, "router")))
        for name in routers:
            require(name in KNOWN, f"--router: router {name!r} is not known. Known: {', '.join(KNOWN)}.")
        read_bytes_per_s = shared_gbit_per_s * 1e9 / 8
        disk = disk_plan("--shared-gib", shared_gib, read_bytes_per_s, prefill_tokens_per_s, sizes, "close")
        policies = _policies(policy if outputs.is_given(context, "policy") else "lru", sizes, disk, is_routed=True)
    capacities = _capacities(capacity_blocks, budget_gib, sizes)

    from runner.files import json_bytes
    from runner.simulate.grid import ReplicaJob, SimulationJob
    from runner.simulate.rows import Speeds, policies_picture, policies_report, replicas_report
    from runner.text import picture_format

    traces = _separate(options) if separate else [options.read()]
    grid: Any = [
        SimulationJob(index, name, blocks, nbytes, sizes, disk)
        for index in range(len(traces))
        for name in policies
        for blocks, nbytes in capacities
    ]
    speeds = Speeds(prefill_tokens_per_s, decode_tokens_per_s)
    if replicas is not None:
        grid = [
            ReplicaJob(each, name, count, speeds, options.seed) for each in grid for count in counts for name in routers
        ]
    rows, stop = run_grid(traces, grid, jobs, ray)
    if isinstance(stop, outputs.UsageError) and not rows:
        raise stop
    if stop is not None:
        outputs.say(f"interrupted: {len(rows)} of {len(grid)} simulations had finished.")
    reported = policies_report(traces, rows) if replicas is None else replicas_report(traces, rows, speeds)
    shown, document = reported
    results.show(*shown)
    if rows:
        document = {
            **document,
            **({} if drafting is None else drafting[1]),
            "interrupted": stop is not None,
            **outputs.about(context),
        }
        results.write("--json", lambda: json_bytes(document))
    if rows and plot_file is not None:
        infinite, form = document["infinite_block_hit_ratio"], picture_format(plot_file)
        results.write("--plot", lambda: policies_picture(rows, infinite, form))
    if stop is not None:
        raise stop
    results.finish()


def count_drafts(options: TraceOptions, token_cost: float) -> tuple[list[Any], dict[str, Any]]:
    """What drafting saves on the replies of the conversations: what to show, and the same as JSON."""
    require(options.model is not None, "--speculate needs --model: its tokenizer and chat template spell the replies.")
    require(0 <= token_cost <= 1, f"--draft-token-cost is {token_cost:g}; wanted 0 to 1.")
    from runner.files import InputError
    from runner.simulate.drafts import SPECULATE, DraftCount, drafting_report, leaves_calls_out, recorded_turns

    conversations = read_chosen(options.trace, options.skip_bad)
    tokenizer = options.tokenizer
    counts = [DraftCount(name, token_cost) for name in SPECULATE]
    lines, replies = ProgressLines(), 0
    with outputs.usage_errors(InputError):
        for _, prompt, reply in recorded_turns(conversations, tokenizer):
            for count in counts:
                count.add(prompt, reply)
            replies += 1
            lines.tell(lambda: f"drafting: {replies:,} replies of {plural(len(conversations), 'conversation')}")  # noqa: B023
    require(counts[0].row.replies > 0, "--speculate: no conversation has a recorded reply of two tokens or more.")
    spells_calls = any(leaves_calls_out(each, tokenizer) for each in conversations)
    return drafting_report([each.row for each in counts], spells_calls=spells_calls)


def _write_drafting(results: outputs.Outputs, document: dict[str, Any]) -> None:
    from runner.files import json_bytes

    results.write("--json", lambda: json_bytes(document))
    results.finish()


def run_grid(
    traces: Sequence[Trace], grid: Sequence[AnyJob[R]], jobs: int, ray: str | None = None
) -> tuple[list[R], Exception | None]:
    """Run a grid under a bar. Returns the rows that finished, and what to raise later if not all did."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from runner.simulate.grid import run_locally, run_on_ray

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

            run = run_locally(traces, grid, jobs, advance) if ray is None else run_on_ray(traces, grid, ray, advance)
            rows.extend(run)
    except KeyboardInterrupt:
        return rows, typer.Exit(outputs.EXIT_INTERRUPTED)
    except PolicyError as error:
        # Ray wraps the first cause into an exception of its own.
        cause = getattr(error, "cause", error)
        return rows, outputs.UsageError(f"--policy: policy {cause.policy}: {cause.hook}() {cause.reason}.")
    except BrokenProcessPool:
        return rows, outputs.UsageError(
            "a process of --jobs was killed, perhaps because memory ran out. Use fewer jobs."
        )
    except ConnectionError as error:
        return rows, outputs.UsageError(f"--ray {ray}: no cluster answers ({error}).")
    return rows, None


def _separate(options: TraceOptions) -> list[Trace]:
    paths = options.trace
    require(len(set(paths)) == len(paths), "--separate: a path was given twice; wanted each path once.")
    traces = [options.read(path) for path in paths]
    names = [trace.name for trace in traces]
    return [
        trace if names.count(trace.name) == 1 else replace(trace, name=str(path))
        for path, trace in zip(paths, traces, strict=True)
    ]


def disk_plan(
    option: str,
    gib: float | None,
    read_bytes_per_s: float,
    prefill_tokens_per_s: float,
    sizes: ModelBytes | None,
    write_on: WriteOn = "eviction",
) -> DiskPlan | None:
    """The disk of this size that `option` names; None: no size was given."""
    from runner.simulate.rows import DiskPlan

    if gib is None:
        return None
    require(sizes is not None, f"{option} needs --model-config or --bytes-per-token.")
    return DiskPlan(max(1, int(gib * GIB)), read_bytes_per_s, prefill_tokens_per_s, write_on)


def _policies(listed: str, sizes: ModelBytes | None, disk: DiskPlan | None, *, is_routed: bool = False) -> list[str]:
    from policies import OFFLINE_POLICIES, POLICIES

    names = _words(listed, "policy")
    defined = "--policy: belady-bypass works only"
    has_checkpoints = sizes is not None and sizes.checkpoint_bytes > 0
    if "belady-bypass" in names:
        require(not has_checkpoints, f"{defined} without checkpoints; {sizes}.")
        require(disk is None, f"{defined} without a disk.")
    if "all" in names:
        bypasses = disk is None and not has_checkpoints
        bounds = [name for name in sorted(OFFLINE_POLICIES) if name != "belady-bypass" or bypasses]
        names = [*(name for name in names if name != "all"), *sorted(POLICIES), *bounds]
    for name in names:
        if name not in OFFLINE_POLICIES:
            outputs.require_policy(name)
        else:
            require(not is_routed, f"--policy: {name} knows the future of one cache. Leave it or --replicas out.")
    return list(dict.fromkeys(names))


def _replica_counts(listed: str) -> list[int]:
    words = [word.strip() for word in listed.split(",")]
    for word in words:
        is_count = word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_REPLICAS
        require(is_count, f"--replicas has {word!r}; wanted whole numbers from 1 to {MOST_REPLICAS:,}.")
    return list(dict.fromkeys(map(int, words)))


def _words(listed: str, noun: str) -> list[str]:
    words = [word.strip() for word in listed.split(",") if word.strip()]
    require(bool(words), f"--{noun} names no {noun}.")
    return words


def _capacities(
    capacity_blocks: str | None, budget_gib: str | None, sizes: ModelBytes | None
) -> list[tuple[int | None, int | None]]:
    """Pairs of blocks and bytes, one of them None."""
    require(
        capacity_blocks is None or budget_gib is None,
        "--capacity-blocks and --budget-gib exclude each other. Leave one out.",
    )
    if capacity_blocks is not None:
        blocks = _numbers(capacity_blocks, "--capacity-blocks")
        are_whole, has_size = all(each == int(each) for each in blocks), sizes is None or sizes.token_bytes > 0
        require(are_whole, f"--capacity-blocks is {capacity_blocks}; wanted whole numbers.")
        require(has_size, f"{sizes}: a block takes 0 bytes; give --budget-gib.")
        return [(int(each), None) for each in dict.fromkeys(blocks)]
    if budget_gib is None:
        raise outputs.UsageError("give --capacity-blocks or --budget-gib.")
    require(sizes is not None, "--budget-gib needs --model-config or --bytes-per-token.")
    budgets = [max(1, int(each * GIB)) for each in _numbers(budget_gib, "--budget-gib")]
    return [(None, each) for each in dict.fromkeys(budgets)]


def _numbers(listed: str, option: str) -> list[float]:
    numbers = []
    for text in listed.split(","):
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        require(
            0 < value <= outputs.MOST,
            f"{option} has {text.strip()!r}; wanted numbers above 0, at most {outputs.MOST:g}.",
        )
        numbers.append(value)
    return numbers
