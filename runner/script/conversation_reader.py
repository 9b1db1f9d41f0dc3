"""Read conversations from files, whatever known format each is in.

A bad record is an error that names file, line, what was found and what was wanted. With `skip_bad` the same line goes
to `ReadResult.skipped` and reading goes on. A file that cannot be read at all is always an error.

JSON records of a text with the line each begins at: one per line (JSONL), or the values of one document.

A bad record comes out as a `ConversationError` in its place, so that the caller decides whether to stop or to count it
and go on. Lines count from 1. After a syntax error inside a JSON document nothing tells where its next record begins:
the error is the last thing that comes out. A JSONL text goes on with its next line.

The conversations that `radixcache replay` uses when none are given.

Four applications, each with its own system prompt (two with a tool list, which the prompt also spells out, since some
chat templates leave tools away) and two users. Beside plain turns there are edited and regenerated ones, so that the
conversations part after the system prompt, inside and after the first user turn, in the middle, and at the last turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from os import PathLike
from pathlib import Path
from typing import Any

from runner.files import files_below
from runner.script.conversation import Conversation, ConversationError
from runner.script.conversation_formats import TOOL_FILES, Origin, expanded, is_message, parse_record
from runner.text import printable

# A line longer than this is no conversation that fits a model's context, and parsing it takes many times its memory.
MAX_RECORD_CHARS = 64 << 20
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class JsonRecord:
    """One JSON value and the line where it begins."""

    line: int
    value: Any


@dataclass(frozen=True)
class Document:
    """A text's records; `is_array` where they are the elements of one JSON array."""

    is_array: bool
    records: Iterator[JsonRecord | ConversationError]


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


def _read_lines(text: str, path: str) -> Iterator[JsonRecord | ConversationError]:
    # Not splitlines: JSON text may hold U+2028 and other ends of line that end no record.
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield _read_value(content.strip(), f"{path}:{line}", line)


def _read_single(text: str, start: int, path: str) -> Iterator[JsonRecord | ConversationError]:
    line = 1 + text.count("\n", 0, start)
    record, end = _decode(text, start, f"{path}:{line}", path, line)
    after = _skip_blank(text, end)
    if isinstance(record, JsonRecord) and after < len(text):
        where = f"{path}:{line + text.count(chr(10), start, after)}"
        yield ConversationError(f"{where}: text after the end of the JSON value; wanted one value, or one per line.")
    else:
        yield record


def _read_value(content: str, where: str, line: int) -> JsonRecord | ConversationError:
    if len(content) > MAX_RECORD_CHARS:
        return ConversationError(f"{where}: the line has {len(content)} characters; wanted at most {MAX_RECORD_CHARS}.")
    record, end = _decode(content, 0, where, None, line)
    if isinstance(record, JsonRecord) and end < len(content):
        return ConversationError(
            f"{where}: text after the end of the JSON value (column {end + 1}); wanted one per line."
        )
    return record


def _read_array(text: str, start: int, path: str) -> Iterator[JsonRecord | ConversationError]:
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


def _decode(
    text: str, start: int, where: str, path: str | None, line: int
) -> tuple[JsonRecord | ConversationError, int]:
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
    return JsonRecord(line, value), end


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at


SUFFIXES = (".json", ".jsonl", ".ndjson", ".traj")


@dataclass(frozen=True)
class ReadResult:
    """What was read, in the order of the files, and one line for each record that was left out."""

    conversations: list[Conversation]
    skipped: list[str]


def read_conversations(*paths: str | PathLike[str], skip_bad: bool = False) -> ReadResult:
    """Read every conversation of the files.

    Known formats, told by content: OpenAI messages as JSON (an object with `messages`, a list of such, or one bare list
    of messages) or JSONL (one conversation per line, with `tools`, `user`, `id` and `first_turn` if wanted); ShareGPT
    JSON; tau-bench trajectories, with the tool list that lies beside them; mt-bench questions; SGD dialogues; .traj
    files of SWE-agent; InterCode logs.

    Args:
        paths: files, and folders, which are read with those below them.
        skip_bad: leave bad records out, and say so in the result, instead of raising.

    Raises:
        ConversationError: a file cannot be read, a record is bad and `skip_bad` is off, or nothing is left.
        ValueError: no path was given.
    """
    if not paths:
        raise ValueError("no conversation file was given; wanted at least one path.")
    conversations: list[Conversation] = []
    skipped: list[str] = []
    sources: dict[str, str] = {}
    for path, label in _labels([file for each in paths for file in _files(Path(each))]):
        for item in _read_file(path, label, skip_bad):
            found = _distinct(item, sources, path) if isinstance(item, Conversation) else item
            if isinstance(found, Conversation):
                conversations.append(found)
            elif skip_bad:
                skipped.append(str(found))
            else:
                raise found
    if not conversations:
        first = f"; the first of {len(skipped)} skipped: {skipped[0]}" if skipped else "."
        raise ConversationError(f"{', '.join(map(str, paths))}: no conversation found{first}")
    return ReadResult(conversations, skipped)


def _files(path: Path) -> list[Path]:
    """The path itself, or the files of conversations in a folder and in those below it, by name."""
    if not path.is_dir():
        return [path]
    try:
        files = files_below(path, SUFFIXES)
    except OSError as error:
        raise ConversationError(f"{path}: cannot be read ({error.strerror}); wanted conversations.") from error
    files = [file for file in files if file.name not in TOOL_FILES]
    if not files:
        raise ConversationError(f"{path}: no {', '.join(SUFFIXES)} file in the folder; wanted conversations.")
    return files


def _labels(paths: list[Path]) -> list[tuple[Path, str]]:
    """Each path with what its conversations are called where they have no id: as short as is distinct."""
    stems = [path.stem for path in paths]
    return [(path, stem if stems.count(stem) == 1 else str(path)) for path, stem in zip(paths, stems, strict=True)]


def _distinct(conversation: Conversation, sources: dict[str, str], path: Path) -> Conversation | ConversationError:
    """The conversation, unless its id was seen before."""
    line = conversation.source.rpartition(":")[2]
    earlier = sources.setdefault(conversation.conversation_id, f"{path}:{line}")
    if earlier == f"{path}:{line}":
        return conversation
    return ConversationError(
        f"{path}:{line}: the id {conversation.conversation_id!r} was already used at {earlier}; wanted distinct ids."
    )


def _read_file(path: Path, label: str, skip_bad: bool) -> Iterator[Conversation | ConversationError]:
    document = parse_document(_read_text(path, skip_bad), str(path))
    records: Iterable[JsonRecord | ConversationError] = document.records
    if document.is_array:
        records = _conversations_of_array(list(records))
    every = (each for record in records for each in _expanded(record))
    for index, record in enumerate(every):
        yield _parse(record, Origin(path, getattr(record, "line", 0), f"{printable(label)}#{index}"))


def _expanded(record: JsonRecord | ConversationError) -> list[JsonRecord] | list[ConversationError]:
    if isinstance(record, ConversationError):
        return [record]
    return [JsonRecord(record.line, value) for value in expanded(record.value)]


def _conversations_of_array(elements: list[JsonRecord | ConversationError]) -> list[JsonRecord | ConversationError]:
    """A JSON array is a list of conversations, or the messages of a single one."""
    records = [element for element in elements if isinstance(element, JsonRecord)]
    if not any(is_message(record.value) for record in records):
        return elements
    # Where a message is lost, the conversation is.
    errors = [element for element in elements if isinstance(element, ConversationError)]
    return [errors[0] if errors else JsonRecord(records[0].line, [record.value for record in records])]


def _parse(record: JsonRecord | ConversationError, origin: Origin) -> Conversation | ConversationError:
    if isinstance(record, ConversationError):
        return record
    try:
        return parse_record(record.value, origin)
    except ConversationError as error:
        return error


def _read_text(path: Path, skip_bad: bool) -> str:
    """The file as text; with `skip_bad`, bytes that are not UTF-8 become lone surrogates, which spoil one record."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConversationError(
            f"{path}: cannot be read ({error.strerror}); wanted a file of conversations."
        ) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if skip_bad:
            return content.decode("utf-8-sig", errors="surrogateescape")
        line = content.count(b"\n", 0, error.start) + 1
        raise ConversationError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8; wanted UTF-8 text."
        ) from None


_FILE_NAME = "builtin.jsonl"


def builtin_conversations() -> list[Conversation]:
    """Read the built-in conversations, in the order of their users."""
    with as_file(files(__package__) / _FILE_NAME) as path:
        return read_conversations(path).conversations
