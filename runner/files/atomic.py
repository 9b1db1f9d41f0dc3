"""Files that are complete or not there. This file never imports MLX."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
