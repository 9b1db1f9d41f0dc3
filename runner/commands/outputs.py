"""Outputs: where results go. All are checked before a command runs; each is written whatever becomes of the others.

`-` is stdout: what is shown to people goes to stderr then.

What commands say when something is not as it should be: one line on stderr, and an exit code.

Light on purpose: nothing here imports MLX, numpy or matplotlib.

Files that a tree is shown in: their ending says as what.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from runner.files import require_writable, write_atomically
from runner.origin import machine, versions

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
#: Of a cache that keeps everything.
UNLIMITED_BYTES = 1 << 62


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


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, and is not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def command_line(context: typer.Context) -> str:
    """What was typed, for the JSON of a result."""
    return shlex.join(["radixcache", *context.obj])


def about(context: typer.Context) -> dict[str, Any]:
    """What made a result, for its JSON."""
    return {"command": command_line(context), "machine": machine(), "versions": versions()}


def say(message: str) -> None:
    """One line on stderr, whatever the message holds, if there still is one."""
    with suppress(OSError):
        print(" ".join(message.split()), file=sys.stderr, flush=True)


STDOUT = Path("-")
MOST_COLUMNS = 10_000
# Wide enough for tables where the output is a file or a pipe, which have no width of their own.
PIPE_COLUMNS = 120
#: The endings that say what is written, where an option does not leave that open.
ENDINGS = {"--plot": (".png", ".svg", ".pdf"), "--html": (".html", ".htm")}
# What trees are drawn with, for terminals that have none of it.
PLAIN = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-", "…": "~", "±": "~"})


class Outputs:
    """The files of one command, by the option that names each.

    Args:
        inputs: files and folders that are read, and not to be overwritten.

    Raises:
        UsageError: one cannot be written, is an input, or is named twice.
    """

    def __init__(self, files: Mapping[str, Path | None], inputs: Iterable[Path | None] = ()) -> None:
        self._files = {option: path for option, path in files.items() if path is not None}
        self._has_failed = False
        for (one, path), (other, same) in combinations(self._files.items(), 2):
            require(not _is_one_file(path, same), f"{one} and {other} are both {path}; wanted a file for each.")
        for option, path in self._files.items():
            for given in inputs:
                if given is not None and _holds(given, path):
                    raise UsageError(f"{option} {path} is read as well, and would be overwritten. Name another file.")
            endings = ENDINGS.get(option, ())
            if path != STDOUT and path.suffix and endings:
                require(path.suffix.lower() in endings, f"{option} {path}: wanted {', '.join(endings)}.")
            if path != STDOUT:
                try:
                    require_writable(path)
                except OSError as error:
                    raise UsageError(f"{path}: cannot be written ({error.strerror}). Name another file.") from error

    def show(self, *parts: str | Table) -> None:
        """Show text and tables to people."""
        stream = sys.stderr if STDOUT in self._files.values() else sys.stdout
        text = io.StringIO()
        console = Console(
            file=text,
            force_terminal=stream.isatty(),
            width=None if stream.isatty() else PIPE_COLUMNS,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        for part in parts:
            console.print(part if isinstance(part, str) or _fits(part, console) else _as_lines(part))
        self._attempt(lambda: _print(text.getvalue(), stream), "the output")

    def print(self, text: str) -> None:
        """Write a result that is text itself to stdout, whatever else is written there."""
        self._attempt(lambda: _print(text.rstrip("\n") + "\n", sys.stdout), "the output")

    def write(self, option: str, content: Callable[[], bytes]) -> None:
        """Write what an option asks for, if it was given."""
        path = self._files.get(option)
        if path is not None:
            self._attempt(lambda: _write(path, content()), str(path))

    def finish(self) -> None:
        """Exit with 2 if anything could not be written."""
        if self._has_failed:
            raise typer.Exit(EXIT_USAGE)

    def _attempt(self, write: Callable[[], None], what: str) -> None:
        try:
            write()
        except BrokenPipeError:
            discard_stdout()  # who reads no further needs no word
        except OSError as error:
            self._has_failed = True
            say(f"error: {what}: cannot be written ({error.strerror}).")
            if what == "the output":
                discard_stdout()


def discard_stdout() -> None:
    """What is left in its buffer would fail once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(path: Path, content: bytes) -> None:
    if path == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    else:
        write_atomically(path, content)


def _print(text: str, stream: TextIO) -> None:
    try:
        text.encode(stream.encoding)
    except UnicodeEncodeError:
        text = text.translate(PLAIN)
    stream.write(text)
    stream.flush()


def _is_one_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, or will; devices and pipes take any number of writers."""
    try:
        return os.path.samefile(one, other) and one.is_file()
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _holds(given: Path, path: Path) -> bool:
    """Whether an output is an input, or a file that is there in a folder of them."""
    if path == STDOUT or given == STDOUT:
        return False
    inside = path.is_file() and Path(os.path.realpath(given)) in Path(os.path.realpath(path)).parents
    return _is_one_file(given, path) or (given.is_dir() and inside)


def _fits(table: Table, console: Console) -> bool:
    return Measurement.get(console, console.options.update(width=MOST_COLUMNS), table).minimum <= console.width


def _as_lines(table: Table) -> str:
    """A table that is too wide: a line for each of its rows, which the terminal wraps."""
    columns = [(str(column.header).replace("\n", " "), list(column.cells)) for column in table.columns]
    (_, names), *figures = columns
    lines = [
        f"{name}: " + ", ".join(f"{header} {cells[index]}" for header, cells in figures if cells[index])
        for index, name in enumerate(names)
    ]
    return "\n".join(lines)


if TYPE_CHECKING:
    from radixcache import TreeView

#: Formats of `PrefixCache.render` by the ending of the file.
VIEW_ENDINGS = {".txt": "text", ".svg": "svg", ".html": "html", ".json": "json"}


def require_view_file(path: Path) -> str:
    """The format that a file's ending asks for."""
    wanted = ", ".join(VIEW_ENDINGS)
    require(
        path.suffix.lower() in VIEW_ENDINGS, f"{path}: ends in {path.suffix or 'nothing'!r}; wanted one of {wanted}."
    )
    return VIEW_ENDINGS[path.suffix.lower()]


def view_bytes(view: TreeView, format_name: str, max_nodes: int | None = None) -> bytes:
    """A tree in one of these formats, for a file."""
    from radixcache.observe.page import render_view

    return (render_view(view, format_name, max_nodes).rstrip("\n") + "\n").encode("utf-8", "backslashreplace")
