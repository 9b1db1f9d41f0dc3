"""What the server and the reader of recorded conversations both do with bodies of APIs. Never imports MLX.

Messages become those of OpenAI's chat API as it is now, which chat templates take. The files of the other APIs,
`anthropic_blocks.py` and `response_items.py`, say what a part of a message is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")
#: A list that may be long. The first wrong item is reported: messages about each of a million would take seconds.
Many: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
# Claude Code begins its system prompt with such a line. It differs in every request, so it would end every prefix.
BILLING = "x-anthropic-billing-header:"


class Checked(BaseModel):
    """A body of an API or a part of one. Values are not converted between types, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def first_finding(errors: Sequence[Any]) -> tuple[str, str]:
    """The wrong field in the first of pydantic's findings, and what is wrong."""
    first = errors[0]
    # Pydantic also names types, such as literal['auto','none'] and, at the end, str, and [key].
    place = first["loc"][:-1] if first["loc"][-1:] == ("str",) else first["loc"]
    field = ".".join(str(part) for part in place if part != "body" and "[" not in str(part))
    return field, first["msg"].removeprefix("Value error, ")


def as_parts(content: Any) -> Any:
    """Content as a list of parts, if it is a text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def or_text(parts: Any) -> BeforeValidator:
    """Let a field of `parts` be a text, too."""
    return BeforeValidator(as_parts, json_schema_input_type=str | parts)


def dicts_in(values: Any) -> list[dict[str, Any]]:
    """The objects of a list; none if it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def with_text(parts: Sequence[Any], has_text: Callable[[Any], bool], left_out: Counter[str]) -> list[Any]:
    """The parts of a message that a template has text for; the other parts are counted by their type."""
    shown = []
    for part in parts:
        kind = part.get("type", part.get("content_type")) if isinstance(part, dict) else None
        if isinstance(kind, str) and not has_text(part):
            left_out[kind] += 1
        else:
            shown.append(part)
    return shown


def with_texts(turn: Any, has_text: Callable[[Any], bool], left_out: Counter[str]) -> Any:
    """Turns of an API, or a part of one, `with_text` at every depth and without nulls."""
    if isinstance(turn, list):
        return [with_texts(each, has_text, left_out) for each in turn]
    if not isinstance(turn, dict):
        return turn
    given = {name: value for name, value in turn.items() if value is not None}
    for name in ("content", "output"):
        if isinstance(parts := given.get(name), list):
            given[name] = with_texts(with_text(parts, has_text, left_out), has_text, left_out)
    return given


def without_billing(parts: Sequence[Any]) -> list[Any]:
    """The parts of a system text without billing lines. A part that has nothing else is left out."""
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or BILLING not in text:
            kept.append(part)
        elif text := "\n".join(line for line in text.split("\n") if not line.startswith(BILLING)):
            kept.append({**part, "text": text})
    return kept


def as_tool(function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def in_present_form(message: Any) -> Any:
    """A message of OpenAI's chat API with `tool_calls` for a `function_call`, and with refusals as texts."""
    if not isinstance(message, dict):
        return message
    given = {**message, "role": "tool"} if message.get("role") == "function" else {**message}
    if given.get("function_call") and not given.get("tool_calls"):
        given["tool_calls"] = [as_tool(given.pop("function_call"))]
    if isinstance(given.get("content"), list):
        given["content"] = [*map(_refusal_as_text, given["content"])]
    return given


def _refusal_as_text(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
    return {"type": "text", "text": part["refusal"]} if is_refusal else part


def content_of(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """The content of a message: a line for each text, or a list if there are images."""
    urls = [getattr(part, "image_url", None) for part in parts]
    if not any(urls):
        return "\n".join(part.text for part in parts)
    return [
        {"type": "image_url", "image_url": {"url": url}} if url else {"type": "text", "text": part.text}
        for part, url in zip(parts, urls, strict=True)
    ]


def reply_of(parts: Sequence[Any]) -> dict[str, Any]:
    """A message of the assistant. A part has a `text`, a `thought`, or `call_id`, `name` and `arguments` of a call."""
    texts = [part for part in parts if hasattr(part, "text") or hasattr(part, "image_url")]
    message: dict[str, Any] = {"role": "assistant", "content": content_of(texts)}
    if thought := "\n".join(filter(None, (getattr(part, "thought", None) for part in parts))):
        message["reasoning_content"] = thought
    calls = [part for part in parts if hasattr(part, "arguments")]
    if calls:
        functions = ({"name": call.name, "arguments": call.arguments} for call in calls)
        pairs = zip(calls, functions, strict=True)
        message["tool_calls"] = [{"id": call.call_id, **as_tool(function)} for call, function in pairs]
    return message


def reasoning_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template that say whether to reason, by each name that templates have for it.

    `thinking` is a truth value, or an object as in Anthropic's API. Values of other types count as missing.
    """
    effort, thinking = body.get("reasoning_effort"), body.get("thinking")
    if isinstance(thinking, dict):
        thinking = {"enabled": True, "disabled": False}.get(str(thinking.get("type")))
    said = (body.get("enable_thinking"), thinking, False if effort == "none" else None)
    is_thinking = next((each for each in said if isinstance(each, bool)), None)
    effort = effort if isinstance(effort, str) else None
    named = {"reasoning_effort": effort, "enable_thinking": is_thinking, "thinking": is_thinking}
    return {name: value for name, value in named.items() if value is not None}
