"""BodyLimit: a request reaches its route once its whole body is there, and small enough. Pure ASGI; never imports MLX.

A client that sends slowly holds a connection, which `runner.serve.http_server` closes in time, and what it has sent.
What all hold together, until their requests are over, is bounded as well.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.serve.errors import ApiError

#: Bodies of the largest size that there is memory for at a time.
MAX_BODIES = 16


class BodyLimit:
    """Hands requests to `app` with their bodies in one piece; nothing is done for a client that leaves before.

    Raises:
        ApiError: the body is too large, by what its header says or by what was counted, or the bodies together are.
    """

    def __init__(self, app: ASGIApp, *, max_mib: float) -> None:
        self._app, self._max_mib = app, max_mib
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._require_room(int(Headers(scope=scope).get("content-length", 0)))
        body, sent_bytes, is_more = bytearray(), 0, True
        try:
            while is_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                part = message.get("body", b"")
                body += part
                sent_bytes += len(part)
                self._held_bytes += len(part)
                self._require_room(sent_bytes)
                is_more = message.get("more_body", False)
            whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]
            body.clear()

            async def receive_whole() -> Message:
                return whole.pop() if whole else await receive()

            await self._app(scope, receive_whole, send)
        finally:
            self._held_bytes -= sent_bytes

    def _require_room(self, body_bytes: int) -> None:
        max_bytes = self._max_mib * (1 << 20)
        if self._held_bytes > MAX_BODIES * max_bytes:
            raise ApiError(429, "others have sent as much as the server takes; ask again later.", retry_after_s=5)
        if body_bytes > max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_mib:g} MiB, which is what the server takes.")
