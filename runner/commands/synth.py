"""`radixcache synth`: a made-up trace of many users."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from runner.commands.outputs import Outputs, require, say, usage_errors


class Format(StrEnum):
    """The format of the file."""

    COMPACT = "compact"
    MOONCAKE = "mooncake"


def synth(
    file: Annotated[Path, Argument(help="File to write.", show_default=False)],
    file_format: Annotated[Format, Option("--format", help="compact: radixcache's; mooncake: JSONL.")] = Format.COMPACT,
    force: Annotated[bool, Option("--force", help="Overwrite an existing file.")] = False,
    seed: Annotated[int, Option(help="Seed; equal seeds and options give equal traces.")] = 0,
    requests: Annotated[int, Option(help="Number of requests.")] = 10_000,
    block_tokens: Annotated[int, Option(help="Tokens per block; Mooncake's own traces have 512.")] = 64,
    applications: Annotated[int, Option(help="Applications, each with its own system prompt.")] = 20,
    zipf: Annotated[float, Option(help="Zipf exponent of the applications; 0 gives equal shares.")] = 1.0,
    agent_share: Annotated[float, Option(help="Share of applications whose conversations use tools.")] = 0.3,
    turns: Annotated[float, Option(help="Mean number of user turns of a conversation (geometric).")] = 3.5,
    tool_calls: Annotated[float, Option(help="Mean number of tool calls in an agent's turn (geometric).")] = 4.0,
    branching: Annotated[float, Option(help="Probability that a turn goes back to an earlier turn.")] = 0.05,
    context_tokens: Annotated[int, Option(help="Most tokens of a prompt; a conversation ends before that.")] = 131_072,
    sessions_per_hour: Annotated[float, Option(help="Conversations that begin per hour (Poisson).")] = 600.0,
    think_s: Annotated[float, Option(help="Mean seconds from a reply to the user's next message.")] = 30.0,
    tool_s: Annotated[float, Option(help="Mean seconds that a tool takes.")] = 3.0,
    output_tokens_per_s: Annotated[float, Option(help="Decoding speed, in tokens/s.")] = 40.0,
    system_tokens: Annotated[float, Option(help="Median length of a system prompt (log-normal).")] = 1_000,
    user_tokens: Annotated[float, Option(help="Median length of a user's message (log-normal).")] = 60,
    reply_tokens: Annotated[float, Option(help="Median length of a reply (log-normal).")] = 200,
    tool_result_tokens: Annotated[float, Option(help="Median length of a tool's result (log-normal).")] = 400,
) -> None:
    """Generate a synthetic trace of many users.

    The trace has applications with system prompts, conversations that branch, agents with tools, and think times.
    """
    given = locals()
    outputs = Outputs({"FILE": file})
    require(force or not file.is_file(), f"{file}: exists already; --force overwrites it.")
    from dataclasses import fields

    from runner.traces.synthesis import Synth, synthesize
    from runner.traces.trace_formats import compact_bytes, mooncake_bytes

    with usage_errors(ValueError):
        parameters = Synth(**{field.name: given[field.name] for field in fields(Synth)})
        trace = synthesize(parameters, seed=seed, name=file.stem)
    outputs.write("FILE", lambda: (mooncake_bytes if file_format is Format.MOONCAKE else compact_bytes)(trace))
    outputs.finish()
    if file_format is Format.MOONCAKE:
        say("note: the times are synthetic, and this format cannot record that.")
    outputs.show(
        f"{file}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt tokens, {trace.block_refs:,} block"
        f" references, {trace.requests[-1].time_ms / 6e4:,.0f} minutes, seed {seed}; synthetic."
    )
