"""What commands say when something is not as it should be: one line on stderr, and an exit code.

Light on purpose: nothing here imports MLX, numpy or matplotlib.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from runner.files.atomic import require_writable
from runner.files.origin import machine, versions
from runner.files.picture import picture_format

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Wide enough for tables where the output is a file or a pipe, which have no width of their own.
PIPE_COLUMNS = 120


class UsageError(Exception):
    """Something the user can put right; the message is one line."""


def require(holds: bool, message: str) -> None:
    """Raise UsageError unless the condition holds."""
    if not holds:
        raise UsageError(message)


def require_policy(policy: str) -> None:
    """Find out before a long run that there is no such policy."""
    from policies import make_policy

    try:
        make_policy(policy)
    except ValueError as error:
        raise UsageError(f"--policy: {error}") from error


def bytes_of(budget_mib: float) -> int:
    """The bytes of a --budget-mib."""
    require(0 < budget_mib < float("inf"), f"--budget-mib is {budget_mib:g}; wanted more than 0.")
    return max(1, int(budget_mib * (1 << 20)))


def require_writable_files(*paths: Path | None) -> None:
    """Find out before a long run that its result could not be written."""
    for path in paths:
        if path is not None:
            try:
                require_writable(path)
            except OSError as error:
                raise UsageError(f"{path}: cannot be written ({error.strerror}). Name another file.") from error


def require_picture_format(path: Path | None) -> None:
    """Find out before a long run that there is no such kind of picture."""
    if path is not None:
        try:
            picture_format(path)
        except ValueError as error:
            raise UsageError(str(error)) from error


@contextmanager
def writing() -> Iterator[None]:
    """Turn a file that cannot be written after all into one line."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written ({error.strerror}).") from error


def stdout() -> Console:
    """Where results go, as they are: names may hold what looks like markup."""
    return Console(
        width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def command_line(context: typer.Context) -> str:
    """What was typed, for the JSON of a result."""
    return shlex.join(["radixcache", *context.obj])


def about(context: typer.Context) -> dict[str, Any]:
    """What made a result, for its JSON."""
    return {"command": command_line(context), "machine": machine(), "versions": versions()}


def say(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print(" ".join(message.split()), file=sys.stderr)
