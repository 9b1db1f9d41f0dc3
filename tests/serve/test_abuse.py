"""Whatever clients send: a real server stays up, says what is wrong, and holds nothing on their behalf afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from typing import Any, NamedTuple

import pytest

from tests.serve.serving import GUARD_S, ServedProcess, serving

KEY, ADMIN = "key-of-ann", "key-of-root"
BUDGET_BYTES = 8 << 20
#: What MLX may have in use besides weights and caches: what the last requests were evaluated with.
REST_BYTES = 1 << 20
USER = {"role": "user", "content": "?"}
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
OLLAMA = "/api/chat"
#: A body that each route takes.
GOOD: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [USER]},
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "?"},
    "/responses": {"input": "?"},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"model": "claude-x", "max_tokens": 2, "messages": [USER]},
    MESSAGES + "/count_tokens": {"model": "claude-x", "messages": [USER]},
    OLLAMA: {"messages": [USER], "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "?", "options": {"num_predict": 2}},
    "/api/show": {"model": "x"},
    "/cache/explain": {"prompt": "?"},
    "/cache/warm": {"prompt": "?"},
    "/cache/reclaim": {"target_bytes": BUDGET_BYTES},
}
NO_JSON = [b"", b"{", b"[]", b"7", b"\xff", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000]
ODD: list[Any] = [
    None, True, -1, 0, 5.5, 10**30, -(10**4000), 1e308, "", "x", "\0", "~nobody/x", "x" * 5000, [], {}, [5.5], [[]],
    {"x": {}}, {"": ""}, [{"role": "x" * 5000, "content": ["x"]}],
]  # fmt: skip


class Abused:
    def __init__(self, served: ServedProcess) -> None:
        self.process, self._served = served.process, served
        self.host, port = served.url.removeprefix("http://").split(":")
        self.port = int(port)
        self._connection = HTTPConnection(self.host, self.port, timeout=GUARD_S)
        self.ask(CHAT, GOOD[CHAT])
        self._least_bytes = self._active_bytes()

    def send(self, method: str, path: str, body: bytes | None = None, key: str = ADMIN) -> tuple[int, bytes]:
        self._connection.request(method, path, body, {"x-api-key": key, "Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        return self.send("POST", path, json.dumps(body).encode())

    def json(self, method: str, path: str) -> Any:
        status, body = self.send(method, path)
        assert status == 200, body
        return json.loads(body)

    def require_sound(self) -> None:
        """Nothing waits or runs, nothing failed, and memory is what it was."""
        while (state := self.json("GET", "/cache/state"))["running"] or state["waiting"]:
            assert self.process.poll() is None, self._served.log
        assert self.json("POST", "/cache/check")["active_bytes"] <= self._least_bytes + BUDGET_BYTES + REST_BYTES
        assert self._active_bytes() <= self._least_bytes + REST_BYTES
        counts = self.send("GET", "/metrics")[1].decode()
        assert not re.findall(r"^radixcache_serve_http_requests_total.*status=\"5.*", counts, re.MULTILINE)
        assert "Traceback" not in self._served.log
        assert self.send("GET", "/health")[0] == 200

    def _active_bytes(self) -> int:
        self.json("DELETE", "/cache")
        active_bytes: int = self.json("POST", "/cache/check")["active_bytes"]
        return active_bytes


@pytest.fixture(scope="module")
def abused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    folder = tmp_path_factory.mktemp("keys")
    for name, line in (("keys", f"ann {KEY}"), ("admin", f"root {ADMIN}")):
        (folder / name).write_text(line)
        (folder / name).chmod(0o600)
    options: Sequence[Any] = (
        "--api-keys", folder / "keys", "--admin-key-file", folder / "admin", "--max-tokens", 3,
        "--prompt-cache-bytes", BUDGET_BYTES, "--max-body-mib", 1,
    )  # fmt: skip
    with serving(*options) as served:
        yield Abused(served)


def require_refused(path: str, answer: tuple[int, bytes]) -> Any:
    """It is a 4xx with a reason, in the form of the API that was asked; returns the error."""
    status, body = answer
    assert 400 <= status < 500, (path, status, body[:300])
    error = json.loads(body)["error"]
    if path.startswith("/api/"):
        return {"message": error}
    assert set(error) == ({"type", "message"} if path.startswith(MESSAGES) else {"message", "type", "param", "code"})
    assert error["message"], path
    return error


def documented_fields(abused: Abused) -> Iterator[tuple[str, str]]:
    document = abused.json("GET", "/openapi.json")
    for path, operations in document["paths"].items():
        if body := operations.get("post", {}).get("requestBody"):
            schema = body["content"]["application/json"]["schema"]
            if "$ref" in schema:
                schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            yield from ((path, field) for field in schema["properties"])


def test_each_field_of_each_body_refuses_what_it_cannot_be_and_takes_nothing_odd_amiss(abused: Abused) -> None:
    fields = list(documented_fields(abused))
    assert {path for path, _ in fields} == set(GOOD)
    assert len(fields) > 60
    for path, field in fields:
        error = require_refused(path, abused.ask(path, {**GOOD[path], field: [5.5]}))
        assert field in (error.get("param") or error["message"]), (path, field, error)
    draws = random.Random(0)
    for path, field in fields:
        for value in draws.sample(ODD, 2):
            status, body = abused.ask(path, {**GOOD[path], field: value})
            if status != 200:
                require_refused(path, (status, body))
    abused.require_sound()


class Attempt(NamedTuple):
    """What a client sends; which answers are right (None: it may see none); how many bytes it reads (None: all)."""

    path: str
    sent: bytes
    right: frozenset[int | None]
    read: int | None = None
    is_reset: bool = False


class Abuse:
    def __init__(self, seed: int, fields: Sequence[tuple[str, str]]) -> None:
        self._draws = random.Random(seed)
        self._fields = fields

    def attempt(self) -> Attempt:
        kinds = (
            self._reply, self._reply, self._leave, self._leave, self._odd_field, self._odd_field, self._no_json,
            self._no_key, self._too_long, self._too_large, self._no_http, self._half,
        )  # fmt: skip
        return self._draws.choice(kinds)()

    def _reply(self) -> Attempt:
        path = self._draws.choice([CHAT, TEXT, MESSAGES, RESPONSES, OLLAMA])
        return Attempt(path, post(path, self._body(path, self._draws.randint(1, 3))), frozenset([200]))

    def _leave(self) -> Attempt:
        path = self._draws.choice([CHAT, TEXT, MESSAGES, RESPONSES, OLLAMA])
        sent, read = post(path, self._body(path, 100)), self._draws.choice([0, 1, 200, 1000])
        return Attempt(path, sent, frozenset([200, None]), read, is_reset=self._draws.random() < 0.5)

    def _odd_field(self) -> Attempt:
        path, field = self._draws.choice(self._fields)
        body = {**GOOD[path], field: self._draws.choice(ODD)}
        return Attempt(path, post(path, json.dumps(body).encode()), frozenset([200, 400, 404, 409, 413]))

    def _no_json(self) -> Attempt:
        path = self._draws.choice([*GOOD])
        body = self._draws.choice(NO_JSON[:-2])
        return Attempt(path, post(path, body), frozenset([400]))

    def _no_key(self) -> Attempt:
        path = self._draws.choice([*GOOD])
        return Attempt(path, post(path, b"{}", key=self._draws.choice(["", "wrong", KEY + "x"])), frozenset([401]))

    def _too_long(self) -> Attempt:
        return Attempt(TEXT, post(TEXT, json.dumps({"prompt": "x" * 40_000}).encode()), frozenset([400]))

    def _too_large(self) -> Attempt:
        path = self._draws.choice([*GOOD])
        if self._draws.random() < 0.5:
            return Attempt(path, post(path, bytes((1 << 20) + 1)), frozenset([413]))
        # On a slow machine the server has closed it before all was sent.
        return Attempt("", post(path, b"", **{"X-Huge": "x" * (1 << 20)}), frozenset([431, None]))

    def _no_http(self) -> Attempt:
        return Attempt("", self._draws.randbytes(64).replace(b"\n", b"") + b"\r\n\r\n", frozenset([400]))

    def _half(self) -> Attempt:
        whole = self._reply()
        return whole._replace(sent=whole.sent[: self._draws.randrange(len(whole.sent))], right=frozenset([None]))

    def _body(self, path: str, max_tokens: int) -> bytes:
        draws = self._draws
        text = draws.choice(["Why?", "Why not?", "What else?"]) * draws.randint(1, 8)
        prompt = {
            TEXT: {"prompt": text},
            RESPONSES: {"input": text, "max_output_tokens": max_tokens},
            OLLAMA: {"messages": [{**USER, "content": text}], "options": {"num_predict": max_tokens}},
        }.get(path, {"messages": [{"role": "user", "content": text}]})
        more = {"max_tokens": max_tokens, "stream": draws.random() < 0.5 or max_tokens > 3}
        return json.dumps({**GOOD[path], **prompt, **more}).encode()


def post(path: str, body: bytes, key: str = ADMIN, **headers: str) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-api-key: {key}\r\n{more}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def answered(abused: Abused, attempt: Attempt) -> bytes:
    reader, writer = await asyncio.open_connection(abused.host, abused.port)
    try:
        writer.write(attempt.sent)
        if attempt.right == frozenset([None]):
            writer.write_eof()
        async with asyncio.timeout(GUARD_S):
            return await reader.read(-1 if attempt.read is None else attempt.read)
    except ConnectionError:
        return b""
    finally:
        if attempt.is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()


async def storm(abused: Abused, seed: int, count: int, at_once: int = 16) -> None:
    """Send many attempts, some at a time, beside clients that never finish what they send."""
    abuse = Abuse(seed, list(documented_fields(abused)))
    left = iter([abuse.attempt() for _ in range(count)])

    async def client() -> None:
        for attempt in left:
            answer = await answered(abused, attempt)
            status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") and len(answer) > 12 else None
            assert status in attempt.right, (attempt, answer[:500])
            if status is not None and status >= 400:
                require_refused(attempt.path, (status, answer.partition(b"\r\n\r\n")[2]))

    half = [await asyncio.open_connection(abused.host, abused.port) for _ in range(16)]
    for _, writer in half:
        whole = abuse._reply().sent
        writer.write(whole[: len(whole) // 2])
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client())
    finally:
        for _, writer in half:
            writer.close()


def test_a_storm_of_requests_leaves_nothing_behind(abused: Abused) -> None:
    asyncio.run(storm(abused, seed=0, count=100))
    abused.require_sound()
