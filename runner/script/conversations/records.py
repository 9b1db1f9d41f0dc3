"""JSON records of a text with the line each begins at: one per line (JSONL), or the values of one document.

A bad record comes out as a `ConversationError` in its place, so that the caller decides whether to stop or to count it
and go on. Lines count from 1. After a syntax error inside a JSON document nothing tells where its next record begins:
the error is the last thing that comes out. A JSONL text goes on with its next line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from runner.script.conversations.conversation import ConversationError

# A line longer than this is no conversation that fits a model's context, and parsing it takes many times its memory.
MAX_RECORD_CHARS = 64 << 20
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class Record:
    """One JSON value and the line where it begins."""

    line: int
    value: Any


@dataclass(frozen=True)
class Document:
    """A text's records; `is_array` where they are the elements of one JSON array."""

    is_array: bool
    records: Iterator[Record | ConversationError]


def parse_document(text: str, path: str) -> Document:
    """Tell JSONL from a JSON document by what is in it, and split it into records.

    Raises:
        ConversationError: there is nothing in the text.
    """
    start = _skip_blank(text, 0)
    if start == len(text):
        raise ConversationError(f"{path}: the file is empty; wanted conversations as JSON or JSONL.")
    if _is_jsonl(text, start, path):
        return Document(is_array=False, records=_read_lines(text, path))
    if text[start] == "[":
        return Document(is_array=True, records=_read_array(text, start, path))
    return Document(is_array=False, records=_read_single(text, start, path))


def _is_jsonl(text: str, start: int, path: str) -> bool:
    """Whether each line is a record of its own.

    So it is when the first line is a whole value and more lines follow. A first line that is broken says little: an
    indented document breaks off there too, but has no whole object at the beginning of a line.
    """
    first, _, rest = text[start:].partition("\n")
    if not rest.strip():
        return False
    if _parses(first):
        return True
    if first.startswith("[") or first.rstrip() == "{" or _parses(text):
        return False
    return path.endswith((".jsonl", ".ndjson")) or any(_is_object(line) for line in rest.split("\n"))


def _is_object(line: str) -> bool:
    return line.startswith("{") and _parses(line)


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_lines(text: str, path: str) -> Iterator[Record | ConversationError]:
    # Not splitlines: JSON text may hold U+2028 and other ends of line that end no record.
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield _read_value(content.strip(), f"{path}:{line}", line)


def _read_single(text: str, start: int, path: str) -> Iterator[Record | ConversationError]:
    line = 1 + text.count("\n", 0, start)
    record, end = _decode(text, start, f"{path}:{line}", path, line)
    after = _skip_blank(text, end)
    if isinstance(record, Record) and after < len(text):
        where = f"{path}:{line + text.count(chr(10), start, after)}"
        yield ConversationError(f"{where}: text after the end of the JSON value; wanted one value, or one per line.")
    else:
        yield record


def _read_value(content: str, where: str, line: int) -> Record | ConversationError:
    if len(content) > MAX_RECORD_CHARS:
        return ConversationError(f"{where}: the line has {len(content)} characters; wanted at most {MAX_RECORD_CHARS}.")
    record, end = _decode(content, 0, where, None, line)
    if isinstance(record, Record) and end < len(content):
        return ConversationError(
            f"{where}: text after the end of the JSON value (column {end + 1}); wanted one per line."
        )
    return record


def _read_array(text: str, start: int, path: str) -> Iterator[Record | ConversationError]:
    lines = _LineCounter(text)
    at = _skip_blank(text, start + 1)
    more = text[at : at + 1] != "]"
    while more:
        line = lines.line_at(at)
        record, at = _decode(text, at, f"{path}:{line}", path, line)
        yield record
        if isinstance(record, ConversationError) and at == len(text):
            return
        at = _skip_blank(text, at)
        more = text[at : at + 1] == ","
        if more:
            at = _skip_blank(text, at + 1)
    if text[at : at + 1] != "]":
        found = f"found {text[at]!r}" if at < len(text) else "the file ends"
        yield ConversationError(f"{path}:{lines.line_at(at)}: not JSON ({found} in an array; wanted ',' or ']').")
    elif (after := _skip_blank(text, at + 1)) < len(text):
        yield ConversationError(f"{path}:{lines.line_at(after)}: text after the end of the JSON array; wanted none.")


class _LineCounter:
    """The line of each offset, for offsets that ascend."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._offset = 0
        self._line = 1

    def line_at(self, offset: int) -> int:
        self._line += self._text.count("\n", self._offset, offset)
        self._offset = offset
        return self._line


def _decode(text: str, start: int, where: str, path: str | None, line: int) -> tuple[Record | ConversationError, int]:
    """Decode the value at `start`.

    Args:
        path: of the document, where a syntax error is to name its own line; None where `text` is one line.

    Returns:
        The record or what is wrong with it, and where to read on: the text's end after a syntax error.
    """
    constants: list[str] = []
    try:
        value, end = json.JSONDecoder(parse_constant=constants.append).raw_decode(text, start)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}" if path else where
        return ConversationError(f"{place}: not JSON ({error.msg} at column {error.colno})."), len(text)
    except RecursionError:
        return ConversationError(f"{where}: nested too deeply; wanted a conversation."), len(text)
    except ValueError as error:  # an integer of thousands of digits
        return ConversationError(f"{where}: not usable JSON ({error})."), len(text)
    if constants:
        return ConversationError(f"{where}: holds {constants[0]}, which is not JSON; wanted a number or null."), end
    return Record(line, value), end


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at
