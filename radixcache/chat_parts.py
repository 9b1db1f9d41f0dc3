"""The parts of a chat prompt: name the changed part that keeps a prompt from matching an earlier prompt further.

A Chat is what a chat template takes. It consists of parts, and each part has a name:

    system message 0                       a message: its role and its index
    assistant message 4, its tool calls    a field of a message, unless the content differs too
    the list of tools                      which tools there are, and their order
    tool `search`, its description         a field of a tool
    template argument `enable_thinking`    documents, dates, switches: everything else that a template takes
    the chat template                      it writes a different text for the same chat, such as today's date

If two chats differ in several parts, each of these parts is put alone into the earlier chat. The cause is the part that
changes the earlier rendering first. So it does not matter where a template writes a part. Never imports MLX.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple

from radixcache.chat import RenderedChat, chat_tokens, tool_function
from radixcache.chat_template import ChatTemplate, Message, Rendering, common_rendering, plain
from radixcache.tokens import Keys, common_length

KEPT_CHATS, KEPT_KEYS = 16, 1 << 25  # how many recent chats are kept, and the most keys of these together
TRIED_CHANGES, TRIED_MESSAGES = 32, 8  # most changed parts that are tried one by one, and most messages among them
SHOWN_NAMES, NAME_CHARS = 4, 64  # most names of tools in a sentence, and most characters of a name

Tool = Mapping[str, Any]


class Chat(NamedTuple):
    """What a chat template takes: messages, tools, and its other arguments (`documents`, `enable_thinking`, ...)."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None
    arguments: Mapping[str, Any] = {}

    def rendering(self, tokenizer: Any) -> Rendering | None:
        """The rendering for the next reply; None: the template refuses the chat."""
        try:
            template = ChatTemplate(tokenizer, self.tools, dict(self.arguments))
            is_reply = self.messages[-1]["role"] == "assistant"
            return RenderedChat(template, self.messages, "message" if is_reply else "reply").rendering
        except Exception:  # Templates and tokenizers are foreign code.
            return None


@dataclass(frozen=True)
class Change:
    """A part of a chat that differs from an earlier chat.

    Attributes:
        part: name of the part.
        detail: how it differs.
        hint: what to do about it.
        message: index of the message; None: the part is no message.
        keeps_rest: whether the parts after it equal those of the earlier chat, so their tokens were evaluated before.
    """

    part: str
    detail: str
    hint: str
    message: int | None = None
    keeps_rest: bool = True

    def __str__(self) -> str:
        return self.part if self.detail == DIFFERS else f"{self.part}: {self.detail}"


TOOL_LIST = "the list of tools"
DIFFERS = "it differs"
_REORDERED = "the same in another order"
_REMOVED = "messages before it were removed"
_MOVED = "the same messages in another order"
_NOT_WRITTEN = "the prompt differs from what the model wrote"
_REPLY_HINT = (
    "If the client sends replies back unchanged, the chat template writes reasoning, text or calls differently from "
    "the model. Only another chat template can change that."
)
_ORDER_HINT = "Send the tools in the same order in every request, for example sorted by name."
_LIST_HINT = "Send the same tools in every request of a conversation, and new tools at the end of the list."
_TOOL_HINT = "Keep the definitions of tools free of text that changes; put it into the last message."
_ARGUMENT_HINT = "Use one value in all requests that share a prefix, or put what changes into the last message."
_MESSAGE_HINT = "Put text that changes behind the text that does not."
_REMOVED_HINT = "Shorten the history in large steps instead of a little in every request."


_MOVED_TOOLS = Change(
    TOOL_LIST,
    "the template writes it in front of the last messages, so it moves in every turn",
    "Use a chat template that writes the tools in front of all messages.",
)
_REWRITTEN = Change(
    "the chat template",
    "it writes another text for the same messages and tools, such as the date",
    "Pass the date as an argument of the template, with one value in all requests that share a prefix.",
)


def message_name(message: Message, index: int) -> str:
    return f"{message['role']} message {index}"


def first_change(tokenizer: Any, stored: Chat, asked: Chat) -> Change | None:
    """The part of `asked` that makes its rendering leave that of `stored`; None: no part, or only later messages."""
    before, now = stored.rendering(tokenizer), asked.rendering(tokenizer)
    if before is None or now is None:
        return None
    fork, places = common_rendering(before, now), list[tuple[int, bool, Change]]()
    if fork == len(before):
        return None
    for change, chat in islice(_changes(stored, asked), TRIED_CHANGES):
        rendering = chat.rendering(tokenizer)
        if rendering != before:
            # A template may refuse the mixed chat; then assume that the part is at the fork.
            at = fork if rendering is None else common_rendering(before, rendering)
            places.append((at, rendering is None, change))
    at, _, first = min(places, key=lambda each: each[:2], default=(fork, False, None))
    if (places and at <= fork) or len(asked.messages) <= len(stored.messages):
        return first
    # Because of later messages, a template may write earlier messages or the tools elsewhere.
    old, new = (chat._replace(tools=None).rendering(tokenizer) for chat in (stored, asked))
    is_moved = stored.tools and old is not None and new is not None and common_rendering(old, new) > fork
    return _MOVED_TOOLS if is_moved else None


class ChatLog:
    """The last `most` chats and their keys, at most `KEPT_KEYS` keys. Thread-safe."""

    def __init__(self, most: int = KEPT_CHATS) -> None:
        self._kept: deque[tuple[str, Keys, Chat]] = deque(maxlen=most)
        self._lock = Lock()

    def add(self, keys: Keys, chat: Chat, namespace: str = "") -> None:
        """Keep a chat and its keys, unless the keys alone are too many. The chat must not change afterwards."""
        if len(keys) > KEPT_KEYS:
            return
        with self._lock:
            self._kept.append((namespace, keys, chat))
            while sum(len(each) for _, each, _ in self._kept) > KEPT_KEYS:
                self._kept.popleft()

    def add_copy(self, keys: Keys, chat: Chat, namespace: str) -> None:
        """Keep a copy of a chat and its keys."""
        self.add(keys, deepcopy(chat), namespace)

    def clear(self, namespace: str | None = None) -> None:
        with self._lock:
            kept = [each for each in self._kept if namespace is not None and each[0] != namespace]
            self._kept.clear()
            self._kept.extend(kept)

    def prompts(self, namespace: str = "") -> list[Keys]:
        return [keys for keys, _ in self._of(namespace)]

    def _of(self, namespace: str) -> list[tuple[Keys, Chat]]:
        with self._lock:
            return [(keys, chat) for name, keys, chat in self._kept if name == namespace]

    def first_change(
        self, tokenizer: Any, keys: Keys, chat: Chat, start: int, namespace: str = ""
    ) -> tuple[Change, Keys, Chat] | None:
        """The first change from the nearest earlier chat, the keys of that chat, and the chat itself.

        None: no kept chat has exactly `start` keys in common with these, or no part of the nearest chat differs.
        """
        kept = [(each, other) for each, other in self._of(namespace) if other is not chat]
        # Of the chats with exactly `start` common keys, take the one with the fewest differences, then the newest. Skip
        # chats with more common keys: their state is gone, and History has forgotten it.
        near = [(other, each) for each, other in reversed(kept) if _part_at(start, keys, each)]
        if not near:
            return None
        if len(near) > 1:
            near.sort(key=lambda each: sum(1 for _ in islice(_changes(each[0], chat), TRIED_CHANGES)))
        stored, stored_keys = near[0]
        change = first_change(tokenizer, stored, chat)
        if change is None and start < len(stored_keys) and _is_rewritten(tokenizer, stored, keys, start):
            change = _REWRITTEN
        return None if change is None else (change, stored_keys, stored)

    def reply_change(self, keys: Keys, chat: Chat, start: int, namespace: str = "") -> Change | None:
        """The change of an earlier chat's reply, if these keys continue that chat but differ from `start` on."""
        before = [
            len(each.messages)
            for name, other, each in list(self._kept)
            if name == namespace and len(each.messages) < len(chat.messages)
            if [*each.messages] == [*chat.messages[: len(each.messages)]]
            # A prompt ends with the opening of a reply, which the rendered reply may lack.
            if common_length(other, keys) >= min(start, len(other))
        ]
        index = max(before, default=0)
        if not index or chat.messages[index]["role"] != "assistant":
            return None
        return Change(message_name(chat.messages[index], index), _NOT_WRITTEN, _REPLY_HINT, index)


def _part_at(start: int, left: Keys, right: Keys) -> bool:
    """Whether two prompts have exactly the first `start` keys in common."""
    if min(len(left), len(right)) > start and left[start] == right[start]:
        return False
    return common_length(left[:start], right) == start


def _is_rewritten(tokenizer: Any, stored: Chat, keys: Keys, fork: int) -> bool:
    """Whether the template, which may read a clock, now writes a stored chat as `keys` continue after the fork."""
    try:
        tokens = chat_tokens(tokenizer, stored.messages, stored.tools, **stored.arguments)
    except Exception:  # Templates and tokenizers are foreign code.
        return False
    return common_length(tokens, keys) > fork


def _changes(stored: Chat, asked: Chat) -> Iterator[tuple[Change, Chat]]:
    """Each part that differs, and the stored chat with only this part as in `asked`."""
    for name in sorted({*stored.arguments, *asked.arguments}):
        if not _is_same(stored.arguments.get(name), asked.arguments.get(name)):
            arguments = {key: each for key, each in stored.arguments.items() if key != name}
            arguments |= {name: asked.arguments[name]} if name in asked.arguments else {}
            yield (
                Change(f"template argument {_quoted(name)}", DIFFERS, _ARGUMENT_HINT),
                stored._replace(arguments=arguments),
            )
    yield from _message_changes(stored, asked)
    yield from _tool_changes(stored, asked)


def _tool_changes(stored: Chat, asked: Chat) -> Iterator[tuple[Change, Chat]]:
    before, now = _by_name(stored.tools or ()), _by_name(asked.tools or ())
    if list(before) != list(now):
        change = Change(TOOL_LIST, *_list_words([*before], [*now]))
        yield change, stored._replace(tools=[before.get(key, tool) for key, tool in now.items()] or None)
    for key, tool in now.items():
        if key in before and not _is_same(before[key], tool):
            for field, mixed in _fields(before[key], tool):
                tools = [mixed if each == key else old for each, old in before.items()]
                name = f"tool {_quoted(key[0])}" + (f", its {field}" if field else "")
                yield Change(name, DIFFERS if field else _REORDERED, _TOOL_HINT), stored._replace(tools=tools)


def _by_name(tools: Sequence[Tool]) -> dict[tuple[str, int], Tool]:
    """Tools by name, and by how many tools before them have the same name."""
    by_name: dict[tuple[str, int], Tool] = {}
    counts = Counter[str]()
    for tool in tools:
        name = str(tool_function(tool).get("name", ""))
        by_name[name, counts[name]] = tool
        counts[name] += 1
    return by_name


def _list_words(before: list[tuple[str, int]], now: list[tuple[str, int]]) -> tuple[str, str]:
    """How two lists of tools differ, and a hint."""
    old, new = set(before), set(now)
    added = [key[0] for key in now if key not in old]
    removed = [key[0] for key in before if key not in new]
    words = [f"{_listed(names)} {verb}" for names, verb in ((added, "added"), (removed, "removed")) if names]
    if [key for key in before if key in new] != [key for key in now if key in old]:
        return ", ".join(["the same tools in another order", *words]), _ORDER_HINT
    return ", ".join(words), _LIST_HINT


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(map(_quoted, names[:SHOWN_NAMES])) + more


def _fields(before: Tool, now: Tool) -> Iterator[tuple[str, Tool]]:
    """The name of each field that differs, and the earlier object with this field; "": only their order differs."""
    old, new = tool_function(before), tool_function(now)
    is_nested, count = old is not before and new is not now, 0
    for left, right, is_inner in ((old, new, True), (before, now, False)) if is_nested else ((before, now, False),):
        for name in {**left, **right}:
            if _is_same(left.get(name), right.get(name)) or (is_nested and not is_inner and name == "function"):
                continue
            kept = {key: each for key, each in left.items() if key != name or name in right}
            mixed = {**kept, name: right[name]} if name in right else kept
            yield str(name).replace("_", " "), {**before, "function": mixed} if is_inner else mixed
            count += 1
    if not count:
        yield "", now


def _message_changes(stored: Chat, asked: Chat) -> Iterator[tuple[Change, Chat]]:
    before, now = ([plain(each) for each in chat.messages] for chat in (stored, asked))
    count = min(len(before), len(now))
    differing = [index for index in range(count) if not _is_same(before[index], now[index])]
    if not differing:
        return
    first, moved = differing[0], ""
    is_edit = first + 1 < count and len(differing) == 1
    if not is_edit and _is_in(now[first], before[first + 1 :]):
        moved = _REMOVED if Counter(map(_json, before)) - Counter(map(_json, now)) else _MOVED
    elif not is_edit and _is_in(before[first], now[first + 1 :]):
        moved = "it was inserted"
    if moved or now[first]["role"] != before[first]["role"]:
        hint = _REMOVED_HINT if moved == _REMOVED else _MESSAGE_HINT
        change = Change(message_name(now[first], first), moved or DIFFERS, hint, first, keeps_rest=moved != "")
        yield change, stored._replace(messages=asked.messages)
        return
    for index in differing[:TRIED_MESSAGES]:
        fields = [*_fields(before[index], now[index])]
        name = message_name(now[index], index)
        if len(fields) == 1 and fields[0][0] not in ("", "content"):
            name += f", its {fields[0][0]}"
        messages = [*stored.messages[:index], asked.messages[index], *stored.messages[index + 1 :]]
        yield Change(name, DIFFERS, _MESSAGE_HINT, index, keeps_rest=False), stored._replace(messages=messages)


def _is_in(message: Message, messages: Sequence[Message]) -> bool:
    return any(_is_same(message, each) for each in messages)


def _is_same(left: Any, right: Any) -> bool:
    """Whether two values are the same as JSON, the order of keys included."""
    return left is right or (left == right and _json(left) == _json(right))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)


def _quoted(name: str) -> str:
    """A name that a client gave, shortened and printable."""
    shown = name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 3]}..."
    return "`" + "".join(each if each.isprintable() else repr(each)[1:-1] for each in shown) + "`"
