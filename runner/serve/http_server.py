"""HTTP/1.1 on uvicorn and h11, with time limits for slow clients, and a shutdown that lets replies finish.

A client owes the head of a request, then its body, then to read the reply. If it is too slow, it gets an error and the
connection is closed. On a signal the server accepts no more connections, calls `stop` on another thread while replies
go on, and sends the rest. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from runner.serve.middleware import MAX_HEAD_BYTES
from runner.serve.request import ApiError

PATIENCE_S = {"head": 20.0, "body": 60.0, "reading": 60.0, "leaving": 5.0}  # seconds that a client has for what it owes
IDLE_S = 75  # seconds that a connection may be idle between two requests: longer than clients leave one open
SEND_S = 30  # seconds to send the rest of ended replies before the server ends
#: Clients at a time, clients that are accepted before one of them is turned away, and other open files. Shells on macOS
#: allow a process 256 files by default.
MAX_CONNECTIONS, BACKLOG, OTHER_FILES = 900, 512, 124
#: Signals that end the server, except those that it was started to ignore.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, in which requests wait until the server runs. OSError: the address cannot be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + BACKLOG + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the system's limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address, family=family, backlog=BACKLOG)


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves `app`; `run(sockets=[...])` returns when it has ended. `stop` ends replies and frees the backend."""

    def __init__(self, app: ASGIApp, stop: Callable[[], object], patience_s: Mapping[str, float] = PATIENCE_S) -> None:
        config = uvicorn.Config(
            app,
            http=partial(Connection, patience_s=patience_s),  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # A header does not prove a client's address; see runner.serve.middleware.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=SEND_S,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.to_thread(self._stop)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own method raises the signals again at the end, which would change exit code 0.
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in ENDING if is_main}
        heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in heard:
            signal.signal(number, self._end)
        try:
            yield
        finally:
            for number, handler in heard.items():
                signal.signal(number, handler)

    def _end(self, number: int, _: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.should_exit = True


class Connection(H11Protocol):
    def __init__(self, *args: Any, patience_s: Mapping[str, float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience_s = patience_s
        self._owed: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without it, the second of two pieces waits 40 ms for the client to acknowledge the first.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Bytes that the system does not accept at once count as unread.
        transport.set_write_buffer_limits(high=0)
        self._idle_since_s = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._look()

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def shutdown(self) -> None:
        if self._owed == "body":
            self._refuse(ApiError(503, "the server is stopping."))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        self._refuse(ApiError(status, f"not a valid HTTP/1.1 request: {sys.exc_info()[1]}."))

    def _make_room(self) -> None:
        """Close the connection that has been idle longest, else one whose body has not come; else this one."""
        others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        silent = [each for each in others if isinstance(each, Connection) and each._is_silent]
        is_sending = h11.SEND_BODY
        oldest = min(silent, key=lambda each: (each.conn.their_state is is_sending, each._idle_since_s), default=self)
        oldest.transport.abort()

    @property
    def _is_silent(self) -> bool:
        """Whether no whole request waits for its reply."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered or self.conn.their_state is h11.SEND_BODY

    def _look(self) -> None:
        """Start, restart or stop the time limit, by what the client owes now."""
        state = self.conn.their_state
        owes_head = state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0])
        if self.flow.write_paused or self._is_refused:
            self._await("reading" if self.flow.write_paused else "leaving")
        else:
            self._await("body" if state is h11.SEND_BODY else "head" if owes_head else None)

    def _await(self, owed: str | None) -> None:
        if owed == self._owed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._owed, self._timer = owed, None
        if owed is not None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._patience_s[owed], self._give_up, owed)

    def _give_up(self, owed: str) -> None:
        if owed in ("reading", "leaving"):
            self.transport.abort()
        else:
            self._refuse(ApiError(408, f"the request's {owed} took longer than {self._patience_s[owed]:g} s."))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error if nothing was sent yet, and ignore further data."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps(error.in_openai_form()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        response = h11.Response(status_code=error.status, headers=headers)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing with unread data would reset the connection before the client has read this.
        self.transport.write_eof()
        self._is_refused = True
        self._look()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
