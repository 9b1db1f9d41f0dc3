"""Bodies of Anthropic's Messages API, checked field by field, and the Asked that they come to. Never imports MLX.

    blocks of a turn           messages in OpenAI's form
    text, text           ->    content, a line each
    thinking             ->    reasoning_content
    tool_use             ->    tool_calls
    tool_result          ->    a message of its own, role "tool"

Turns of one role that follow each other become one, as Anthropic has it. Checkpoints lie at the end of the opening,
where templates write tools, and at every message's end; `cache_control` asks for one more where a text inside of a
message has it.

What would change a reply's meaning and cannot be honoured (images, documents, server tools, a forced tool, structured
output, a reply that goes on from a beginning) is refused. Of the body's fields `null` is the same as none, and unknown
ones are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from runner.serve.asked import DEFAULT, Asked
from runner.serve.errors import ApiError
from runner.serve.openai_bodies import ChatBody, Count, Share, StopWord, Tokens
from runner.serve.options import ServeOptions

# How the first system block of a well-known client begins. It is no part of the prompt, and as it is another one in
# every request, prompts behind it would share but a few tokens.
_BILLING_HEADER = "x-anthropic-billing-header:"


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class CacheControl(_Checked):
    """A mark; how long it is to last is left to the eviction policy."""

    type: Literal["ephemeral"]


class _Markable(_Checked):
    cache_control: CacheControl | None = None


class Text(_Markable):
    """A block of text."""

    type: Literal["text"]
    text: str


class Thinking(_Checked):
    """A block of reasoning; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(_Checked):
    """Reasoning that another server encrypted; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUse(_Markable):
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


class ToolResult(_Markable):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = []
    is_error: bool = False


UserBlock: TypeAlias = Annotated[Text | ToolResult, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[Text | Thinking | RedactedThinking | ToolUse, Field(discriminator="type")]


class SystemTurn(_Checked):
    """Instructions."""

    role: Literal["system"]
    content: Texts


class UserTurn(_Checked):
    """What the user said, and what tools answered."""

    role: Literal["user"]
    content: Annotated[list[UserBlock], _or_str(list[UserBlock])]


class AssistantTurn(_Checked):
    """An earlier reply."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], _or_str(list[AssistantBlock])]


Turn: TypeAlias = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]


class Tool(_Markable):
    """A tool of the client's; tools that a server runs have another type."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    input_schema: dict[str, Any]

    def in_openai_form(self) -> dict[str, Any]:
        """As a function."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(_Checked):
    """A model cannot be made to call a tool, or to call one at most; it can be left without them."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] = False


class ThinkingChoice(_Checked):
    """Whether the chat template asks for reasoning; adaptive leaves it to the template. A budget is not kept."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(_Checked):
    """A form of the output cannot be promised."""

    format: None = None


class PromptBody(_Checked):
    """The body of POST /v1/messages/count_tokens: what becomes the prompt."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Texts = []
    tools: list[Tool] = []
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

    def asked(self, options: ServeOptions, namespace: str) -> Asked:
        """What the generation thread is asked for; what the body leaves open is as `options` have it."""
        messages, ends = zip(*self._messages(), strict=True)
        asked = ChatBody.read({"messages": [*messages], **self._openai_fields()}, options).asked(namespace)
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
        if system:
            yield {"role": "system", "content": _text_of(system)}, _marked_ends(system)
        for role, turns in groupby(self.messages, key=lambda turn: turn.role):
            blocks = [block for turn in turns for block in turn.content]
            if role == "assistant":
                yield _assistant_message(blocks), _marked_ends(blocks)
            else:
                yield from _other_messages(role, blocks)


class MessagesBody(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[StopWord], Field(max_length=64)] = []
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


def _other_messages(role: str, blocks: Sequence[Any]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Messages of what is not the assistant's, with where marked texts end."""
    for is_result, run in groupby(blocks, key=lambda block: isinstance(block, ToolResult)):
        if not is_result:
            texts = list(run)
            yield {"role": role, "content": _text_of(texts)}, _marked_ends(texts)
            continue
        for result in run:
            # OpenAI's form has no place for a failure but the text.
            content = ("Error: " if result.is_error else "") + _text_of(result.content)
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


def _text_of(blocks: Iterable[Any]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, Text))


def _marked_ends(blocks: Iterable[Any]) -> list[int]:
    """Where in `_text_of(blocks)` a marked text ends with others behind it."""
    texts = [block for block in blocks if isinstance(block, Text)]
    return [len(_text_of(texts[:count])) for count, text in enumerate(texts[:-1], 1) if text.cache_control]
