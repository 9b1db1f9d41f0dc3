"""A recorded conversation in OpenAI's chat form, the checks that data is one, and what makes messages of data.

The server and the readers share the functions that make chat messages, as templates take them, of bodies of APIs.
`anthropic_blocks.py` and `response_items.py` have the parts of a message in the other APIs.

Invariants of a `Conversation` that a reader returns:

  CV1  At least one message has the role user; every role is one of `ROLES`.
  CV2  `content` is text, or is missing if a reply calls tools; all text can be encoded as UTF-8.
  CV3  A tool call has a function with a name, and arguments that are JSON text or an object.
  CV4  `asked_messages` is less than the number of messages.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, Union, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from runner.files import InputError, expect
from runner.text import shortened

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")
MOST_REPEATS, FEW_MESSAGES = 100, 100_000  # how often messages of a tree may stand on its paths; fewer are always fine
MOST_LEVELS = 100  # of a message or a tool: later code calls itself for each
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


class Opening(StrEnum):
    """Why a request of an agent does not go on from the request before."""

    SESSION = "session"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"  # a summary took the place of the history
    EDIT = "edit"  # the user went back, and asked something else
    MODEL = "model"  # another model went on


class Call(NamedTuple):
    """What the log of an agent says of one request. `prompt_tokens` and `cached_tokens`: as the provider reported.

    `time` is the reply's, as ISO 8601 in UTC: without the Z, texts in their order.
    """

    reply_id: str
    time: str
    model: str
    opening: Opening | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Conversation:
    """A conversation as it was recorded.

    A regenerated, edited or logged conversation repeats messages of an earlier one. It does not ask for replies to its
    first `asked_messages` messages. Without `replies_recorded` only the user's turns are known, and each gets a reply.
    `source` is a file and a line. `arguments` are those of the chat template: `chat_template_kwargs` of the record.
    `left_out` counts parts that no template has text for, such as images, by their type. A conversation that
    `is_request` is the body of one request of a log. `calls` are those of an agent's log, one for each of the last
    replies; None: the reply is no request of this conversation.
    """

    conversation_id: str
    user: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    asked_messages: int = 0
    source: str = ""
    replies_recorded: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    is_request: bool = False
    calls: tuple[Call | None, ...] = ()


def turn_start(messages: Sequence[Mapping[str, Any]], turn: int, where: str) -> int:
    """The position of the user's message that begins a turn, from 0. InputError: there is none."""
    starts = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if not messages:
        raise InputError(f"{where}: the conversation is empty; wanted at least one message of role user.")
    if not starts:
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise InputError(f"{where}: no user turn among {len(messages)} messages (roles: {roles}).")
    if not 0 <= turn < len(starts):
        wanted = f"wanted 0 to {len(starts) - 1} (there are {len(starts)} user turns)"
        raise InputError(f"{where}: first_turn is {turn}; {wanted}.")
    return starts[turn]


def checked_tools(values: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """Return function definitions, or None for none. InputError: the first bad one."""
    if values is None:
        return None
    expect(isinstance(values, list), f"{where}: tools is", values, "a list of function definitions")
    for index, tool in enumerate(values):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        expect(has_name(function), f"{where}: tool {index} is", tool, "a function with a name")
        require_unicode(tool, f"{where}: tool {index}")
    return tuple(values) or None


def as_parts(content: Any) -> Any:
    """Content as a list of parts, if it is a text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def or_text(parts: Any) -> BeforeValidator:
    """Let a field of `parts` be a text, too."""
    return BeforeValidator(as_parts, json_schema_input_type=str | parts)


def null_as(value: Any) -> BeforeValidator:
    """Let null in a field mean this value."""
    return BeforeValidator(lambda given: value if given is None else given)


@dataclass(frozen=True)
class ByType:
    """In `Annotated[A | B, ByType(kinds)]`: tell the members apart by `type`. A type not in `kinds` is foreign."""

    kinds: Collection[str]
    default: str | None = None

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def kind_of(part: Any) -> str:
            kind = part.get("type", self.default) if isinstance(part, dict) else getattr(part, "type", None)
            return str(kind) if kind in self.kinds else "foreign"

        types = {member: get_args(member.model_fields["type"].annotation) or ("foreign",) for member in get_args(union)}
        members = (Annotated[member, Tag(kind)] for member, kinds in types.items() for kind in kinds)
        return handler.generate_schema(Annotated[Union[tuple(members)], Discriminator(kind_of)])  # noqa: UP007


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


def without_billing(content: Any) -> Any:
    """The parts of a system text without billing lines. A part that has nothing else is left out."""
    kept, parts = [], as_parts(content)
    if not isinstance(parts, list):
        return parts
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or BILLING not in text:
            kept.append(part)
        elif text := "\n".join(line for line in text.split("\n") if not line.startswith(BILLING)):
            kept.append({**part, "text": text})
    return kept


def as_tool(function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, **as_tool({"name": name, "arguments": arguments})}


def in_present_form(message: Any) -> Any:
    """A message of OpenAI's chat API with `tool_calls` for a `function_call`, and with refusals as texts."""
    if not isinstance(message, dict):
        return message
    given = {**message, "role": "tool"} if message.get("role") == "function" else {**message}
    if given.get("function_call") and not given.get("tool_calls"):
        given["tool_calls"] = [as_tool(given.pop("function_call"))]
    if isinstance(parts := given.get("content"), list):
        given["content"] = [
            {"type": "text", "text": part["refusal"]}
            if isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
            else part
            for part in parts
        ]
    return given


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
        message["tool_calls"] = [tool_call(each.call_id, each.name, each.arguments) for each in calls]
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


def require_unicode(value: Any, where: str) -> None:
    """Raise InputError where any text inside a value cannot be written as UTF-8, or a number not as JSON."""
    for text in _texts(value, where):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            is_byte = 0xDC80 <= code <= 0xDCFF  # with --skip-bad, bad bytes are read as these surrogates
            found = f"the byte 0x{code - 0xDC00:02x}" if is_byte else f"the lone surrogate U+{code:04X}"
            raise InputError(
                f"{where} holds {found} at character {error.start} of a text; wanted valid UTF-8."
            ) from None


def json_of(value: Any) -> Any:
    """The value of a JSON text; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str | bytes) else value
    except (ValueError, RecursionError):
        return value


def object_of(value: Any) -> dict[str, Any]:
    """An object, or the object in a JSON text; empty for all else."""
    found = json_of(value)
    return found if isinstance(found, dict) else {}


def named_value(value: Any, names: str) -> tuple[str, Any]:
    """The first of some values that is there, and its name; None: none of them is. `a/b` is a path of keys."""
    for name in names.split():
        found = value
        for key in name.split("/"):
            found = (found if isinstance(found, dict) else object_of(found)).get(key)
        if found is not None:
            return name, found
    return names.split()[0], None


def value_at(value: Any, names: str) -> Any:
    return named_value(value, names)[1]


def has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _texts(value: Any, where: str, levels: int = MOST_LEVELS) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where} holds {value}; wanted a number that JSON has.")
    elif isinstance(value, (Mapping, list)):
        if not levels:
            raise InputError(f"{where} is nested too deeply; wanted at most {MOST_LEVELS} levels.")
        for item in value if isinstance(value, list) else [*map(str, value), *value.values()]:
            yield from _texts(item, where, levels - 1)


def paths(parents: Mapping[str, str | None], where: str) -> Iterator[tuple[list[str], int]]:
    """The paths of a tree from a root to each leaf; how many messages of each one the paths before had.

    InputError: a parent is missing, messages are in circles, or all paths together are too long.
    """
    children: dict[str | None, list[str]] = {}
    for name, parent in parents.items():
        is_known = parent is None or (isinstance(parent, str) and parent in parents)
        expect(is_known, f"{where}: the parent of {shortened(name, 40)} is", parent, "a message of the tree")
        children.setdefault(parent, []).append(name)
    most = max(MOST_REPEATS * len(parents), FEW_MESSAGES)
    waiting = [(name, 0) for name in reversed(children.get(None, []))]
    path: list[str] = []
    shared = found = total = 0  # messages of the last path, of the tree, of all paths
    while waiting:
        name, depth = waiting.pop()
        path[depth:] = [name]
        shared, found = min(shared, depth), found + 1
        waiting += [(child, depth + 1) for child in reversed(children.get(name, ()))]
        if name not in children:
            total += len(path)
            expect(total <= most, f"{where}: the messages on all paths of the tree are", total, f"at most {most:,}")
            yield path[:], shared
            shared = len(path)
    expect(found == len(parents), f"{where}: messages in circles are", len(parents) - found, "none")
