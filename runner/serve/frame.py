"""Frame: what is around every route: CORS, errors in the form of the API that was asked, a count. Pure ASGI."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.serve.access import is_admins
from runner.serve.errors import ApiError
from runner.serve.streaming import CLIENT_CLOSED_REQUEST, to_json

logger = logging.getLogger(__name__)


class Frame:
    """Answers for `app` where it raises.

    Args:
        allowed_origins: whose pages may read replies, as mlx_lm.server has it; `*` is everybody's.
        count: called with a route's path, or `other`, and a status, once for each request.
    """

    def __init__(self, app: ASGIApp, *, allowed_origins: Sequence[str], count: Callable[[str, int], None]) -> None:
        self._app, self._allowed_origins, self._count = app, allowed_origins, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, status, is_whole = Headers(scope=scope), None, False
        cors = [] if is_admins(scope["path"]) else self._cors(headers.get("origin"))

        async def received() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole |= not message.get("more_body", False)
            return message

        async def framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *cors]}
            await send(message)

        try:
            if cors and scope["method"] == "OPTIONS":
                # What a browser asks before it sends a request of another page's, without a key.
                await Response(status_code=204)(scope, receive, framed)
            else:
                await self._app(scope, received, framed)
        except Exception as error:
            if status is not None:
                raise
            # A connection that is closed with something unread in it is reset before the client has read why.
            is_last = headers.get("connection", "").lower() == "close" or scope["http_version"] == "1.0"
            while is_last and not is_whole:
                await received()
            await error_response(scope, _as_api_error(error))(scope, receive, framed)
        finally:
            self._count(getattr(scope.get("route"), "path", "other"), status or CLIENT_CLOSED_REQUEST)

    def _cors(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        headers = {"Access-Control-Allow-Methods": "*", "Access-Control-Allow-Headers": "*, Authorization"}
        if "*" in self._allowed_origins:
            headers["Access-Control-Allow-Origin"] = "*"
        elif origin is not None and origin in self._allowed_origins:
            headers |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def error_response(scope: Scope, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """An error as the API says it whose route was asked."""
    is_anthropic = scope["path"].startswith("/v1/messages")
    response = to_json(error.in_anthropic_form() if is_anthropic else error.in_openai_form(), error.status)
    response.headers.update(headers or {})
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says where.")
