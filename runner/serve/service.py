"""Service: how the routes of every API get replies. Runs on the event loop; never imports MLX.

reply = await service.ask(asked)          ApiError before anything was sent: full, stopping, bad request
async for part in reply: ...              Progress and Delta
reply.ending                              how it ended, once it is through
reply.cancel()                            also when the iteration is left early

What the routes of every API share: a body of JSON read, a client's leaving noticed, events sent.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runner.serve.request import (
    ApiError,
    Ended,
    Failed,
    FinishReason,
    OpenRequest,
    PrefillProgress,
    ReplyEvent,
    Request,
    RequestRecord,
    Started,
    Token,
)


class Runs(Protocol):
    """What the service needs of the generation thread; `runner.serve.scheduler.Running` is it."""

    @property
    def is_healthy(self) -> bool:
        """Whether it can serve requests."""

    def ask(self, opened: OpenRequest) -> None:
        """Take a request in; any thread. ApiError: it is full (429) or stopping (503)."""


@dataclass(frozen=True)
class Delta:
    """What one or several tokens added to a reply.

    Attributes:
        text, reasoning: less control sequences and stop words.
        tool_calls: whole ones, each {"id", "name", "arguments"}, with arguments as JSON text.
        tokens: for logprobs and counts.
    """

    text: str
    reasoning: str
    tool_calls: tuple[dict[str, str], ...]
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Ending:
    """How a reply ended. `finish_reason` is OpenAI's."""

    finish_reason: FinishReason
    has_tool_calls: bool
    record: RequestRecord


class Reader(Protocol):
    """Turns steps into deltas; `runner.serve.reply_reader.Reading` is it."""

    def add(self, step: Token) -> Delta: ...

    def finish(self) -> Delta: ...


class ServedReply:
    """One reply as it comes in. Made by Service.ask."""

    def __init__(
        self, opened: OpenRequest, answers: asyncio.Queue[ReplyEvent], started: Started, timer: asyncio.TimerHandle
    ) -> None:
        self.prompt_tokens = started.prompt_tokens
        self.ending: Ending | None = None
        self.id = opened.id
        self._job, self._answers, self._reading, self._timer = opened, answers, started.reading, timer

    def cancel(self) -> None:
        """End it soon."""
        self._timer.cancel()
        self._job.cancel()

    async def __aiter__(self) -> AsyncIterator[PrefillProgress | Delta]:
        """ApiError: it failed on the way."""
        reason: FinishReason = "stop"
        has_tool_calls = False
        try:
            while True:
                answer = await self._answers.get()
                if isinstance(answer, PrefillProgress):
                    yield answer
                elif isinstance(answer, Token):
                    reason = answer.finish_reason or reason
                    delta = self._reading.add(answer)
                    has_tool_calls |= bool(delta.tool_calls)
                    yield delta
                elif isinstance(answer, Failed):
                    raise ApiError(answer.status, answer.message)
                elif isinstance(answer, Ended):
                    delta = self._reading.finish()
                    has_tool_calls |= bool(delta.tool_calls)
                    if answer.record.outcome != "stop":
                        reason = "length"
                    self.ending = Ending(reason, has_tool_calls, answer.record)
                    yield delta
                    return
        finally:
            self.cancel()


class _Mailbox:
    """Answers on their way to an event loop, which is woken once for all that come at a time: a round's tokens."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answers: deque[tuple[asyncio.Queue[ReplyEvent], ReplyEvent]] = deque()
        self._is_woken = False

    def put(self, queue: asyncio.Queue[ReplyEvent], answer: ReplyEvent) -> None:
        """Have an answer put into its queue; any thread. RuntimeError: the loop is closed."""
        self._answers.append((queue, answer))
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: what comes from now on may be too late for this time
        while self._answers:
            queue, answer = self._answers.popleft()
            queue.put_nowait(answer)


class Service:
    """Asks the generation thread on behalf of the routes.

    Args:
        runs: the generation thread.
        timeout_s: from asking to the reply's end, beyond which it is ended with what it has.
    """

    def __init__(self, runs: Runs, *, timeout_s: float) -> None:
        self._runs, self._timeout_s = runs, timeout_s
        self._mailbox: _Mailbox | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return self._runs.is_healthy

    async def ask(self, asked: Request) -> ServedReply:
        """Hand a request in, and wait until its prompt is in tokens.

        Raises:
            ApiError: it cannot be served, and why.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        mailbox, answers = self._mailbox, asyncio.Queue[ReplyEvent]()

        def put(answer: ReplyEvent) -> None:
            try:
                mailbox.put(answers, answer)
            except RuntimeError:  # the loop is closed: nobody listens any more
                opened.cancel()

        opened = OpenRequest(asked, put)
        self._runs.ask(opened)
        timer = loop.call_later(self._timeout_s, opened.cancel)
        try:
            first: Any = await answers.get()
        except BaseException:
            opened.cancel()
            timer.cancel()
            raise
        if isinstance(first, Failed):
            timer.cancel()
            raise ApiError(first.status, first.message, retry_after_s=first.retry_after_s)
        if isinstance(first, Ended):
            timer.cancel()
            raise ApiError(503, "the request was ended before it was served: it took too long, or the server stops.")
        assert isinstance(first, Started), first
        return ServedReply(opened, answers, first, timer)


T = TypeVar("T")

#: Nobody reads it; logs and metrics do. As nginx has it.
CLIENT_CLOSED_REQUEST = 499
#: Lists and objects in one another. What copies and renders them is recursive, and Python's stack is not endless.
MAX_DEPTH = 64


async def read_json(request: HttpRequest) -> dict[str, Any]:
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
        raise ApiError(400, f"HttpRequest should be a JSON dictionary; it is a {type(body).__name__}.")
    _require_shallow(body)
    return body


def _require_shallow(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise ApiError(400, f"HttpRequest is nested more than {MAX_DEPTH} levels deep.")


def namespace_of(request: HttpRequest) -> str:
    """The namespace that whoever sent `request` keeps to."""
    return str(getattr(getattr(request.state, "tenant", None), "namespace", ""))


def to_json(body: object, status: int = 200) -> Response:
    """A response of JSON. Half a surrogate pair, which a model may write, is escaped as any other character."""
    return Response(json.dumps(body), status, media_type="application/json")


async def while_connected(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
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


async def _disconnect(request: HttpRequest) -> None:
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

    def __init__(self, reply: ServedReply, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()
