"""`radixcache mrc`: LRU hit ratios at all capacities from one pass over a trace."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from runner.commands.trace_options import (
    BlockTokens,
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
from runner.commands.usage import PIPE_COLUMNS, UsageError, require, require_writable_files, say


def mrc(
    context: typer.Context,
    trace: TracePaths,
    sample: Annotated[
        float, typer.Option(metavar="RATE", help="Share of the blocks to follow, for huge traces; 1 is exact.")
    ] = 1.0,
    model_config: ModelConfig = None,
    bytes_per_token: BytesPerToken = None,
    kv_bits: KvBits = None,
    kv_group_size: KvGroupSize = 64,
    skip_bad: SkipBad = False,
    seed: Seed = 0,
    sessions_per_hour: SessionsPerHour = 30.0,
    model: Tokenizer = None,
    block_tokens: BlockTokens = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the curve to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the curve (.png, .svg or .pdf).")] = None,
) -> None:
    """LRU hit ratios of a trace at all capacities, in one pass.

    Exact for whole blocks and a cache that evicts leaves first; with --sample an estimate and its standard error.
    """
    require(0 < sample <= 1, f"--sample is {sample:g}; wanted more than 0 and at most 1.")
    require_writable_files(json_file, plot_file)
    sizes = load_model_bytes(model_config, bytes_per_token, 0.0, kv_bits, kv_group_size)
    from runner.curve_report import (
        COUNTS,
        curve_document,
        curve_picture,
        curve_table,
        picture_format,
        write_curve_picture,
    )
    from runner.mrc import lru_curve
    from runner.report import machine, versions, write_json

    try:
        file_format = None if plot_file is None else picture_format(plot_file)
    except ValueError as error:
        raise UsageError(str(error)) from error
    read = load_trace(
        trace,
        skip_bad=skip_bad,
        seed=seed,
        sessions_per_hour=sessions_per_hour,
        model=model,
        block_tokens=block_tokens,
    )
    curve = lru_curve(read, sample_rate=sample, seed=seed)
    block_bytes = None
    if sizes is not None:
        require(sizes.token_bytes > 0, f"{sizes}: blocks have no size of their own; use radixcache simulate.")
        block_bytes = sizes.token_bytes * read.block_tokens
        if sizes.checkpoint_bytes:
            say(f"note: {sizes}; the checkpoints are not in the GiB below, radixcache simulate counts them.")
    stdout = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    stdout.print(curve_table(curve, read, block_bytes))
    stdout.print(
        f"{read.name}: {len(read.requests):,} requests, {curve.block_refs:,} block references, {curve.unique_blocks:,}"
        f" distinct blocks of {read.block_tokens} tokens. Infinite cache: {curve.infinite_block_hit_ratio:.4f} by"
        f" block, {curve.infinite_token_hit_ratio:.4f} by token. {COUNTS}",
        markup=False,
        soft_wrap=True,
    )
    about = {
        "source": read.source,
        "command": shlex.join(["radixcache", *context.obj]),
        "machine": machine(),
        "versions": versions(),
    }
    if json_file is not None:
        write_json(json_file, curve_document(curve, read, block_bytes, **about))
    if plot_file is not None and file_format is not None:
        marks = {"knee": curve.knee_blocks()}
        write_curve_picture(plot_file, curve_picture(curve, read, block_bytes, marks=marks, file_format=file_format))
