"""`radixcache replay`: the same conversations through several caches, or for several users at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import runner
from runner.commands.inputs import load_model, read_chosen, scheduled_requests
from runner.commands.outputs import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    STDOUT,
    Outputs,
    UsageError,
    bytes_of,
    command_line,
    is_given,
    require,
    require_policy,
    require_view_file,
    say,
    view_bytes,
)
from runner.replay import CACHE_NAMES
from runner.text import GIB, MIB, plural

if TYPE_CHECKING:
    from runner.models.load import LoadedModel
    from runner.replay.replayer import ReplayOptions
    from runner.replay.report import ParallelReport, Report
    from runner.script.conversation import Conversation
    from runner.script.script import Script

# How many differing answers are named one by one.
NAMED_DIFFERENCES = 10


def replay(
    context: typer.Context,
    cache: Annotated[str, typer.Option(help="Caches to compare, in this order, separated by commas.")] = (
        ",".join(CACHE_NAMES)
    ),
    conversations: Annotated[
        list[Path] | None,
        typer.Option(help="File of conversations to replay; may be given several times. Default: a built-in set."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out, and count, what cannot be read or does not fit the model.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="demo, tiny, tiny:KIND, a folder in mlx-lm's format, or a hub id.")
    ] = "demo",
    policy: Annotated[str, typer.Option(help="What the radix cache evicts first.")] = "lru",
    users: Annotated[int | None, typer.Option(help="Take only the first so many users.  [default: all]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the schedule: the same seed, the same requests.")] = 0,
    requests: Annotated[int, typer.Option(help="Requests to replay at most.")] = 24,
    budget_mib: Annotated[
        float, typer.Option(help="Byte budget of mlx-lm and of radix, in MiB: each has all of it.")
    ] = 128,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per reply, greedily.")] = 8,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Generate one token per reply, then feed the recorded reply.")
    ] = False,
    step_size: Annotated[int, typer.Option(help="Tokens per chunk of prefill.")] = 2048,
    parallel: Annotated[
        int | None,
        typer.Option(help="Serve so many users at a time, a forward pass for all; --cache radix, mlx-lm or both."),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Let radix resume at multiples of --step-size only, equal to the bit."),
    ] = False,
    disk: Annotated[
        Path | None, typer.Option(help="Folder that keeps what radix stores, for replays to come too.")
    ] = None,
    disk_gib: Annotated[float, typer.Option(help="GiB that it may take.", min=0.001)] = 32,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures, with a row per request, to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw TTFT and bytes held per request (.png, .svg or .pdf).")
    ] = None,
    dump_tree: Annotated[bool, typer.Option("--dump-tree", help="Print the radix cache's tree at the end.")] = False,
    tree_file: Annotated[
        Path | None,
        typer.Option("--tree", help="Write the radix cache's tree at the end to this .html, .svg, .txt or .json."),
    ] = None,
) -> None:
    """Serve conversations through several caches.

    The requests of several users are interleaved by a seeded schedule and rendered with the model's own chat template.
    The caches take turns, request by request, and their answers are compared with those computed without a cache.
    """
    caches = _cache_names(cache)
    if parallel is not None:
        caches = caches if is_given(context, "cache") else ["radix"]
        step_size = _require_parallel(context, parallel, caches, step_size, recorded=recorded, exact=exact)
    require_policy(policy)
    for option, value in (
        ("--users", 1 if users is None else users),
        ("--requests", requests),
        ("--max-tokens", max_tokens),
        ("--step-size", step_size),
    ):
        require(value >= 1, f"{option} is {value}; wanted at least 1.")
    budget_bytes = bytes_of(budget_mib)
    require(disk is None or parallel is None, "--disk goes with one request at a time. Leave it or --parallel out.")
    require(disk is None or "radix" in caches, "--disk is for the radix cache; wanted radix among --cache.")
    require(disk_gib < float("inf"), f"--disk-gib is {disk_gib:g}; wanted a finite number.")
    for option, wanted in ((f"--tree {tree_file}", tree_file is not None), ("--dump-tree", dump_tree)):
        require(not wanted or "radix" in caches, f"{option} shows the radix cache; wanted radix among --cache.")
    tree_format = "text" if tree_file is None or tree_file == STDOUT else require_view_file(tree_file)
    files = {"--json": json_file, "--plot": plot_file, "--tree": tree_file}
    outputs = Outputs(files, [*(conversations or []), Path(model)])
    if runner.BLAS_ADVICE:
        say(f"note: {runner.BLAS_ADVICE}")
    with _interruptible():
        chosen = read_chosen(conversations, skip_bad)
        loaded = load_model(model)

        from runner.replay.replayer import ReplayOptions

        options = ReplayOptions(
            budget_bytes,
            policy,
            max_tokens,
            recorded,
            step_size,
            dump_tree,
            exact,
            tree_file is not None,
            None if disk is None else str(disk),
            int(disk_gib * GIB),
        )
        script = _script(loaded, chosen, options, users=users, seed=seed, requests=requests, skip_bad=skip_bad)
    report, broken_off = _run(loaded, script, caches, options, parallel)
    if isinstance(broken_off, UsageError) and not report.runs:
        raise broken_off
    _show(report, outputs)
    about = {
        "model": loaded.name,
        "seed": seed,
        "command": command_line(context),
        "options": {"users": users, "requests": requests, "parallel": parallel, **vars(options)},
        "skipped_requests": script.skipped_requests,
        "interrupted": broken_off is not None,
    }
    _write_files(report, outputs, plot_file, about)
    for view in [run.view for run in report.runs if run.view is not None]:
        outputs.write("--tree", partial(view_bytes, view, tree_format))
    if broken_off is not None:
        say(f"interrupted: {report.progress(len(script))} had finished.")
        raise broken_off
    differences = _name_differences(report)
    outputs.finish()
    if differences:
        raise typer.Exit(EXIT_CHECK_FAILED)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn Ctrl-C during the preparations into one line and its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted: nothing had finished.")
        raise typer.Exit(EXIT_INTERRUPTED) from None


# What was asked for ---------------------------------------------------------------------------------------------------


def _cache_names(listed: str) -> list[str]:
    """Split and check --cache; a cache named twice runs once."""
    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    require(bool(names), f"--cache names no cache; wanted some of {', '.join(CACHE_NAMES)}.")
    for name in names:
        require(name in CACHE_NAMES, f"--cache has {name!r}; wanted some of {', '.join(CACHE_NAMES)}.")
    return names


def _require_parallel(
    context: typer.Context, parallel: int, caches: Sequence[str], step_size: int, *, recorded: bool, exact: bool
) -> int:
    """Refuse what does not go with --parallel; returns the step size, which has another default with it."""

    require(parallel >= 1, f"--parallel is {parallel}; wanted at least 1.")
    from runner.replay.together import TOGETHER

    require(
        set(caches) <= set(TOGETHER),
        f"--parallel serves users from {' or '.join(TOGETHER)}; --cache has {','.join(caches)}. Leave one of them out.",
    )
    require(not recorded, "--parallel generates replies, and --recorded feeds known ones. Leave one of them out.")
    require(
        not exact,
        "--exact compares bits, which differ with the number of users in a forward pass. Leave it or --parallel out.",
    )
    from runner.engine.admission import PARALLEL_STEP_SIZE

    # A serial replay has nobody to hold up.
    return step_size if is_given(context, "step_size") else PARALLEL_STEP_SIZE


def _script(
    loaded: "LoadedModel",
    conversations: "Sequence[Conversation]",
    options: "ReplayOptions",
    *,
    users: int | None,
    seed: int,
    requests: int,
    skip_bad: bool,
) -> "Script":
    from runner.script.script import Script, ScriptError

    scheduled = scheduled_requests(conversations, users=users, seed=seed, max_requests=requests)
    try:
        script = Script(loaded, scheduled, max_tokens=options.max_tokens, recorded=options.recorded, skip_bad=skip_bad)
    except ScriptError as error:
        raise UsageError(str(error)) from error
    if script.skipped_requests:
        of_all = f"{script.skipped_requests} of {plural(len(scheduled), 'request')}"
        say(f"note: {of_all} skipped: not fit for {loaded.name}.")
    return script


# What comes of it -----------------------------------------------------------------------------------------------------


def _run(
    loaded: "LoadedModel", script: "Script", caches: Sequence[str], options: "ReplayOptions", parallel: int | None
) -> "tuple[Report | ParallelReport, Exception | None]":
    """Serve the script; returns what finished, and what broke the run off before the rest."""
    from radixcache import BudgetFullError, PolicyError, StoreError, UnsupportedCacheError
    from runner.replay.progress import ReplayProgress
    from runner.replay.replayer import Replay
    from runner.replay.report import ParallelReport, Report
    from runner.replay.together import ParallelReplay
    from runner.script.script import ScriptError

    progress = ReplayProgress(Console(stderr=True, highlight=False))
    served: Replay | ParallelReplay = (
        Replay(loaded, script, caches, options, progress)
        if parallel is None
        else ParallelReplay(loaded, script, options, parallel, progress, caches)
    )
    broken_off: Exception | None = None
    try:
        with progress:
            served.run()
    except KeyboardInterrupt:
        broken_off = typer.Exit(EXIT_INTERRUPTED)
    except UnsupportedCacheError as error:
        raise UsageError(f"{loaded.name}: {error}") from error
    except StoreError as error:
        raise UsageError(str(error)) from error
    except BudgetFullError as error:
        broken_off = UsageError(
            f"--budget-mib is {options.budget_bytes / MIB:g}; one of the requests takes "
            f"{(error.held_bytes + error.wanted_bytes) / MIB:,.1f} MiB. Give more."
        )
    except PolicyError as error:
        broken_off = UsageError(f"--policy: {error}")
    except ScriptError as error:
        # A prompt that waited for generated replies, and turned out not to fit.
        broken_off = UsageError(str(error))
    if isinstance(served, Replay):
        return Report(served.result()), broken_off
    partings = served.partings() if broken_off is None else []
    return ParallelReport(served.result(), served.alone(), partings), broken_off


def _show(report: "Report | ParallelReport", outputs: Outputs) -> None:
    trees = [f"\n{run.cache}:\n{run.tree}" for run in report.runs if run.tree is not None]
    outputs.show(*([report.table()] if report.runs else []), report.sentence(), *trees)


def _name_differences(report: "Report | ParallelReport") -> int:
    """Say on stderr which answers differ; returns how many."""
    differences = report.differences()
    for cache, index, row in differences[:NAMED_DIFFERENCES]:
        say(
            f"check failed: {cache}, request {index + 1} (user {row.user}, {row.conversation_id}, turn {row.turn}): "
            f"the output tokens differ from those without a cache; {row.cached_tokens:,} of {row.prompt_tokens:,} "
            "prompt tokens were restored."
        )
    if len(differences) > NAMED_DIFFERENCES:
        say(f"check failed: {len(differences) - NAMED_DIFFERENCES} more answers differ; --json names them all.")
    return len(differences)


def _write_files(
    report: "Report | ParallelReport", outputs: Outputs, plot_file: Path | None, about: dict[str, Any]
) -> None:
    from runner.files import json_bytes
    from runner.picture import picture_format
    from runner.replay.progress import replay_picture

    if not report.runs:
        return
    outputs.write("--json", lambda: json_bytes(report.document(**about)))
    if plot_file is not None:
        rows, form = report.runs[0].rows, picture_format(plot_file)
        title = f"{about['model']}, {plural(len(rows), 'request')} of {plural(len({r.user for r in rows}), 'user')}"
        drawn = partial(replay_picture, report.runs, title=title, budget_bytes=about["options"]["budget_bytes"])
        outputs.write("--plot", lambda: drawn(file_format=form))
