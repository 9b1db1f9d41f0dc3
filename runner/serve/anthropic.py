"""Anthropic's Messages API: bodies, their translation to OpenAI's form, replies, routes. Never imports MLX.

    MessagesBody      what the client sent, checked; becomes a Request by way of ChatBody
    MessageDraft      the reply, whole or as events
    anthropic_routes  POST /v1/messages and /v1/messages/count_tokens

`messages_of` turns blocks into messages in OpenAI's form, which chat templates take:

    text, text    ->  content, a line each
    thinking      ->  reasoning_content
    tool_use      ->  tool_calls
    tool_result   ->  a message of its own, role "tool", the tool's answer as content
    image         ->  content is a list: texts, and images as data URLs
    document, search_result, tool_reference  ->  text

Successive turns of one role become one turn, as in Anthropic's API. Every end of a message is a checkpoint anyway, so a
mark (`cache_control`) adds a checkpoint only on a text inside a message. Tools that Anthropic's servers run, and what
they did in past turns, are left out, with a line in the log. The server refuses documents that are not text. A last
turn of the assistant is a beginning that the reply continues. `null` means the same as no field.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, WithJsonSchema

from runner.serve.openai import ChatBody, ThinkingChoice, without_billing
from runner.serve.options import ServeOptions
from runner.serve.request import (
    MAX_MESSAGES,
    ApiError,
    Checked,
    Count,
    Many,
    PrefillProgress,
    Request,
    Share,
    StopWord,
    Temperature,
    Tokens,
    body_schema,
)
from runner.serve.service import (
    EVENTS,
    Delta,
    ServedReply,
    Service,
    namespace_of,
    read_arguments,
    read_json,
    server_sent_event,
    to_json,
    while_connected,
)
from runner.text import shortened

logger = logging.getLogger(__name__)

LEFT_OUT = "left out of a prompt, as only Anthropic's servers have it: %s"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


class CacheControl(Checked):
    """A mark. Its `ttl` is ignored: the eviction policy decides how long state stays."""

    type: Literal["ephemeral"]


class Markable(Checked):
    cache_control: CacheControl | None = None


class Text(Markable):
    type: Literal["text"]
    text: str


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _or_str(blocks: Any) -> BeforeValidator:
    return BeforeValidator(_as_blocks, json_schema_input_type=str | blocks)


Texts: TypeAlias = Annotated[Many[Text], _or_str(list[Text])]


class TextSource(Checked):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class BlocksSource(Checked):
    type: Literal["content"]
    content: Texts

    @property
    def text(self) -> str:
        return _text_of(self.content)


class Document(Markable):
    type: Literal["document"]
    source: Annotated[TextSource | BlocksSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResult(Markable):
    type: Literal["search_result"]
    source: str
    title: str
    content: Many[Text]

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, _text_of(self.content)))


class ToolReference(Markable):
    """A tool that a search for tools has found."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ImageSource(Checked):
    type: Literal["base64"]
    media_type: Literal["image/gif", "image/jpeg", "image/png", "image/webp"]
    data: str


class Image(Markable):
    type: Literal["image"]
    source: ImageSource


class Thinking(Checked):
    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Checked):
    """Reasoning that another server encrypted; it is left out."""

    type: Literal["redacted_thinking"]


class ServerBlock(Checked):
    """What a tool of Anthropic's servers was asked or found; it is left out."""

    type: Literal[
        "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
        "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
        "mcp_tool_use", "mcp_tool_result", "container_upload",
    ]  # fmt: skip


class ToolUse(Markable):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Shown: TypeAlias = Annotated[Text | Image | Document | SearchResult | ToolReference, Field(discriminator="type")]


class ToolResult(Markable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Many[Shown], _or_str(list[Shown])] = Field(default_factory=list)
    is_error: bool = False


UserBlock: TypeAlias = Annotated[
    Text | Image | Document | SearchResult | ToolResult | ServerBlock, Field(discriminator="type")
]
AssistantBlock: TypeAlias = Annotated[
    Text | Thinking | RedactedThinking | ToolUse | ServerBlock, Field(discriminator="type")
]
#: Blocks that are text in a prompt.
TEXTUAL = (Text, Document, SearchResult, ToolReference)


class SystemTurn(Checked):
    role: Literal["system"]
    content: Texts


class UserTurn(Checked):
    role: Literal["user"]
    content: Annotated[Many[UserBlock], _or_str(list[UserBlock])]


class AssistantTurn(Checked):
    role: Literal["assistant"]
    content: Annotated[Many[AssistantBlock], _or_str(list[AssistantBlock])]


Turn: TypeAlias = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]


def _without_billing(turns: Iterable[Turn]) -> Iterator[Turn]:
    """The turns without billing lines in system texts. A turn that had nothing else is left out."""
    for turn in turns:
        if isinstance(turn, SystemTurn):
            kept = [block.model_copy(update={"text": without_billing(block.text)}) for block in turn.content]
            blocks = [block for block, given in zip(kept, turn.content, strict=True) if block.text or not given.text]
            if turn.content and not blocks:
                continue
            turn = SystemTurn(role="system", content=blocks)
        yield turn


def messages_of(turns: Iterable[Turn]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Messages in OpenAI's form, each with the ends of its marked texts, in characters of its content."""
    for role, run in groupby(turns, key=lambda turn: turn.role):
        blocks = _own_blocks(block for turn in run for block in turn.content)
        if role == "assistant":
            yield _assistant_message(blocks), _marked_ends(blocks)
            continue
        for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResult)):
            if is_result:
                yield from ((_tool_message(result), []) for result in group)
            else:
                shown = list(group)
                content = _content_of(shown)
                yield {"role": role, "content": content}, _marked_ends(shown) if isinstance(content, str) else []
        if not blocks:
            yield {"role": role, "content": ""}, []


def _own_blocks(blocks: Iterable[Any]) -> list[Any]:
    found = [*blocks]
    if foreign := sorted({block.type for block in found if isinstance(block, ServerBlock)}):
        logger.warning(LEFT_OUT, ", ".join(foreign))
    return [block for block in found if not isinstance(block, ServerBlock)]


def _tool_message(result: Any) -> dict[str, Any]:
    # OpenAI's form has no field for a failure, only the text.
    content = _content_of(result.content, "Error: " if result.is_error else "")
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}


def _assistant_message(blocks: Sequence[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(blocks)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, Thinking)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, ToolUse)]:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
            for call in calls
        ]
    return message


def _content_of(blocks: Sequence[Any], prefix: str = "") -> str | list[dict[str, Any]]:
    if not any(isinstance(block, Image) for block in blocks):
        return prefix + _text_of(blocks)
    parts: list[dict[str, Any]] = [{"type": "text", "text": prefix}] if prefix else []
    for block in blocks:
        if isinstance(block, Image):
            url = f"data:{block.source.media_type};base64,{block.source.data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": block.text})
    return parts


def _text_of(blocks: Iterable[Any]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TEXTUAL))


def _marked_ends(blocks: Iterable[Any]) -> list[int]:
    texts = [block for block in blocks if isinstance(block, TEXTUAL)]
    ends = accumulate((len(text.text) for text in texts), lambda end, length: end + 1 + length)  # 1: the line's end
    return [end for end, text in zip(ends, texts[:-1], strict=False) if text.cache_control]


class Tool(Markable):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    input_schema: dict[str, Any]


class ServerTool(Checked):
    """A tool that only Anthropic's servers run; it is left out."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]


def _own_tools(tools: Any) -> Any:
    """The tools without those that only Anthropic's models know by their type, such as web_search_20250305."""
    if not isinstance(tools, list):
        return tools
    types = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    foreign = [kind for kind in types if isinstance(kind, str) and kind != "custom"]
    if foreign:
        logger.warning(LEFT_OUT, shortened(", ".join(foreign), 200))
    return [tool for tool, kind in zip(tools, types, strict=True) if kind not in foreign]


class ToolChoice(Checked):
    """Whether the model may call tools, must not, must call one, or must call the one that is named."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def in_chats(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return self.type


class OutputFormat(Checked):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Checked):
    effort: Annotated[str, Field(max_length=100)] | None = None
    format: OutputFormat | None = None


class AnthropicPromptBody(Checked):
    """The body of POST /v1/messages/count_tokens: what becomes the prompt."""

    model: str
    messages: Annotated[Many[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[Many[Tool], BeforeValidator(_own_tools, json_schema_input_type=list[Tool | ServerTool])] = Field(
        default_factory=list
    )
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingChoice = ThinkingChoice(type="adaptive")
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        return cls.checked({name: value for name, value in body.items() if value is not None})

    def request(self, options: ServeOptions, namespace: str) -> Request:
        turns = [*([SystemTurn(role="system", content=self.system)] if self.system else []), *self.messages]
        found = [*messages_of(_without_billing(turns))]
        fields = {"messages": [message for message, _ in found], **self._openai_fields()}
        marked = [(index, end) for index, (_, ends) in enumerate(found) for end in ends]
        chat = ChatBody.read(fields, options)
        return chat.request(namespace, format_field="output_config.format", marked_texts=marked)

    def _openai_fields(self) -> dict[str, Any]:
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in self.tools
        ]
        wanted = self.output_config.format
        schema = None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
        return {
            "model": self.model,
            "max_tokens": 1,
            "tools": [{"type": "function", "function": function} for function in functions],
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
MessageEvents: TypeAlias = Iterator[dict[str, Any]]


class MessageDraft:
    """Writes one reply. At most one block is open, and it is the last one.

    First message_start, when the cached tokens are known, and pings until then; `_add` gives content_block_start,
    _delta and _stop; `_end` message_delta and message_stop.
    """

    def __init__(self, reply: ServedReply, model: str) -> None:
        self._reply = reply
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._blank = ""
        self._stop_word: str | None = None
        self.message: dict[str, Any] = {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self.message

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events. A failure is the last of them."""
        try:
            async for event in self._events():
                yield server_sent_event(event, event["type"])
        except ApiError as error:
            yield server_sent_event(error.in_anthropic_form(), "error")

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        async for part in self._reply:
            is_waiting = isinstance(part, PrefillProgress) and self._reply.cached_tokens is None
            if "usage" not in self.message and not is_waiting:
                self.message["usage"] = _usage(self._reply.prompt_tokens, self._reply.cached_tokens or 0, 0)
                yield {"type": "message_start", "message": copy.deepcopy(self.message)}
            for event in [{"type": "ping"}] if isinstance(part, PrefillProgress) else self._add(part):
                yield event
        for event in self._end():
            yield event

    def _add(self, delta: Delta) -> MessageEvents:
        for token in delta.tokens:
            self._stop_word = token.stop_word
        if delta.reasoning:
            yield from self._write("thinking", delta.reasoning)
        # White space alone is no block: models write it between reasoning, calls and text.
        text, self._blank = self._blank + delta.text, ""
        if text.strip() or (text and self._is_writing("text")):
            yield from self._write("text", text)
        else:
            self._blank = text
        for call in delta.tool_calls:
            yield from self._call(call)

    def _end(self) -> MessageEvents:
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

    def _is_writing(self, kind: str) -> bool:
        return self._is_open and self._content[-1]["type"] == kind

    def _write(self, kind: str, text: str) -> MessageEvents:
        if not self._is_writing(kind):
            yield from self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: dict[str, Any]) -> MessageEvents:
        function = call["function"]
        arguments, is_whole = read_arguments(function["arguments"])
        written = json.dumps(arguments) if is_whole else function["arguments"]
        yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        self._content[-1]["input"] = arguments
        yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> MessageEvents:
        yield from self._close()
        self._is_open, self._blank = True, ""
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**block}}

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> MessageEvents:
        if self._is_open:
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Count each prompt token once. Writing to the cache costs nothing, so its count is 0."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def anthropic_routes(service: Service, options: ServeOptions) -> APIRouter:
    router = APIRouter()

    def checked(kind: type[Body], request: HttpRequest, given: dict[str, Any]) -> tuple[Body, Request]:
        body = kind.read(given)
        return body, body.request(options, namespace_of(request, given))

    @router.post(MESSAGES, openapi_extra=body_schema(MessagesBody, MESSAGES, stream=EVENTS))
    async def messages(request: HttpRequest) -> Response:
        body, asked = await read_json(request, lambda given: checked(MessagesBody, request, given))
        return await service.answer(request, asked, lambda reply: MessageDraft(reply, body.model), stream=body.stream)

    @router.post(COUNT_TOKENS, openapi_extra=body_schema(AnthropicPromptBody, COUNT_TOKENS))
    async def count_tokens(request: HttpRequest) -> Response:
        _, asked = await read_json(request, lambda given: checked(AnthropicPromptBody, request, given))
        tokens = await while_connected(request, service.backend.count_tokens(asked))
        return to_json({"input_tokens": tokens})

    return router
