"""Run mlx_lm.server or radixcache serve in a process, on a port that the system chooses."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 120.0, 60.0

#: mlx_lm.server prints the requested port, not the real one. This script prints the real URL, then runs its main.
MLX_LM_SERVER = """
import runner
import http.server, sys
import mlx_lm.server
{change}
activate = http.server.HTTPServer.server_activate
def announced(server):
    activate(server)
    print(f"http://127.0.0.1:{{server.server_port}}", flush=True)
http.server.HTTPServer.server_activate = announced
sys.argv = ["mlx_lm.server", "--port", "0", *sys.argv[1:]]
mlx_lm.server.main()
"""


class ServerProcess:
    """A server that runs inside a `with` block. The end of the block ends the process.

    Args:
        command: arguments for Python.
        log: file for its output, which includes its URL.

    Attributes:
        url: http://127.0.0.1:PORT.

    Raises:
        RuntimeError: the server ended, or printed no URL within two minutes; with its output.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = [sys.executable, *command], log
        self.url = ""

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        until = time.monotonic() + START_S
        while True:
            is_over = self._process.poll() is not None
            if found := re.search(r"http://127\.0\.0\.1:[1-9]\d*(?=\s)", self.printed):
                self.url = found[0]
                return self
            if is_over or time.monotonic() > until:
                self._end()
                raise RuntimeError(f"{self._command} did not start:\n{self.printed}")
            time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def _end(self) -> None:
        # Not SIGINT, the only signal that mlx_lm.server handles: a background process may ignore SIGINT.
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def mlx_lm_server(model: Path, log: Path, *options: str, change: str = "") -> ServerProcess:
    """Return mlx_lm.server on a model folder; `change` is a statement that runs before the start."""
    return ServerProcess(["-c", MLX_LM_SERVER.format(change=change), "--model", str(model), *options], log)


def radixcache_serve(model: Path, log: Path, *options: str) -> ServerProcess:
    return ServerProcess(["-m", "radixcache", "serve", "--port", "0", "--model", str(model), *options], log)
