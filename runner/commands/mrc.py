"""`radixcache mrc`: LRU hit ratios at all capacities from one pass over a trace."""

import math
from pathlib import Path
from typing import Annotated

import typer

from runner.commands.trace_options import TraceOptions, with_trace_options
from runner.commands.usage import (
    UsageError,
    about,
    require,
    require_picture_format,
    require_writable_files,
    say,
    stdout,
    writing,
)


@with_trace_options
def mrc(
    context: typer.Context,
    options: TraceOptions,
    sample: Annotated[
        float, typer.Option(metavar="RATE", help="Share of the blocks to follow, for huge traces; 1 is exact.")
    ] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the curve to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the curve (.png, .svg or .pdf).")] = None,
) -> None:
    """LRU hit ratios of a trace at all capacities, in one pass.

    Exact for whole blocks and a cache that evicts leaves first; with --sample an estimate and its standard error.
    """
    require(0 < sample <= 1, f"--sample is {sample:g}; wanted more than 0 and at most 1.")
    require_writable_files(json_file, plot_file)
    require_picture_format(plot_file)
    sizes = options.model_bytes
    require(
        sizes is None or sizes.token_bytes > 0, f"{sizes}: blocks have no size of their own; use radixcache simulate."
    )
    from runner.files.atomic import write_atomically
    from runner.files.json_file import write_json
    from runner.files.picture import picture_format
    from runner.simulate.curve_report import COUNTS, curve_document, curve_picture, curve_table
    from runner.simulate.mrc import lru_curve

    read = options.read()
    try:
        curve = lru_curve(read, sample_rate=sample, seed=options.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    block_bytes = None if sizes is None else sizes.token_bytes * read.block_tokens
    if sizes is not None and sizes.checkpoint_bytes:
        say(f"note: {sizes}; the checkpoints are not in the GiB below, radixcache simulate counts them.")
    if math.isnan(curve.block_error_at(1) or 0.0):
        say("note: the sample is too small to tell its error; follow more of the blocks.")
    console = stdout()
    console.print(curve_table(curve, read, block_bytes))
    console.print(
        f"{read.name}: {len(read.requests):,} requests, {curve.block_refs:,} block references, {curve.unique_blocks:,}"
        f" distinct blocks of {read.block_tokens} tokens. Infinite cache: {curve.infinite_block_hit_ratio:.4f} by"
        f" block, {curve.infinite_token_hit_ratio:.4f} by token. {COUNTS}"
    )
    with writing():
        if json_file is not None:
            write_json(json_file, curve_document(curve, read, block_bytes, source=read.source, **about(context)))
        if plot_file is not None:
            knee_blocks = curve.knee_blocks()
            marks = {"knee": knee_blocks} if knee_blocks else {}
            image = curve_picture(curve, read, block_bytes, marks=marks, file_format=picture_format(plot_file))
            write_atomically(plot_file, image)
