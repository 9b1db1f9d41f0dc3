"""Lines of a trace file as JSON, and what to do with a bad one: stop, or count it and go on.

A file is read line by line, so a trace may be larger than memory. Lines count from 1.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.files.excerpt import shown
from runner.traces.request import TraceError

#: Numbers up to here are exact as floats.
MOST_EXACT = 1 << 53
MOST_BLOCK_TOKENS = 1 << 31


class BadLines:
    """Where readers take what they cannot use. Without `skip_bad` the first one ends the reading."""

    def __init__(self, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self.skipped: list[str] = []

    def add(self, error: TraceError) -> None:
        """Count a bad line.

        Raises:
            TraceError: the same, where nothing is skipped.
        """
        if not self._skip_bad:
            raise error
        self.skipped.append(str(error))


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its JSON object, or what is wrong with it."""

    where: str
    value: Any
    error: TraceError | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of a JSONL file that is not blank.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                if content.strip():
                    yield _parse(content, f"{path}:{number}")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> TraceError:
    """The one line for a file that cannot be read."""
    return TraceError(f"{path}: cannot be read ({error.strerror}); wanted a trace.")


def whole_number(record: dict[str, Any], name: str, where: str, *, at_least: int = 0, at_most: int = MOST_EXACT) -> int:
    """A field that holds a whole number.

    Raises:
        TraceError: it holds something else, too little or too much.
    """
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted a whole number, {at_least} or more.")
    if value > at_most:
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted at most {at_most:,}.")
    return value


def seconds(record: dict[str, Any], name: str, where: str) -> float:
    """A field that holds seconds, 0 or more.

    Raises:
        TraceError: it holds something else.
    """
    value = record.get(name)
    # Comparisons with NaN are False, so it ends here too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TraceError(f"{where}: {name} is {shown(value)}; wanted seconds, 0 or more.")
    return float(value)


def block_ids(record: dict[str, Any], where: str) -> list[int]:
    """The field `hash_ids`: a list of whole numbers.

    Raises:
        TraceError: it holds something else.
    """
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block_id) is int for block_id in ids):
        raise TraceError(f"{where}: hash_ids is {shown(ids)}; wanted a list of whole numbers.")
    return ids


def _parse(content: bytes, where: str) -> Line:
    try:
        value = json.loads(content)
    except RecursionError:
        return Line(where, None, TraceError(f"{where}: nested too deeply; wanted a request."))
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8"
        return Line(where, None, TraceError(f"{where}: {found}; wanted one JSON object per line."))
    except ValueError as error:
        return Line(where, None, TraceError(f"{where}: not JSON ({error}); wanted one object per line."))
    if not isinstance(value, dict):
        return Line(where, None, TraceError(f"{where}: found {shown(value)}; wanted an object."))
    return Line(where, value)
