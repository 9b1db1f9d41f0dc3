"""`radixcache advise`: what a prefix cache can save on a trace, and how many bytes that takes."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from runner.commands.usage import UsageError, require, require_writable_files, say

if TYPE_CHECKING:
    from runner.traces import Trace


def advise(
    context: typer.Context,
    trace: TracePaths,
    model_config: ModelConfig = None,
    bytes_per_token: BytesPerToken = None,
    bytes_per_checkpoint: BytesPerCheckpoint = 0.0,
    kv_bits: KvBits = None,
    kv_group_size: KvGroupSize = 64,
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
    skip_bad: SkipBad = False,
    seed: Seed = 0,
    sessions_per_hour: SessionsPerHour = 30.0,
    model: Tokenizer = None,
    block_tokens: BlockTokens = None,
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
        require(value is None or 0 < value < float("inf"), f"{option} is {value}; wanted more than 0.")
    require(jobs >= 1, f"--jobs is {jobs}; wanted at least 1.")
    require_writable_files(json_file, html_file)
    sizes = load_model_bytes(model_config, bytes_per_token, bytes_per_checkpoint, kv_bits, kv_group_size)
    has_size = sizes is not None and sizes.token_bytes > 0
    require(
        budget_gib is None or has_size, "--budget-gib needs bytes per token: give --model-config of a model with any."
    )
    rows = None if simulation is None else _rows(simulation)

    from runner.advise import advice_document, advice_html, advice_of, advice_text, best_policy
    from runner.curve_report import curve_picture
    from runner.mrc import lru_curve
    from runner.report import machine, versions, write_atomically, write_json

    read = load_trace(
        trace,
        skip_bad=skip_bad,
        seed=seed,
        sessions_per_hour=sessions_per_hour,
        model=model,
        block_tokens=block_tokens,
    )
    curve = lru_curve(read, sample_rate=sample, seed=seed)
    advice = advice_of(
        read,
        curve,
        token_bytes=None if sizes is None else sizes.token_bytes,
        checkpoint_bytes=0 if sizes is None else sizes.checkpoint_bytes,
        budget_bytes=None if budget_gib is None else budget_gib * (1 << 30),
        budget_blocks=capacity_blocks,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    best = None
    if rows is None and advice.own is not None:
        rows = _simulated(read, advice.own.capacity_blocks, jobs)
    if rows is not None:
        own_blocks = None if advice.own is None else advice.own.capacity_blocks
        try:
            best = best_policy(rows, trace=read.name, capacity_blocks=own_blocks)
        except (KeyError, TypeError) as error:
            raise UsageError(f"{simulation}: not the rows of a simulation ({error!r}).") from error
        require(best is not None, f"{simulation}: no row of trace {read.name!r} with a capacity in blocks.")
    print(advice_text(advice, best))
    if json_file is not None:
        about = {"source": read.source, "command": shlex.join(["radixcache", *context.obj])}
        document = {**advice_document(advice, best), **about, "machine": machine(), "versions": versions()}
        write_json(json_file, document)
    if html_file is not None:
        marks = {budget.name: budget.capacity_blocks for budget in (*advice.budgets[:3], advice.own) if budget}
        picture = curve_picture(curve, read, advice.block_bytes, marks=marks, file_format="svg")
        write_atomically(html_file, advice_html(advice, picture, best).encode())


def _simulated(trace: "Trace", capacity_blocks: int, jobs: int) -> list[dict[str, Any]]:
    """Every policy that a cache can follow, at one capacity."""
    from policies import POLICIES
    from runner.simulate.grid import Job, run_locally

    say(f"simulating {len(POLICIES)} policies at {capacity_blocks:,} blocks ...")
    grid = [Job(0, policy, capacity_blocks, None, None) for policy in sorted(POLICIES)]
    return [row.as_dict() for row in run_locally([trace], grid, jobs)]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); wanted rows of radixcache simulate.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error}); wanted rows of radixcache simulate.") from error
    rows: list[dict[str, Any]] | None = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: has no list of rows; wanted rows of radixcache simulate.")
    return rows
