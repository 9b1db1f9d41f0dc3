"""The command line `radixcache`. stdout is the result, stderr is progress.

Exit codes: 0 fine; 1 a check failed; 2 a mistake of the user, or an output that cannot be written; 128 plus the number
of the signal that stopped the command. A mistake is one line on stderr that starts with `error:`; a traceback is a bug.

Commands import MLX, numpy and matplotlib only when they need them, so `--help` and mistakes answer at once.
"""

import errno
import io
import signal
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, NoReturn

import typer

from radixcache import __version__
from radixcache.errors import PolicyError
from runner.commands.advise import advise
from runner.commands.doctor import doctor
from runner.commands.explain import explain
from runner.commands.inputs import CONVERSATIONS, TRACES
from runner.commands.launch import launch
from runner.commands.mrc import mrc
from runner.commands.outputs import EXIT_INTERRUPTED, EXIT_USAGE, Outputs, UsageError, discard_stdout, require, say
from runner.commands.replay import replay
from runner.commands.serve import serve
from runner.commands.simulate import simulate
from runner.commands.store import store
from runner.commands.synth import synth
from runner.commands.tree import tree

#: How writing to stdout fails: a full disk, a quota, a reader that is gone.
OUTPUT_ERRORS = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)
#: Signals that stop a command as Ctrl-C does, if the system has them.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
#: typer contains a copy of click in newer releases and imports click in older ones: take the class from typer.
CommandLineError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="radixcache",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_stopped_by: list[int] = []


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal may lack letters, and a file name may not be text in any encoding.
            stream.reconfigure(errors="backslashreplace")
    _stopped_by.clear()
    handled = _handle_stop_signals()
    try:
        code = _exit_code(sys.argv[1:] if arguments is None else list(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        code = 0
        if error.errno != errno.EPIPE:  # a reader that is gone needs no message
            code = _complain(f"the output cannot be written ({error.strerror}).")
        discard_stdout()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
    if code == EXIT_INTERRUPTED and _stopped_by:
        code = 128 + _stopped_by[0]
    sys.exit(code)


def _handle_stop_signals() -> list[int]:
    """Make each stop signal act as Ctrl-C unless the caller ignores or handles it; returns the signals changed."""

    def stop(number: int, _: object) -> None:
        _stopped_by.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in STOP_SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    return handled


def _exit_code(arguments: Sequence[str]) -> int:
    """Run a command; print a mistake of the user as one line."""
    try:
        return _command().main(args=arguments, prog_name="radixcache", standalone_mode=False, obj=arguments) or 0
    except CommandLineError as error:
        describe = getattr(error, "format_message", error.__str__)
        return _complain(f"{describe()} See radixcache --help.")
    except UsageError as error:
        return _complain(str(error))
    except PolicyError as error:
        return _complain(f"--policy: {error}")
    except (KeyboardInterrupt, typer.Abort):
        # Newer releases of typer turn Ctrl-C into the same exit code themselves.
        return EXIT_INTERRUPTED


@cache
def _command() -> Any:
    """The commands as typer makes them of the functions, which takes a while."""
    return typer.main.get_command(app)


def _complain(message: str) -> int:
    say(f"error: {message}")
    return EXIT_USAGE


def _print_version(context: typer.Context, is_asked: bool) -> None:
    if not is_asked:
        return
    if context.params["verbose"]:
        from runner.commands.doctor import version_report

        Outputs({}).print(version_report())
    else:
        print(f"radixcache {__version__}")
    raise typer.Exit


@app.callback()
def radixcache(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Print the version.")] = False,
    verbose: Annotated[
        # Eager: read before --version, wherever it stands.
        bool,
        typer.Option("--verbose", is_eager=True, help="With --version: add packages, system and device."),
    ] = False,
) -> None:
    """A prefix cache for MLX language models, and tools that show what it saves."""
    require(not verbose, "--verbose goes with --version.")


for command in (simulate, mrc, advise):
    app.command(epilog=TRACES)(command)
for command in (tree, explain, replay):
    app.command(epilog=CONVERSATIONS)(command)
for command in (synth, serve, launch, doctor):
    app.command()(command)
app.add_typer(store)
