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
    from runner.replay.report import Report
    from runner.replay.servers import ReplayOptions
    from runner.script.conversation import Conversation
    from runner.script.script import Script

# The short replay: few users with short prompts, who share system prompts, go on, edit a question and repeat one.
SHORT_USERS = ("recipe/mei", "recipe/olu", "travel/tomas")
SHORT_MAX_TOKENS, SHORT_BUDGET_MIB = 4, 64
MAX_TOKENS, BUDGET_MIB = 8, 128
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
    full: Annotated[
        bool, typer.Option("--full", help="Replay all built-in conversations: some minutes instead of about one.")
    ] = False,
    users: Annotated[int | None, typer.Option(help="Take only the first so many users.  [default: all]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the schedule: the same seed, the same requests.")] = 0,
    requests: Annotated[int, typer.Option(help="Requests to replay at most.")] = 24,
    budget_mib: Annotated[
        float | None,
        typer.Option(help="Byte budget of mlx-lm and of radix, in MiB, each.  [default: 64; in full 128]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate per reply, greedily.  [default: 4; in full 8]")
    ] = None,
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
        typer.Option("--exact", help="Let radix resume at multiples of --step-size only: answers equal to the bit."),
    ] = False,
    disk: Annotated[
        Path | None, typer.Option(help="Folder where radix stores its state, also for later replays.")
    ] = None,
    disk_gib: Annotated[float, typer.Option(help="GiB that the folder may take.", min=0.001)] = 32,
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

    By default three users of the built-in conversations are served, with short replies: about a minute on 2 cores.
    --full, --users, --parallel and --conversations replay in full: everything that is chosen, with longer replies.
    """
    is_short = not (full or conversations) and users is None and parallel is None
    caches = _cache_names(cache)
    if parallel is not None:
        caches = caches if is_given(context, "cache") else ["radix"]
        step_size = _require_parallel(context, parallel, caches, step_size, recorded=recorded, exact=exact)
    require_policy(policy)
    if max_tokens is None:
        max_tokens = SHORT_MAX_TOKENS if is_short else MAX_TOKENS
    if budget_mib is None:
        budget_mib = SHORT_BUDGET_MIB if is_short else BUDGET_MIB
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
        if is_short:
            chosen = [each for each in chosen if each.user in SHORT_USERS]
        loaded = load_model(model)

        from runner.replay.servers import ReplayOptions

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
    trees = [f"\n{run.cache}:\n{run.tree}" for run in report.runs if run.tree is not None]
    outputs.show(*([report.table()] if report.runs else []), report.sentence(), *trees)
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


# Arguments ------------------------------------------------------------------------------------------------------------


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
    """Refuse what does not go with --parallel; returns the step size, whose default differs with --parallel."""
    require(parallel >= 1, f"--parallel is {parallel}; wanted at least 1.")
    from runner.replay.replayer import TOGETHER

    require(
        set(caches) <= set(TOGETHER),
        f"--parallel serves users from {' or '.join(TOGETHER)}; --cache has {','.join(caches)}. Leave one of them out.",
    )
    require(not recorded, "--parallel generates replies, and --recorded feeds known ones. Leave one of them out.")
    require(
        not exact,
        "--exact compares bits, which differ with the number of users in a forward pass. Leave it or --parallel out.",
    )
    from runner.engine.engine import PARALLEL_STEP_SIZE

    # One request at a time delays nobody, so chunks may be larger there.
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


# Results -------------------------------------------------------------------------------------------------------------


def _run(
    loaded: "LoadedModel", script: "Script", caches: Sequence[str], options: "ReplayOptions", parallel: int | None
) -> "tuple[Report, Exception | None]":
    """Serve the script; returns what finished, and the error that ended the replay early."""
    from radixcache import BudgetFullError, PolicyError, StoreError, UnsupportedCacheError
    from runner.replay.progress import ReplayProgress, expected_time
    from runner.replay.replayer import Replay
    from runner.replay.report import Report
    from runner.script.script import ScriptError

    note = None
    if parallel is None:
        reply_tokens = 1 if options.recorded else options.max_tokens
        note = partial(expected_time, prompts=script.expected_prompts, caches=caches, reply_tokens=reply_tokens)
    progress = ReplayProgress(Console(stderr=True, highlight=False), note)
    replay = Replay(loaded, script, caches, options, progress, parallel)
    broken_off: Exception | None = None
    try:
        with progress:
            replay.run()
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
    except ScriptError as error:  # a prompt that waited for generated replies does not fit
        broken_off = UsageError(str(error))
    differences = replay.differences() if broken_off is None else []
    is_parallel = parallel is not None
    return Report(replay.result(), is_parallel=is_parallel, alone=replay.alone(), partings=differences), broken_off


def _name_differences(report: "Report") -> int:
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


def _write_files(report: "Report", outputs: Outputs, plot_file: Path | None, about: dict[str, Any]) -> None:
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
