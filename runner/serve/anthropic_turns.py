"""Turns of a conversation as Anthropic's Messages API has them, and as OpenAI's has them. Never imports MLX.

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

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


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
