"""Files that are written whole or not at all, input files, and the JSON records in them. This file never imports MLX.

Records are one per line (JSONL), or the values of a document. An input file may be packed with gzip. A file that cannot
be read, unpacked or decoded is an InputError. It names the file, and the line behind the last line that could be read;
there is no line if the system refuses the file. A record that cannot be parsed is an InputError in the place of its
value. A document ends at a syntax error.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from runner.text import shown

TOOL_FILES = ("airline_tools.json", "retail_tools.json")  # tau-bench's lists of tools, beside trajectories
NO_INPUT = ("agent-*.meta.json", "sessions-index.json", *TOOL_FILES)  # Claude Code has the others beside sessions
MOST_RECORD_BYTES = 64 << 20  # a longer record fits no model's context, and parsing it takes many times its memory
BLANK = " \t\r\n"
#: Blanks, and the mark that some editors put before UTF-8.
BLANK_BYTES = b" \t\r\n\xef\xbb\xbf"
_NOT_BLANK = re.compile(f"[^{BLANK}]")
_PIECE_BYTES = 1 << 16


class InputError(ValueError):
    """An input that is not what was wanted: where, what was found, what was wanted, on one line."""


class Record(NamedTuple):
    """A JSON value of a file, or an InputError in its place, and the line where it begins, from 1.

    `default_id`: the id of what the value holds, if the value has none.
    """

    value: Any
    path: Path
    line: int
    default_id: str = ""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def expect(holds: bool, found: str, value: Any, wanted: str) -> None:
    """Raise InputError "FOUND VALUE; wanted WANTED." unless it holds."""
    if not holds:
        raise InputError(f"{found} {shown(value)}; wanted {wanted}.")


def note_id(name: str, where: str, known: dict[str, str]) -> None:
    """Add an id, and where it is, to the known ones. InputError: it is known."""
    if name in known:
        raise InputError(f"{where}: the id {name!r} was already used at {known[name]}; wanted distinct ids.")
    known[name] = where


def nothing_found(paths: Iterable[Any], wanted: str, skipped: Sequence[str]) -> InputError:
    first = f"; the first of {len(skipped)} skipped: {skipped[0]}" if skipped else "."
    return InputError(f"{', '.join(map(str, paths))}: no {wanted} found{first}")


def require_writable(path: Path) -> None:
    """Check before a long run that a file can be written at its end. OSError: it cannot, with reason and path."""
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder; wanted a file", str(path))
    with _name_path(path):
        if not _is_special(path):
            handle, probe = _neighbour(path)
            os.close(handle)
            os.unlink(probe)
        elif not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a neighbour, then rename it. A link stays a link; a FIFO or a device is written to directly."""
    with _name_path(path):
        if _is_special(path):
            path.write_bytes(content)
            return
        handle, partial = _neighbour(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # mkstemp makes files that only their owner can read.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(partial, 0o666 & ~mask)
            os.replace(partial, os.path.realpath(path))
        except BaseException:
            os.unlink(partial)
            raise


def _is_special(path: Path) -> bool:
    """Whether the path leads to a FIFO or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _neighbour(path: Path) -> tuple[int, str]:
    """A new file beside the one that a path leads to: its handle, open for writing, and its name."""
    folder, name = os.path.split(os.path.realpath(path))
    return tempfile.mkstemp(dir=folder, prefix=f".{name}.")


@contextmanager
def _name_path(path: Path) -> Iterator[None]:
    """Make every OSError name this path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def read_json(path: Path, wanted: str, error_class: type[Exception]) -> Any:
    """Read a JSON file; `error_class` is raised, and says what was wanted, if that fails."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise error_class(f"{path}: cannot be read ({error.strerror}); wanted {wanted}.") from error
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise error_class(f"{path}:{line}: not JSON ({error}); wanted {wanted}.") from error


def json_bytes(document: dict[str, Any]) -> bytes:
    """A document as JSON. Bytes of file names that are not UTF-8 are escaped."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, document: dict[str, Any]) -> None:
    write_atomically(path, json_bytes(document))


def input_files(path: Path, suffixes: Sequence[str], wanted: str) -> list[Path]:
    """The path itself, or the files below a folder with these endings, packed or not, sorted, without hidden ones.

    InputError: there is none, or a folder cannot be read.
    """
    endings, found = (*suffixes, *(f"{suffix}.gz" for suffix in suffixes)), list[Path]()

    def refuse(error: OSError) -> None:
        raise error

    try:
        if not path.is_dir():
            return [path]
        for parent, folders, names in os.walk(path, onerror=refuse):
            folders[:] = (name for name in folders if not name.startswith("."))
            found += (Path(parent, name) for name in names if name.endswith(endings) and not name.startswith("."))
        found = sorted(file for file in found if file.is_file() and not any(map(file.match, NO_INPUT)))
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}); wanted {wanted}.") from error
    if not found:
        raise InputError(f"{path}: no {', '.join(suffixes)} file in the folder; wanted {wanted}.")
    return found


def read_beginning(path: Path, wanted: str, most_bytes: int) -> bytearray:
    """The bytes of a file, those of gzip unpacked: all, or the first `most_bytes` and some more."""
    content = bytearray()
    for _, piece in _pieces(path, wanted, _PIECE_BYTES, in_lines=False):
        content += piece
        if len(content) > most_bytes:
            break
    return content


def read_text(path: Path, wanted: str, most_bytes: int = MOST_RECORD_BYTES, errors: str = "strict") -> str:
    content = read_beginning(path, wanted, most_bytes)
    if len(content) > most_bytes:
        raise InputError(f"{path}: has more than {most_bytes:,} bytes; wanted {wanted} of at most so many.")
    return _decode(content, path, errors=errors)


def read_objects(path: Path, wanted: str) -> Iterator[Record]:
    """The objects of a JSONL file, one at a time, or those of an array of at most MOST_RECORD_BYTES."""
    for record in _read_records(path, wanted):
        if not isinstance(record.value, dict | InputError):
            error = InputError(f"{record.where}: found {shown(record.value)}; wanted an object.")
            record = record._replace(value=error)
        yield record


def _read_records(path: Path, wanted: str) -> Iterator[Record]:
    if read_beginning(path, wanted, 0).lstrip(BLANK_BYTES).startswith(b"["):
        yield from document_records(read_text(path, wanted), path)
        return
    is_rest = False
    for line, content in _pieces(path, wanted, MOST_RECORD_BYTES + 1, in_lines=True):
        if not is_rest:
            try:
                yield from line_records(_decode(content, path, line), path, line)
            except InputError as error:
                yield Record(error, path, line)
        is_rest = not content.endswith(b"\n")


def line_records(text: str, path: Path, line: int) -> Iterator[Record]:
    """The record of a line of a JSONL file; none if the line is blank."""
    where = f"{path}:{line}"
    if len(text) > MOST_RECORD_BYTES:
        error = f"{where}: the line is too long; wanted at most {MOST_RECORD_BYTES:,} bytes."
        yield Record(InputError(error), path, line)
    elif text := text.strip():
        value, end = _parse(text, 0, where)
        if end < len(text) and not isinstance(value, InputError):
            error = f"{where}: text after the end of the JSON value (column {end + 1}); wanted one per line."
            value = InputError(error)
        yield Record(value, path, line)


def document_records(text: str, path: Path, start: int | None = None) -> Iterator[Record]:
    """The values of the array that begins at `start`, or the values from there on; up to a syntax error.

    Without a start, the text begins behind its blanks.
    """
    start = len(text) - len(text.lstrip(BLANK)) if start is None else start
    closing = "]" if text[start] == "[" else ""
    line, at = 1, 0

    def next_char(offset: int) -> str:
        """Move behind the blanks from `offset` on. Returns the character there, "" at the end."""
        nonlocal line, at
        found = _NOT_BLANK.search(text, offset)
        before, at = at, found.start() if found else len(text)
        line += text.count("\n", before, at)
        return text[at : at + 1]

    has_more = (char := next_char(start + len(closing))) != closing
    while has_more:
        value, end = _parse(text, at, f"{path}:{line}", path)
        yield Record(value, path, line)
        if isinstance(value, InputError):
            return
        char = next_char(end)
        has_more = char == "," if closing else char != ""
        if closing and has_more:
            next_char(at + 1)
    if closing and char != closing:
        found = f"found {char!r}" if char else "the file ends"
        yield Record(InputError(f"{path}:{line}: not JSON ({found} in an array; wanted ',' or ']')."), path, line)
    elif closing and next_char(at + 1):
        yield Record(InputError(f"{path}:{line}: text after the end of the JSON array; wanted none."), path, line)


def is_jsonl(text: str, start: int, path: Path) -> bool:
    """Whether each line is a record: the first line is a whole value, or, if it is broken, another line is."""
    first, _, rest = text[start:].partition("\n")
    if not rest.strip():
        return False
    if _parses(first):
        return True
    if first.startswith("[") or first.rstrip() == "{" or _parses(text):
        return False
    lines = rest.split("\n")
    return path.name.endswith((".jsonl", ".ndjson")) or any(line.startswith("{") and _parses(line) for line in lines)


def _pieces(path: Path, wanted: str, most_bytes: int, *, in_lines: bool) -> Iterator[tuple[int, bytes]]:
    """The bytes of a file, unpacked, in pieces of at most `most_bytes` or a line, each with its first line's number."""
    line = 1
    try:
        with path.open("rb") as raw, gzip.open(raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw as file:
            # Not read: it loses what it could unpack before an error.
            read = file.readline if in_lines else file.read1
            while piece := read(most_bytes):
                yield line, piece
                line += piece.count(b"\n")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None)
        where = f"{path}" if reason else f"{path}:{line}"
        raise InputError(f"{where}: cannot be read ({reason or error}); wanted {wanted}.") from error


def _decode(content: bytes | bytearray, path: Path, line: int = 1, errors: str = "strict") -> str:
    try:
        return content.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        found = f"byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8"
        raise InputError(f"{path}:{line}: {found}; wanted UTF-8 text.") from None


def _parses(text: str) -> bool:
    return not isinstance(_parse(text, 0, "")[0], InputError)


def _parse(text: str, start: int, where: str, path: Path | None = None) -> tuple[Any, int]:
    """The value at `start` or an InputError, and its end.

    With the `path` of a document, a syntax error names its own line.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}" if path else where
        return InputError(f"{place}: not JSON ({error.msg} at column {error.colno})."), len(text)
    except RecursionError:
        return InputError(f"{where}: nested too deeply; wanted fewer levels."), len(text)
    except ValueError as error:  # an integer of thousands of digits
        return InputError(f"{where}: not usable JSON ({error})."), len(text)


_DECODER = json.JSONDecoder()
