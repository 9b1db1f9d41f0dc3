"""`radixcache advise`: what a prefix cache can save on a trace, and how many bytes that takes."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from runner.commands.inputs import TraceOptions, with_trace_options
from runner.commands.outputs import Outputs, UsageError, about, require, say
from runner.commands.simulate import (
    DISK_MIB_PER_S,
    MOST_CAPACITY,
    PREFILL_TOKENS_PER_S,
    DiskMibPerS,
    disk_plan,
    run_grid,
)
from runner.files import read_json
from runner.text import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.models.footprint import ModelBytes
    from runner.simulate.advice import DiskAdvice, Estimate
    from runner.simulate.curve import Curve
    from runner.simulate.rows import DiskPlan
    from runner.traces.trace import Trace

#: Processes for a long trace, unless --jobs says otherwise.
MOST_JOBS = 4
#: Samples of so many requests are done before other processes have started.
SOON_REQUESTS = 1_000
INTERRUPTED = "Interrupted: policies were not compared. These are LRU's figures."


class Comparison(NamedTuple):
    """Policies at one budget.

    Attributes:
        rows: of policies on the whole trace; None: they were not compared.
        notes: how they were chosen.
        estimates: what samples said of all policies.
        with_disk: what a disk besides brings LRU; None: that was not simulated.
        stop: what broke it off.
    """

    rows: list[dict[str, Any]] | None
    notes: "Sequence[str]" = ()
    estimates: "Sequence[Estimate]" = ()
    with_disk: "DiskAdvice | None" = None
    stop: Exception | None = None


@with_trace_options
def advise(
    context: typer.Context,
    options: TraceOptions,
    budget_gib: Annotated[float | None, typer.Option(help="Your budget, in GiB.")] = None,
    capacity_blocks: Annotated[int | None, typer.Option(help="Your budget, in blocks.")] = None,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="How fast your model prefills, for seconds saved.")
    ] = None,
    disk_gib: Annotated[
        float | None,
        typer.Option(help="A disk beside the budget, in GiB.  [default: ten times the budget, or room for everything]"),
    ] = None,
    disk_mib_per_s: DiskMibPerS = DISK_MIB_PER_S,
    simulation: Annotated[
        Path | None,
        typer.Option(help="Rows of `radixcache simulate --json` for this trace, instead of simulating at your budget."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes to simulate in.  [default: 1, for long traces up to 4]")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Simulate every policy on the whole trace, however long, and the optimum.")
    ] = False,
    sample: Annotated[float, typer.Option(metavar="RATE", help="Share of the blocks to follow; 1 is exact.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as a page of its own.")] = None,
) -> None:
    """Say which budget and policy to take.

    What can be saved at all, the budgets worth having, the best policy at yours, and a line to paste.
    """
    require(0 < sample <= 1, f"--sample is {sample:g}; wanted more than 0 and at most 1.")
    require(budget_gib is None or capacity_blocks is None, "give --budget-gib or --capacity-blocks; wanted only one.")
    for option, value in (
        ("--budget-gib", budget_gib),
        ("--capacity-blocks", capacity_blocks),
        ("--prefill-tokens-per-s", prefill_tokens_per_s),
    ):
        require(value is None or 0 < value <= MOST_CAPACITY, f"{option} is {value}; wanted more than 0.")
    require(
        disk_gib is None or (simulation is None and (budget_gib or capacity_blocks) is not None),
        "--disk-gib goes with --budget-gib or --capacity-blocks, and without --simulation.",
    )
    require(jobs is None or jobs >= 1, f"--jobs is {jobs}; wanted at least 1.")
    outputs = Outputs({"--json": json_file, "--html": html_file}, [*options.inputs, simulation])
    # Without bytes per token blocks have no size of their own: they are counted.
    sizes = options.model_bytes if options.model_bytes is not None and options.model_bytes.token_bytes > 0 else None
    require(
        budget_gib is None or sizes is not None,
        "--budget-gib needs bytes per token: give --model-config of a model with any.",
    )
    speed = prefill_tokens_per_s or PREFILL_TOKENS_PER_S
    disk = disk_plan(disk_gib, disk_mib_per_s, speed, sizes)
    rows = None if simulation is None else _rows(simulation)

    from runner.files import json_bytes
    from runner.simulate.advice import advice_document, advice_html, advice_of, best_policy, lru_text, policy_text
    from runner.simulate.curve import curve_picture, lru_curve

    read = options.read()
    try:
        curve = lru_curve(read, sample_rate=sample, seed=options.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    advice = advice_of(
        read,
        curve,
        token_bytes=None if sizes is None else sizes.token_bytes,
        checkpoint_bytes=0 if options.model_bytes is None else options.model_bytes.checkpoint_bytes,
        budget_bytes=None if budget_gib is None else budget_gib * GIB,
        budget_blocks=capacity_blocks,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    own_blocks = None if advice.own is None else advice.own.capacity_blocks
    require(
        own_blocks is None or own_blocks > 0,
        f"--budget-gib is {budget_gib}; wanted at least a block of {advice.block_bytes} bytes.",
    )
    outputs.show(lru_text(advice))  # at once: policies take a while
    best, compared = None, Comparison(rows)
    if rows is None and own_blocks is not None:
        if disk is None and advice.disk_bytes:
            disk = disk_plan(advice.disk_bytes / GIB, disk_mib_per_s, speed, sizes)
        compared = _compared(read, curve, own_blocks, sizes, disk, jobs, full=full, seed=options.seed)
    if compared.rows is not None:
        try:
            best = best_policy(compared.rows, trace=read.name, capacity_blocks=own_blocks)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{simulation}: not the rows of a simulation ({error!r}).") from error
        require(best is not None, f"{simulation}: no row of trace {read.name!r} with a capacity in blocks.")
    outputs.show(policy_text(advice, best, compared.notes))
    document = advice_document(
        advice, best, compared.estimates, compared.with_disk, interrupted=compared.stop is not None
    )
    outputs.write("--json", lambda: json_bytes({**document, "source": read.source, **about(context)}))
    marks = {each.name: each.capacity_blocks for each in (*advice.budgets[:3], advice.own) if each}
    # Where nothing is used twice they are at 0, which a logarithmic axis has not.
    marks = {name: blocks for name, blocks in marks.items() if blocks}

    def page() -> bytes:
        picture = curve_picture(curve, read, advice.block_bytes, marks=marks, file_format="svg")
        return advice_html(advice, picture, best, compared.notes).encode("utf-8", "backslashreplace")

    outputs.write("--html", page)
    if compared.stop is not None:
        say("interrupted: policies were not compared.")
        raise compared.stop
    outputs.finish()


def _compared(
    trace: "Trace",
    curve: "Curve",
    capacity_blocks: int,
    sizes: "ModelBytes | None",
    disk: "DiskPlan | None",
    jobs: int | None,
    *,
    full: bool,
    seed: int,
) -> Comparison:
    from policies import POLICIES
    from runner.simulate.advice import (
        LEVEL,
        WHOLE_REFS,
        DiskAdvice,
        apart,
        best_two,
        estimates_of,
        parts_of,
        sample_note,
        samples_of,
    )
    from runner.simulate.grid import SimulationJob

    has_checkpoints = sizes is not None and sizes.checkpoint_bytes > 0
    # The curve says LRU's share to the block, where there are no checkpoints.
    lru = {"trace": trace.name, "policy": "lru", "capacity_blocks": capacity_blocks}
    lru["token_hit_ratio"] = curve.token_hit_ratio_at(capacity_blocks)
    is_all = curve.infinite_token_hit_ratio - curve.token_hit_ratio_at(capacity_blocks) < LEVEL
    if not full and is_all and not has_checkpoints and curve.sample_rate == 1:
        return Comparison([lru], ["All that can be saved fits this budget: no policy saves more than LRU."])
    is_long = trace.block_refs > WHOLE_REFS
    jobs = jobs or (min(MOST_JOBS, os.cpu_count() or 1) if is_long else 1)
    names = sorted(POLICIES)
    notes: list[str] = []
    estimates: list[Estimate] = []
    if is_long and not full:
        parts = parts_of(trace, capacity_blocks)
        samples = samples_of(trace, parts, seed=seed)
        blocks = capacity_blocks // parts
        grid = [SimulationJob(index, name, blocks, None, sizes) for name in names for index in range(len(samples))]
        requests = sum(len(each.requests) for each in samples)
        found, stop = run_grid(samples, grid, jobs if requests > SOON_REQUESTS else 1)
        if stop is not None:
            return Comparison(None, [INTERRUPTED], stop=stop)
        estimates = estimates_of(found)
        notes.append(sample_note(apart(estimates), samples, trace))
        knows_lru = not has_checkpoints and curve.sample_rate == 1
        names = [each.policy for each in best_two(estimates) if each.policy != "lru" or not knows_lru]
        if not knows_lru and "lru" not in names:
            names.append("lru")
    elif not has_checkpoints:
        names.insert(0, "belady")
    grid = [SimulationJob(0, name, capacity_blocks, None, sizes) for name in names]
    with_disk = None
    if disk is not None and sizes is not None and is_long and not full and not has_checkpoints:
        with_disk = DiskAdvice.estimated(
            curve, disk, capacity_blocks, trace.block_tokens, sizes.token_bytes * trace.block_tokens
        )
    elif disk is not None:
        grid.append(SimulationJob(0, "lru", capacity_blocks, None, sizes, disk))
    found, stop = run_grid([trace], grid, jobs)
    if stop is not None:
        # What finished says nothing about what did not.
        return Comparison(None, [*notes, INTERRUPTED], estimates, stop=stop)
    beside = found.pop() if disk is not None and with_disk is None else None
    rows = [*([] if "lru" in names else [lru]), *map(asdict, found)]
    if beside is not None:
        alone = next(row["token_hit_ratio"] for row in rows if row["policy"] == "lru")
        with_disk = DiskAdvice.simulated(beside, alone)
    return Comparison(rows, [*notes, with_disk.note] if with_disk else notes, estimates, with_disk)


def _rows(path: Path) -> list[dict[str, Any]]:
    document = read_json(path, "rows of radixcache simulate", UsageError)
    rows: list[dict[str, Any]] | None = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: has no list of rows; wanted rows of radixcache simulate.")
    return rows
