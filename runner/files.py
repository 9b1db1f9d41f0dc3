"""Files that are complete or not there. This file never imports MLX.

Folders: the files in one and in those below it. This file never imports MLX.

JSON files: read where somebody names one, written whole. This file never imports MLX.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def require_writable(path: Path) -> None:
    """Find out now whether the file could be written at the end of a long run.

    Raises:
        OSError: it could not; `strerror` and `filename` say why.
    """
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder; wanted a file", str(path))
    with _named(path):
        if _is_special(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
            return
        handle, probe = _neighbour(path)
        os.close(handle)
        os.unlink(probe)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is complete or not there: into a neighbour first, then renamed.

    A link stays one, and what it leads to is replaced. What is no regular file, such as a FIFO, is written to instead.

    Raises:
        OSError: it could not be written; `strerror` and `filename` say why.
    """
    with _named(path):
        if _is_special(path):
            path.write_bytes(content)
            return
        handle, partial = _neighbour(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(partial, 0o666 & ~_umask())
            os.replace(partial, os.path.realpath(path))
        except BaseException:
            os.unlink(partial)
            raise


def _is_special(path: Path) -> bool:
    """Whether a FIFO or a device is there, perhaps behind a link: it is written to, and not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _neighbour(path: Path) -> tuple[int, str]:
    """A new file beside the one that a path leads to, open for writing, and its name."""
    folder, name = os.path.split(os.path.realpath(path))
    return tempfile.mkstemp(dir=folder, prefix=f".{name}.")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an OSError name the file that was asked for, whatever it was that failed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _umask() -> int:
    """The process's umask: mkstemp makes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files with one of these endings, sorted, without what is hidden. OSError: the folder cannot be read."""
    next(folder.iterdir(), None)  # rglob passes over what it may not read
    found = (path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def read_json(path: Path, wanted: str, error_class: type[Exception]) -> Any:
    """The value in a file.

    Raises:
        error_class: it cannot be read, or is not JSON; the message says what was wanted.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise error_class(f"{path}: cannot be read ({error.strerror}); wanted {wanted}.") from error
    except (ValueError, RecursionError) as error:
        raise error_class(f"{path}: not JSON ({error}); wanted {wanted}.") from error


def json_bytes(document: dict[str, Any]) -> bytes:
    """A document as JSON. Names of files may hold bytes that are no UTF-8: they are spelled as JSON spells them."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document as JSON, atomically."""
    write_atomically(path, json_bytes(document))
