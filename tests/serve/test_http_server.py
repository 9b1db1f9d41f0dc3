"""Connections that keep the server waiting, do not speak HTTP, or run when it ends. Real sockets, no model.

Where a client is to be given up the server has no patience at all, elsewhere more than any test lasts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runner.serve import http_server
from runner.serve.http_server import HttpServer, listen
from runner.serve.middleware import BodyLimit, Frame

LONG_S = 300.0
PATIENT = dict.fromkeys(http_server.PATIENCE_S, LONG_S)
MIB = 1 << 20
GUARD_S = 120
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"


class Routes:
    def __init__(self) -> None:
        self.reached = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached += 1
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


class Served:
    def __init__(self, server: HttpServer, listening: socket.socket, patience_s: dict[str, float]) -> None:
        self.server, self.patience_s, self._address = server, patience_s, listening.getsockname()[:2]
        self.thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})

    def connect(self, *sent: bytes) -> socket.socket:
        client = socket.create_connection(self._address, timeout=GUARD_S)
        for data in sent:
            client.sendall(data)
        return client

    def ask(self, *sent: bytes) -> tuple[int, bytes]:
        """Send something and return the status and body that come back; the connection is the server's to close."""
        with self.connect(*sent) as client:
            return parse(read_all(client))


@contextmanager
def serving(app: ASGIApp, *, stop: Any = lambda: None, max_mib: float = 1, **patience_s: float) -> Iterator[Served]:
    """Serve an application; impatient only where the test says so."""
    listening = listen("127.0.0.1", 0)
    patience_s = {**PATIENT, **patience_s}
    framed = Frame(BodyLimit(app, max_mib=max_mib), allowed_origins=["*"], count=lambda *_: None)
    server = HttpServer(framed, stop, patience_s=patience_s)
    served = Served(server, listening, patience_s)
    served.thread.start()
    try:
        yield served
    finally:
        server.should_exit = True
        served.thread.join(GUARD_S)
        listening.close()
        assert not served.thread.is_alive()


def read_all(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(1 << 16):
        received += data
    return received


def read_reply(client: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(1)
    length = int(received.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return b"".join(client.recv(1) for _ in range(length))


def is_closed(client: socket.socket) -> bool:
    with suppress(ConnectionError):
        return client.recv(1) == b""
    return True


def parse(reply: bytes) -> tuple[int, bytes]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def error_of(reply: tuple[int, bytes]) -> tuple[int, str]:
    error: Mapping[str, Any] = json.loads(reply[1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return reply[0], error["message"]


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_client_that_never_ends_a_head_is_given_up(sent: bytes) -> None:
    routes = Routes()
    with serving(routes, head=0.0) as served:
        status, message = error_of(served.ask(sent))
    assert (status, routes.reached) == (408, 0)
    assert "head" in message


@pytest.mark.parametrize("sent", [POST, POST + b"a", POST.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked")])
def test_a_client_that_never_ends_a_body_is_given_up_and_reaches_no_route(sent: bytes) -> None:
    routes = Routes()
    with serving(routes, body=0.0) as served:
        status, message = error_of(served.ask(sent))
    assert (status, routes.reached) == (408, 0)
    assert "body" in message


def test_a_client_that_reads_nothing_is_given_up() -> None:
    is_gone = threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
            await asyncio.sleep(0)
        is_gone.set()

    with serving(endless, reading=0.0) as served, served.connect(GET):
        assert is_gone.wait(GUARD_S)


def test_a_connection_that_is_idle_between_two_requests_owes_nothing() -> None:
    routes = Routes()

    async def then_impatient(scope: Scope, receive: Receive, send: Send) -> None:
        served.patience_s["head"] = 0.0
        await routes(scope, receive, send)

    with serving(then_impatient) as served, served.connect(POST, b"abc") as client:
        for sent in (b"", POST + b"abc", POST + b"abc"):
            client.sendall(sent)
            assert read_reply(client) == b"abc"
    assert routes.reached == 3


def test_a_full_server_closes_the_connection_that_has_been_idle_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    with serving(Routes()) as served, served.connect(POST, b"abc") as idle, served.connect(POST, b"a") as sending:
        assert read_reply(idle) == b"abc"
        with served.connect(POST, b"def") as third:
            assert read_reply(third) == b"def"
            assert is_closed(idle)
            sending.sendall(b"bc")
            assert read_reply(sending) == b"abc"


def test_a_server_full_of_running_requests_turns_away_later_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    routes, is_over = Routes(), threading.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.to_thread(is_over.wait, GUARD_S)
        await routes(scope, receive, send)

    with serving(slow) as served, served.connect(POST, b"abc") as one, served.connect(POST, b"def") as another:
        while len(served.server.server_state.tasks) < 2:
            pass
        with served.connect() as third:
            assert is_closed(third)
        is_over.set()
        assert (read_reply(one), read_reply(another)) == (b"abc", b"def")


def test_what_is_sent_in_pieces_waits_for_no_acknowledgement() -> None:
    with serving(Routes()) as served, served.connect(POST, b"abc") as client:
        assert read_reply(client) == b"abc"
        (connection,) = served.server.server_state.connections
        assert connection.transport.get_write_buffer_limits() == (0, 0)
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (POST.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Huge: " + b"x" * MIB, 431),
        (GET[:-2] + b"Connection: close\r\nX-Huge: " + b"x" * (65 << 10) + b"\r\n\r\n", 431),
        (GET[:-2].replace(b"/", b"/" + b"x" * (65 << 10), 1) + b"Connection: close\r\n\r\n", 431),
        (GET[:-2] + b"Connection: close\r\n" + b"X: y\r\n" * 100 + b"\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_with_a_reason(sent: bytes, status: int) -> None:
    routes = Routes()
    with serving(routes) as served:
        found, message = error_of(served.ask(sent))
        assert (found, routes.reached) == (status, 0)
        assert message
        with served.connect(POST, b"abc") as client:
            assert read_reply(client) == b"abc"


@pytest.mark.parametrize(
    "head", [POST.replace(b" 3", b" %d" % (MIB + 1)), POST.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked")]
)
def test_a_client_whose_body_is_too_large_is_told_and_may_ask_again(head: bytes) -> None:
    """The rest of the body is read and thrown away; without that most clients would never see the answer."""
    body = b"x" * (MIB + 1)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if b"chunked" in head else body

    with serving(Routes()) as served, served.connect(head, sent) as client:
        assert json.loads(read_reply(client))["error"]["message"].startswith("the body is larger than 1 MiB")
        client.sendall(POST + b"abc")
        assert read_reply(client) == b"abc"


def test_a_client_is_where_it_connects_from_whatever_its_headers_say() -> None:
    async def whence(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(scope["client"][0])(scope, receive, send)

    with (
        serving(whence) as served,
        served.connect(GET.replace(b"Host", b"X-Forwarded-For: 192.0.2.1\r\nHost")) as client,
    ):
        assert read_reply(client) == b"127.0.0.1"


def test_replies_that_run_when_the_server_is_to_end_are_finished() -> None:
    stops: list[threading.Event] = []
    is_ended = threading.Event()

    def stop() -> None:
        stops.append(is_ended)
        is_ended.set()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.to_thread(is_ended.wait, GUARD_S)
        await send({"type": "http.response.body", "body": b"last"})

    with serving(slow, stop=stop) as served, served.connect(GET) as client, served.connect() as idle:
        received = b""
        while b"first" not in received:
            received += client.recv(1)
        served.server.should_exit = True
        assert b"last" in read_all(client)
        assert is_closed(idle)
        served.thread.join(GUARD_S)
        with pytest.raises(ConnectionError):
            served.connect()
    assert len(stops) == 1


def test_a_client_that_has_not_sent_its_request_is_not_waited_for_in_the_end() -> None:
    asks_first = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    with serving(Routes()) as served, served.connect(asks_first) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 100")
        served.server.should_exit = True
        assert error_of(parse(read_all(client))) == (503, "the server is stopping.")
