"""Options that every command over traces has, and what comes of them: a trace, and bytes per token."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runner.commands.usage import UsageError, require, say

if TYPE_CHECKING:
    from runner.model_config import ModelBytes
    from runner.traces import Trace

TracePaths = Annotated[
    list[Path],
    typer.Argument(
        help="Trace files or folders: Mooncake JSONL, coding-agent sessions, conversations (with --model), or recorded"
        " traces. Several make one trace.",
        show_default=False,
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out, and count, what cannot be read.")]
Seed = Annotated[int, typer.Option(help="Seed of whatever is drawn: arrivals that are not recorded, samples.")]
SessionsPerHour = Annotated[
    float, typer.Option(help="Rate at which sessions begin, for data that does not record it (synthetic arrivals).")
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--model", help="Model whose tokenizer reads conversations: demo, tiny, a folder, or a hub id."),
]
BlockTokens = Annotated[
    int | None, typer.Option(help="Tokens per block, for conversations and for other Mooncake hashes than by 512.")
]
ModelConfig = Annotated[
    Path | None, typer.Option("--model-config", help="A model's config.json (or its folder), for sizes in bytes.")
]
BytesPerToken = Annotated[float | None, typer.Option(help="Bytes of cache per token, instead of --model-config.")]
BytesPerCheckpoint = Annotated[
    float, typer.Option(help="With --bytes-per-token: bytes of windows and recurrent state per checkpoint.")
]
KvBits = Annotated[int | None, typer.Option(help="With --model-config: bits per element of quantized keys and values.")]
KvGroupSize = Annotated[int, typer.Option(help="With --kv-bits: elements per group.")]


def load_trace(
    paths: Sequence[Path],
    *,
    skip_bad: bool = False,
    seed: int = 0,
    sessions_per_hour: float = 30.0,
    model: str | None = None,
    block_tokens: int | None = None,
) -> "Trace":
    """Read a trace, and say on stderr what of it was left out or made up."""
    from runner.traces import Pace, TraceError, read_trace

    require(block_tokens is None or block_tokens >= 1, f"--block-tokens is {block_tokens}; wanted at least 1.")
    try:
        trace = read_trace(
            *paths,
            skip_bad=skip_bad,
            seed=seed,
            pace=Pace(sessions_per_hour=sessions_per_hour),
            tokenizer=None if model is None else _tokenizer(model),
            block_tokens=block_tokens,
        )
    except (TraceError, ValueError) as error:
        raise UsageError(str(error)) from error
    if trace.skipped:
        say(f"note: {len(trace.skipped)} lines skipped, the first: {trace.skipped[0]}")
    if trace.is_timing_synthetic:
        say("note: arrival times are synthetic, at least in part.")
    return trace


def load_model_bytes(
    model_config: Path | None,
    bytes_per_token: float | None,
    bytes_per_checkpoint: float = 0.0,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> "ModelBytes | None":
    """The sizes that were asked for, or None for none."""
    from runner.model_config import ModelBytes, ModelConfigError, read_model_bytes

    require(
        model_config is None or bytes_per_token is None, "give --model-config or --bytes-per-token; wanted only one."
    )
    if bytes_per_token is not None:
        for option, value in (("--bytes-per-token", bytes_per_token), ("--bytes-per-checkpoint", bytes_per_checkpoint)):
            require(0 <= value < float("inf"), f"{option} is {value:g}; wanted 0 or more.")
        return ModelBytes("given", round(bytes_per_token), round(bytes_per_checkpoint), (), "given")
    if model_config is None:
        return None
    try:
        return read_model_bytes(model_config, kv_bits=kv_bits, kv_group_size=kv_group_size)
    except ModelConfigError as error:
        raise UsageError(str(error)) from error


def _tokenizer(model: str) -> object:
    from runner.models import ModelError, load_model

    try:
        return load_model(model).tokenizer
    except ModelError as error:
        raise UsageError(str(error)) from error
