"""What commands read: conversations, models and traces, and the options that all commands over traces share.

Everything that is wrong with an input becomes a UsageError, which is one line.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.commands.outputs import UsageError, require, require_counts, say
from runner.text import plural

if TYPE_CHECKING:
    from runner.models.footprint import ModelBytes
    from runner.models.load import LoadedModel, ModelOutline
    from runner.script.conversation import Conversation
    from runner.script.schedule import ScheduledRequest
    from runner.traces.trace import Trace

# Input formats for --help. click keeps the line breaks after \b.
CONVERSATIONS = """
\b
Conversations are JSON, or JSONL with one per line; id and tools may stand beside the messages:
{"user": "ann", "messages": [{"role": "user", "content": "Hello"}]}
{"user": "ben", "messages": [{"role": "user", "content": "Hi"}]}

Also ShareGPT, tau-bench, mt-bench, SGD, SWE-agent's .traj and InterCode's logs, and folders with all below them; - is
stdin.
"""

TRACES = """
\b
Traces are JSONL, a request per line, equal ids for equal prefixes:
{"timestamp": 0, "input_length": 900, "output_length": 80, "hash_ids": [1, 2]}
{"timestamp": 3000, "input_length": 950, "output_length": 95, "hash_ids": [1, 3]}

Also a coding agent's sessions, what PrefixCache(trace=FILE) recorded, what radixcache synth makes, conversations with
--model, and folders with all below them; - is stdin.
"""

ModelConfig = Annotated[Path | None, typer.Option(help="A model's config.json (or its folder), for sizes in bytes.")]
BytesPerToken = Annotated[float | None, typer.Option(help="Bytes of cache per token, instead of --model-config.")]
BytesPerCheckpoint = Annotated[
    float | None, typer.Option(help="With --bytes-per-token: bytes of windows and recurrent state per checkpoint.")
]
KvBits = Annotated[int | None, typer.Option(help="Bits per element of the model's quantized keys and values.")]
KvGroupSize = Annotated[int, typer.Option(help="With --kv-bits: elements per group.")]


@contextmanager
def usage_errors(*errors: type[Exception], prefix: str = "") -> Iterator[None]:
    """Turn these errors into a UsageError with the same message."""
    try:
        yield
    except errors as error:
        raise UsageError(f"{prefix}{error}") from error


def given_files(paths: Sequence[Path]) -> list[Path]:
    """The files that the user named. `-` is stdin, copied into a file, since readers read a file twice."""
    return [_from_stdin() if path == Path("-") else path for path in paths]


@cache
def _from_stdin() -> Path:
    folder = TemporaryDirectory(prefix="radixcache-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "stdin"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


def read_chosen(paths: Sequence[Path] | None, skip_bad: bool) -> Sequence[Conversation]:
    """Read conversations, the built-in ones if no file is named; say on stderr what is left out."""
    from runner.script.conversation import ConversationError
    from runner.script.conversation_reader import builtin_conversations, read_conversations

    if not paths:
        return builtin_conversations()
    with usage_errors(ConversationError):
        result = read_conversations(*given_files(paths), skip_bad=skip_bad)
    if result.skipped:
        say(f"note: {plural(len(result.skipped), 'record')} skipped, the first: {result.skipped[0]}")
    return result.conversations


def scheduled_requests(
    conversations: Sequence[Conversation], *, users: int | None, seed: int, max_requests: int | None
) -> list[ScheduledRequest]:
    """The requests of conversations, as `schedule` interleaves them."""
    from runner.script.schedule import schedule

    with usage_errors(ValueError):
        return schedule(conversations, users=users, seed=seed, max_requests=max_requests)


def load_model(spec: str) -> LoadedModel:
    """The model that a --model names."""
    from runner.models.load import ModelError, load_model

    with usage_errors(ModelError):
        return load_model(spec)


def load_outline(spec: str) -> ModelOutline:
    """The tokenizer and the configuration of the model that a --model names, without its weights."""
    from runner.models.load import ModelError, load_outline

    with usage_errors(ModelError):
        return load_outline(spec)


def load_model_bytes(
    model_config: Path | None,
    bytes_per_token: float | None,
    bytes_per_checkpoint: float | None,
    kv_bits: int | None,
    kv_group_size: int,
) -> ModelBytes | None:
    """The sizes that these options name; None without a configuration and without bytes per token."""
    from runner.models.footprint import ModelBytes, ModelConfigError

    for option, value in (("--bytes-per-token", bytes_per_token), ("--bytes-per-checkpoint", bytes_per_checkpoint)):
        require(value is None or 0 <= value < float("inf"), f"{option} is {value}; wanted 0 or more.")
    require(
        model_config is None or bytes_per_token is None, "give --model-config or --bytes-per-token; wanted only one."
    )
    require(
        bytes_per_checkpoint is None or bytes_per_token is not None, "--bytes-per-checkpoint needs --bytes-per-token."
    )
    if bytes_per_token is not None:
        sizes = ModelBytes("the model", round(bytes_per_token), round(bytes_per_checkpoint or 0), (), "its dtype")
        require(sizes.token_bytes + sizes.state_bytes > 0, f"{sizes}; wanted more than 0.")
        return sizes
    if model_config is None:
        return None
    # Imported here: sizes that the user gives need no MLX.
    from runner.models.sizes import read_model_bytes

    with usage_errors(ModelConfigError):
        return read_model_bytes(model_config, kv_bits=kv_bits, kv_group_size=kv_group_size)


@dataclass(frozen=True)
class TraceOptions:
    """The options of all commands over traces; a field is an option."""

    trace: Annotated[
        list[Path],
        typer.Argument(
            help="Trace files or folders: Mooncake JSONL, coding-agent sessions, conversations (with --model), or"
            " recorded traces. Several make one trace.",
            show_default=False,
        ),
    ]
    model_config: ModelConfig = None
    bytes_per_token: BytesPerToken = None
    bytes_per_checkpoint: BytesPerCheckpoint = None
    kv_bits: KvBits = None
    kv_group_size: KvGroupSize = 64
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out, and count, what cannot be read.")] = False
    seed: Annotated[int, typer.Option(help="Seed of all that is random: arrivals that are not recorded, samples.")] = 0
    sessions_per_hour: Annotated[
        float, typer.Option(help="Rate at which sessions begin, for data that does not record it (synthetic arrivals).")
    ] = 30.0
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer reads conversations: demo, tiny, a folder, or a hub id.")
    ] = None
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens per block, for conversations and for Mooncake hashes of other than 512.")
    ] = None

    @property
    def inputs(self) -> list[Path]:
        """Paths that the command reads and must not overwrite."""
        given = [*self.trace, self.model_config, None if self.model is None else Path(self.model)]
        return [path for path in given if path is not None]

    def read(self, *paths: Path) -> Trace:
        """Read these paths, or all, as one trace; say on stderr what is left out or made up."""
        from runner.traces.trace import Pace
        from runner.traces.trace_reader import read_trace

        require_counts(block_tokens=self.block_tokens)
        with usage_errors(ValueError):
            trace = read_trace(
                *given_files(paths or self.trace),
                skip_bad=self.skip_bad,
                seed=self.seed,
                pace=Pace(sessions_per_hour=self.sessions_per_hour),
                tokenizer=self._tokenizer,
                block_tokens=self.block_tokens,
            )
        if trace.skipped:
            say(f"note: {plural(len(trace.skipped), 'line')} skipped, the first: {trace.skipped[0]}")
        if trace.is_timing_synthetic:
            say("note: arrival times are synthetic, at least in part.")
        return trace

    @cached_property
    def model_bytes(self) -> ModelBytes | None:
        """The model's bytes, if the user gave them or a configuration."""
        require(self.kv_bits is None or self.model_config is not None, "--kv-bits needs --model-config.")
        return load_model_bytes(
            self.model_config, self.bytes_per_token, self.bytes_per_checkpoint, self.kv_bits, self.kv_group_size
        )

    @cached_property
    def _tokenizer(self) -> object:
        return None if self.model is None else load_outline(self.model).tokenizer


def with_trace_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn `command(context, options, ...)` into a command that has an option for each field of `TraceOptions`."""
    context, _, *own = signature(command, eval_str=True).parameters.values()
    trace, *shared = signature(TraceOptions, eval_str=True).parameters.values()

    @wraps(command)
    def run(context: typer.Context, **given: Any) -> None:
        options = TraceOptions(**{field.name: given.pop(field.name) for field in fields(TraceOptions)})
        command(context, options, **given)

    # typer reads the options from the signature.
    named = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in (trace, *own, *shared)]
    run.__signature__ = Signature([context, *named])  # type: ignore[attr-defined]
    return run
