"""Anthropic's Messages API: bodies, their translation to OpenAI's form, replies, routes. Never imports MLX.

    MessagesBody      what the client sent, checked; it becomes a ChatBody, then a Request
    MessageWriter      the reply, whole or as events
    anthropic_routes  POST /v1/messages and /v1/messages/count_tokens

`runner/script/anthropic_blocks.py` turns blocks into messages. Each end of a message is a checkpoint anyway. So a mark
(`cache_control`) adds a checkpoint only on a text inside a message. Tools that Anthropic's servers run, and their calls
in past turns, are left out, with a line in the log. The server refuses documents that are not text. If the last turn is
the assistant's, the reply continues it. `null` means the same as no field.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from runner.engine.token import Token
from runner.script.anthropic_blocks import AnthropicChat, CacheControl, Turn, foreign_tools, left_out
from runner.script.conversation import Checked, Many, as_tool
from runner.serve.openai import ChatBody
from runner.serve.options import ServeOptions
from runner.serve.reply_reader import read_arguments
from runner.serve.request import (
    MAX_MESSAGES,
    ApiError,
    Count,
    PrefillProgress,
    Request,
    Share,
    StopWord,
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
    namespace_of,
    read_json,
    to_json,
    while_connected,
)
from runner.text import shortened

logger = logging.getLogger(__name__)

LEFT_OUT = "left out of a prompt, as only Anthropic's servers have it: %s"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


class ToolChoice(Checked):
    """Whether the model may call tools, must not, must call one, or must call the tool with this name."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def in_chats(self) -> Any:
        if self.type == "tool":
            return as_tool({"name": self.name or ""})
        return self.type


class AnthropicPromptBody(AnthropicChat):
    """The body of POST /v1/messages/count_tokens: the fields that make the prompt."""

    model: str
    messages: Annotated[Many[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    tool_choice: ToolChoice = ToolChoice(type="auto")
    cache_control: CacheControl | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        if foreign := foreign_tools(body.get("tools")):
            logger.warning(LEFT_OUT, shortened(", ".join(foreign), 200))
        return check_body(cls, body)

    def request(self, options: ServeOptions, namespace: str) -> Request:
        if foreign := left_out(self.messages):
            logger.warning(LEFT_OUT, shortened(", ".join(foreign), 200))
        found = self.marked_messages()
        fields = {"messages": [message for message, _ in found], **self._openai_fields()}
        marked = [(index, end) for index, (_, ends) in enumerate(found) for end in ends]
        chat = ChatBody.read(fields, options)
        return chat.request(namespace, format_field="output_config.format", marked_texts=marked)

    def _openai_fields(self) -> dict[str, Any]:
        wanted = self.output_config.format
        schema = None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
        return {
            "model": self.model,
            "max_tokens": 1,
            "tools": self.functions(),
            "tool_choice": self.tool_choice.in_chats(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "response_format": schema,
            "thinking": self.thinking.model_dump(),
            "reasoning_effort": self.output_config.effort,
        }


class MessagesBody(AnthropicPromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Tokens
    stop_sequences: Many[StopWord] = Field(default_factory=list, max_length=64)
    stream: bool = False
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None

    def _openai_fields(self) -> dict[str, Any]:
        sampling = self.model_dump(include={"temperature", "top_p", "top_k", "max_tokens"})
        return {**super()._openai_fields(), **sampling, "stop": self.stop_sequences}


Body = TypeVar("Body", bound=AnthropicPromptBody)


class MessageWriter(BlockWriter):
    """Writes one reply.

    It sends pings until the cached tokens are known, then message_start. `_add` gives content_block_start, _delta and
    _stop; `_end` gives message_delta and message_stop.
    """

    def __init__(self, reply: ServedReply, model: str) -> None:
        content: list[dict[str, Any]] = []
        self._stop_word: str | None = None
        self.message: dict[str, Any] = {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }
        super().__init__(reply, self.message, content, "thinking", "text")

    def _failure(self, error: ApiError) -> dict[str, Any]:
        return error.in_anthropic_form()

    async def _events(self) -> AsyncIterator[dict[str, Any] | PrefillProgress]:
        async for part in self._reply:
            is_waiting = isinstance(part, PrefillProgress) and self._reply.cached_tokens is None
            if "usage" not in self.message and not is_waiting:
                self.message["usage"] = _usage(self._reply.prompt_tokens, self._reply.cached_tokens or 0, 0)
                yield {"type": "message_start", "message": copy.deepcopy(self.message)}
            for event in [{"type": "ping"}] if isinstance(part, PrefillProgress) else self._add(part):
                yield event
        for event in self._end():
            yield event

    def _add(self, part: Token) -> Events:
        if part.id is not None:
            self._stop_word = part.stop_word
        yield from super()._add(part)

    def _end(self) -> Events:
        record = self._reply.record
        assert record is not None
        if self._stop_word is not None:
            reason = "stop_sequence"
        elif self._reply.finish_reason == "length":
            reason = "max_tokens"
        else:
            reason = "tool_use" if self._reply.has_tool_calls else "end_turn"
        why = {"stop_reason": reason, "stop_sequence": self._stop_word}
        usage = _usage(record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        self.message |= {**why, "usage": usage}
        yield from self._close()
        yield from ({"type": "message_delta", "delta": why, "usage": usage}, {"type": "message_stop"})

    def _write(self, kind: str, text: str) -> Events:
        if not self._is_writing(kind):
            yield from self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: dict[str, Any]) -> Events:
        function = call["function"]
        arguments, is_whole = read_arguments(function["arguments"])
        written = json.dumps(arguments) if is_whole else function["arguments"]
        yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        self._blocks[-1]["input"] = arguments
        yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> Events:
        yield from self._close()
        self._is_open, self._blank = True, ""
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Events:
        if self._is_open:
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Count each prompt token once. Writes to the cache are free, so their count is 0."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def anthropic_routes(service: Service, options: ServeOptions) -> APIRouter:
    router = APIRouter()

    def read_body(kind: type[Body], request: HttpRequest, given: dict[str, Any]) -> tuple[Body, Request]:
        body = kind.read(given)
        return body, body.request(options, namespace_of(request, given))

    @router.post(MESSAGES, openapi_extra=body_schema(MessagesBody, MESSAGES, stream=EVENTS))
    async def messages(request: HttpRequest) -> Response:
        body, asked = await read_json(request, lambda given: read_body(MessagesBody, request, given))

        def writer(replies: Sequence[ServedReply]) -> MessageWriter:
            return MessageWriter(replies[0], short_name(body.model))

        return await service.answer(request, [asked], writer, stream=body.stream)

    @router.post(COUNT_TOKENS, openapi_extra=body_schema(AnthropicPromptBody, COUNT_TOKENS))
    async def count_tokens(request: HttpRequest) -> Response:
        _, asked = await read_json(request, lambda given: read_body(AnthropicPromptBody, request, given))
        tokens = await while_connected(request, service.backend.count_tokens(asked))
        return to_json({"input_tokens": tokens})

    return router
