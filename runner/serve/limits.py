"""BodyLimit: a request reaches its route once its whole body is there, and small enough. Pure ASGI; never imports MLX.

A client that sends slowly holds a connection, which `runner.serve.http_server` closes in time, and nothing else.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.serve.errors import ApiError


class BodyLimit:
    """Hands requests to `app` with their bodies in one piece; nothing is done for a client that leaves before.

    Raises:
        ApiError: the body is too large, by what its header says or by what was counted.
    """

    def __init__(self, app: ASGIApp, *, max_mib: float) -> None:
        self._app, self._max_mib = app, max_mib

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._require_room(int(Headers(scope=scope).get("content-length", 0)))
        body, is_more = bytearray(), True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            self._require_room(len(body))
            is_more = message.get("more_body", False)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, receive_whole, send)

    def _require_room(self, body_bytes: int) -> None:
        if body_bytes > self._max_mib * (1 << 20):
            raise ApiError(413, f"the body is larger than {self._max_mib:g} MiB, which is what the server takes.")
