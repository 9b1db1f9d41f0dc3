"""A storm: many requests of every kind, good and bad, some of whose clients leave at any moment."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.serve.serving import GUARD_S

KEY, ADMIN = "key-of-ann", "key-of-root"
#: The largest body that the server takes.
MAX_BODY_BYTES = 1 << 20
AT_ONCE = 16
USER = {"role": "user", "content": "?"}
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
OLLAMA = "/api/chat"
DIALECTS = (CHAT, TEXT, MESSAGES, RESPONSES, OLLAMA)
#: A body that each route takes.
GOOD: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [USER]},
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "?"},
    "/responses": {"input": "?"},
    RESPONSES: {"input": [USER]},
    RESPONSES + "/input_tokens": {"input": [USER]},
    MESSAGES: {"model": "claude-x", "max_tokens": 2, "messages": [USER]},
    MESSAGES + "/count_tokens": {"model": "claude-x", "messages": [USER]},
    OLLAMA: {"messages": [USER], "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "?", "options": {"num_predict": 2}},
    "/api/show": {"model": "x"},
    "/cache/explain": {"prompt": "?"},
    "/cache/warm": {"prompt": "?"},
    "/cache/reclaim": {"target_bytes": 8 << 20},
}
NO_JSON = [b"", b"{", b"[]", b"7", b"\xff", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000]
ODD: list[Any] = [
    None, True, -1, 0, 5.5, 10**30, -(10**4000), 1e308, "", "x", "\0", "~nobody/x", "x" * 5000, [], {}, [5.5], [[]],
    {"x": {}}, {"": ""}, [{"role": "x" * 5000, "content": ["x"]}],
]  # fmt: skip
READ = (
    "/health",
    "/metrics",
    "/cache",
    "/cache/state",
    "/cache/tree",
    "/v1/models",
    "/v1/models/gpt-5",
    "/openapi.json",
)
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "f", "description": "?", "parameters": SCHEMA}
#: Fields that a request of each API may have beside its prompt.
MORE: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {}, {"n": 2, "seed": 1, "temperature": 1}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["a", "bc"]},
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"stream_options": {"include_usage": True}, "cache_salt": "salt"}, {"cache_prompt": False},
    ],
    TEXT: [
        {}, {"prompt": ["Why?", "Why not?"]}, {"prompt": [70, 71, 72], "echo": True}, {"logprobs": 2}, {"n": 3},
    ],
    MESSAGES: [
        {}, {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"name": "f", "input_schema": SCHEMA}]}, {"stop_sequences": ["a"]},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    RESPONSES: [
        {}, {"instructions": "Be brief.", "store": False}, {"tools": [{"type": "function", **FUNCTION}]},
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    ],
    OLLAMA: [{}, {"format": SCHEMA}, {"tools": [{"type": "function", "function": FUNCTION}]}, {"keep_alive": "5m"}],
}  # fmt: skip
#: Schemas that would cost a server without limits much.
EXPLOSIVE: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    {"enum": [f"value {index}" for index in range(20_000)]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"properties": {f"p{index}": {} for index in range(3000)}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
]


class Attempt(NamedTuple):
    """What a client sends; which answers are right (None: it may see none); when it leaves.

    `read`: bytes after which it leaves. `leave_s`: seconds after which it leaves. None: it stays to the end.
    """

    path: str
    sent: bytes
    right: frozenset[int | None]
    read: int | None = None
    leave_s: float | None = None
    is_reset: bool = False


def request(method: str, path: str, body: bytes = b"", key: str = ADMIN, **headers: str) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-api-key: {key}\r\n{more}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Abuse:
    """Draws attempts. `fields`: the route and name of each field of a body."""

    def __init__(self, seed: int, fields: Sequence[tuple[str, str]]) -> None:
        self._draws = random.Random(seed)
        self._fields = fields

    def attempt(self) -> Attempt:
        kinds = (
            self.reply, self.reply, self._leave, self._leave, self._leave_later, self._odd_field, self._odd_field,
            self._no_json, self._no_key, self._too_long, self._too_large, self._no_http, self._half, self._read,
            self._ask_cache, self._explode, self._unknown, self._count,
        )  # fmt: skip
        return self._draws.choice(kinds)()

    def reply(self) -> Attempt:
        path = self._draws.choice(DIALECTS)
        return self._post(path, self._body(path, self._draws.randint(1, 3)), 200, key=self._draws.choice([KEY, ADMIN]))

    def _leave(self) -> Attempt:
        path = self._draws.choice(DIALECTS)
        left = self._post(path, self._body(path, 100), 200, None)
        return left._replace(read=self._draws.choice([0, 1, 200, 1000]), is_reset=self._draws.random() < 0.5)

    def _leave_later(self) -> Attempt:
        path = self._draws.choice(DIALECTS)
        left = self._post(path, self._body(path, 100), 200, None)
        return left._replace(leave_s=self._draws.uniform(0, 0.1), is_reset=self._draws.random() < 0.5)

    def _odd_field(self) -> Attempt:
        path, field = self._draws.choice(self._fields)
        return self._post(path, {**GOOD[path], field: self._draws.choice(ODD)}, 200, 400, 404, 409, 413)

    def _no_json(self) -> Attempt:
        return self._post(self._draws.choice([*GOOD]), self._draws.choice(NO_JSON[:-2]), 400)

    def _no_key(self) -> Attempt:
        return self._post(self._draws.choice([*GOOD]), b"{}", 401, key=self._draws.choice(["", "wrong", KEY + "x"]))

    def _too_long(self) -> Attempt:
        return self._post(TEXT, {"prompt": "x" * 40_000}, 400)

    def _too_large(self) -> Attempt:
        path = self._draws.choice([*GOOD])
        if self._draws.random() < 0.5:
            return self._post(path, bytes(MAX_BODY_BYTES + 1), 413)
        # On a slow machine the server has closed it before all was sent.
        return Attempt("", request("POST", path, **{"X-Huge": "x" * (1 << 20)}), frozenset([431, None]))

    def _no_http(self) -> Attempt:
        return Attempt("", self._draws.randbytes(64).replace(b"\n", b"") + b"\r\n\r\n", frozenset([400]))

    def _half(self) -> Attempt:
        whole = self.reply()
        return whole._replace(sent=whole.sent[: self._draws.randrange(len(whole.sent))], right=frozenset([None]))

    def _read(self) -> Attempt:
        path, key = self._draws.choice(READ), self._draws.choice([KEY, ADMIN])
        is_refused = key == KEY and path.startswith(("/cache", "/metrics"))
        return Attempt(path, request("GET", path, key=key), frozenset([403 if is_refused else 200]))

    def _ask_cache(self) -> Attempt:
        path = self._draws.choice(DIALECTS)
        return self._draws.choice([
            self._post("/cache/explain", self._body(path, 1), 200, 400),  # 400: of several prompts
            self._post("/cache/warm", {"prompt": "Why? Why not?", "ttl_requests": 5}, 200, 409),
            self._post("/cache/reclaim", {"target_bytes": self._draws.choice([0, 1 << 18])}, 200),
            self._post("/cache/check", b"", 200),
            Attempt("/cache", request("DELETE", "/cache?namespace=%20salt"), frozenset([200])),
        ])  # fmt: skip

    def _explode(self) -> Attempt:
        schema = self._draws.choice(EXPLOSIVE)
        wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
        return self._post(CHAT, {**GOOD[CHAT], **wanted}, 200, 400)

    def _unknown(self) -> Attempt:
        path = self._draws.choice(DIALECTS)
        if path == RESPONSES:
            return self._post(path, {**GOOD[path], "previous_response_id": "resp_x"}, 404)
        return self._post(path, {**GOOD[path], "model": "/nowhere/model"}, 404)

    def _count(self) -> Attempt:
        path = MESSAGES + "/count_tokens"
        return self._post(path, {**GOOD[path], **self._draws.choice(MORE[MESSAGES])}, 200)

    def _post(self, path: str, body: Any, *right: int | None, key: str = ADMIN) -> Attempt:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Attempt(path, request("POST", path, sent, key), frozenset(right))

    def _body(self, path: str, max_tokens: int) -> dict[str, Any]:
        draws = self._draws
        text = draws.choice(["Why?", "Why not?", "What else?"]) * draws.randint(1, 8)
        prompt = {
            TEXT: {"prompt": text},
            RESPONSES: {"input": text, "max_output_tokens": max_tokens},
            OLLAMA: {"messages": [{**USER, "content": text}], "options": {"num_predict": max_tokens}},
        }.get(path, {"messages": [{"role": "user", "content": text}]})
        more = {"max_tokens": max_tokens, "stream": draws.random() < 0.5 or max_tokens > 3}
        return {**GOOD[path], **prompt, **more, **draws.choice(MORE[path])}


async def answered(host: str, port: int, attempt: Attempt) -> bytes:
    """What the client reads; nothing if it leaves before, or the server does."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except ConnectionError:
        return b""
    try:
        writer.write(attempt.sent)
        if attempt.right == frozenset([None]):
            writer.write_eof()
        async with asyncio.timeout(GUARD_S if attempt.leave_s is None else attempt.leave_s):
            return await reader.read(-1 if attempt.read is None else attempt.read)
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        if attempt.is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()


def status_of(answer: bytes) -> int | None:
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") and len(answer) > 12 else None


def require_right(attempt: Attempt, answer: bytes) -> None:
    status = status_of(answer)
    assert status in attempt.right, (attempt, answer[:500])
    if status is not None and status >= 400:
        require_refused(attempt.path, (status, answer.partition(b"\r\n\r\n")[2]))


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


async def storm(
    host: str, port: int, abuse: Abuse, count: int, *, judge: Callable[[Attempt, bytes], None] = require_right
) -> None:
    """Make many attempts, 16 at a time, beside clients that never finish what they send; judge each answer."""
    left = iter([abuse.attempt() for _ in range(count)])

    async def client() -> None:
        for attempt in left:
            judge(attempt, await answered(host, port, attempt))

    half = [await asyncio.open_connection(host, port) for _ in range(AT_ONCE)]
    for _, writer in half:
        whole = abuse.reply().sent
        writer.write(whole[: len(whole) // 2])
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(AT_ONCE):
                clients.create_task(client())
    finally:
        for _, writer in half:
            writer.close()
