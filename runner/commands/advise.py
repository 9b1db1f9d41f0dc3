"""`radixcache advise`: what a prefix cache can save on a trace, and how many bytes that takes."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.commands.simulate import MOST_CAPACITY, run_grid
from runner.commands.trace_options import TraceOptions, with_trace_options
from runner.commands.usage import UsageError, about, require, require_writable_files, say, writing
from runner.files.json_file import read_json
from runner.files.units import GIB

if TYPE_CHECKING:
    from runner.models.footprint import ModelBytes
    from runner.simulate.grid import Job


@with_trace_options
def advise(
    context: typer.Context,
    options: TraceOptions,
    budget_gib: Annotated[float | None, typer.Option(help="Your budget, in GiB.")] = None,
    capacity_blocks: Annotated[int | None, typer.Option(help="Your budget, in blocks.")] = None,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="How fast your model prefills, for seconds saved.")
    ] = None,
    simulation: Annotated[
        Path | None,
        typer.Option(help="Rows of `radixcache simulate --json` for this trace, instead of simulating at your budget."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes to simulate in.")] = 1,
    sample: Annotated[float, typer.Option(metavar="RATE", help="Share of the blocks to follow; 1 is exact.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as a page of its own.")] = None,
) -> None:
    """A short report: what can be saved at all, the budgets worth having, and the best policy at yours."""
    require(0 < sample <= 1, f"--sample is {sample:g}; wanted more than 0 and at most 1.")
    require(budget_gib is None or capacity_blocks is None, "give --budget-gib or --capacity-blocks; wanted only one.")
    for option, value in (
        ("--budget-gib", budget_gib),
        ("--capacity-blocks", capacity_blocks),
        ("--prefill-tokens-per-s", prefill_tokens_per_s),
    ):
        require(value is None or 0 < value <= MOST_CAPACITY, f"{option} is {value}; wanted more than 0.")
    require(jobs >= 1, f"--jobs is {jobs}; wanted at least 1.")
    require_writable_files(json_file, html_file)
    # Without bytes per token blocks have no size of their own: they are counted.
    sizes = options.model_bytes if options.model_bytes is not None and options.model_bytes.token_bytes > 0 else None
    require(
        budget_gib is None or sizes is not None,
        "--budget-gib needs bytes per token: give --model-config of a model with any.",
    )
    rows = None if simulation is None else _rows(simulation)

    from runner.files.atomic import write_atomically
    from runner.files.json_file import write_json
    from runner.simulate.advise import advice_document, advice_html, advice_of, advice_text, best_policy
    from runner.simulate.curve_report import curve_picture
    from runner.simulate.mrc import lru_curve

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
    best, stop = None, None
    if rows is None and own_blocks is not None:
        found, stop = run_grid([read], _grid(own_blocks, sizes), jobs)
        # What finished says nothing about what did not.
        rows = [asdict(row) for row in found] if stop is None else None
    if rows is not None:
        try:
            best = best_policy(rows, trace=read.name, capacity_blocks=own_blocks)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{simulation}: not the rows of a simulation ({error!r}).") from error
        require(best is not None, f"{simulation}: no row of trace {read.name!r} with a capacity in blocks.")
    print(advice_text(advice, best))
    with writing():
        if json_file is not None:
            write_json(json_file, {**advice_document(advice, best), "source": read.source, **about(context)})
        if html_file is not None:
            marks = {each.name: each.capacity_blocks for each in (*advice.budgets[:3], advice.own) if each}
            # Where nothing is used twice they are at 0, which a logarithmic axis has not.
            marks = {name: blocks for name, blocks in marks.items() if blocks}
            picture = curve_picture(curve, read, advice.block_bytes, marks=marks, file_format="svg")
            write_atomically(html_file, advice_html(advice, picture, best).encode())
    if stop is not None:
        say("interrupted: policies were not compared.")
        raise stop


def _grid(capacity_blocks: int, sizes: "ModelBytes | None") -> "list[Job]":
    """Every policy that a cache can follow at one capacity, and the optimum where there is one."""
    from policies import POLICIES
    from runner.simulate.grid import Job

    names = sorted(POLICIES) if sizes is not None and sizes.checkpoint_bytes else ["belady", *sorted(POLICIES)]
    return [Job(0, name, capacity_blocks, None, sizes) for name in names]


def _rows(path: Path) -> list[dict[str, Any]]:
    document = read_json(path, "rows of radixcache simulate", UsageError)
    rows: list[dict[str, Any]] | None = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: has no list of rows; wanted rows of radixcache simulate.")
    return rows
