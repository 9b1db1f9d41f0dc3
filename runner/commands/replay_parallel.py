"""`radixcache replay --parallel N`: what goes with it, and how it is run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from runner.commands.usage import EXIT_INTERRUPTED, UsageError, require
from runner.turn_taking import PARALLEL_STEP_SIZE

if TYPE_CHECKING:
    from runner.models import LoadedModel
    from runner.parallel_report import ParallelReport
    from runner.replay import ReplayOptions
    from runner.script import Script


def require_parallel(
    context: typer.Context, parallel: int, caches: Sequence[str], step_size: int, *, recorded: bool, exact: bool
) -> int:
    """Refuse what does not go with --parallel; returns the step size, which has another default with it."""

    def is_given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name != "DEFAULT"

    require(parallel >= 1, f"--parallel is {parallel}; wanted at least 1.")
    require(
        not is_given("cache") or list(caches) == ["radix"],
        f"--parallel serves users from the radix cache alone; --cache has {','.join(caches)}. Leave one of them out.",
    )
    require(not recorded, "--parallel generates replies, and --recorded feeds known ones. Leave one of them out.")
    require(
        not exact,
        "--exact compares bits, which differ with the number of users in a forward pass. Leave it or --parallel out.",
    )
    # A serial replay has nobody to hold up.
    return step_size if is_given("step_size") else PARALLEL_STEP_SIZE


def run_parallel(
    loaded: "LoadedModel", script: "Script", options: "ReplayOptions", parallel: int
) -> "tuple[ParallelReport, Exception | None]":
    """Serve the script; returns what finished, and what broke the run off before the rest."""
    from radixcache import BudgetFullError, UnsupportedCacheError
    from runner.parallel_replay import ParallelReplay
    from runner.parallel_report import ParallelReport
    from runner.progress import ReplayProgress
    from runner.script import ScriptError

    broken_off: Exception | None = None
    try:
        with ReplayProgress(Console(stderr=True, highlight=False)) as progress:
            replay = ParallelReplay(loaded, script, options, parallel, progress)
            replay.run()
    except KeyboardInterrupt:
        broken_off = typer.Exit(EXIT_INTERRUPTED)
    except UnsupportedCacheError as error:
        raise UsageError(f"{loaded.name}: {error}") from error
    except BudgetFullError as error:
        broken_off = UsageError(f"--budget-mib is too small for one of the requests alone: {error}")
    except ScriptError as error:
        # A prompt that waited for generated replies, and turned out not to fit.
        broken_off = UsageError(str(error))
    return ParallelReport(replay.result()), broken_off
