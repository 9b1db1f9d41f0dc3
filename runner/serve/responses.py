"""OpenAI's Responses API: bodies, replies, and the conversations that later requests continue. Never imports MLX.

    ResponsesBody     the checked body of a request; becomes a ChatBody, then a Request
    ResponseWriter     the reply, whole or as events
    ResponseMemory    the conversations that `previous_response_id` and `item_reference` may name
    responses_routes  POST /v1/responses; routes to count tokens, and to read and delete stored responses

`runner/script/response_items.py` turns items into messages. The prompt leaves out tools and items that only OpenAI's
servers can use; the log names them. A field that is `null` counts as missing.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema
from pydantic_core import from_json

from runner.engine.token import Token
from runner.script.conversation import Checked, Many, as_tool
from runner.script.response_items import SEAL, CustomTool, Item, OwnTool, ResponseChat, as_items, flat_name
from runner.serve.openai import ChatBody
from runner.serve.options import ServeOptions
from runner.serve.request import (
    DEFAULT,
    MAX_MESSAGES,
    ApiError,
    PrefillProgress,
    Request,
    Share,
    Temperature,
    Tokens,
    body_schema,
    check_body,
    short_name,
)
from runner.serve.service import (
    EVENTS,
    BlockWriter,
    Events,
    ServedReply,
    Service,
    beside_loop,
    namespace_of,
    read_json,
    shared_namespace_of,
    to_json,
    while_connected,
)
from runner.text import shortened

logger = logging.getLogger(__name__)
T = TypeVar("T")

RESPONSES = "/v1/responses"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
MAX_STORED, MAX_STORED_BYTES = 1000, 64 << 20
#: Seconds after which a silent stream repeats an event. Codex drops streams after 300 s, and ignores comments.
KEEPALIVE_S = 30


class ChosenTool(Checked):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    def in_chats(self) -> dict[str, Any]:
        return as_tool({"name": flat_name(self.namespace, self.name)})


class ChosenTools(Checked):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[ChosenTool]


class PlainFormat(Checked):
    type: Literal["text", "json_object"]


class SchemaFormat(Checked):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class TextConfig(Checked):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def _foreground(background: bool) -> bool:
    if background:
        raise ValueError("wanted false: replies are not made in the background")
    return background


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(Many[Item])


class ResponsesBody(ResponseChat):
    """The body of POST /v1/responses. Other fields go to ChatBody: `top_k`, `seed` and so on."""

    model_config = ConfigDict(extra="allow")

    model: str = DEFAULT
    input: Annotated[
        Many[Item], Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(as_items, json_schema_input_type=str | list[Item]),
    ]  # fmt: skip
    previous_response_id: str | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | ChosenTools = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    text: TextConfig = TextConfig()
    stream: bool = False
    store: bool = True
    include: Many[str] = Field(default_factory=list)
    metadata: dict[str, str] = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"
    prompt_cache_key: str | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    background: Annotated[bool, AfterValidator(_foreground), WithJsonSchema({"const": False})] = False
    conversation: None = None
    prompt: None = None

    def request(self, options: ServeOptions, namespace: str, past: Sequence[Item] = ()) -> Request:
        """Return a Request with the items of `past`, then those of this body. ApiError: a field is wrong."""
        if foreign := sorted(set(self.foreign())):
            logger.info(
                "left out of a prompt, because only OpenAI's servers have it: %s", shortened(", ".join(foreign), 200)
            )
        chat = {
            **(self.model_extra or {}),
            **self.model_dump(include={"model", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key"}),
            "messages": self.messages(past),
            "n": None,
            "max_tokens": self.max_output_tokens,
            "tools": self.functions(),
            "tool_choice": self._tool_choice(),
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning.effort,
        }
        return ChatBody.read(chat, options).request(namespace, format_field="text.format")

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, ChosenTools):
            allowed = {"mode": choice.mode, "tools": [tool.in_chats() for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        return choice.in_chats() if isinstance(choice, ChosenTool) else choice

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format
        if isinstance(wanted, SchemaFormat):
            return {"type": wanted.type, "json_schema": {"schema": wanted.schema_}}
        return None if wanted is None else {"type": wanted.type}


#: Fields that a response copies from the body, with the defaults for fields that the body lacks.
_REPEATED: dict[str, Any] = {
    "background": False, "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None, "safety_identifier": None,
    "service_tier": "default", "store": True, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "truncation": "disabled", "user": None,
}  # fmt: skip


def begun_response(id: str, body: Mapping[str, Any], options: ServeOptions) -> dict[str, Any]:
    """Return the response object for a body, still without output."""

    def given(name: str, default: Any) -> Any:
        return default if body.get(name) is None else body[name]

    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": short_name(given("model", DEFAULT)),
        "output": [],
        "usage": None,
        "reasoning": {"effort": None, "summary": None, **given("reasoning", {})},
        "temperature": given("temperature", options.temp),
        "top_p": given("top_p", options.top_p),
        "text": {"format": {"type": "text"}, **given("text", {})},
        **{name: given(name, default) for name, default in _REPEATED.items()},
    }


Owner: TypeAlias = tuple[str, str]  # the name of an API key, and a namespace of the cache


class ResponseWriter(BlockWriter):
    """Writes one reply. Each block is an item of the output.

    Events: created, in_progress; for each item output_item.added, deltas, output_item.done; then completed, incomplete
    or failed. An event shares objects with the response: serialize each event before you ask for the next one.
    `on_end` is called with the response before the last event.
    """

    def __init__(
        self,
        reply: ServedReply,
        response: dict[str, Any],
        *,
        tools: Mapping[str, OwnTool] = {},
        is_sealed: bool = False,
        on_end: Callable[[dict[str, Any]], None] = lambda response: None,
    ) -> None:
        super().__init__(reply, response, response["output"], "reasoning", "message")
        self.response, self._tools, self._is_sealed, self._on_end = response, tools, is_sealed, on_end
        self._event_count = self._reasoning_tokens = self._silent_tokens = 0

    def _failure(self, error: ApiError) -> dict[str, Any]:
        error.rename("messages", "input")
        failure = error.in_openai_form()["error"]
        failure["code"] = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        self.response |= {"status": "failed", "error": failure}
        return self._event("failed", response=self.response)

    async def _events(self) -> AsyncIterator[dict[str, Any] | PrefillProgress]:
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)
        told_s = time.monotonic()
        async for part in self._reply:
            if isinstance(part, Token):
                for event in self._add(part):
                    yield event
                continue
            yield part
            if time.monotonic() - told_s >= KEEPALIVE_S:
                told_s = time.monotonic()
                yield self._event("in_progress", response=self.response)
        for event in self._end():
            yield event

    def _add(self, part: Token) -> Events:
        # The reader may hold back a token's text. Such tokens are reasoning if the next part is reasoning.
        self._silent_tokens += part.id is not None
        if part.reasoning:
            self._reasoning_tokens += self._silent_tokens
        if part.reasoning or part.text or part.tool_calls:
            self._silent_tokens = 0
        yield from super()._add(part)

    def _end(self) -> Events:
        record = self._reply.record
        assert record is not None
        status = "incomplete" if self._reply.finish_reason == "length" else "completed"
        yield from self._close(status)
        self.response |= {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": record.prompt_tokens,
                "input_tokens_details": {"cached_tokens": record.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": record.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": record.prompt_tokens + record.completion_tokens,
            },
        }
        self._on_end(self.response)
        yield self._event(status, response=self.response)

    def _write(self, kind: str, text: str) -> Events:
        if not self._is_writing(kind):
            yield from self._close()
            if kind == "message":
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                yield from self._open("msg", {"type": kind, "role": "assistant", "content": []})
            else:
                part = {"type": "reasoning_text", "text": ""}
                yield from self._open("rs", {"type": kind, "summary": [], "content": []})
            self._blocks[-1]["content"].append(part)
            yield self._item_event("content_part.added", content_index=0, part=part)
        part = self._blocks[-1]["content"][0]
        part["text"] += text
        yield self._item_event(f"{part['type']}.delta", content_index=0, delta=text, **_logprobs(part))

    def _call(self, call: dict[str, Any]) -> Events:
        function = call["function"]
        own = self._tools.get(function["name"])
        item = {"call_id": call["id"], "name": own.tool.name if own else function["name"]}
        if own and own.namespace:
            item["namespace"] = own.namespace
        yield from self._close()
        if own and isinstance(own.tool, CustomTool):
            kind, field, value = "custom_tool_call_input", "input", _text_input(function["arguments"])
            yield from self._open("ctc", {"type": "custom_tool_call", **item, "input": ""})
        else:
            kind, field, value = "function_call_arguments", "arguments", function["arguments"]
            yield from self._open("fc", {"type": "function_call", **item, "arguments": ""})
        self._blocks[-1][field] = value
        yield self._item_event(f"{kind}.delta", delta=value)
        yield self._item_event(f"{kind}.done", **{field: value})
        if self._reply.finish_reason is None:  # after the last token, _end closes the item
            yield from self._close()

    def _open(self, prefix: str, item: dict[str, Any]) -> Events:
        self._is_open, self._blank = True, ""
        id = f"{prefix}_{self._reply.id}_{len(self._blocks)}"
        self._blocks.append({"id": id, "status": "in_progress", **item})
        yield self._event("output_item.added", output_index=len(self._blocks) - 1, item=self._blocks[-1])

    def _close(self, status: str = "completed") -> Events:
        if not self._is_open:
            return
        self._is_open, item = False, self._blocks[-1]
        if "content" in item:
            part = item["content"][0]
            text = {"text": part["text"], **_logprobs(part)}
            yield self._item_event(f"{part['type']}.done", content_index=0, **text)
            yield self._item_event("content_part.done", content_index=0, part=part)
            if item["type"] == "reasoning" and self._is_sealed:
                item["encrypted_content"] = SEAL + part["text"]
        item["status"] = status
        yield self._event("output_item.done", output_index=len(self._blocks) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        at = {"item_id": self._blocks[-1]["id"], "output_index": len(self._blocks) - 1}
        return self._event(kind, **at, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return event


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": part["logprobs"]} if "logprobs" in part else {}


def _text_input(arguments: str) -> str:
    """Return the text for a custom tool: `input` of the arguments, even if cut off; without `input`, all arguments."""
    with suppress(ValueError):
        found = from_json(arguments, allow_partial="trailing-strings")
        if isinstance(found, dict) and isinstance(found.get("input"), str):
            text: str = found["input"]
            return text
    return arguments


class Remembered(NamedTuple):
    """A conversation. `response`: its last response as JSON, without output. `output_count`: items of the output."""

    conversation: tuple[bytes, ...]
    response: bytes = b""
    output_count: int = 0

    @property
    def length_bytes(self) -> int:
        return sum(map(len, self.conversation)) + len(self.response)

    def items(self) -> list[Any]:
        return [item for piece in self.conversation for item in json.loads(piece)]

    def whole(self) -> dict[str, Any]:
        """Return the response with its output."""
        output = json.loads(self.conversation[-1])
        return {**json.loads(self.response), "output": output[len(output) - self.output_count :]}

    def input_items(self) -> list[dict[str, Any]]:
        """Return all items that the response answers. An item without an id is named by its index."""
        items = self.items()
        items = items[: len(items) - self.output_count]
        return [{"id": f"item_{at}", **_in_full(item)} for at, item in enumerate(items)]


def _in_full(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item in its full form. A short form of a message has no type, or a string as content."""
    if "type" in item and not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    content = item.get("content")
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
    return {"type": "message", "status": "completed", **item, "content": parts}


class ResponseMemory:
    """The newest conversations, which later requests of the same owner may continue. Only the event loop uses it.

    An owner is an API key with a namespace of the cache. Clearing the namespace deletes the conversations of the owner.

    A conversation is a tuple of JSON texts: for each request, the items of the request and of its reply. A later
    conversation shares the texts of the earlier one, so the counted bytes are an upper bound.
    """

    def __init__(self) -> None:
        self._conversations: dict[tuple[Owner, str], Remembered] = {}
        self._bytes = 0
        self._clears = Counter[str | None]()

    def clear(self, namespace: str | None = None) -> None:
        """Forget all conversations, or those of one namespace. Its running requests will store no conversation."""
        self._clears[namespace] += 1
        kept = {key: each for key, each in self._conversations.items() if namespace not in (None, key[0][1])}
        self._conversations = kept
        self._bytes = sum(each.length_bytes for each in kept.values())

    def clears(self, owner: Owner) -> int:
        """Count how often the owner's namespace was cleared. A request stores nothing if that happens meanwhile."""
        return self._clears[None] + self._clears[owner[1]]

    def put(
        self, owner: Owner, id: str, conversation: tuple[bytes, ...], response: bytes = b"", output_count: int = 0
    ) -> None:
        found = Remembered(conversation, response, output_count)
        if found.length_bytes > MAX_STORED_BYTES:
            return
        self._conversations[owner, id] = found
        self._bytes += found.length_bytes
        while len(self._conversations) > MAX_STORED or self._bytes > MAX_STORED_BYTES:
            self._bytes -= self._conversations.pop(next(iter(self._conversations))).length_bytes

    def get(self, owner: Owner, id: str) -> tuple[bytes, ...]:
        """Return the conversation that ends with a response. ApiError: it is not stored, or another owner's."""
        return self.find(owner, id, "previous_response_id").conversation

    def find(self, owner: Owner, id: str, param: str = "response_id") -> Remembered:
        """Return a stored response, and mark it as just used. ApiError: it is not stored, or another owner's."""
        if (found := self._conversations.pop((owner, id), None)) is None:
            what = param.removesuffix("_id").replace("_", " ").capitalize()
            message = f"{what} with id {shortened(id, 80)!r} not found: not of this server or namespace, or too old."
            raise ApiError(404, message, param=param, code=f"{param.removesuffix('_id')}_not_found")
        self._conversations[owner, id] = found
        return found

    def forget(self, owner: Owner, id: str) -> None:
        """Forget a response; conversations that continue it stay. ApiError: it is not stored, or another owner's."""
        self._bytes -= self.find(owner, id).length_bytes
        del self._conversations[owner, id]

    def join(self, body: dict[str, Any], owner: str) -> dict[str, Any]:
        """Return a body with the conversation that it continues as part of the input. Any key's conversation will do.

        ApiError: an item or a response is not stored. `owner`: the name of the client's API key.
        """
        id, namespace = body.get("previous_response_id"), body.get("namespace") or ""
        if id is None or not isinstance(namespace, str):  # a wrong namespace is reported later
            return body
        if not isinstance(id, str):
            what = f"previous_response_id is {shortened(repr(id), 80)}; wanted a string."
            raise ApiError(400, what, param="previous_response_id")
        found = (each for each, its in self._conversations if its == id and each[1] == namespace)
        wall = next(found, (owner, namespace))
        past = [item for piece in self.get(wall, id) for item in json.loads(piece)]
        own = self.resolve(wall, as_items(body.get("input")), lambda more_bytes: None)
        return {**body, "previous_response_id": None, "input": [*past, *(own if isinstance(own, list) else [own])]}

    def resolve(self, owner: Owner, items: Any, hold: Callable[[int], None]) -> Any:
        """Replace references among the items of a body by the stored items. ApiError: an item is not stored.

        References are `item_reference` and reasoning without text, as LangChain sends it. Such reasoning stays if it is
        not stored. `hold` is called with the bytes read. An item is found once, so a small body gives no huge prompt.
        """

        @cache
        def output(response_id: str) -> dict[str, Any]:
            if (owner, response_id) not in self._conversations:
                return {}
            piece = self.get(owner, response_id)[-1]
            hold(len(piece))
            return {item["id"]: item for item in json.loads(piece) if "id" in item}

        def stored(item: Any) -> Any:
            kind = item.get("type") if isinstance(item, dict) else None
            is_empty = kind == "reasoning" and not any(map(item.get, ("content", "summary", "encrypted_content")))
            if kind != "item_reference" and not is_empty:
                return item
            id = item.get("id")
            found = output("resp_" + id.split("_")[1]).pop(id, None) if isinstance(id, str) and "_" in id else None
            if found is None and not is_empty:
                name = shortened(str(id), 80)
                message = f"Item with id {name!r} not found: not of this server, too old, or named twice."
                raise ApiError(404, message, param="input", code="item_not_found")
            return found or item

        return [stored(item) for item in items] if isinstance(items, list) else items


class _Question(NamedTuple):
    """A checked body, its Request, and the conversation that it continues."""

    given: dict[str, Any]
    owner: Owner
    past: tuple[bytes, ...]
    body: ResponsesBody
    request: Request


def _hold(request: HttpRequest, more_bytes: int) -> None:
    """Count the stored bytes that a request reads as if they were part of its body."""
    getattr(request.state, "hold", lambda more_bytes: None)(more_bytes)


def _owner(request: HttpRequest, given: Mapping[str, Any]) -> Owner:
    return str(getattr(getattr(request.state, "tenant", None), "name", "")), shared_namespace_of(request, given)


async def _read_question(request: HttpRequest, options: ServeOptions, memory: ResponseMemory) -> _Question:
    given = await read_json(request, lambda body: body)
    owner = _owner(request, given)
    given["input"] = memory.resolve(owner, given.get("input"), partial(_hold, request))
    before = given.get("previous_response_id")
    past = memory.get(owner, before) if isinstance(before, str) else ()
    past_bytes = sum(map(len, past))
    _hold(request, past_bytes)

    def make() -> tuple[ResponsesBody, Request]:
        body = check_body(ResponsesBody, given)
        items = [item for piece in past for item in json.loads(piece)]
        return body, body.request(options, namespace_of(request, given), _ITEMS.validate_python(items))

    return _Question(given, owner, past, *await beside_loop(past_bytes + len(await request.body()), make))


def _page(items: list[dict[str, Any]], order: str, limit: int, after: str | None) -> dict[str, Any]:
    """Return a page of a list in OpenAI's form. ApiError: no item has the id `after`."""
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise ApiError(400, "wanted the id of an item of this response.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    shown = ordered[start : start + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": start + limit < len(ordered)}


def responses_routes(service: Service, options: ServeOptions, memory: ResponseMemory) -> APIRouter:
    router = APIRouter()

    @router.post(RESPONSES, openapi_extra=body_schema(ResponsesBody, RESPONSES, stream=EVENTS))
    @router.post(RESPONSES.removeprefix("/v1"), openapi_extra=body_schema(ResponsesBody, RESPONSES, stream=EVENTS))
    async def responses(request: HttpRequest) -> Response:
        asked = await _read_question(request, options, memory)
        clears = memory.clears(asked.owner)

        def remember(response: dict[str, Any]) -> None:
            if asked.body.store and asked.request.is_kept and memory.clears(asked.owner) == clears:
                output = response["output"]
                fresh = json.dumps([*as_items(asked.given["input"]), *output]).encode()
                about = json.dumps({**response, "output": []}).encode()
                memory.put(asked.owner, response["id"], (*asked.past, fresh), about, len(output))

        def writer(replies: Sequence[ServedReply]) -> ResponseWriter:
            return ResponseWriter(
                replies[0],
                begun_response(replies[0].id, asked.given, options),
                tools=asked.body.own_tools(),
                is_sealed="reasoning.encrypted_content" in asked.body.include,
                on_end=remember,
            )

        return await service.answer(request, [asked.request], writer, stream=asked.body.stream)

    @router.post(INPUT_TOKENS, openapi_extra=body_schema(ResponsesBody, INPUT_TOKENS))
    async def input_tokens(request: HttpRequest) -> Response:
        asked = await _read_question(request, options, memory)
        tokens = await while_connected(request, service.backend.count_tokens(asked.request))
        return to_json({"object": "response.input_tokens", "input_tokens": tokens})

    async def remembered(request: HttpRequest, id: str, read: Callable[[Remembered], T]) -> T:
        found = memory.find(_owner(request, request.query_params), id)
        _hold(request, found.length_bytes)
        return await beside_loop(found.length_bytes, lambda: read(found))

    @router.get(RESPONSES + "/{response_id}")
    async def response(request: HttpRequest, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise ApiError(400, "wanted false: a stored response has no events.", param="stream")
        return to_json(await remembered(request, response_id, Remembered.whole))

    @router.delete(RESPONSES + "/{response_id}")
    async def delete_response(request: HttpRequest, response_id: str) -> Response:
        memory.forget(_owner(request, request.query_params), response_id)
        return to_json({"id": response_id, "object": "response", "deleted": True})

    @router.get(RESPONSES + "/{response_id}/input_items")
    async def input_items(
        request: HttpRequest,
        response_id: str,
        order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> Response:
        items = await remembered(request, response_id, Remembered.input_items)
        return to_json(_page(items, order, limit, after))

    return router
