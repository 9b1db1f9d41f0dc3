"""Turns of a conversation as Anthropic's Messages API has them, and as OpenAI's has them. Never imports MLX.

    blocks of a turn           messages in OpenAI's form
    text, text           ->    content, a line each
    thinking             ->    reasoning_content
    tool_use             ->    tool_calls
    tool_result          ->    a message of its own, role "tool"

Turns of one role that follow each other become one, as Anthropic has it. Checkpoints lie at every message's end, so a
mark (`cache_control`) asks for one more where it is on a text inside of a message. Images and documents are no blocks.
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


class ToolResult(Markable):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = []
    is_error: bool = False


UserBlock: TypeAlias = Annotated[Text | ToolResult, Field(discriminator="type")]
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
    texts = [block for block in blocks if isinstance(block, Text)]
    return [len(_text_of(texts[:count])) for count, text in enumerate(texts[:-1], 1) if text.cache_control]
