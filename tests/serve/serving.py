"""A real server, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
#: Against hanging alone.
GUARD_S = 120


@dataclass
class ServedProcess:
    """`radixcache serve`, and where it is reached. `log` is what it says on stderr."""

    url: str
    process: subprocess.Popen[str]
    _stderr: IO[str]

    @property
    def log(self) -> str:
        return Path(self._stderr.name).read_text()

    def wait(self) -> int:
        return self.process.wait(GUARD_S)


@contextmanager
def serving(*arguments: object, model: str = "tiny") -> Iterator[ServedProcess]:
    """Run `radixcache serve` on a free port, from the time it is ready until the block's end."""
    command = [sys.executable, "-m", "radixcache", "serve", "--model", model, "--port", "0", *map(str, arguments)]
    with (
        tempfile.NamedTemporaryFile("w+") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        try:
            ready = re.search(r"at (http://\S+)", process.stdout.readline())
            served = ServedProcess(ready[1] if ready else "", process, stderr)
            assert ready, served.log
            yield served
        finally:
            process.kill()
