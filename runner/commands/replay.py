"""`radixcache replay`: the same conversations through several caches, or for several users at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Option

import runner
from radixcache.settings import STORED_BITS
from runner.commands import outputs
from runner.commands.inputs import (
    ConversationOptions,
    JsonFile,
    PlotFile,
    StoredBits,
    load_model,
    read_chosen,
    with_options,
)
from runner.commands.outputs import require
from runner.files import json_bytes
from runner.replay import CACHE_NAMES, TOGETHER, ReplayOptions
from runner.text import GIB, MIB, ProgressLines, plural

if TYPE_CHECKING:
    from runner.models.load import LoadedModel
    from runner.replay.report import Report
    from runner.replay.servers import RequestRow
    from runner.script.script import Script

# The short replay: its budget has room for the state of all its conversations once, and not for a copy of each.
SHORT_MAX_TOKENS, SHORT_BUDGET_MIB = 4, 32
MAX_TOKENS, BUDGET_MIB, REQUESTS = 8, 128, 24
Speculate = Literal["tree", "prompt"]
NAMED_DIFFERENCES = 10  # how many differing answers are named one by one


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(ConversationOptions):
    """The options of the command; a field is an option."""

    cache: Annotated[str, Option(help="Caches to compare, in this order, separated by commas.")] = ",".join(CACHE_NAMES)
    conversations: Annotated[list[Path] | None, Option(help="Conversations; repeatable.  [default: built-in]")] = None
    full: Annotated[bool, Option("--full", help="Replay all built-in conversations.")] = False
    max_tokens: Annotated[int | None, Option(help="Tokens per reply.  [default: 4; 8 in full]")] = None
    recorded: Annotated[bool, Option("--recorded", help="Generate 1 token, then feed the recorded reply.")] = False
    step_size: Annotated[int, Option(help="Tokens per chunk of prefill.")] = 2048
    parallel: Annotated[int | None, Option(help="Serve N users together; --cache radix, mlx-lm or both.")] = None
    exact: Annotated[bool, Option("--exact", help="Resume only at multiples of --step-size: bit-identical.")] = False
    stored_bits: StoredBits = None
    speculate: Annotated[Speculate | None, Option(help="Draft radix's replies from the tree or the prompt.")] = None
    disk: Annotated[Path | None, Option(help="Folder where radix keeps state, also for later replays.")] = None
    disk_gib: Annotated[float, Option(help="Size limit of the folder, in GiB.", min=0.001)] = 32
    json_file: JsonFile = None
    plot_file: PlotFile = None
    tree_file: Annotated[
        Path | None, Option("--tree", help="Write radix's tree (.html, .svg, .txt or .json); - prints it.")
    ] = None

    @property
    def is_short(self) -> bool:
        return not (self.full or self.conversations) and self.users is None and self.parallel is None


class ReplayProgress(Progress):
    """An `Observer` that draws a bar for each cache; without a terminal, it writes a line now and then.

    A bar counts requests; the running one counts by the share of its prompt that is done.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TextColumn("{task.fields[requests_done]}/{task.total} requests"),
            TextColumn("{task.fields[prompt_tokens]:,} prompt tokens"),
            TextColumn("{task.fields[cached]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._lines = ProgressLines()
        self._bars: dict[str, TaskID] = {}
        # Of each cache: requests that are done, their prompt tokens, and how many of those were cached.
        self._done: dict[str, tuple[int, int, int]] = {}

    def run_started(self, cache: str, requests: int) -> None:
        self._done[cache] = 0, 0, 0
        self._bars[cache] = self.add_task(cache, total=requests, requests_done=0, prompt_tokens=0, cached="")

    def request_advanced(self, cache: str, done_tokens: int, prompt_tokens: int) -> None:
        requests, tokens, _ = self._done[cache]
        self._draw(cache, requests + done_tokens / prompt_tokens, tokens + done_tokens)

    def request_done(self, cache: str, row: "RequestRow") -> None:
        requests, tokens, cached_tokens = self._done[cache]
        self._done[cache] = requests + 1, tokens + row.prompt_tokens, cached_tokens + row.cached_tokens
        self._draw(cache, requests + 1, tokens + row.prompt_tokens)

    def _draw(self, cache: str, completed: float, prompt_tokens: int) -> None:
        requests, done_tokens, cached_tokens = self._done[cache]
        cached = f"{cached_tokens / done_tokens:.0%} cached" if done_tokens else ""
        self.update(
            self._bars[cache], completed=completed, requests_done=requests, prompt_tokens=prompt_tokens, cached=cached
        )
        self._lines.tell(lambda: f"{cache}: {requests} requests, {prompt_tokens:,} prompt tokens {cached}")


@with_options(ReplayArguments)
def replay(context: typer.Context, options: ReplayArguments) -> None:
    """Serve conversations through several caches.

    A seeded schedule interleaves the requests of several users. The model's own chat template renders them. The caches
    take turns, request by request, and each answer is compared with the answer computed without a cache.

    By default, four users with one system prompt take turns and get short replies: half a minute on 2 cores. --full,
    --users, --parallel and --conversations replay in full: all chosen conversations, with longer replies.
    """
    caches, settings = _check(context, options)
    tree_format = (
        outputs.require_view_file(options.tree_file) if options.tree_file not in (None, outputs.STDOUT) else "text"
    )
    files = {"--json": options.json_file, "--plot": options.plot_file, "--tree": options.tree_file}
    results = outputs.Outputs(files, [*(options.conversations or []), Path(options.model)])
    if runner.BLAS_ADVICE:
        outputs.say(f"note: {runner.BLAS_ADVICE}")
    loaded, script = _prepare(options, settings)
    report, broken_off = _run(loaded, script, caches, settings, options.parallel)
    results.show(*([report.table()] if report.runs else []), report.sentence())
    chosen = {"users": options.users, "requests": options.requests or REQUESTS, "parallel": options.parallel}
    about = {
        "model": loaded.name,
        "seed": options.seed,
        **outputs.about(context),
        "options": {**chosen, **vars(settings)},
        "skipped_requests": script.skipped_requests,
        "interrupted": broken_off is not None,
    }
    _write_files(report, results, options.plot_file, tree_format, about)
    if broken_off is not None:
        finished = len(report.runs[0].rows) if report.runs else 0
        outputs.say(f"interrupted: {finished} of {len(script)} requests had finished.")
        raise broken_off
    differences = _name_differences(report)
    results.finish()
    if differences:
        raise typer.Exit(outputs.EXIT_CHECK_FAILED)


def _check(context: typer.Context, options: ReplayArguments) -> tuple[list[str], ReplayOptions]:
    """The caches and the settings of the replay. UsageError: an option is wrong, or two do not go together."""
    caches, step_size = _cache_names(options.cache), options.step_size
    is_alone = options.parallel is None
    if not is_alone:
        caches = caches if outputs.is_given(context, "cache") else ["radix"]
        outputs.require_counts(parallel=options.parallel)
        several = f"--parallel works with the caches {' and '.join(TOGETHER)}; --cache has {','.join(caches)}."
        require(set(caches) <= set(TOGETHER), f"{several} Leave one option out.")
        known = "--parallel generates replies, and --recorded feeds recorded replies."
        require(not options.recorded, f"{known} Leave one option out.")
        equal = "--exact promises equal bits, and bits depend on the number of users in a forward pass."
        require(not options.exact, f"{equal} Leave one option out.")
        if not outputs.is_given(context, "step_size"):
            from runner.engine.generator import PARALLEL_STEP_SIZE

            step_size = PARALLEL_STEP_SIZE  # one request at a time delays nobody, so its chunks may be larger
    max_tokens, budget_mib = (SHORT_MAX_TOKENS, SHORT_BUDGET_MIB) if options.is_short else (MAX_TOKENS, BUDGET_MIB)
    max_tokens = max_tokens if options.max_tokens is None else options.max_tokens
    outputs.require_counts(max_tokens=max_tokens, step_size=step_size)
    budget_bytes = options.budget_bytes(budget_mib)
    disk, bits, speculate = options.disk, options.stored_bits, options.speculate
    require(disk is None or is_alone, "--disk works with one request at a time. Leave --disk or --parallel out.")
    require(options.disk_gib < float("inf"), f"--disk-gib is {options.disk_gib:g}; wanted a finite number.")
    require(bits in STORED_BITS, f"--stored-bits is {bits}; wanted 4 or 8.")
    for_radix = {
        "--disk is for": disk,
        "--stored-bits is for": bits,
        f"--speculate {speculate} is for": speculate,
        f"--tree {options.tree_file} shows": options.tree_file,
    }
    for what, value in for_radix.items():
        require(value is None or "radix" in caches, f"{what} the radix cache; add radix to --cache.")
    rounds = "--stored-bits rounds stored state, so --exact is impossible. Leave one option out."
    require(bits is None or not options.exact, rounds)
    is_plain = not options.exact and not options.recorded
    drafted = f"--speculate {speculate} works neither with --exact nor with --recorded. Leave one out."
    require(speculate is None or is_plain, drafted)
    return caches, ReplayOptions(
        budget_bytes=budget_bytes,
        policy=options.policy,
        max_tokens=max_tokens,
        recorded=options.recorded,
        step_size=step_size,
        exact=options.exact,
        stored_bits=bits,
        speculate=speculate,
        keep_view=options.tree_file is not None,
        disk=None if disk is None else str(disk),
        disk_bytes=int(options.disk_gib * GIB),
    )


def _cache_names(listed: str) -> list[str]:
    """Split and check --cache; a cache named twice runs once."""
    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    require(bool(names), f"--cache names no cache. Known: {', '.join(CACHE_NAMES)}.")
    for name in names:
        require(name in CACHE_NAMES, f"--cache has {name!r}. Known: {', '.join(CACHE_NAMES)}.")
    return names


def _prepare(options: ReplayArguments, settings: ReplayOptions) -> "tuple[LoadedModel, Script]":
    """Load the model and render the requests. Ctrl-C becomes one line and its exit code."""
    try:
        conversations = read_chosen(options.conversations, options.skip_bad, is_short=options.is_short)
        loaded = load_model(options.model)
        from runner.script.script import Script, ScriptError

        scheduled = options.schedule(conversations, REQUESTS)
        with outputs.usage_errors(ScriptError):
            script = Script(
                loaded, scheduled, max_tokens=settings.max_tokens, recorded=settings.recorded, skip_bad=options.skip_bad
            )
    except KeyboardInterrupt:
        outputs.say("interrupted: nothing had finished.")
        raise typer.Exit(outputs.EXIT_INTERRUPTED) from None
    if skipped := script.skipped_requests:
        outputs.say(f"note: {skipped} of {plural(len(scheduled), 'request')} skipped: they do not fit {loaded.name}.")
    return loaded, script


def _run(
    loaded: "LoadedModel", script: "Script", caches: Sequence[str], options: ReplayOptions, parallel: int | None
) -> "tuple[Report, Exception | None]":
    """Serve the script; returns what finished, and the error that ended the replay early. UsageError: no reply came."""
    from radixcache import PolicyError, RequestTooLargeError, StoreError, UnsupportedCacheError
    from runner.replay.replayer import Replay
    from runner.replay.report import Report
    from runner.script.script import ScriptError

    progress = ReplayProgress(Console(stderr=True, highlight=False))
    replay = Replay(loaded, script, caches, options, progress, parallel)
    broken_off: Exception | None = None
    try:
        with (
            outputs.usage_errors(UnsupportedCacheError, prefix=f"{loaded.name}: "),
            outputs.usage_errors(StoreError),
            progress,
        ):
            replay.run()
    except KeyboardInterrupt:
        broken_off = typer.Exit(outputs.EXIT_INTERRUPTED)
    except RequestTooLargeError as error:
        broken_off = outputs.UsageError(
            f"one request needs {error.needed_bytes / MIB:,.1f} MiB; the device can spare "
            f"{error.available_bytes / MIB:,.1f} MiB."
        )
    except PolicyError as error:
        broken_off = outputs.UsageError(f"--policy: {error}")
    except ScriptError as error:  # a prompt that waited for generated replies does not fit
        broken_off = outputs.UsageError(str(error))
    differences = replay.differences() if broken_off is None else []
    report = Report(
        replay.result(),
        is_parallel=parallel is not None,
        alone=replay.alone(),
        partings=differences,
        stored_bits=options.stored_bits,
    )
    if isinstance(broken_off, outputs.UsageError) and not report.runs:
        raise broken_off
    return report, broken_off


def _name_differences(report: "Report") -> int:
    """Say on stderr which answers differ; returns how many."""
    differences = report.differences()
    for cache, index, row in differences[:NAMED_DIFFERENCES]:
        outputs.say(
            f"check failed: {cache}, request {index + 1} (user {row.user}, {row.conversation_id}, turn {row.turn}): "
            f"the output tokens differ from those without a cache; {row.cached_tokens:,} of {row.prompt_tokens:,} "
            "prompt tokens were restored."
        )
    if len(differences) > NAMED_DIFFERENCES:
        outputs.say(f"check failed: {len(differences) - NAMED_DIFFERENCES} more answers differ; --json names them all.")
    return len(differences)


def _write_files(
    report: "Report", results: outputs.Outputs, plot_file: Path | None, tree_format: str, about: dict[str, Any]
) -> None:
    from runner.replay.report import replay_picture
    from runner.text import picture_format

    if not report.runs:
        return
    results.write("--json", lambda: json_bytes(report.document(**about)))
    if plot_file is not None:
        rows, form = report.runs[0].rows, picture_format(plot_file)
        title = f"{about['model']}, {plural(len(rows), 'request')} of {plural(len({r.user for r in rows}), 'user')}"
        drawn = partial(replay_picture, report.runs, title=title, budget_bytes=about["options"]["budget_bytes"])
        results.write("--plot", lambda: drawn(file_format=form))
    for view in [run.view for run in report.runs if run.view is not None]:
        results.write("--tree", partial(outputs.view_bytes, view, tree_format))
