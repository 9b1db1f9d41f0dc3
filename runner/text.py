"""How values, sizes, counts, tables, progress and pictures are shown to people. This file never imports MLX.

The extra [plot] brings matplotlib, which is imported only to draw. Commands ask `can_draw` before they start.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 1 << 20
GIB = 1 << 30
_SHOWN_CHARS, MOST_NAME_CHARS = 40, 24
LONGEST_TEXT = 200  # characters of a client's text in a log line
DPI = 120  # of pictures
PICTURE_ENDINGS = (".png", ".svg", ".pdf")
FIRST_AFTER_S, INTERVAL_S = 10.0, 30.0


class ProgressLines:
    """Progress as a line on stderr every `INTERVAL_S`; nothing on a terminal that shows a bar."""

    def __init__(self, *, has_bar: bool = True) -> None:
        self._next_s = float("inf") if has_bar and sys.stderr.isatty() else time.monotonic() + FIRST_AFTER_S

    def tell(self, text: Callable[[], str]) -> None:
        """Print the line if one is due."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            with suppress(OSError):
                print(text(), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text that any file can hold: file names may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: Any) -> str:
    """A value for an error message: its type, and how it begins."""
    return "missing" if value is None else f"{type(value).__name__} {shortened(repr(value), _SHOWN_CHARS)}"


def shortened(text: str, length_chars: int) -> str:
    text = " ".join(printable(text).split())
    return text if len(text) <= length_chars else text[: length_chars - 3] + "..."


def cut(text: str) -> str:
    """Text of a client, cut to LONGEST_TEXT and without line breaks."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:LONGEST_TEXT])
    return shown if len(text) <= LONGEST_TEXT else f"{shown}\u2026"


def plural(count: int, noun: str) -> str:
    """1 user, 2,000 users."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def figures_table(columns: Iterable[Sequence[str]], *, names: Collection[str]) -> Table:
    """A table of columns, each a title and its cells. Titles wrap, and so do long cells of `names`; figures do not."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    columns = list(columns)
    for title, *texts in columns:
        width = max(map(len, [*title.split(), *texts]))
        width = min(width, MOST_NAME_CHARS) if title in names else width
        justify: Literal["left", "right"] = "left" if title in names else "right"
        table.add_column("\n".join(wrap(title, width)), justify=justify, overflow="fold", width=width)
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(Text, row))
    return table


@dataclass(frozen=True, slots=True)
class Column:
    """How one figure of a row is shown, divided by `unit`; an optional column goes if no row has a value.

    `value` is the path of a field, as "disk.read_bytes", or a function; `form` is a format specification or a function.
    """

    title: str
    value: str | Callable[[Any], Any]
    form: str | Callable[[Any], str] = ""
    unit: int = 1
    is_optional: bool = False

    def of(self, row: Any) -> Any:
        if not isinstance(self.value, str):
            return self.value(row)
        for name in self.value.split("."):
            row = None if row is None else getattr(row, name)
        return row

    def cell(self, value: Any) -> str:
        if value is None:
            return "-"
        if not isinstance(self.form, str):
            return self.form(value)
        if value != value:
            return "unknown"
        return format(value if self.unit == 1 else value / self.unit, self.form)


def cells(columns: Iterable[Column], rows: Iterable[Any]) -> list[list[str]]:
    """The columns as text, each with its title first, without optional columns that have no value."""
    rows = list(rows)
    found = [(column, [column.of(row) for row in rows]) for column in columns]
    return [
        [column.title, *map(column.cell, values)]
        for column, values in found
        if not column.is_optional or any(value is not None for value in values)
    ]


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def picture_format(path: Path) -> str:
    """The format that a file's ending names; PNG if there is no ending."""
    return path.suffix.lower().removeprefix(".") or "png"


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure without pyplot: nothing global is set, and no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def picture_bytes(figure: Figure, file_format: str = "png") -> bytes:
    """Draw a figure. Equal figures give equal bytes: no date, and fixed ids."""
    from matplotlib import rc_context

    image = io.BytesIO()
    with rc_context({"svg.hashsalt": "radixcache"}):
        metadata = {"Date": None} if file_format == "svg" else None
        figure.savefig(image, format=file_format, dpi=DPI, metadata=metadata)
    return image.getvalue()
