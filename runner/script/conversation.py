"""A recorded conversation in OpenAI chat form, and the checks that data is one.

Invariants of a `Conversation` that a reader returns:

  CV1  At least one message has the role user; every role is one of `ROLES`.
  CV2  `content` is text, or is missing if a reply calls tools; all text can be encoded as UTF-8.
  CV3  A tool call has a function with a name, and arguments that are JSON text or an object.
  CV4  `first_turn` is the number of a user turn that exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from runner.text import printable, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
# Chat templates read no other keys of messages (refusal, annotations, audio ...).
_MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


MOST_LEVELS = 100  # of a message or a tool: later code calls itself for each
T = TypeVar("T")
#: A list that may be long. The first wrong item is reported: messages about each of a million would take seconds.
Many: TypeAlias = Annotated[list[T], Field(fail_fast=True)]


class Checked(BaseModel):
    """A body of an API or a part of one. Values are not converted between types, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def first_finding(errors: Sequence[Any]) -> tuple[str, str]:
    """The wrong field in the first of pydantic's findings, and what is wrong."""
    first = errors[0]
    # Pydantic also names types, such as literal['auto','none'], and [key].
    field = ".".join(str(part) for part in first["loc"] if part != "body" and "[" not in str(part))
    return field, first["msg"].removeprefix("Value error, ")


class ConversationError(ValueError):
    """A file or a record that is not a conversation: where, what was found, what was wanted, on one line."""


class Opening(StrEnum):
    """Why a request of an agent does not go on from the request before."""

    SESSION = "session"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"  # a summary took the place of the history
    EDIT = "edit"  # the user went back, and asked something else
    MODEL = "model"  # another model went on


class Call(NamedTuple):
    """What the log of an agent says of one request. `prompt_tokens` and `cached_tokens`: as the provider reported.

    `time` is the reply's, as ISO 8601 in UTC: texts in their order.
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

    A regenerated or edited conversation repeats messages of an earlier one and asks only from turn `first_turn` on.
    Without `replies_recorded` only the user's turns are known, and each gets a reply. `source` is a file and a line.
    `arguments` are those of the chat template: `chat_template_kwargs` of the record. `left_out` counts parts that no
    template has text for, such as images, by their type. A conversation that `is_request` is the body of one request
    of a log; replies to its first `asked_messages` messages were asked for by earlier bodies. `calls` are those of an
    agent's log: only the last replies of the conversation were asked for, one in each call.
    """

    conversation_id: str
    user: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    first_turn: int = 0
    source: str = ""
    replies_recorded: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    is_request: bool = False
    asked_messages: int = 0
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where a record is from, and the id of its conversation if the record has none."""

    path: Path
    line: int
    default_id: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def source(self) -> str:
        return f"{printable(self.path.name)}:{self.line}"


class Record(NamedTuple):
    """A JSON object of a file."""

    value: dict[str, Any]
    origin: Origin


def expect(holds: bool, found: str, value: Any, wanted: str) -> None:
    """Raise ConversationError "FOUND VALUE; wanted WANTED." unless it holds."""
    if not holds:
        raise ConversationError(f"{found} {shown(value)}; wanted {wanted}.")


def checked_conversation(conversation: Conversation, where: str) -> Conversation:
    """Return the conversation if it has a turn to ask. ConversationError: no message, no user turn, no `first_turn`."""
    turns = sum(message["role"] == "user" for message in conversation.messages)
    if not conversation.messages:
        raise ConversationError(f"{where}: the conversation is empty; wanted at least one message of role user.")
    if turns == 0:
        roles = ", ".join(sorted({message["role"] for message in conversation.messages}))
        raise ConversationError(f"{where}: no user turn among {len(conversation.messages)} messages (roles: {roles}).")
    if not 0 <= conversation.first_turn < turns:
        raise ConversationError(
            f"{where}: first_turn is {conversation.first_turn}; wanted 0 to {turns - 1} (there are {turns} user turns)."
        )
    return conversation


def checked_messages(values: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Return messages with the keys that templates know. ConversationError: the first bad one."""
    expect(isinstance(values, list), f"{where}: messages is", values, "a list of messages")
    return tuple(_checked_message(value, f"{where}: message {index}") for index, value in enumerate(values))


def checked_tools(values: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """Return function definitions, or None for none. ConversationError: the first bad one."""
    if values is None:
        return None
    expect(isinstance(values, list), f"{where}: tools is", values, "a list of function definitions")
    for index, tool in enumerate(values):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        expect(_has_name(function), f"{where}: tool {index} is", tool, "a function with a name")
        require_unicode(tool, f"{where}: tool {index}")
    return tuple(values) or None


def checked_arguments(value: Any, where: str) -> dict[str, Any]:
    """Return arguments of the chat template; empty for None. ConversationError: it is no object."""
    if value is None:
        return {}
    expect(isinstance(value, dict), f"{where}: chat_template_kwargs is", value, "an object")
    require_unicode(value, f"{where}: chat_template_kwargs")
    return dict(value)


def with_text(parts: Sequence[Any], has_text: Callable[[Any], bool], left_out: Counter[str]) -> list[Any]:
    """The parts of a message that a template has text for; the other parts are counted by their type."""
    shown = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and not has_text(part):
            left_out[kind] += 1
        else:
            shown.append(part)
    return shown


def require_unicode(value: Any, where: str) -> None:
    """Raise ConversationError where any text inside a value cannot be written as UTF-8."""
    for text in _texts(value, where):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            is_byte = 0xDC80 <= code <= 0xDCFF  # with --skip-bad, bad bytes are read as these surrogates
            found = f"the byte 0x{code - 0xDC00:02x}" if is_byte else f"the lone surrogate U+{code:04X}"
            raise ConversationError(
                f"{where} holds {found} at character {error.start} of a text; wanted valid UTF-8."
            ) from None


def _checked_message(value: Any, where: str) -> dict[str, Any]:
    expect(isinstance(value, dict), f"{where} is", value, "an object with role and content")
    role = value.get("role")
    expect(role in ROLES, f"{where} has role", role, f"one of {', '.join(ROLES)}")
    message = {key: value[key] for key in _MESSAGE_KEYS if value.get(key) is not None}
    if isinstance(parts := message.get("content"), list):
        for index, part in enumerate(parts):
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            expect(is_text, f"{where}: content part {index} is", part, "a part of type text")
        message["content"] = "".join(part["text"] for part in parts)
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    calls = message.get("tool_calls", [])
    expect(isinstance(calls, list), f"{where} has tool_calls", calls, "a list of calls")
    for index, call in enumerate(calls):
        function: Any = call.get("function") if isinstance(call, dict) else None
        where_call = f"{where}: tool call {index}"
        expect(_has_name(function), f"{where_call} is", call, "a function with a name")
        arguments = function.get("arguments", "")
        expect(isinstance(arguments, (str, dict)), f"{where_call} has arguments", arguments, "JSON text or an object")
    for key in ("content", "reasoning_content", "tool_call_id", "name"):
        expect(isinstance(message.get(key, ""), str), f"{where} has {key}", message.get(key), "text")
    if "content" not in message and not (role == "assistant" and "tool_calls" in message):
        raise ConversationError(f"{where} (role {role}) has no content; wanted text.")
    require_unicode(message, where)
    return message


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _texts(value: Any, where: str, levels: int = MOST_LEVELS) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        if not levels:
            raise ConversationError(f"{where} is nested too deeply; wanted at most {MOST_LEVELS} levels.")
        for item in value if isinstance(value, list) else [*map(str, value), *value.values()]:
            yield from _texts(item, where, levels - 1)
