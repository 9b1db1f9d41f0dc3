"""Bodies are limited before they are read, and a route is reached once a body is whole."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from runner.serve.middleware import MAX_BODIES, BodyLimit
from runner.serve.request import ApiError

MIB = 1 << 20
GONE: Message = {"type": "http.disconnect"}


class Request:
    """A request that comes in these messages, and what the route behind the limit makes of it."""

    def __init__(self, *messages: Message, length: int | None = None) -> None:
        self.unread = list(messages)
        self.received: list[Message] = []
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        self.scope: Scope = {"type": "http", "headers": headers}

    def send(self, *, max_mib: float = 1) -> None:
        asyncio.run(BodyLimit(self.route, max_mib=max_mib)(self.scope, self.receive, self.answer))

    async def receive(self) -> Message:
        return self.unread.pop(0)

    async def answer(self, _: Message) -> None:
        raise AssertionError("the limit answers nothing itself")

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received += [await receive(), await receive()]


def part(size: int, *, is_last: bool = False) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": not is_last}


def test_bodies_together_are_limited_until_their_requests_are_over() -> None:
    async def send() -> None:
        is_done = asyncio.Event()

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            await is_done.wait()

        limit = BodyLimit(route, max_mib=1)

        async def ask() -> None:
            request = Request(part(MIB, is_last=True))
            await limit(request.scope, request.receive, request.answer)

        asked = [asyncio.ensure_future(ask()) for _ in range(MAX_BODIES)]
        await asyncio.sleep(0)  # they all begin
        with pytest.raises(ApiError, match="try again later") as refused:
            await ask()
        assert (refused.value.status, refused.value.retry_after_s) == (429, 5)
        is_done.set()
        await asyncio.gather(*asked)
        await ask()

    asyncio.run(send())


def test_what_a_request_goes_on_with_counts_like_its_body_until_it_is_over() -> None:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["hold"](MIB - 1)
        with pytest.raises(ApiError, match="larger than 1 MiB"):
            scope["state"]["hold"](1)

    limit = BodyLimit(route, max_mib=1)
    for _ in range(MAX_BODIES + 1):
        request = Request(part(1, is_last=True))
        asyncio.run(limit(request.scope, request.receive, request.answer))


def test_nothing_is_done_for_a_client_that_leaves_before_its_body_is_whole() -> None:
    request = Request(part(3), GONE, length=5)
    request.send()
    assert request.received == []
