"""The command line `radixcache`. stdout is the result, stderr is progress; exit 0 fine, 1 a check failed, 2 usage.

MLX, numpy and matplotlib are imported once a command really needs them, so that `--help` and mistakes answer at once.
Whatever the user got wrong is one line on stderr that starts with `error:`; a traceback means a bug of ours.
"""

import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from runner.commands.advise import advise
from runner.commands.explain import explain
from runner.commands.mrc import mrc
from runner.commands.replay import replay
from runner.commands.simulate import simulate
from runner.commands.synth import synth
from runner.commands.tree import tree
from runner.commands.usage import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UsageError, say

# What writing to stdout fails with: a full disk, a quota, a reader that went away.
OUTPUT_ERRORS = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)

# typer brings a copy of click in newer releases and uses click itself in older ones: take the class from typer.
CommandLineError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(name="radixcache", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    try:
        code = _exit_code(sys.argv[1:] if arguments is None else list(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        if error.errno != errno.EPIPE:  # who reads no further needs no word
            say(f"error: the output cannot be written ({error.strerror}).")
        # What is left of it would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_CHECK_FAILED
    sys.exit(code)


def _exit_code(arguments: Sequence[str]) -> int:
    """Run a command; whatever the user got wrong is told."""
    try:
        return app(args=arguments, prog_name="radixcache", standalone_mode=False, obj=arguments) or 0
    except CommandLineError as error:
        return _complain(f"{_explain(error)} See radixcache --help.")
    except UsageError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        # Newer releases of typer turn Ctrl-C into the same exit code themselves.
        return EXIT_INTERRUPTED


@app.callback()
def radixcache() -> None:
    """A prefix cache for MLX language models, and tools that show what it saves."""


for command in (simulate, mrc, synth, advise, tree, explain, replay):
    app.command()(command)


def _complain(message: str) -> int:
    say(f"error: {message}")
    return EXIT_USAGE


def _explain(error: Exception) -> str:
    """What was wrong with the command line, with the option's name where there is one."""
    describe = getattr(error, "format_message", None)
    return str(describe() if describe is not None else error)
