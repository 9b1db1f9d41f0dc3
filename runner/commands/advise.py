"""`radixcache advise`: what a prefix cache saves on a trace, how many bytes that takes, and which policy is best."""

import os
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer import Option

from runner.commands import outputs
from runner.commands.inputs import TraceOptions, with_options
from runner.commands.outputs import require
from runner.commands.simulate import run_grid
from runner.files import json_bytes
from runner.text import GIB, picture_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.models import ModelBytes
    from runner.simulate.advice import Advice, BestPolicy, DiskAdvice, Estimate
    from runner.simulate.rows import DiskPlan

#: Processes for a long trace without --jobs.
MOST_JOBS = 4
#: Samples with fewer requests finish before other processes have started.
SOON_REQUESTS = 1_000
INTERRUPTED = "Interrupted: policies were not compared. These are the figures of LRU."


class Comparison(NamedTuple):
    """Policies at one budget: the best one, or None; estimates from samples; `stop` interrupted the comparison."""

    best: "BestPolicy | None"
    notes: "Sequence[str]" = ()
    estimates: "Sequence[Estimate]" = ()
    with_disk: "DiskAdvice | None" = None
    stop: Exception | None = None


@with_options(TraceOptions)
def advise(
    context: typer.Context,
    options: TraceOptions,
    full: Annotated[bool, Option("--full", help="Simulate every policy, and the optimum, on the whole trace.")] = False,
) -> None:
    """Recommend a budget and a policy for a trace.

    Shows how much prefill a cache can save, which budgets are worth having, the best policy at your budget, and a line
    of Python to paste. --json and --plot have the hits of LRU at every capacity.
    """
    results, capacities = options.checked_outputs(), options.capacities()
    require(len(capacities) < 2, "advise takes one budget; radixcache simulate takes several.")
    own_blocks, own_bytes = capacities[0] if capacities else (None, None)
    require(options.disk_gib is None or bool(capacities), "--disk-gib needs --budget-gib or --capacity-blocks.")
    # Without bytes per token, capacities are in blocks.
    sizes = options.model_bytes if options.model_bytes is not None and options.model_bytes.token_bytes > 0 else None
    wanted = "--budget-gib needs bytes per token; give --bytes-per-token, or --model-config of a model with attention."
    require(own_bytes is None or sizes is not None, wanted)
    disk = options.disk_plan("--disk-gib", options.disk_gib)
    compared = Comparison(None)

    from runner.simulate.advice import Advice, advice_document, lru_report, policy_text
    from runner.simulate.curve import curve_picture, lru_curve

    trace = options.read()
    with outputs.usage_errors(ValueError):
        curve = lru_curve(trace)
    advice = Advice(
        trace,
        curve,
        token_bytes=None if sizes is None else sizes.token_bytes,
        checkpoint_bytes=0 if options.model_bytes is None else options.model_bytes.checkpoint_bytes,
        budget_bytes=own_bytes,
        budget_blocks=own_blocks,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
    )
    require(
        advice.own is None or advice.own.capacity_blocks > 0,
        f"--budget-gib is {options.budget_gib}; wanted at least a block of {advice.block_bytes} bytes.",
    )
    results.show(*lru_report(advice))  # at once: comparing policies takes a while
    if advice.own is not None:
        if disk is None and advice.disk_bytes:
            disk = options.disk_plan("--disk-gib", advice.disk_bytes / GIB)
        compared = _compare(advice, advice.own.capacity_blocks, options, sizes, disk, full=full)
    best, notes, estimates, with_disk, stop = compared
    results.show(policy_text(advice, best, notes))
    document = advice_document(advice, best, estimates, with_disk, interrupted=stop is not None)
    results.write("--json", lambda: json_bytes({**document, "source": trace.source, **outputs.about(context)}))
    if options.plot_file is not None:
        form = picture_format(options.plot_file)
        marked = [*advice.budgets[:3], *([advice.own] if advice.own else [])]
        # A trace without reuse has all marks at 0, where a logarithmic axis has none.
        marks = {each.name: each.capacity_blocks for each in marked if each.capacity_blocks}
        results.write("--plot", lambda: curve_picture(curve, trace, advice.block_bytes, marks=marks, file_format=form))
    if stop is not None:
        outputs.say("interrupted: policies were not compared.")
        raise stop
    results.finish()


def _compare(
    advised: "Advice",
    capacity_blocks: int,
    options: TraceOptions,
    sizes: "ModelBytes | None",
    disk: "DiskPlan | None",
    *,
    full: bool,
) -> Comparison:
    """Simulate policies at a budget, of a long trace those that are best on samples."""
    from policies import POLICIES
    from runner.simulate import advice
    from runner.simulate.simulator import SimulationJob

    trace, curve = advised.trace, advised.curve
    has_checkpoints = sizes is not None and sizes.checkpoint_bytes > 0
    knows_lru = not has_checkpoints  # then the curve gives LRU's share exactly
    lru = curve.token_hit_ratio_at(capacity_blocks)
    is_all = curve.infinite_token_hit_ratio - lru < advice.LEVEL
    if not full and is_all and knows_lru:
        best = advice.best_policy({"lru": lru}, capacity_blocks)
        return Comparison(best, ["All that can be saved fits this budget: no policy saves more than LRU."])
    is_long = trace.block_refs > advice.WHOLE_REFS
    jobs = options.jobs or (min(MOST_JOBS, os.cpu_count() or 1) if is_long else 1)
    names = sorted(POLICIES.keys() - {advice.BY_CHANCE})
    notes: list[str] = []
    estimates: list[Estimate] = []
    if is_long and not full:
        parts = advice.parts_of(trace, capacity_blocks)
        samples = advice.samples_of(trace, parts, seed=options.seed)
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
    ratios = {"lru": lru} | {row.policy: row.token_hit_ratio for row in found}
    if beside is not None and beside.disk is not None:
        plan, written_bytes = beside.disk.plan, beside.disk.written_bytes
        with_disk = advice.DiskAdvice(plan, ratios["lru"], beside.token_hit_ratio, written_bytes, is_estimate=False)
    best = advice.best_policy(ratios, capacity_blocks)
    return Comparison(best, [*notes, with_disk.note] if with_disk else notes, estimates, with_disk)
