"""Service: how the routes of all APIs get replies. Runs on the event loop; never imports MLX.

await read_json(http_request, make)    parses the body; `make` of the API checks the fields and makes the Request
await service.answer(...)              returns the whole response, which the API's ReplyWriter writes

reply = await service.ask(request)     ApiError: the server is full or stops, or the request is wrong
async for part in reply: ...           PrefillProgress and Token
reply.record, reply.finish_reason      how it ended, after the loop
reply.cancel()                         also called when the loop is left early

require_few_values refuses bodies that would take long to parse. FairThreads are threads on which clients take turns.
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from numpy.typing import NDArray
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from runner.engine.token import FinishReason, Token
from runner.serve.request import (
    CLIENT,
    NOT_KEPT,
    ApiError,
    OpenRequest,
    PrefillProgress,
    ReplyEvent,
    Request,
    RequestRecord,
)

T = TypeVar("T")

EVENTS = "text/event-stream"
CLIENT_CLOSED_REQUEST = 499  # status of a request whose client went away, as in nginx: for logs and metrics only
IDLE_S = 15  # seconds until a reply without tokens repeats its progress: proxies and clients drop silent connections
MAX_SALT_CHARS = 200
TENANT_HEADERS = ("x-apc-tenant", "x-tenant-id")  # of mlx-vlm's server
#: The most that the values of a body may cost. A plain value costs 1; a list, an object or a field CONTAINER_COST.
#: Parsing holds Python's global lock, on any thread. So only this limit bounds how long other threads wait.
MAX_COST, CONTAINER_COST = 1_000_000, 10
LARGE_BYTES = 64 << 10  # larger bodies are parsed on another thread
MAX_DEPTH = 64  # deepest nesting of lists and objects in a body, because copying and rendering are recursive


class ReplyBackend(Protocol):
    """Answers requests: the Scheduler of this process, or a Fleet of replicas."""

    @property
    def is_healthy(self) -> bool: ...

    def ask(self, opened: OpenRequest) -> None:
        """Accept a request; any thread. ApiError: the backend is full (429) or stopping (503)."""

    async def count_tokens(self, request: Request) -> int:
        """Count the tokens of a prompt. ApiError: the prompt cannot be made, or there is no such model."""


class ServedReply:
    """One reply as it arrives. `record` and `finish_reason` are None until it has ended.

    `cached_tokens`: how many prompt tokens the cache had; None before the first part. `echo`: the text of the prompt,
    if wanted. `echoed`: the tokens of the prompt, if their log-probabilities are wanted.
    """

    def __init__(
        self, opened: OpenRequest, events: asyncio.Queue[ReplyEvent], first: PrefillProgress, timer: asyncio.TimerHandle
    ) -> None:
        self.id, self.prompt_tokens, self.echo = opened.id, first.prompt_tokens, first.echo
        self.echoed: tuple[Token, ...] = ()
        self.cached_tokens: int | None = None
        self.record: RequestRecord | None = None
        self.finish_reason: FinishReason | None = None
        self.has_tool_calls = False
        assert first.new_reader is not None, first
        self._opened, self._events, self._new_reader, self._timer = opened, events, first.new_reader, timer

    def cancel(self) -> None:
        self._timer.cancel()
        self._opened.cancel()

    async def __aiter__(self) -> AsyncIterator[PrefillProgress | Token]:
        """Yield the parts. Before the first token, yield progress at least every IDLE_S. ApiError: the reply failed."""
        reason: FinishReason = "stop"
        progress, reader = PrefillProgress(0, self.prompt_tokens), None
        try:
            while self.record is None:
                try:
                    async with asyncio.timeout(IDLE_S if reader is None else None):
                        event = await self._events.get()
                except TimeoutError:
                    event = progress
                if isinstance(event, PrefillProgress):
                    self.echoed = event.echoed or self.echoed
                    if event.new_reader or event.echoed:  # a reader: another replica starts the reply again
                        continue
                    if self.cached_tokens is None and event is not progress:
                        self.cached_tokens = event.done_tokens
                    progress = event
                    yield event
                    continue
                if isinstance(event, ApiError):
                    raise event
                reader = reader or self._new_reader()
                if isinstance(event, Token):
                    reason = event.finish_reason or reason
                    part = reader.add(event)
                else:
                    part, self.record, self.cached_tokens = reader.finish(), event, event.cached_tokens
                    self.finish_reason = reason if event.outcome == "stop" else "length"
                self.has_tool_calls |= bool(part.tool_calls)
                yield part
        finally:
            self.cancel()


async def merge_replies(replies: Sequence[ServedReply]) -> AsyncIterator[tuple[int, PrefillProgress | Token]]:
    """Yield the parts of several replies as they arrive, each with the index of its reply. ApiError: a reply failed."""
    if len(replies) == 1:
        async for part in replies[0]:
            yield 0, part
        return
    streams = [aiter(reply) for reply in replies]
    awaited = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = awaited.pop(task)
                with suppress(StopAsyncIteration):
                    yield index, task.result()
                    # Not before the yield: the caller must see the reply as it was at this part.
                    awaited[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in awaited:
            task.cancel()
        await asyncio.gather(*awaited, return_exceptions=True)


class ReplyWriter(Protocol):
    async def whole(self) -> dict[str, Any]:
        """Wait for the whole reply, in the form of an API. ApiError: it failed."""

    def events(self) -> AsyncIterator[str]:
        """Yield server-sent events or lines. An error is an event or a line, too."""


Events: TypeAlias = Iterator[dict[str, Any]]


class BlockWriter(ABC):
    """Writes one reply as a list of blocks: reasoning, text or a call. Only the last block may be open.

    White space alone opens no block, because models write it between reasoning, calls and text.
    """

    def __init__(
        self, reply: ServedReply, result: dict[str, Any], blocks: list[dict[str, Any]], reasoning: str, text: str
    ) -> None:
        self._reply, self._result, self._blocks, self._reasoning, self._text = reply, result, blocks, reasoning, text
        self._is_open = False
        self._blank = ""

    async def whole(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self._result

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events, with comments during prefill. An error is the last event."""
        try:
            async for event in self._events():
                if isinstance(event, PrefillProgress):
                    yield f": keepalive {event.done_tokens}/{event.prompt_tokens}\n\n"
                else:
                    yield server_sent_event(event, event["type"])
        except ApiError as error:
            failure = self._failure(error)
            yield server_sent_event(failure, failure["type"])

    @abstractmethod
    def _failure(self, error: ApiError) -> dict[str, Any]:
        """The event of an error."""

    @abstractmethod
    def _events(self) -> AsyncIterator[dict[str, Any] | PrefillProgress]: ...

    def _add(self, part: Token) -> Events:
        if part.reasoning:
            yield from self._write(self._reasoning, part.reasoning)
        text, self._blank = self._blank + part.text, ""
        if text.strip() or (text and self._is_writing(self._text)):
            yield from self._write(self._text, text)
        else:
            self._blank = text
        for call in part.tool_calls:
            yield from self._call(call)

    def _is_writing(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    @abstractmethod
    def _write(self, kind: str, text: str) -> Events:
        """Add to the text of the open block if it is of this kind, else open one."""

    @abstractmethod
    def _call(self, call: dict[str, Any]) -> Events: ...


class _Mailbox:
    """Carries events from other threads to the event loop. The loop wakes once for all events of a round."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[tuple[asyncio.Queue[ReplyEvent], ReplyEvent]] = deque()
        self._is_woken = False

    def put(self, queue: asyncio.Queue[ReplyEvent], event: ReplyEvent) -> None:
        self._events.append((queue, event))
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # before the loop: an event that is put meanwhile must wake the event loop again
        while self._events:
            queue, event = self._events.popleft()
            queue.put_nowait(event)


class Service:
    """Passes requests of routes to the backend. `timeout_s` after its request, a reply ends with its text so far."""

    def __init__(self, backend: ReplyBackend, *, timeout_s: float) -> None:
        self.backend, self._timeout_s = backend, timeout_s
        self._mailbox: _Mailbox | None = None

    async def answer(
        self,
        http_request: HttpRequest,
        requests: Sequence[Request],
        writer: Callable[[Sequence[ServedReply]], ReplyWriter],
        *,
        stream: bool,
        media_type: str = EVENTS,
    ) -> Response:
        """Serve requests together and return one response: whole, or as a stream of events.

        ApiError: a request cannot be served.
        """
        replies = await while_connected(http_request, self._ask_all(requests))
        if stream:
            return ReplyStream(replies, writer(replies).events(), media_type)
        try:
            return to_json(await while_connected(http_request, writer(replies).whole()))
        finally:
            for reply in replies:
                reply.cancel()

    async def _ask_all(self, requests: Sequence[Request]) -> list[ServedReply]:
        asked = [asyncio.ensure_future(self.ask(request)) for request in requests]
        try:
            return await asyncio.gather(*asked)
        except BaseException:
            for each in asked:
                each.cancel()
            for reply in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(reply, ServedReply):
                    reply.cancel()
            raise

    async def ask(self, request: Request) -> ServedReply:
        """Submit a request and wait until its prompt is tokenized. ApiError: it cannot be served."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        mailbox, events = self._mailbox, asyncio.Queue[ReplyEvent]()

        def put(event: ReplyEvent) -> None:
            try:
                mailbox.put(events, event)
            except RuntimeError:  # the loop is closed
                opened.cancel()

        opened = OpenRequest(request, put)
        self.backend.ask(opened)
        timer = loop.call_later(self._timeout_s, opened.cancel)
        try:
            first = await events.get()
        except BaseException:
            opened.cancel()
            timer.cancel()
            raise
        if isinstance(first, PrefillProgress):
            return ServedReply(opened, events, first, timer)
        timer.cancel()
        if isinstance(first, ApiError):
            raise first
        raise ApiError(503, "the request was ended before it was served: it took too long, or the server stops.")


async def read_json(request: HttpRequest, make: Callable[[dict[str, Any]], T]) -> T:
    """Parse the body of a request and return `make(body)`.

    ApiError: no JSON object, nested too deep, NaN, infinity or half a surrogate pair; or `make` raises it.
    """
    raw = await request.body()
    return await beside_loop(len(raw), lambda: make(_parse(raw)))


async def beside_loop(length_bytes: int, work: Callable[[], T]) -> T:
    """Do work on a body. If the body is long, another thread does the work, so that the event loop is free."""
    if length_bytes <= LARGE_BYTES:
        return work()
    return await asyncio.wrap_future(READERS.submit(CLIENT.get(), work))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"Invalid JSON in request body: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"Request should be a JSON dictionary; it is a {type(body).__name__}.")
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        if math.inf in inner or -math.inf in inner:  # a number with a large exponent
            raise ApiError(400, "Invalid JSON in request body: a number is too large.")
        level = [value for value in inner if isinstance(value, (dict, list))]
    if level:
        raise ApiError(400, f"Request is nested more than {MAX_DEPTH} levels deep.")
    return body


def namespace_of(request: HttpRequest, body: Mapping[str, Any]) -> str:
    """Return the namespace of a request. With `cache_prompt: false` (llama.cpp), only this request has it.

    ApiError: a field is wrong.
    """
    namespace, keeps = shared_namespace_of(request, body), body.get("cache_prompt")
    if not isinstance(keeps, bool | None):
        raise ApiError(400, "wanted true or false.", param="cache_prompt")
    return f"{namespace} {uuid.uuid4()}{NOT_KEPT}" if keeps is False else namespace


def shared_namespace_of(request: HttpRequest, body: Mapping[str, Any]) -> str:
    """Return the namespace of the API key; if there is a salt, add a space and the salt. ApiError: the salt is wrong.

    The salt is `cache_salt` of the body (vLLM, SGLang), or a header for tenants of mlx-vlm.
    """
    namespace = str(getattr(getattr(request.state, "tenant", None), "namespace", ""))
    salt = body.get("cache_salt")
    if not isinstance(salt, str | None) or len(salt or "") > MAX_SALT_CHARS:
        raise ApiError(400, f"wanted text of at most {MAX_SALT_CHARS} characters.", param="cache_salt")
    headers = (request.headers.get(name, "")[:MAX_SALT_CHARS] for name in TENANT_HEADERS)
    salt = salt or next(filter(None, headers), "")
    return f"{namespace} {salt}" if salt else namespace


def to_json(body: object, status: int = 200) -> Response:
    """Return a JSON response. Half a surrogate pair, which a model may write, is escaped."""
    return Response(json.dumps(body), status, media_type="application/json")


async def while_connected(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If the client disconnects, cancel it and raise ApiError. Read the body before you call this."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away.")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def server_sent_event(data: object, name: str | None = None) -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"


class ReplyStream(StreamingResponse):
    """Streams replies as server-sent events or lines. When the response ends or fails, all replies are cancelled."""

    def __init__(self, replies: Sequence[ServedReply], events: AsyncIterator[str], media_type: str) -> None:
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for reply in self._replies:
                reply.cancel()


def require_few_values(raw: bytes) -> None:
    """Raise ApiError if parsing a body would take too long. Characters inside texts do not count.

    The count is exact for valid JSON. For other JSON, it includes all that a parser reads before the first error.
    """
    if _cost(np.frombuffer(raw, np.uint8)) <= MAX_COST:
        return
    # Remove escapes: then each quote begins or ends a text.
    bare = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    cost = _cost(bare[~np.logical_xor.accumulate(bare == ord('"'))])
    if cost > MAX_COST:
        counted = f"a list, an object or a field counts as {CONTAINER_COST}"
        raise ApiError(400, f"Request has {cost:,} JSON values ({counted}); at most {MAX_COST:,} are read.")


def _cost(signs: NDArray[np.uint8]) -> int:
    counts = {sign: int(np.count_nonzero(signs == ord(sign))) for sign in ",[{:"}
    return counts.pop(",") + CONTAINER_COST * sum(counts.values())


class FairThreads:
    """Threads on which clients take turns. A client has `each` threads at most, so that other clients need not wait."""

    def __init__(self, count: int, each: int, name: str) -> None:
        self._pool, self._each = ThreadPoolExecutor(count, name), each
        self._lock = Lock()  # guards the fields below
        self._waiting: dict[str, deque[Future[Any]]] = {}  # the client whose turn it is comes first
        self._work: dict[Future[Any], Callable[[], Any]] = {}
        self._running = Counter[str]()

    def submit(self, client: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on a thread, in the caller's context, when it is the client's turn."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append(future)
            self._work[future] = partial(copy_context().run, function, *arguments)
        future.add_done_callback(self._forget)
        self._pool.submit(self._run)
        return future

    def close(self) -> None:
        """Cancel work that waits. Work that runs goes on."""
        with self._lock:
            left = [future for futures in self._waiting.values() for future in futures]
            self._waiting.clear()
        for future in left:
            future.cancel()
        self._pool.shutdown(wait=False)

    def _run(self) -> None:
        client = None
        while (turn := self._next(client)) is not None:
            client, future = turn
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._work[future]())
                except BaseException as error:
                    future.set_exception(error)

    def _next(self, ended: str | None) -> tuple[str, Future[Any]] | None:
        """Return the next client and its work; None: no work may run now. `ended`: the client whose work has ended."""
        with self._lock:
            if ended is not None:
                self._running[ended] -= 1
                if not self._running[ended]:
                    del self._running[ended]
            client = next((each for each in self._waiting if self._running[each] < self._each), None)
            if client is None:
                return None
            futures = self._waiting.pop(client)
            future = futures.popleft()
            if futures:
                self._waiting[client] = futures  # behind all other clients
            self._running[client] += 1
            return client, future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._work.pop(future, None)


READERS = FairThreads(1, 1, "bodies")
