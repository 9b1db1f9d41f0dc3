"""`radixcache synth`: a made-up trace of many users."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from runner.commands.inputs import Seed
from runner.commands.outputs import Outputs, require, say, usage_errors


class Format(StrEnum):
    """The format of the file."""

    COMPACT = "compact"
    MOONCAKE = "mooncake"


def synth(
    file: Annotated[Path, Argument(help="File to write; it must not exist.", show_default=False)],
    file_format: Annotated[Format, Option("--format", help="compact: radixcache's; mooncake: JSONL.")] = Format.COMPACT,
    seed: Seed = 0,
    requests: Annotated[int, Option(help="Number of requests.")] = 10_000,
    block_tokens: Annotated[int, Option(help="Tokens per block; Mooncake's own traces have 512.")] = 64,
    agent_share: Annotated[float, Option(help="Share of applications whose conversations use tools.")] = 0.3,
    sessions_per_hour: Annotated[float, Option(help="Conversations that begin per hour (Poisson).")] = 600.0,
) -> None:
    """Generate a synthetic trace of many users.

    The trace has applications with system prompts, conversations that branch, agents with tools, and think times.
    Equal seeds and options give equal traces.
    """
    outputs = Outputs({"FILE": file})
    require(not file.is_file(), f"{file}: exists already. Remove it, or name another file.")
    from runner.traces.synthesis import Synth, synthesize
    from runner.traces.trace_formats import compact_bytes, mooncake_bytes

    with usage_errors(ValueError):
        parameters = Synth(
            requests=requests, block_tokens=block_tokens, agent_share=agent_share, sessions_per_hour=sessions_per_hour
        )
    trace = synthesize(parameters, seed=seed, name=file.stem)
    outputs.write("FILE", lambda: (mooncake_bytes if file_format is Format.MOONCAKE else compact_bytes)(trace))
    outputs.finish()
    if file_format is Format.MOONCAKE:
        say("note: the times are synthetic, and this format cannot record that.")
    outputs.show(
        f"{file}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt tokens, {trace.block_refs:,} block"
        f" references, {trace.requests[-1].time_ms / 6e4:,.0f} minutes, seed {seed}; synthetic."
    )
