"""What the routes of every API share: a body of JSON read, a client's leaving noticed, events sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runner.serve.errors import ApiError
from runner.serve.service import Reply

T = TypeVar("T")

#: Nobody reads it; logs and metrics do. As nginx has it.
CLIENT_CLOSED_REQUEST = 499
#: Lists and objects in one another. What copies and renders them is recursive, and Python's stack is not endless.
MAX_DEPTH = 64


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body of `request`, whatever content type it says it has.

    Raises:
        ApiError: it is no object of JSON in UTF-8, has what JSON does not (NaN, infinities, half a surrogate pair), or
            is nested deeper than MAX_DEPTH.
    """
    raw = await request.body()
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"Invalid JSON in request body: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"Request should be a JSON dictionary; it is a {type(body).__name__}.")
    _require_shallow(body)
    return body


def _require_shallow(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise ApiError(400, f"Request is nested more than {MAX_DEPTH} levels deep.")


def namespace_of(request: Request) -> str:
    """The namespace that whoever sent `request` keeps to."""
    return str(getattr(getattr(request.state, "tenant", None), "namespace", ""))


def to_json(body: object, status: int = 200) -> Response:
    """A response of JSON. Half a surrogate pair, which a model may write, is escaped as any other character."""
    return Response(json.dumps(body), status, media_type="application/json")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, such as Service.ask or a whole reply, and cancel it as soon as the client goes away.

    The request's body has been read. A Reply whose iteration is cancelled cancels itself.

    Raises:
        ApiError: the client went away.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away.")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def server_sent_event(data: object, name: str | None = None) -> str:
    """One event with JSON data; `name` is for clients that listen to events by their names."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"


class ReplyStream(StreamingResponse):
    """A reply as server-sent events. Whatever ends the response ends the reply, also before its first event.

    Starlette listens for the client's going away while it sends.
    """

    def __init__(self, reply: Reply, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()
