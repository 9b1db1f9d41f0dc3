"""Turns: fit a conversation to the roles that a chat template takes.

Templates treat a system turn behind the first one, a developer turn, or two turns of one role in a row in three ways:
they render it, they raise an error, or they leave it out without a word. `Turns` finds out by rendering short
conversations with unique texts: a template takes a turn if all texts appear, in order.

    developer ──▶ system ──▶ user         function ──▶ tool ──▶ user         any other role ──▶ user

A turn that the template does not take gets the next role of its line, in place. Turns that must not stand side by side
become one turn, with a blank line between their texts. A system text without a system role joins the user turn behind
it. Invariants:

  T1  A turn that the template takes stays as it is.
  T2  No turn is left out, and the texts keep their order.
  T3  The form of a turn depends on the turns before it, and on later ones only if they join it.

Each short conversation is rendered once per template; the results are kept in `known`. Never imports MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Renders messages with tools, or without; None: the template refuses them.
RenderText = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str | None]

_NEAREST = {"developer": "system", "function": "tool"}
_SYSTEM = ("system", "developer")
_KNOWN_ROLES = (*_SYSTEM, "user", "assistant", "tool", "function")
#: Other roles of a conversation that the template is asked about: each takes some 14 renderings. Later ones are users.
MAX_UNKNOWN_ROLES = 16
# Texts that occur in no template and that no template changes.
_TEXTS = tuple(f"Vq{letter}xz" for letter in "abcdefghijkl")
_CALL = {"id": "callVq001", "type": "function", "function": {"name": "probe", "arguments": {"at": "x"}}}
_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "description": "A place."}}}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "Look.", "parameters": _PARAMETERS}}

# Conversations that a template must render if it takes X; `call` is an assistant's turn that calls a tool.
_FIRST = ("X user", "X user assistant user")
_LATER = (
    *("user X", "user X assistant user", "user assistant X user", "user assistant user X"),
    "user X assistant user X assistant user",
)
_AFTER_SYSTEM = ("system user assistant X user", "system user X")
_TOOL_TURN = ("user call X", "user call X assistant user")
# Pairs of turns that some templates refuse, and conversations that have them.
_PAIRS = {
    ("system", "system"): ("system system user",),
    ("user", "user"): ("user user", "user user assistant user", "user assistant user user"),
    ("assistant", "assistant"): ("user assistant assistant", "user assistant assistant user"),
    ("tool", "user"): ("user call tool user", "user call tool user assistant user"),
}


class Turns:
    def __init__(self, render: RenderText, known: dict[str, bool]) -> None:
        """`known`: results for this template, filled here."""
        self._render, self._known = render, known
        self._unknown: dict[str, bool] = {}  # results for roles that only this conversation has
        self._unknown_roles: set[str] = set()

    def fit(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages that the template takes."""
        fitted: list[dict[str, Any]] = []
        is_leading = True  # only system turns so far
        for index, message in enumerate(messages):
            was_leading, is_leading = is_leading, is_leading and message["role"] in _SYSTEM
            role = self._role_of(message["role"], index)
            left = fitted[-1]["role"] if fitted else ""
            if index == 0:
                joins = False
            elif is_leading:
                joins = role == "user" or not self._takes_pair(left, role)
            else:
                is_behind_system_text = was_leading and left == role == "user"
                joins = is_behind_system_text or not self._takes_pair(left, role)
            given = message if role == message["role"] else {**message, "role": role}
            if joins and _can_join(fitted[-1], given):
                fitted[-1] = _joined(fitted[-1], given)
            else:
                fitted.append(given)
        return fitted

    def _role_of(self, role: str, index: int) -> str:
        """The nearest role that the template takes at this place."""
        if not self._is_readable:
            return role
        if role not in _KNOWN_ROLES:
            if len(self._unknown_roles) >= MAX_UNKNOWN_ROLES and role not in self._unknown_roles:
                return "user"
            self._unknown_roles.add(role)
        while role not in ("user", "assistant") and not self._takes(role, index):
            role = _NEAREST.get(role, "user")
        return role

    @property
    def _is_readable(self) -> bool:
        """Whether the template shows the texts of an ordinary conversation; else nothing can be found out."""
        return self._shows("user assistant user", "user") and self._shows("user", "user")

    def _takes(self, role: str, index: int) -> bool:
        if role == "tool":
            return self._shows_all(_TOOL_TURN, role)
        if index == 0 and role in _SYSTEM:
            return self._shows_all(_FIRST, role)
        has_system = self._shows_all(_FIRST, "system")
        return self._shows_all((*_LATER, *(_AFTER_SYSTEM if has_system else ())), role)

    def _takes_pair(self, left: str, right: str) -> bool:
        pair = ("system" if left in _SYSTEM else left, "system" if right in _SYSTEM else right)
        return pair not in _PAIRS or not self._is_readable or self._shows_all(_PAIRS[pair], right)

    def _shows_all(self, conversations: Sequence[str], role: str) -> bool:
        return all(self._shows(conversation, role) for conversation in conversations)

    def _shows(self, conversation: str, role: str) -> bool:
        """Whether the template renders all texts of a conversation in order; X stands for the role."""
        key = f"{role}: {conversation}"
        # Roles that clients make up have no bound, so their results go with the conversation.
        results = self._known if role in _KNOWN_ROLES else self._unknown
        if (known := results.get(key)) is not None:
            return known
        roles = [role if each == "X" else each for each in conversation.split()]
        found = self._renders(roles, None)
        # A template may use other code with tools. It is judged by that only if it has such code.
        if found and self._shows_tools():
            found = self._renders(roles, [_TOOL])
        results[key] = found
        return found

    def _shows_tools(self) -> bool:
        if (known := self._known.get("tools")) is None:
            known = self._known["tools"] = self._renders(["user", "assistant", "user"], [_TOOL])
        return known

    def _renders(self, roles: Sequence[str], tools: Sequence[dict[str, Any]] | None) -> bool:
        text = self._render([_probe(role, text) for role, text in zip(roles, _TEXTS, strict=False)], tools)
        position = 0 if text is not None else -1
        for role, wanted in zip(roles, _TEXTS, strict=False):
            if text is None or position < 0:
                break
            position = position if role == "call" else text.find(wanted, position)
        return position >= 0


def _probe(role: str, text: str) -> dict[str, Any]:
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    if role in ("tool", "function"):
        return {"role": role, "content": text, "tool_call_id": _CALL["id"], "name": "probe"}
    return {"role": role, "content": text}


def _can_join(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether both contents are text or lists of parts; the template judges any other content."""
    return all(isinstance(each.get("content") or "", str | list) for each in (left, right))


def _joined(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """One turn with the role of the left one."""
    first, second = left.get("content") or "", right.get("content") or ""
    between = "\n\n" if first and second else ""
    content: Any
    if isinstance(first, str) and isinstance(second, str):
        content = first + between + second
    else:
        content = [*_parts(first), *_parts(between), *_parts(second)]
    joined = {**right, **left, "content": content}
    for name in ("tool_calls", "reasoning_content"):
        if left.get(name) and right.get(name):
            joined[name] = left[name] + right[name]
    return joined


def _parts(content: str | list[Any]) -> list[Any]:
    return ([{"type": "text", "text": content}] if content else []) if isinstance(content, str) else content
