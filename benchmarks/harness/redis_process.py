"""A private redis-server or valkey-server on a Unix socket in its own folder."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

#: Starting on two busy cores is slow.
PATIENCE_S = 60.0


class Server:
    """A server without persistence: a restart loses all data."""

    def __init__(self, program: str, *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="radixcache-"))
        self.socket = self.folder / "socket"
        self._command = [program, "--port", "0", "--unixsocket", str(self.socket), "--save", "", *options]
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, cwd=self.folder, stdout=log, stderr=log)
        self.client: Any = Redis(unix_socket_path=str(self.socket))
        ends_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < ends_s:
            try:
                if self.client.ping():
                    return
            except RedisError:
                time.sleep(0.01)
        self.kill()
        raise RuntimeError((self.folder / "log").read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)
