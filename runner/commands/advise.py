"""`radixcache advise`: what a prefix cache saves on a trace, how many bytes that takes, and which policy is best."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Option

from runner.commands import outputs
from runner.commands.inputs import TraceOptions, with_options
from runner.commands.outputs import require
from runner.commands.simulate import (
    DISK_MIB_PER_S,
    DRAFT_TOKEN_COST,
    PREFILL_TOKENS_PER_S,
    DiskMibPerS,
    DraftTokenCost,
    Speculate,
    count_drafts,
    disk_plan,
    run_grid,
)
from runner.files import read_json
from runner.text import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.models.footprint import ModelBytes
    from runner.simulate.advice import DiskAdvice, Estimate
    from runner.simulate.curve import Curve
    from runner.simulate.rows import DiskPlan
    from runner.traces.trace import Trace

#: Processes for a long trace without --jobs.
MOST_JOBS = 4
#: Samples with fewer requests finish before other processes have started.
SOON_REQUESTS = 1_000
INTERRUPTED = "Interrupted: policies were not compared. These are the figures of LRU."


class Comparison(NamedTuple):
    """Policies at one budget: rows on the whole trace, or None; estimates from samples; `stop` interrupted it."""

    rows: list[dict[str, Any]] | None
    notes: "Sequence[str]" = ()
    estimates: "Sequence[Estimate]" = ()
    with_disk: "DiskAdvice | None" = None
    stop: Exception | None = None


@with_options(TraceOptions)
def advise(
    context: typer.Context,
    options: TraceOptions,
    budget_gib: Annotated[float | None, Option(help="Your budget in GiB; needs bytes per token.")] = None,
    capacity_blocks: Annotated[int | None, Option(help="Your budget in blocks.")] = None,
    prefill_tokens_per_s: Annotated[
        float | None, Option(help="Your model's prefill speed, to show time saved.")
    ] = None,
    disk_gib: Annotated[
        float | None, Option(help="Disk below memory, in GiB.  [default: ten times the budget, or room for all]")
    ] = None,
    disk_mib_per_s: DiskMibPerS = DISK_MIB_PER_S,
    speculate: Speculate = False,
    draft_token_cost: DraftTokenCost = DRAFT_TOKEN_COST,
    simulation: Annotated[Path | None, Option(help="File of `simulate --json`, instead of simulating.")] = None,
    jobs: Annotated[int | None, Option(help="Processes to use.  [default: 1; up to 4 for long traces]")] = None,
    full: Annotated[bool, Option("--full", help="Simulate every policy, and the optimum, on the whole trace.")] = False,
    sample: Annotated[float, Option(metavar="RATE", help="Share of the blocks to follow; 1 is exact.")] = 1.0,
    json_file: Annotated[Path | None, Option("--json", help="Write the figures to this JSON file.")] = None,
    html_file: Annotated[Path | None, Option("--html", help="Write the report to this HTML file.")] = None,
) -> None:
    """Recommend a budget and a policy for a trace.

    Shows how much prefill a cache can save, which budgets are worth having, the best policy at your budget, and a line
    of Python to paste.
    """
    require(0 < sample <= 1, f"--sample is {sample:g}; wanted more than 0 and at most 1.")
    require(
        budget_gib is None or capacity_blocks is None,
        "--budget-gib and --capacity-blocks exclude each other. Leave one out.",
    )
    outputs.require_positive(budget_gib=budget_gib, capacity_blocks=capacity_blocks, disk_gib=disk_gib)
    outputs.require_positive(disk_mib_per_s=disk_mib_per_s, prefill_tokens_per_s=prefill_tokens_per_s)
    require(
        disk_gib is None or (simulation is None and (budget_gib or capacity_blocks) is not None),
        "--disk-gib needs --budget-gib or --capacity-blocks, and excludes --simulation.",
    )
    outputs.require_counts(jobs=jobs)
    results = outputs.Outputs({"--json": json_file, "--html": html_file}, [*options.inputs, simulation])
    # Without bytes per token, capacities are in blocks.
    sizes = options.model_bytes if options.model_bytes is not None and options.model_bytes.token_bytes > 0 else None
    require(
        budget_gib is None or sizes is not None,
        "--budget-gib needs bytes per token; give --bytes-per-token, or --model-config of a model with attention.",
    )
    speeds = (disk_mib_per_s * MIB, prefill_tokens_per_s or PREFILL_TOKENS_PER_S)
    disk = disk_plan("--disk-gib", disk_gib, *speeds, sizes)
    compared = Comparison(None if simulation is None else _read_rows(simulation))

    from runner.files import json_bytes
    from runner.simulate.advice import advice_document, advice_html, advice_of, best_policy, lru_report, policy_text
    from runner.simulate.curve import curve_picture, lru_curve

    trace = options.read()
    with outputs.usage_errors(ValueError):
        curve = lru_curve(trace, sample_rate=sample, seed=options.seed)
    advice = advice_of(
        trace,
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
    drafting = count_drafts(options, draft_token_cost) if speculate else None
    results.show(*lru_report(advice))  # at once: comparing policies takes a while
    if compared.rows is None and own_blocks is not None:
        if disk is None and advice.disk_bytes:
            disk = disk_plan("--disk-gib", advice.disk_bytes / GIB, *speeds, sizes)
        compared = _compare(trace, curve, own_blocks, sizes, disk, jobs, full=full, seed=options.seed)
    best = None
    if compared.rows is not None:
        try:
            best = best_policy(compared.rows, trace=trace.name, capacity_blocks=own_blocks)
        except (KeyError, TypeError, ValueError) as error:
            raise outputs.UsageError(
                f"{simulation}: a row is wrong ({error!r}); wanted rows of radixcache simulate --json."
            ) from error
        require(best is not None, f"{simulation}: no row of trace {trace.name!r} with a capacity in blocks.")
    results.show(policy_text(advice, best, compared.notes))
    if drafting is not None:
        results.show(*drafting[0])
    document = advice_document(
        advice, best, compared.estimates, compared.with_disk, interrupted=compared.stop is not None
    )
    results.write(
        "--json",
        lambda: json_bytes(
            {**document, **({} if drafting is None else drafting[1]), "source": trace.source, **outputs.about(context)}
        ),
    )

    def page() -> bytes:
        # A trace without reuse has all marks at 0, where a logarithmic axis has none.
        marked = [*advice.budgets[:3], *([advice.own] if advice.own else [])]
        marks = {each.name: each.capacity_blocks for each in marked if each.capacity_blocks}
        picture = curve_picture(curve, trace, advice.block_bytes, marks=marks, file_format="svg")
        return advice_html(advice, picture, best, compared.notes).encode("utf-8", "backslashreplace")

    results.write("--html", page)
    if compared.stop is not None:
        outputs.say("interrupted: policies were not compared.")
        raise compared.stop
    results.finish()


def _compare(
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
    """Simulate policies at a budget, of a long trace those that are best on samples."""
    from policies import POLICIES
    from runner.simulate import advice
    from runner.simulate.grid import SimulationJob

    has_checkpoints = sizes is not None and sizes.checkpoint_bytes > 0
    # Without checkpoints the curve gives LRU's share exactly.
    knows_lru = not has_checkpoints and curve.sample_rate == 1
    lru = {"trace": trace.name, "policy": "lru", "capacity_blocks": capacity_blocks}
    lru["token_hit_ratio"] = curve.token_hit_ratio_at(capacity_blocks)
    is_all = curve.infinite_token_hit_ratio - curve.token_hit_ratio_at(capacity_blocks) < advice.LEVEL
    if not full and is_all and knows_lru:
        return Comparison([lru], ["All that can be saved fits this budget: no policy saves more than LRU."])
    is_long = trace.block_refs > advice.WHOLE_REFS
    jobs = jobs or (min(MOST_JOBS, os.cpu_count() or 1) if is_long else 1)
    names = sorted(POLICIES.keys() - {advice.BY_CHANCE})
    notes: list[str] = []
    estimates: list[Estimate] = []
    if is_long and not full:
        parts = advice.parts_of(trace, capacity_blocks)
        samples = advice.samples_of(trace, parts, seed=seed)
        blocks = capacity_blocks // parts
        grid = [SimulationJob(index, name, blocks, None, sizes) for name in names for index in range(len(samples))]
        requests = sum(len(each.requests) for each in samples)
        found, stop = run_grid(samples, grid, jobs if requests > SOON_REQUESTS else 1)
        if stop is not None:
            return Comparison(None, [INTERRUPTED], stop=stop)
        estimates = advice.estimates_of(found)
        notes.append(advice.sample_note(advice.distinct(estimates), samples, trace))
        names = [each.policy for each in advice.best_two(estimates) if each.policy != "lru" or not knows_lru]
        if not knows_lru and "lru" not in names:
            names.append("lru")
    elif not has_checkpoints:
        names.insert(0, "belady")
    grid = [SimulationJob(0, name, capacity_blocks, None, sizes) for name in names]
    with_disk = None
    if disk is not None and sizes is not None and is_long and not full and not has_checkpoints:
        block_bytes = sizes.token_bytes * trace.block_tokens
        with_disk = advice.estimated_disk(curve, disk, capacity_blocks, trace.block_tokens, block_bytes)
    elif disk is not None:
        grid.append(SimulationJob(0, "lru", capacity_blocks, None, sizes, disk))
    found, stop = run_grid([trace], grid, jobs)
    if stop is not None:
        # Policies that finished say nothing about those that did not.
        return Comparison(None, [*notes, INTERRUPTED], estimates, stop=stop)
    beside = found.pop() if disk is not None and with_disk is None else None
    rows = [*([] if "lru" in names else [lru]), *map(asdict, found)]
    if beside is not None and beside.disk is not None:
        alone = next(row["token_hit_ratio"] for row in rows if row["policy"] == "lru")
        plan, written_bytes = beside.disk.plan, beside.disk.written_bytes
        with_disk = advice.DiskAdvice(plan, alone, beside.token_hit_ratio, written_bytes, is_estimate=False)
    return Comparison(rows, [*notes, with_disk.note] if with_disk else notes, estimates, with_disk)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    document = read_json(path, "rows of radixcache simulate", outputs.UsageError)
    rows: list[dict[str, Any]] | None = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise outputs.UsageError(f"{path}: has no list of rows; wanted a file of radixcache simulate --json.")
    return rows
