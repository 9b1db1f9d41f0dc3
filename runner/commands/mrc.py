"""`radixcache mrc`: LRU hit ratios at all capacities from one pass over a trace."""

import math
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from runner.commands.inputs import TraceOptions, with_options
from runner.commands.outputs import Outputs, about, require, say, usage_errors
from runner.text import plural


@with_options(TraceOptions)
def mrc(
    context: typer.Context,
    options: TraceOptions,
    sample: Annotated[float, Option(metavar="RATE", help="Share of the blocks to follow; 1 is exact.")] = 1.0,
    json_file: Annotated[Path | None, Option("--json", help="Write the curve to this JSON file.")] = None,
    plot_file: Annotated[Path | None, Option("--plot", help="Draw the curve (.png, .svg or .pdf).")] = None,
) -> None:
    """Compute LRU hit ratios at all capacities, in one pass.

    The ratios are exact for whole blocks and a cache that evicts leaves first. With --sample they are estimates, with
    their standard error.
    """
    require(0 < sample <= 1, f"--sample is {sample:g}; wanted more than 0 and at most 1.")
    outputs = Outputs({"--json": json_file, "--plot": plot_file}, options.inputs)
    sizes = options.model_bytes
    require(sizes is None or sizes.token_bytes > 0, f"{sizes}: a block takes 0 bytes; use radixcache simulate.")
    from runner.files import json_bytes
    from runner.simulate.curve import CURVE_COUNTS, curve_document, curve_picture, curve_table, lru_curve
    from runner.text import picture_format

    trace = options.read()
    with usage_errors(ValueError):
        curve = lru_curve(trace, sample_rate=sample, seed=options.seed)
    block_bytes = None if sizes is None else sizes.token_bytes * trace.block_tokens
    if sizes is not None and sizes.checkpoint_bytes:
        say(f"note: {sizes}; the GiB below leave checkpoints out. radixcache simulate counts them.")
    if math.isnan(curve.block_error_at(1) or 0.0):
        say("note: the sample is too small for a standard error; raise --sample.")
    outputs.show(
        curve_table(curve, trace, block_bytes),
        f"{trace.name}: {plural(len(trace.requests), 'request')}, {curve.block_refs:,} block references,"
        f" {curve.unique_blocks:,} distinct blocks of {trace.block_tokens} tokens. A cache without limit has a block"
        f" hit ratio of {curve.infinite_block_hit_ratio:.4f} and a token hit ratio of"
        f" {curve.infinite_token_hit_ratio:.4f}."
        f" {CURVE_COUNTS}",
    )
    document = {**curve_document(curve, trace, block_bytes), "source": trace.source, **about(context)}
    outputs.write("--json", lambda: json_bytes(document))
    if plot_file is not None:
        marks = {"knee": knee_blocks} if (knee_blocks := curve.knee_blocks()) else {}
        form = picture_format(plot_file)
        outputs.write("--plot", lambda: curve_picture(curve, trace, block_bytes, marks=marks, file_format=form))
    outputs.finish()
