"""`radixcache simulate`: traces through eviction policies at several capacities, or through routers and replicas.

`run_grid` runs any grid of simulations under a progress bar, and turns what goes wrong into one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer import Option

from radixcache.errors import PolicyError
from radixcache.settings import STORED_BITS
from radixcache.stores.block_store import WriteOn
from runner.commands import outputs
from runner.commands.inputs import StoredBits, TraceOptions, read_chosen, with_options
from runner.commands.outputs import require
from runner.files import json_bytes
from runner.routing import ROUTERS, make_router
from runner.text import ProgressLines, plural

if TYPE_CHECKING:
    from runner.models import ModelBytes
    from runner.simulate.grid import AnyJob
    from runner.simulate.rows import DiskPlan, ResultRow
    from runner.traces.trace import Trace

R = TypeVar("R", bound="ResultRow")

#: Speeds of a common network, and of a laptop with a model of 8 billion parameters.
SHARED_BYTES_PER_S, DECODE_TOKENS_PER_S = 10e9 / 8, 40.0
ALL_ROUTERS = ",".join(ROUTERS)
MOST_REPLICAS = 1024
#: Options that need --replicas, and options that exclude it.
FOR_REPLICAS = ("router", "shared_gib", "decode_tokens_per_s")
FOR_ONE_CACHE = {"disk_gib": "--disk-gib", "plot_file": "--plot"}


@with_options(TraceOptions)
def simulate(
    context: typer.Context,
    options: TraceOptions,
    policy: Annotated[
        str, Option(help="Policies, separated by commas: names or my.module:Class; all: every policy, and belady.")
    ] = "lru,fifo,belady",
    stored_bits: StoredBits = None,
    speculate: Annotated[
        bool, Option("--speculate", help="Count what drafting saves on the replies of conversations; needs --model.")
    ] = False,
    disk_write_on: Annotated[WriteOn, Option(help="When to write state to the disk.")] = "eviction",
    replicas: Annotated[str | None, Option(help="Comma-separated replica counts; each replica has the budget.")] = None,
    router: Annotated[str, Option(help="With --replicas: routers to compare, separated by commas.")] = ALL_ROUTERS,
    shared_gib: Annotated[float | None, Option(help="With --replicas: a store that all replicas share.")] = None,
    decode_tokens_per_s: Annotated[float, Option(help="With --replicas: decoding speed.")] = DECODE_TOKENS_PER_S,
    ray: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Ray cluster that runs the simulations; auto finds or starts one."),
    ] = None,
) -> None:
    """Simulate eviction policies on traces, or routers before several replicas.

    The simulator runs the tree, budget and policies of the server, with sizes in place of layer state. `belady` and
    `belady-bypass` know the future: no policy beats them if all blocks have the same size. With --replicas, requests
    arrive at their recorded times, the router of the server chooses a replica, and --policy is lru by default.
    --budget-gib, --disk-gib and --shared-gib need --model-config or --bytes-per-token. --speculate counts what drafting
    saves on the replies of conversations; without a capacity it counts nothing else.
    """
    require(ray is None or find_spec("ray") is not None, "--ray needs the package ray: pip install 'radixcache[ray]'.")
    for name in FOR_REPLICAS if replicas is None else ():
        option = "--" + name.replace("_", "-")
        require(not outputs.is_given(context, name), f"{option} needs --replicas.")
    for name, option in FOR_ONE_CACHE.items() if replicas is not None else ():
        require(not outputs.is_given(context, name), f"{option} is for one cache. Leave it or --replicas out.")
    outputs.require_positive(shared_gib=shared_gib, decode_tokens_per_s=decode_tokens_per_s)
    results = options.checked_outputs()
    drafting: dict[str, Any] = {}
    if speculate:
        counted, drafting = _count_drafts(options)
        results.show(*counted)
        if options.capacity_blocks is None and options.budget_gib is None:
            results.write("--json", lambda: json_bytes({**drafting, **outputs.about(context)}))
            results.finish()
            return
    require(stored_bits in STORED_BITS, f"--stored-bits is {stored_bits}; wanted 4 or 8.")
    is_known = options.model_config is not None and options.kv_bits is None
    require(stored_bits is None or is_known, "--stored-bits needs --model-config, without --kv-bits.")
    sizes = options.model_bytes if stored_bits is None else options.load(stored_bits)
    if replicas is None:
        disk = options.disk_plan("--disk-gib", options.disk_gib, write_on=disk_write_on)
        policies = _policies(policy, sizes, disk)
    else:
        counts, routers = _replica_counts(replicas), list(dict.fromkeys(_words(router, "router")))
        for name in routers:
            with outputs.usage_errors(ValueError, prefix="--router: "):
                make_router(name)
        disk = options.disk_plan("--shared-gib", shared_gib, SHARED_BYTES_PER_S, "close")
        policies = _policies(policy if outputs.is_given(context, "policy") else "lru", sizes, disk, is_routed=True)
    capacities = options.capacities()
    require(bool(capacities), "give --capacity-blocks or --budget-gib.")

    from runner.simulate.replicas import ReplicaJob
    from runner.simulate.rows import Speeds, policies_picture, policies_report, replicas_report
    from runner.simulate.simulator import SimulationJob
    from runner.text import picture_format

    trace = options.read()
    grid: Any = [
        SimulationJob(0, name, blocks, nbytes, sizes, disk) for name in policies for blocks, nbytes in capacities
    ]
    speeds = Speeds(options.prefill_speed, decode_tokens_per_s)
    if replicas is not None:
        grid = [
            ReplicaJob(each, name, count, speeds, options.seed) for each in grid for count in counts for name in routers
        ]
    rows, stop = run_grid([trace], grid, options.jobs or 1, ray)
    if isinstance(stop, outputs.UsageError) and not rows:
        raise stop
    if stop is not None:
        outputs.say(f"interrupted: {len(rows)} of {len(grid)} simulations had finished.")
    shown, document = policies_report(trace, rows) if replicas is None else replicas_report(trace, rows, speeds)
    results.show(*shown)
    if rows:
        more = {**drafting, "interrupted": stop is not None, **outputs.about(context)}
        results.write("--json", lambda: json_bytes({**document, **more}))
        if options.plot_file is not None:
            infinite, form = document["infinite_block_hit_ratio"][trace.name], picture_format(options.plot_file)
            results.write("--plot", lambda: policies_picture(rows, infinite, form))
    if stop is not None:
        raise stop
    results.finish()


def _count_drafts(options: TraceOptions) -> tuple[list[Any], dict[str, Any]]:
    """What drafting saves on the replies of the conversations: what to show, and the same as JSON."""
    require(options.model is not None, "--speculate needs --model: its tokenizer and chat template spell the replies.")
    from runner.files import InputError
    from runner.simulate.drafts import SPECULATE, DraftCount, drafting_report, leaves_calls_out, recorded_turns

    conversations = read_chosen(options.trace, options.skip_bad)
    tokenizer = options.tokenizer
    counts = [DraftCount(name) for name in SPECULATE]
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
