"""What commands read: conversations, models and traces, and the options that several commands share.

Each shared option has its name, type and help text here, once. A command takes the options of a dataclass with
`with_options`.

Everything that is wrong with an input becomes a UsageError, which is one line.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

from typer import Argument, Option

from runner.commands.outputs import (
    MOST,
    UNLIMITED_BYTES,
    Outputs,
    bytes_of,
    require,
    require_counts,
    require_policy,
    require_positive,
    say,
    usage_errors,
)
from runner.text import GIB, MIB, plural

if TYPE_CHECKING:
    from radixcache.stores.block_store import WriteOn
    from runner.models import ModelBytes
    from runner.models.load import LoadedModel, ModelOutline
    from runner.script.conversation import Conversation
    from runner.script.schedule import ScheduledRequest
    from runner.simulate.rows import DiskPlan
    from runner.traces.trace import Trace

# Input formats for --help. click keeps the line breaks after \b.
CONVERSATIONS = """
\b
Conversations are JSON, or JSONL with one per line; id and tools are optional keys:
{"user": "ann", "messages": [{"role": "user", "content": "Hello"}]}
{"user": "ben", "messages": [{"role": "user", "content": "Hi"}]}

Sessions of Claude Code, Codex, qwen-code, Gemini CLI, pi and opencode, logs of Anthropic's and OpenAI's APIs, batches,
exports of ChatGPT, Open WebUI, Langfuse and Helicone, and files of OpenAssistant, ShareGPT, LMSYS-Chat-1M, WildChat,
tau-bench, mt-bench, SGD, SWE-agent (.traj) and InterCode work too, also with .gz. A folder means all files below it; -
is stdin.
"""

TRACES = """
\b
Traces are JSONL, a request per line, with equal ids for equal prefixes:
{"timestamp": 0, "input_length": 900, "output_length": 80, "hash_ids": [1, 2]}
{"timestamp": 3000, "input_length": 950, "output_length": 95, "hash_ids": [1, 3]}

Files of Mooncake, Bailian, AIPerf and Dynamo, sessions of coding agents, files of PrefixCache(trace=FILE) and
radixcache synth, and conversations (with --model) work too. A folder means all files below it; - is stdin.
"""

#: What `simulate` and `advise` read without further word: a common NVMe disk, and a laptop with 8 billion parameters.
DISK_MIB_PER_S, PREFILL_TOKENS_PER_S = 2000.0, 1000.0
SkipBad = Annotated[bool, Option("--skip-bad", help="Skip and count records that cannot be read or do not fit.")]
Seed = Annotated[int, Option(help="Seed of all that is drawn; equal seeds and options give equal results.")]
JsonFile = Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")]
PlotFile = Annotated[Path | None, Option("--plot", help="Draw the figures (.png, .svg or .pdf).")]
StoredBits = Annotated[int | None, Option(help="Bits of keys and values that are not live: 8 or 4.")]
MODEL = Option(help="demo, tiny, tiny:KIND, a folder in mlx-lm's format or a hub id; traces need only a tokenizer.")


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


def read_chosen(paths: Sequence[Path] | None, skip_bad: bool, *, is_short: bool = False) -> Sequence[Conversation]:
    """The conversations of these files; without files, the built-in ones, or the few of the short replay."""
    from runner.files import InputError
    from runner.script.conversation_reader import builtin_conversations, read_conversations

    if not paths:
        return builtin_conversations("builtin_short.jsonl" if is_short else "builtin.jsonl")
    with usage_errors(InputError):
        result = read_conversations(*given_files(paths), skip_bad=skip_bad)
    _say_notes("record", result.skipped, result.notes)
    return result.conversations


def _say_notes(noun: str, skipped: Sequence[str], notes: Sequence[str]) -> None:
    if skipped:
        say(f"note: {plural(len(skipped), noun)} skipped, the first: {skipped[0]}")
    for note in notes:
        say(f"note: {note}")


def load_model(spec: str) -> LoadedModel:
    from runner.models.load import ModelError, load_model

    with usage_errors(ModelError):
        return load_model(spec)


def load_outline(spec: str) -> ModelOutline:
    """The tokenizer and the configuration of the model that a --model names, without its weights."""
    from runner.models.load import ModelError, is_downloaded, load_outline

    with usage_errors(ModelError):
        if not is_downloaded(spec):
            say(f"note: the tokenizer of {spec} is not on this machine; it is downloaded now. --model tiny needs none.")
        return load_outline(spec)


@dataclass(frozen=True, kw_only=True)
class ConversationOptions:
    """The options of all commands over conversations; a field is an option."""

    model: Annotated[str, MODEL] = "demo"
    policy: Annotated[str, Option(help="Eviction policy: a name, or my.module:Class.")] = "lru"
    budget_mib: Annotated[
        float | None, Option(help="Budget of a cache, in MiB.  [default: no limit; replay: 32, in full 128]")
    ] = None
    users: Annotated[int | None, Option(help="Use only the first N users.  [default: all]")] = None
    requests: Annotated[int | None, Option(help="Serve at most N requests.  [default: all; replay: 24]")] = None
    seed: Seed = 0
    skip_bad: SkipBad = False

    def budget_bytes(self, default_mib: float | None = None) -> int:
        """The budget; without --budget-mib and a default, one that never evicts. UsageError: an option is wrong."""
        require_counts(users=self.users, requests=self.requests)
        require_policy(self.policy)
        budget_mib = default_mib if self.budget_mib is None else self.budget_mib
        return UNLIMITED_BYTES if budget_mib is None else bytes_of(budget_mib)

    def schedule(self, conversations: Sequence[Conversation], most: int | None = None) -> list[ScheduledRequest]:
        """The requests in the order in which they are served; at most this many without --requests."""
        from runner.script.schedule import schedule

        with usage_errors(ValueError):
            return schedule(conversations, users=self.users, seed=self.seed, max_requests=self.requests or most)


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Options for the bytes of a model; a field is an option."""

    model_config: Annotated[Path | None, Option(help="config.json of a model, or its folder, for sizes in bytes.")] = (
        None
    )
    bytes_per_token: Annotated[float | None, Option(help="Bytes of cache per token, instead of --model-config.")] = None
    bytes_per_checkpoint: Annotated[
        float | None, Option(help="With --bytes-per-token: bytes of windows and recurrent state per checkpoint.")
    ] = None
    kv_bits: Annotated[int | None, Option(help="With --model-config: bits of quantized keys and values.")] = None
    kv_group_size: Annotated[int, Option(help="With --kv-bits: elements per group.")] = 64

    def load(self, stored_bits: int | None = None) -> ModelBytes | None:
        """The bytes that the options give, or None. With `stored_bits`, of keys and values that are not live too."""
        from runner.models import ModelBytes, ModelConfigError

        token, checkpoint = self.bytes_per_token, self.bytes_per_checkpoint
        for option, value in (("--bytes-per-token", token), ("--bytes-per-checkpoint", checkpoint)):
            require(value is None or 0 <= value < float("inf"), f"{option} is {value}; wanted 0 or more.")
        only_one = self.model_config is None or token is None
        require(only_one, "--model-config and --bytes-per-token exclude each other. Leave one out.")
        require(checkpoint is None or token is not None, "--bytes-per-checkpoint needs --bytes-per-token.")
        if token is not None:
            sizes = ModelBytes("the model", round(token), round(checkpoint or 0), (), "its dtype")
            require(sizes.token_bytes + sizes.state_bytes > 0, f"{sizes}; wanted more than 0.")
            return sizes
        if self.model_config is None:
            return None
        # Imported here: sizes that the user gives need no MLX.
        from runner.models.sizes import read_model_bytes

        with usage_errors(ModelConfigError):
            return read_model_bytes(
                self.model_config, kv_bits=self.kv_bits, kv_group_size=self.kv_group_size, stored_bits=stored_bits
            )


@dataclass(frozen=True, kw_only=True)
class TraceOptions(SizeOptions):
    """The options of `simulate` and `advise`."""

    trace: Annotated[list[Path], Argument(help="Trace files or folders; several make one trace.", show_default=False)]
    capacity_blocks: Annotated[
        str | None, Option(help="Capacities in blocks: simulate takes several, separated by commas.")
    ] = None
    budget_gib: Annotated[str | None, Option(help="The same in GiB; needs the bytes of a model.")] = None
    disk_gib: Annotated[
        float | None,
        Option(help="Disk below memory, in GiB.  [default: none; advise: ten times the budget, or room for all]"),
    ] = None
    disk_mib_per_s: Annotated[float, Option(help="Read speed of the disk, in MiB/s.")] = DISK_MIB_PER_S
    prefill_tokens_per_s: Annotated[
        float | None,
        Option(
            help=f"Prefill speed: a slower disk is not read; advise shows seconds.  [default: {PREFILL_TOKENS_PER_S:g}]"
        ),
    ] = None
    jobs: Annotated[int | None, Option(help="Processes to use.  [default: 1; advise: up to 4 for a long trace]")] = None
    json_file: JsonFile = None
    plot_file: PlotFile = None
    skip_bad: SkipBad = False
    seed: Seed = 0
    sessions_per_hour: Annotated[float, Option(help="Sessions that begin per hour, if times are not recorded.")] = 30.0
    model: Annotated[str | None, MODEL] = None
    block_tokens: Annotated[
        int | None, Option(help="Tokens per block.  [default: 64; 512 in Mooncake's files, 16 in Bailian's]")
    ] = None
    time_unit: Annotated[
        str | None,
        Option(help="Unit of times in rows: seconds or milliseconds.  [default: milliseconds; seconds in Bailian's]"),
    ] = None

    @property
    def inputs(self) -> list[Path]:
        given = [*self.trace, self.model_config, None if self.model is None else Path(self.model)]
        return [path for path in given if path is not None]

    def read(self) -> Trace:
        """Read all files as one trace; say on stderr what is left out or made up."""
        from runner.traces.trace import Pace
        from runner.traces.trace_reader import read_trace

        require_counts(block_tokens=self.block_tokens)
        with usage_errors(ValueError):
            trace = read_trace(
                *given_files(self.trace),
                skip_bad=self.skip_bad,
                seed=self.seed,
                pace=Pace(sessions_per_hour=self.sessions_per_hour),
                tokenizer=self.tokenizer,
                block_tokens=self.block_tokens,
                time_unit=self.time_unit,
            )
        _say_notes("line", trace.skipped, trace.notes)
        if trace.is_timing_synthetic:
            say("note: some or all arrival times are synthetic.")
        return trace

    def checked_outputs(self) -> Outputs:
        """The files of --json and --plot. UsageError: one cannot be written, or an option is wrong."""
        require_counts(jobs=self.jobs)
        require_positive(disk_gib=self.disk_gib, disk_mib_per_s=self.disk_mib_per_s)
        require_positive(prefill_tokens_per_s=self.prefill_tokens_per_s)
        return Outputs({"--json": self.json_file, "--plot": self.plot_file}, self.inputs)

    @property
    def prefill_speed(self) -> float:
        return self.prefill_tokens_per_s or PREFILL_TOKENS_PER_S

    def disk_plan(
        self, option: str, gib: float | None, read_bytes_per_s: float | None = None, write_on: WriteOn = "eviction"
    ) -> DiskPlan | None:
        """The tier of this size that `option` names, read at --disk-mib-per-s or the given speed; None: no size."""
        from runner.simulate.rows import DiskPlan

        if gib is None:
            return None
        require(self.model_bytes is not None, f"{option} needs --model-config or --bytes-per-token.")
        speed = read_bytes_per_s or self.disk_mib_per_s * MIB
        return DiskPlan(max(1, int(gib * GIB)), speed, self.prefill_speed, write_on)

    def capacities(self) -> list[tuple[int | None, int | None]]:
        """Pairs of blocks and bytes, one of them None; empty without a capacity and a budget."""
        has_one = self.capacity_blocks is None or self.budget_gib is None
        require(has_one, "--capacity-blocks and --budget-gib exclude each other. Leave one out.")
        sizes = self.model_bytes
        if self.capacity_blocks is not None:
            blocks = _numbers(self.capacity_blocks, "--capacity-blocks")
            are_whole, has_size = all(each == int(each) for each in blocks), sizes is None or sizes.token_bytes > 0
            require(are_whole, f"--capacity-blocks is {self.capacity_blocks}; wanted whole numbers.")
            require(has_size, f"{sizes}: a block takes 0 bytes; give --budget-gib.")
            return [(int(each), None) for each in dict.fromkeys(blocks)]
        if self.budget_gib is None:
            return []
        require(sizes is not None, "--budget-gib needs --model-config or --bytes-per-token.")
        budgets = [max(1, int(each * GIB)) for each in _numbers(self.budget_gib, "--budget-gib")]
        return [(None, each) for each in dict.fromkeys(budgets)]

    @cached_property
    def model_bytes(self) -> ModelBytes | None:
        """The model's bytes, if the user gave them or a configuration."""
        require(self.kv_bits is None or self.model_config is not None, "--kv-bits needs --model-config.")
        return self.load()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of --model, or None."""
        return None if self.model is None else load_outline(self.model).tokenizer


def _numbers(listed: str, option: str) -> list[float]:
    numbers = []
    for text in listed.split(","):
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        require(0 < value <= MOST, f"{option} has {text.strip()!r}; wanted numbers above 0, at most {MOST:g}.")
        numbers.append(value)
    return numbers


Command = Callable[..., None]


def with_options(kind: type[Any], *, come_first: bool = False) -> Callable[[Command], Command]:
    """Turn `command(options, ...)` into a command with an option for each annotated field of a dataclass."""
    # By class: a dataclass may have its fields from another module.
    kinds = get_type_hints(kind, include_extras=True)
    fields = [each.replace(annotation=kinds[each.name]) for each in signature(kind).parameters.values()]
    shared = [each for each in fields if get_origin(each.annotation) is Annotated]

    def decorate(command: Command) -> Command:
        parameters = list(signature(command, eval_str=True).parameters.values())
        index = [each.name for each in parameters].index("options")
        context, own = parameters[:index], parameters[index + 1 :]

        @wraps(command)
        def run(*arguments: Any, **given: Any) -> None:
            options = kind(**{each.name: given.pop(each.name) for each in shared})
            command(*arguments, options=options, **given)

        # typer reads the options from the signature, and passes all of them by name.
        named = [*shared, *own] if come_first else [*own, *shared]
        parameters = [*context, *(each.replace(kind=Parameter.KEYWORD_ONLY) for each in named)]
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
