"""An HTTP request as plain data, and an application called with it. Never imports MLX."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope


class AdminRequest(NamedTuple):
    """What the admin asked, once it was let in; the body is JSON."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""


class AdminReply(NamedTuple):
    """What came of it."""

    status: int
    media_type: str
    body: bytes


async def called(app: ASGIApp, request: AdminRequest) -> AdminReply:
    """Have an application answer, as one that asks from this machine."""
    headers = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(request.body))}
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "query_string": request.query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    media_type = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
    return AdminReply(sent[0]["status"], media_type, b"".join(message.get("body", b"") for message in sent[1:]))
