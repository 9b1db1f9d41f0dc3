"""A value as an error message shows it.

Tables for people.

How bytes and counts are shown.

Progress where no bar can be drawn: a line on stderr now and then. This file never imports MLX.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.table import Table

_SHOWN_CHARS = 40


def printable(text: str) -> str:
    """A text that every file takes: names of files may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: Any) -> str:
    """A value as an error message shows it: its type, and a short beginning."""
    if value is None:
        return "missing"
    return f"{type(value).__name__} {shortened(repr(value), _SHOWN_CHARS)}"


def shortened(text: str, length_chars: int) -> str:
    """A text of at most this length that fits on one line of any terminal."""
    text = " ".join(printable(text).split())
    return text if len(text) <= length_chars else text[: length_chars - 3] + "..."


def table_of_figures(first: str, *figures: str) -> Table:
    """A table with these headers: names in the first column, figures in the others."""
    table = Table()
    table.add_column(first)
    for header in figures:
        table.add_column(header, justify="right")
    return table


MIB = 1 << 20
GIB = 1 << 30


def plural(count: int, noun: str) -> str:
    """1 user, 2,000 users."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


FIRST_AFTER_S, INTERVAL_S = 10.0, 30.0


class ProgressLines:
    """Says how far something is, seldom; nothing on a terminal, where a bar does."""

    def __init__(self) -> None:
        self._next_s = float("inf") if sys.stderr.isatty() else time.monotonic() + FIRST_AFTER_S

    def tell(self, text: Callable[[], str]) -> None:
        """Say it if it is time to."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            with suppress(OSError):
                print(text(), file=sys.stderr, flush=True)
