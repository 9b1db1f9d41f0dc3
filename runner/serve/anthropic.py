"""Routes of Anthropic's Messages API. Runs on the event loop; never imports MLX.

Bodies of Anthropic's Messages API, checked field by field, and the Request that they come to. Never imports MLX.

What would change a reply's meaning and cannot be honoured (documents, server tools, a forced tool, structured output,
a reply that goes on from a beginning) is refused. Of the body's fields `null` is the same as none, and unknown
ones are ignored. Marks on tools and on the whole body are for checkpoints that are there anyway.

MessageDraft: a reply as Anthropic's message, while it is being written. Never imports MLX.

    draft.start()          message_start
    draft.add(delta)       content_block_start, content_block_delta, content_block_stop
    draft.end(ending)      content_block_stop, message_delta, message_stop

These are the events of a stream, as they come about; `draft.message` is what they come to, for whoever wants it whole.
At most one block is open at a time, and it is the last one.

Turns of a conversation as Anthropic's Messages API has them, and as OpenAI's has them. Never imports MLX.

    blocks of a turn           messages in OpenAI's form
    text, text           ->    content, a line each
    thinking             ->    reasoning_content
    tool_use             ->    tool_calls
    tool_result          ->    a message of its own, role "tool"
    image                ->    content is a list: texts, and images as data URLs

Turns of one role that follow each other become one, as Anthropic has it. Checkpoints lie at every message's end, so a
mark (`cache_control`) asks for one more where it is on a text inside of a message of text. Documents are no blocks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal, Self, TypeAlias

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from runner.serve.openai import MAX_MESSAGES, ChatBody, Count, Share, StopWord, Tokens
from runner.serve.options import ServeOptions
from runner.serve.request import DEFAULT, ApiError, PrefillProgress, Request, RequestRecord
from runner.serve.service import (
    Delta,
    Ending,
    ReplyStream,
    ServedReply,
    Service,
    namespace_of,
    read_json,
    server_sent_event,
    to_json,
    while_connected,
)

Event: TypeAlias = dict[str, Any]


class MessageDraft:
    """Takes a reply's deltas in their order.

    Args:
        id: of the reply.
        model: as the request named it.
        prompt_tokens: how many of them came from the cache is known at the end.
    """

    def __init__(self, id: str, model: str, prompt_tokens: int) -> None:
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._blank = ""
        self._stop_word: str | None = None
        self.message: dict[str, Any] = {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt_tokens, 0, 0),
        }

    def start(self) -> Event:
        """The first event: the message while it is empty."""
        return {"type": "message_start", "message": copy.deepcopy(self.message)}

    def add(self, delta: Delta) -> list[Event]:
        """Write on: reasoning, then text, then tool calls."""
        for step in delta.tokens:
            self._stop_word = step.stop_word
        events = self._write("thinking", delta.reasoning) if delta.reasoning else []
        # White space alone is no block: models put it between reasoning, calls and text.
        text = self._blank + delta.text
        if self._is_writing("text") or text.strip():
            events += self._write("text", text) if text else []
            text = ""
        self._blank = text
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def end(self, ending: Ending) -> list[Event]:
        """Close the message with why it ended and what it took."""
        if self._stop_word is not None:
            reason = "stop_sequence"
        elif ending.finish_reason == "length":
            reason = "max_tokens"
        else:
            reason = "tool_use" if ending.has_tool_calls else "end_turn"
        why = {"stop_reason": reason, "stop_sequence": self._stop_word}
        usage = _usage_of(ending.record)
        self.message |= {**why, "usage": usage}
        return [*self._close(), {"type": "message_delta", "delta": why, "usage": usage}, {"type": "message_stop"}]

    def _is_writing(self, kind: str) -> bool:
        return self._is_open and self._content[-1]["type"] == kind

    def _write(self, kind: str, text: str) -> list[Event]:
        """Add to the open block, or to a new one; in blocks of either kind the text's field is named like the kind."""
        events = []
        if not self._is_writing(kind):
            # Nothing is signed here, and clients want the field.
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._open({"type": kind, kind: "", **signature})
        self._content[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: dict[str, str]) -> list[Event]:
        # JSON has no NaN, but a model's arguments may.
        arguments = json.loads(call["arguments"], parse_constant=str)
        # The API has objects alone, but a model's arguments may be anything.
        arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        events = self._open({"type": "tool_use", "id": call["id"], "name": call["name"], "input": {}})
        self._content[-1]["input"] = arguments
        delta = self._delta({"type": "input_json_delta", "partial_json": json.dumps(arguments)})
        return [*events, delta, *self._close()]

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._is_open = True
        self._blank = ""
        self._content.append(block)
        return [*events, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**block}}]

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]


def _usage_of(record: RequestRecord) -> dict[str, int]:
    return _usage(record.prompt_tokens, record.cached_tokens, record.completion_tokens)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Each prompt token is counted once. Putting it into the cache costs nothing extra, so none is counted there."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


class Checked(BaseModel):
    """No value is taken for one of another type, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class CacheControl(Checked):
    """A mark; how long it is to last is left to the eviction policy."""

    type: Literal["ephemeral"]


class Markable(Checked):
    """What may have a mark."""

    cache_control: CacheControl | None = None


class Text(Markable):
    """A block of text."""

    type: Literal["text"]
    text: str

    def in_openai_form(self) -> dict[str, Any]:
        """As a part of a message."""
        return {"type": "text", "text": self.text}


class ImageSource(Checked):
    """The bytes of an image; where it could be fetched is no source."""

    type: Literal["base64"]
    media_type: Literal["image/gif", "image/jpeg", "image/png", "image/webp"]
    data: str


class Image(Markable):
    """A block that is an image."""

    type: Literal["image"]
    source: ImageSource

    def in_openai_form(self) -> dict[str, Any]:
        """As a part of a message."""
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class Thinking(Checked):
    """A block of reasoning; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Checked):
    """Reasoning that another server encrypted; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUse(Markable):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _or_str(blocks: Any) -> BeforeValidator:
    return BeforeValidator(_as_blocks, json_schema_input_type=str | blocks)


Texts: TypeAlias = Annotated[list[Text], _or_str(list[Text])]
Shown: TypeAlias = Annotated[Text | Image, Field(discriminator="type")]


class ToolResult(Markable):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Shown], _or_str(list[Shown])] = []
    is_error: bool = False


UserBlock: TypeAlias = Annotated[Text | Image | ToolResult, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[Text | Thinking | RedactedThinking | ToolUse, Field(discriminator="type")]


class SystemTurn(Checked):
    """Instructions."""

    role: Literal["system"]
    content: Texts


class UserTurn(Checked):
    """What the user said, and what tools answered."""

    role: Literal["user"]
    content: Annotated[list[UserBlock], _or_str(list[UserBlock])]


class AssistantTurn(Checked):
    """An earlier reply."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], _or_str(list[AssistantBlock])]


Turn: TypeAlias = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]


def in_openai_form(turns: Iterable[Turn]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Messages, each with where in its content a marked text ends that others follow, in characters."""
    for role, run in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in run for block in turn.content]
        if role == "assistant":
            yield _assistant_message(blocks), _marked_ends(blocks)
        else:
            yield from _other_messages(role, blocks)


def _other_messages(role: str, blocks: Sequence[Any]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Messages of what is not the assistant's."""
    for is_result, run in groupby(blocks, key=lambda block: isinstance(block, ToolResult)):
        if not is_result:
            shown = list(run)
            content = _content_of(shown)
            yield {"role": role, "content": content}, _marked_ends(shown) if isinstance(content, str) else []
            continue
        for result in run:
            # OpenAI's form has no place for a failure but the text.
            content = _content_of(result.content, "Error: " if result.is_error else "")
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}, []
    if not blocks:
        yield {"role": role, "content": ""}, []


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


def _content_of(blocks: Iterable[Any], before: str = "") -> str | list[dict[str, Any]]:
    """Text, or its parts where images are among it."""
    if not any(isinstance(block, Image) for block in blocks):
        return before + _text_of(blocks)
    prefix = [Text(type="text", text=before)] if before else []
    return [block.in_openai_form() for block in [*prefix, *blocks]]


def _text_of(blocks: Iterable[Any]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, Text))


def _marked_ends(blocks: Iterable[Any]) -> list[int]:
    texts = [block for block in blocks if isinstance(block, Text)]
    return [len(_text_of(texts[:count])) for count, text in enumerate(texts[:-1], 1) if text.cache_control]


# How the first system block of a well-known client begins. It is no part of the prompt, and as it is another one in
# every request, prompts behind it would share but a few tokens.
_BILLING_HEADER = "x-anthropic-billing-header:"


class Tool(Markable):
    """A tool of the client's; tools that a server runs have another type."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    input_schema: dict[str, Any]

    def in_openai_form(self) -> dict[str, Any]:
        """As a function."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Checked):
    """A model cannot be made to call a tool, or to call one at most; it can be left without them."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] = False


class ThinkingChoice(Checked):
    """Whether the chat template asks for reasoning; adaptive leaves it to the template. A budget is not kept."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(Checked):
    """A form of the output cannot be promised."""

    format: None = None


class AnthropicPromptBody(Checked):
    """The body of POST /v1/messages/count_tokens: what becomes the prompt."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingChoice = ThinkingChoice(type="adaptive")
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Check a request's body.

        Raises:
            ApiError: a field is missing, or is not what it may be.
        """
        try:
            checked = cls.model_validate({name: value for name, value in body.items() if value is not None})
        except ValidationError as error:
            raise ApiError.of_validation(error.errors()) from error
        if checked.messages[-1].role == "assistant":
            raise ApiError(400, "the last one is the assistant's; a reply cannot go on from it.", param="messages")
        return checked

    def request(self, options: ServeOptions, namespace: str) -> Request:
        """What the generation thread is asked for; what the body leaves open is as `options` have it."""
        messages, ends = zip(*self._messages(), strict=True)
        asked = ChatBody.read({"messages": [*messages], **self._openai_fields()}, options).request(namespace)
        return replace(asked, marked_texts=[(index, end) for index, of in enumerate(ends) for end in of])

    def _openai_fields(self) -> dict[str, Any]:
        """The body in OpenAI's form, less its messages."""
        thinking = self.thinking.type
        return {
            # Clients often cannot be told other names than Anthropic's, which no weights here have.
            "model": DEFAULT if self.model.startswith("claude-") else self.model,
            "max_tokens": 1,
            "tools": [tool.in_openai_form() for tool in self.tools if self.tool_choice.type == "auto"],
            "chat_template_kwargs": {} if thinking == "adaptive" else {"enable_thinking": thinking == "enabled"},
        }

    def _messages(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Messages, and where in each a text ends that is marked."""
        system = [block for block in self.system if not block.text.startswith(_BILLING_HEADER)]
        turns = [SystemTurn(role="system", content=system)] if system else []
        return in_openai_form([*turns, *self.messages])


class MessagesBody(AnthropicPromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Tokens
    stop_sequences: list[StopWord] = Field(default_factory=list, max_length=64)
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=10_000)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None

    def _openai_fields(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {
            **super()._openai_fields(),
            **sampling,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
        }


MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


def anthropic_routes(
    service: Service, options: ServeOptions, tokens_of: Callable[[Request], Coroutine[Any, Any, int]]
) -> APIRouter:
    """POST /v1/messages and POST /v1/messages/count_tokens.

    Args:
        tokens_of: how many tokens the prompt of a request has; may raise ApiError.
    """
    router = APIRouter()

    @router.post(MESSAGES, openapi_extra=_takes(MessagesBody, MESSAGES))
    async def messages(request: HttpRequest) -> Response:
        """A reply to a conversation, whole or as events."""
        body = MessagesBody.read(await read_json(request))
        reply = await while_connected(request, service.ask(body.request(options, namespace_of(request))))
        draft = MessageDraft(reply.id, body.model, reply.prompt_tokens)
        events = _events(reply, draft)
        if body.stream:
            return ReplyStream(reply, _sent(events))
        await while_connected(request, _whole(events))
        return to_json(draft.message)

    @router.post(COUNT_TOKENS, openapi_extra=_takes(AnthropicPromptBody, COUNT_TOKENS))
    async def count_tokens(request: HttpRequest) -> Response:
        """How many tokens a conversation would be."""
        body = AnthropicPromptBody.read(await read_json(request))
        asked = body.request(options, namespace_of(request))
        return to_json({"input_tokens": await while_connected(request, tokens_of(asked))})

    return router


def _takes(kind: type[AnthropicPromptBody], path: str) -> dict[str, Any]:
    """What the OpenAPI document says of a route that reads its body itself."""
    at = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=at + "/$defs/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _events(reply: ServedReply, draft: MessageDraft) -> AsyncIterator[Event]:
    yield draft.start()
    async for part in reply:
        for event in [{"type": "ping"}] if isinstance(part, PrefillProgress) else draft.add(part):
            yield event
    assert reply.ending is not None
    for event in draft.end(reply.ending):
        yield event


async def _whole(events: AsyncIterator[Event]) -> None:
    async for _ in events:
        pass


async def _sent(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Server-sent events. What fails on the way is the last of them."""
    try:
        async for event in events:
            yield server_sent_event(event, event["type"])
    except ApiError as error:
        yield server_sent_event(error.in_anthropic_form(), "error")
