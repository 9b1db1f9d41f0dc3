"""Where a command's results go: tables for people, files for programs, and one line on stderr for what is wrong.

A file for programs also says `about` the command, the machine and the versions of packages.

All files are checked before a command runs. One that cannot be written at the end does not stop the others. `-` is
stdout; tables then go to stderr. This file imports no MLX, numpy or matplotlib.
"""

from __future__ import annotations

import io
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from runner.files import require_writable, write_atomically
from runner.text import PICTURE_ENDINGS, can_draw, figures_table

if TYPE_CHECKING:
    from radixcache import TreeView

#: Whose versions belong to a result.
PACKAGES = ("radixcache", "mlx", "mlx-lm", "numpy", "transformers")
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
#: The budget of a cache that never evicts.
UNLIMITED_BYTES = 1 << 62
STDOUT = Path("-")
#: The largest value of an option: floats beyond it are not whole numbers.
MOST = 1e15
MOST_COLUMNS = 10_000
#: Width of tables in a file or a pipe.
PIPE_COLUMNS = 120
#: The format of a tree by the ending of its file.
VIEW_ENDINGS = {".txt": "text", ".svg": "svg", ".html": "html", ".json": "json"}
#: Line-drawing characters of trees, for terminals without them.
PLAIN = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-", "…": "~", "±": "~"})


class UsageError(Exception):
    """A mistake that the user can correct; the message is one line."""


@contextmanager
def usage_errors(*errors: type[Exception], prefix: str = "") -> Iterator[None]:
    """Turn these errors into a UsageError with the same message."""
    try:
        yield
    except errors as error:
        raise UsageError(f"{prefix}{error}") from error


def require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def require_positive(**given: float | None) -> None:
    """Refuse values of options that are not above 0, or above `MOST`. A keyword is an option's name."""
    for name, value in given.items():
        require(
            value is None or 0 < value <= MOST,
            f"--{name.replace('_', '-')} is {value}; wanted more than 0, at most {MOST:g}.",
        )


def require_counts(**given: int | None) -> None:
    for name, value in given.items():
        require(value is None or value >= 1, f"--{name.replace('_', '-')} is {value}; wanted at least 1.")


def require_policy(policy: str) -> None:
    from policies import make_policy

    with usage_errors(ValueError, prefix="--policy: "):
        make_policy(policy)


def require_view_file(path: Path) -> str:
    """The format that the ending of a tree's file names."""
    ending = path.suffix.lower()
    require(
        ending in VIEW_ENDINGS,
        f"{path}: the ending is {path.suffix!r}; wanted one of {', '.join(VIEW_ENDINGS)}.",
    )
    return VIEW_ENDINGS[ending]


def bytes_of(budget_mib: float) -> int:
    require(0 < budget_mib < float("inf"), f"--budget-mib is {budget_mib:g}; wanted more than 0.")
    return max(1, int(budget_mib * (1 << 20)))


def is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def command_line(context: typer.Context) -> str:
    return shlex.join(["radixcache", *context.obj])


def machine() -> dict[str, Any]:
    """The hardware and the system: nothing that identifies the computer or its owner."""
    return {
        "processor": _processor(),
        "device": _device(),
        "logical_cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of `PACKAGES`; a package that is not installed is `source`."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            by_package[package] = "source"
    return by_package


def about(context: typer.Context) -> dict[str, Any]:
    return {"command": command_line(context), "machine": machine(), "versions": versions()}


def say(message: str) -> None:
    """Print one line on stderr, if stderr is still open."""
    with suppress(OSError):
        print(" ".join(message.split()), file=sys.stderr, flush=True)


def view_bytes(view: TreeView, format_name: str, max_nodes: int | None = None) -> bytes:
    from radixcache.observe.page import render_view

    return (render_view(view, format_name, max_nodes).rstrip("\n") + "\n").encode("utf-8", "backslashreplace")


class Outputs:
    """The files that a command writes, by option.

    UsageError: a file cannot be written, is an input, or is named twice; or matplotlib is missing for a picture.
    """

    def __init__(self, files: Mapping[str, Path | None], inputs: Iterable[Path | None] = ()) -> None:
        self._files = {option: path for option, path in files.items() if path is not None}
        self._has_failed = False
        for (one, path), (other, same) in combinations(self._files.items(), 2):
            require(not _is_one_file(path, same), f"{one} and {other} are both {path}; wanted a file for each.")
        for option, path in self._files.items():
            is_picture = option == "--plot"
            missing = '--plot draws with matplotlib, which is not installed: pip install "radixcache[plot]".'
            require(not is_picture or can_draw(), missing)
            if path == STDOUT:
                continue
            for given in inputs:
                if given is not None and _holds(given, path):
                    raise UsageError(f"{option} {path} is also an input, and would be overwritten. Name another file.")
            if path.suffix and is_picture:
                wanted = f"--plot {path}: wanted {', '.join(PICTURE_ENDINGS)}."
                require(path.suffix.lower() in PICTURE_ENDINGS, wanted)
            try:
                require_writable(path)
            except OSError as error:
                raise UsageError(f"{path}: cannot be written ({error.strerror}). Name another file.") from error

    def show(self, *parts: str | Table) -> None:
        stream = sys.stderr if STDOUT in self._files.values() else sys.stdout
        text = io.StringIO()
        console = Console(
            file=text,
            force_terminal=stream.isatty(),
            width=None if stream.isatty() else PIPE_COLUMNS,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=not stream.isatty(),
        )
        for part in parts:
            shown = [part] if isinstance(part, str) or _fits(part, console) else _turned(part, console)
            console.print(*shown, sep="")
        self._attempt(lambda: _print(text.getvalue(), stream), "the output")

    def print(self, text: str) -> None:
        """Print a result that is text itself on stdout."""
        self._attempt(lambda: _print(text.rstrip("\n") + "\n", sys.stdout), "the output")

    def print_tree(self, view: TreeView, format_name: str = "text", max_nodes: int | None = None) -> None:
        """Print a tree on stdout; as text, its lines fit the terminal."""
        from radixcache.observe.page import render_view

        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self.print(render_view(view, format_name, max_nodes, columns))

    def write(self, option: str, content: Callable[[], bytes]) -> bool:
        """Write the option's file, if it names one; return whether it was written."""
        path = self._files.get(option)
        return path is not None and self._attempt(lambda: _write(path, content()), str(path))

    def finish(self) -> None:
        if self._has_failed:
            raise typer.Exit(EXIT_USAGE)

    def _attempt(self, write: Callable[[], None], what: str) -> bool:
        try:
            write()
            return True
        except BrokenPipeError:
            discard_stdout()  # a reader that is gone needs no message
        except OSError as error:
            self._has_failed = True
            say(f"error: {what}: cannot be written ({error.strerror}).")
            if what == "the output":
                discard_stdout()
        return False


def discard_stdout() -> None:
    """Drop stdout's buffer: Python would try to write it once more when it ends."""
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
    """Whether two paths lead to the same file. Devices and pipes take any number of writers."""
    try:
        return os.path.samefile(one, other) and one.is_file()
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _holds(given: Path, path: Path) -> bool:
    """Whether an output is an input, or an existing file in an input folder."""
    if given == STDOUT:
        return False
    inside = path.is_file() and Path(os.path.realpath(given)) in Path(os.path.realpath(path)).parents
    return _is_one_file(given, path) or (given.is_dir() and inside)


def _fits(table: Table, console: Console) -> bool:
    return Measurement.get(console, console.options.update(width=MOST_COLUMNS), table).minimum <= console.width


def _turned(table: Table, console: Console) -> Iterator[Table | str]:
    """A table that is too wide: its rows become columns, in as many tables as the width needs."""
    titles = [str(column.header).replace("\n", " ") for column in table.columns]
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    while rows:
        count = len(rows)
        while count > 1 and not _fits(_columns(titles, rows[:count]), console):
            count -= 1
        yield _columns(titles, rows[:count])
        if rows := rows[count:]:
            yield ""


def _columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return figures_table([titles, *rows], names=(titles[0],))


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _device() -> str | None:
    """The accelerator that MLX uses; None: MLX is not loaded, or computes on the CPU."""
    mx = sys.modules.get("mlx.core")
    if mx is None or mx.default_device().type == mx.DeviceType.cpu:
        return None
    return str(mx.device_info().get("device_name", mx.default_device()))
