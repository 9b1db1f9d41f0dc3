"""What commands say when something is not as it should be: one line on stderr, and an exit code.

Light on purpose: nothing here imports MLX, numpy or matplotlib.
"""

import sys
from pathlib import Path

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Wide enough for tables where the output is a file or a pipe, which have no width of their own.
PIPE_COLUMNS = 120


class UsageError(Exception):
    """Something the user can put right; the message is one line."""


def require(holds: bool, message: str) -> None:
    """Raise UsageError unless the condition holds."""
    if not holds:
        raise UsageError(message)


def require_writable_files(*paths: Path | None) -> None:
    """Find out before a long run that its result could not be written."""
    from runner.report import require_writable

    for path in paths:
        if path is not None:
            try:
                require_writable(path)
            except OSError as error:
                raise UsageError(f"{path}: cannot be written ({error.strerror}). Name another file.") from error


def say(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print(" ".join(message.split()), file=sys.stderr)
