"""The command line `radixcache`. stdout is the result, stderr is progress.

Exit codes: 0 fine, 1 a check failed, 2 a mistake of the user's or an output that cannot be written, 128 and a signal's
number when that stopped it.

MLX, numpy and matplotlib are imported once a command really needs them, so that `--help` and mistakes answer at once.
Whatever the user got wrong is one line on stderr that starts with `error:`; a traceback means a bug of ours.
"""

import errno
import io
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from radixcache import __version__
from radixcache.errors import PolicyError
from runner.commands.advise import advise
from runner.commands.explain import explain
from runner.commands.inputs import CONVERSATIONS, TRACES
from runner.commands.mrc import mrc
from runner.commands.outputs import EXIT_INTERRUPTED, EXIT_USAGE, UsageError, discard_stdout, say
from runner.commands.replay import replay
from runner.commands.serve import serve
from runner.commands.simulate import simulate
from runner.commands.store import store
from runner.commands.synth import synth
from runner.commands.tree import tree

# What writing to stdout fails with: a full disk, a quota, a reader that went away.
OUTPUT_ERRORS = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)

# typer brings a copy of click in newer releases and uses click itself in older ones: take the class from typer.
CommandLineError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="radixcache",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


#: Signals that stop a command as Ctrl-C does, where the system has them.
STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_stopped_by: list[int] = []


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal may not know every letter, and a file's name may be none in any encoding.
            stream.reconfigure(errors="backslashreplace")
    _stopped_by.clear()
    heard = _listen()
    try:
        code = _exit_code(sys.argv[1:] if arguments is None else list(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        code = 0
        if error.errno != errno.EPIPE:  # who reads no further needs no word
            code = _complain(f"the output cannot be written ({error.strerror}).")
        discard_stdout()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
    if code == EXIT_INTERRUPTED and _stopped_by:
        code = 128 + _stopped_by[0]
    sys.exit(code)


def _listen() -> list[int]:
    """Let other signals to stop do what Ctrl-C does, but for those that are ignored; returns which."""

    def stop(number: int, _: object) -> None:
        _stopped_by.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in STOPS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, stop)
    return heard


def _exit_code(arguments: Sequence[str]) -> int:
    """Run a command; whatever the user got wrong is told."""
    try:
        return app(args=arguments, prog_name="radixcache", standalone_mode=False, obj=arguments) or 0
    except CommandLineError as error:
        return _complain(f"{_explain(error)} See radixcache --help.")
    except UsageError as error:
        return _complain(str(error))
    except PolicyError as error:
        return _complain(f"--policy: {error}")
    except (KeyboardInterrupt, typer.Abort):
        # Newer releases of typer turn Ctrl-C into the same exit code themselves.
        return EXIT_INTERRUPTED


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"radixcache {__version__}")
        raise typer.Exit


@app.callback()
def radixcache(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """A prefix cache for MLX language models, and tools that show what it saves."""


for command in (simulate, mrc, advise):
    app.command(epilog=TRACES)(command)
for command in (tree, explain, replay):
    app.command(epilog=CONVERSATIONS)(command)
for command in (synth, serve):
    app.command()(command)
app.add_typer(store)


def _complain(message: str) -> int:
    say(f"error: {message}")
    return EXIT_USAGE


def _explain(error: Exception) -> str:
    """What was wrong with the command line, with the option's name where there is one."""
    describe = getattr(error, "format_message", None)
    return str(describe() if describe is not None else error)
