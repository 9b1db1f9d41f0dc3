"""Files that are written whole or not at all, files below a folder, and JSON. This file never imports MLX."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

#: Files that Claude Code puts beside sessions, and lists of tools beside tau-bench's trajectories.
NO_INPUT = ("agent-*.meta.json", "sessions-index.json", "airline_tools.json", "retail_tools.json")


def require_writable(path: Path) -> None:
    """Check before a long run that a file can be written at its end. OSError: it cannot, with reason and path."""
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder; wanted a file", str(path))
    with _naming(path):
        if not _is_special(path):
            handle, probe = _neighbour(path)
            os.close(handle)
            os.unlink(probe)
        elif not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a neighbour, then rename it. A link stays a link; a FIFO or a device is written to directly."""
    with _naming(path):
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
def _naming(path: Path) -> Iterator[None]:
    """Make every OSError name this path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files with these endings, sorted, without hidden ones. OSError: the folder cannot be read."""
    next(folder.iterdir(), None)  # rglob skips a folder that it cannot read
    found = (path for path in folder.rglob("*") if path.name.endswith(tuple(suffixes)) and path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def input_files(path: Path, suffixes: Sequence[str], wanted: str, error_class: type[Exception]) -> list[Path]:
    """The path itself, or the files below a folder with these endings, packed or not. `error_class`: there is none."""
    try:
        if not path.is_dir():
            return [path]
        found = files_below(path, [*suffixes, *(f"{suffix}.gz" for suffix in suffixes)])
    except OSError as error:
        raise error_class(f"{path}: cannot be read ({error.strerror}); wanted {wanted}.") from error
    if found := [file for file in found if not any(map(file.match, NO_INPUT))]:
        return found
    raise error_class(f"{path}: no {', '.join(suffixes)} file in the folder; wanted {wanted}.")


#: What reading a file that `open_unpacked` opened raises, if it cannot be read or unpacked.
UNREADABLE = (OSError, EOFError, zlib.error)


def open_unpacked(path: Path) -> gzip.GzipFile | BufferedReader:
    """Open a regular file to read its bytes, those of gzip unpacked."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else path.open("rb")


def read_unpacked(path: Path, most_bytes: int) -> bytearray:
    """The bytes of a file, those of gzip unpacked: all, or the first `most_bytes` and some more. Raises UNREADABLE."""
    content = bytearray()
    with path.open("rb") as raw, gzip.open(raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw as file:
        # In pieces: a read of so many bytes would allocate all of them.
        while len(content) <= most_bytes and (more := file.read(1 << 16)):
            content += more
    return content


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
