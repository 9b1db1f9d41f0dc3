"""A link between a store and a server that a test can cut, slow down or have swallow what goes over it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path


class Proxy:
    """Forwards TCP connections to a Unix socket; each connection goes by what is set when it is made.

    Attributes:
        url: of the proxy.
        is_silent: take what comes, and answer nothing.
        cut_after: bytes of replies after which a connection is cut; None: it is not.
        bytes_per_s: of replies; None: as fast as it goes.
        connections: made so far.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}"
        self.is_silent = False
        self.cut_after: int | None = None
        self.bytes_per_s: float | None = None
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections."""
        while self._open:
            with suppress(OSError):
                self._open[-1].shutdown(socket.SHUT_RDWR)
            self._open.pop().close()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.connections += 1
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client, self.is_silent), daemon=True).start()

    def _serve(self, client: socket.socket, is_silent: bool) -> None:
        with suppress(OSError):
            if is_silent:
                while client.recv(1 << 16):
                    pass
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._target))
            self._open.append(server)
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            self._reply(server, client, self.cut_after)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _reply(self, server: socket.socket, client: socket.socket, left: int | None) -> None:
        while data := server.recv(1 << 12):
            if left is not None:
                data, left = data[:left], left - len(data)
            if self.bytes_per_s is not None:
                time.sleep(len(data) / self.bytes_per_s)
            client.sendall(data)
            if left is not None and left <= 0:
                break
        client.shutdown(socket.SHUT_RDWR)
        server.close()
