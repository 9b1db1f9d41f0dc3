"""Render chat messages to tokens, and find the offsets ("marks") where other conversations may diverge from this one.

A template may refuse part of a conversation, insert a default system prompt, merge the system prompt into the first
user message, or rewrite earlier turns. So the end of a message is read from the rendering of the conversation up to
that message. If the template refuses or rewrites this part, the end is read from renderings of conversations that
differ only in later messages. A mark promises:

  M1  tokens are what the tokenizer's own `apply_chat_template` gives for the whole conversation.
  M2  tokens[:mark] begins the tokens of every conversation that shares the messages up to that mark and goes on after
      them with the generation prompt or with a message of another role.
  M3  0 < mark <= len(tokens); marks ascend and are distinct. Messages that end at one offset share a mark. A message
      whose end is not certain has none.

A mark leaves out tokens that reach over the border and, without a control token at the border, tokens that other text
could merge with. (If a tokenizer does not split text into words, M2 holds for the beginnings of text in `_FOLLOWERS`.)

The cost is one tokenization of the whole text and one rendering per message. A tokenizer without offsets, or with its
own renderer, needs one tokenization per message. Never imports MLX.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.chat_template import (
    BREAK,
    MARK,
    ChatTemplate,
    Ending,
    Message,
    Rendering,
    choose_form,
    common_rendering,
)

# Beginnings of text that a tokenizer may merge with the text before, one per character class.
_FOLLOWERS = ("a", "s", "B", " a", " ", "  ", "\n", "\na", "\t", "1", ".", "'", "<", "_", "é", "中")
# Text before a border that is examined: merges reach back over a word, not over a page.
_WINDOW_WORDS = 4
_WINDOW_CHARS = 256


class TokenSpans:
    """The tokens of a text, and where they stand in it. A break (`BREAK`) parts the text and has no token."""

    def __init__(self, template: ChatTemplate, text: str) -> None:
        self._template, self._text, self._control = template, text, template.learnt.control
        self._encoding = template.encode([text])[0]
        self._ids: list[int] = self._encoding.ids
        # Indices of the tokens that are left out.
        self._breaks = np.asarray([*self._break_indices()] if template.is_plain_text else [], dtype=np.int64)
        #: The text without breaks.
        self.plain_text = text.replace(BREAK, "") if self._breaks.size else text
        self.tokens = np.delete(np.asarray(self._ids, dtype=np.int32), self._breaks)

    @property
    def control_texts(self) -> tuple[str, ...]:
        return tuple(self._control.values())

    def offset(self, end: int, closed: bool) -> int:
        """The number of tokens before the character at `end` that no later text can change."""
        if not closed and not self._is_control(self._token_at(end - 1), end):
            end = self._settled_end(end)
        index = self._token_at(end)
        return index - int(np.searchsorted(self._breaks, index))

    def token_end(self, end: int) -> int:
        """The number of tokens that start before the character at `end` of the plain text."""
        end += bisect_left(self._break_starts, end)
        index = self._token_at(end)
        while index < len(self._ids) and self._span(index)[0] < end:
            index += 1
        return index - int(np.searchsorted(self._breaks, index))

    @cached_property
    def _break_starts(self) -> list[int]:
        """Where the breaks stand in the plain text."""
        found = re.finditer(BREAK, self._text) if self._breaks.size else ()
        return [each.start() - index for index, each in enumerate(found)]

    def _break_indices(self) -> Iterator[int]:
        at = self._text.find(BREAK)
        while at >= 0:
            index = self._token_at(at)
            while index < len(self._ids) and self._span(index)[0] == at:
                if self._span(index) != (at, at + 1):
                    raise ValueError(
                        "the tokenizer joins a noncharacter with other text; allow special tokens in text."
                    )
                yield index
                index += 1
            at = self._text.find(BREAK, at + 1)

    def _token_at(self, position: int) -> int:
        """The index of the first token that reaches behind a position. Some tokens omit their spaces."""
        for each in range(max(position, 0), len(self._text)):
            if (index := self._encoding.char_to_token(each)) is not None:
                return int(index)
        return len(self._ids)

    def _span(self, index: int) -> tuple[int, int]:
        start, end = self._encoding.token_to_chars(index)
        return start, end

    def _is_control(self, index: int, end: int) -> bool:
        """Whether a token is a control token that ends there."""
        is_token = index < len(self._ids) and self._ids[index] in self._control
        return is_token and self._span(index)[1] == end

    def _settled_end(self, end: int) -> int:
        """The last offset before a border at which text after the border cannot change the tokens.

        The last word before the border (as the pre-tokenizer splits words) may grow, so it is left out. Tokenizing the
        text with each follower shows the other changes.
        """
        start, is_control = self._window_start(end)
        window = self._text[start:end]
        encodings = self._template.encode([window, *(window + follower for follower in _FOLLOWERS)])
        settled = min(_common_end(encodings[0], other, len(window)) for other in encodings[1:])
        return start + min(settled, _last_word_start(encodings[0], len(window), skip=is_control))

    def _window_start(self, end: int) -> tuple[int, bool]:
        """Where the text to examine starts, and whether a control token stands there."""
        words: set[int | None] = set()
        first = index = min(self._token_at(end - 1), len(self._ids) - 1)
        while index >= 0:
            start, stop = self._span(index)
            if stop <= end and self._ids[index] in self._control:
                return start, True
            word = self._encoding.token_to_word(index)
            if word not in words and len(words) == _WINDOW_WORDS:
                return first, False
            if end - start > _WINDOW_CHARS:
                return end - _WINDOW_CHARS, False
            words.add(word)
            first, index = start, index - 1
        return 0, False


def _common_end(encoding: Any, other: Any, length: int) -> int:
    """The character offset in a text where its tokens diverge from those of another text."""
    shared = common_rendering(encoding.ids, other.ids)
    return length if shared == len(encoding) else max((int(end) for _, end in encoding.offsets[:shared]), default=0)


def _last_word_start(encoding: Any, length: int, skip: bool) -> int:
    """The start of the last word of a text; its length if it is one word. `skip`: it starts with a control token."""
    words = encoding.word_ids
    first = len(words)
    while first > 0 and words[first - 1] == words[-1]:
        first -= 1
    return int(encoding.offsets[first][0]) if first > int(skip) else length


# Contents after a border; they differ in the first character.
_PROBE_CONTENTS = ("alpha", "Zulu")
# The length of a plain header before the first user message. A longer one holds a system prompt or a tool list.
_HEADER_CHARS = 64
_HEADER_TOKENS = 8


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> tuple[NDArray[np.int32], tuple[int, ...]]:
    """Render messages with the model's own chat template.

    Args:
        tokenizer: a transformers tokenizer or mlx-lm's TokenizerWrapper.
        messages: OpenAI chat messages; not changed. Arguments of tool calls may be JSON text or objects.
        tools: function definitions in OpenAI form, or None.
        add_generation_prompt: end with the opening of the assistant's reply; ignored if the last message is a reply.
        template_kwargs: passed to the template (`enable_thinking`, `documents`, ...).

    Returns:
        Tokens (int32, shape (T,)) and marks: ascending offsets where the system prompt and each message end, as far
        as other conversations with the same messages have the same tokens there.

    Raises:
        ValueError: no chat template, no messages, a message without role, or the template refuses the conversation.
    """
    tokens, opening, ends = message_ends(
        tokenizer, messages, tools, add_generation_prompt=add_generation_prompt, **template_kwargs
    )
    return tokens, tuple(sorted({end for end in (opening, *ends) if end > 0}))


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> NDArray[np.int32]:
    """The int32 tokens of `render_chat` without marks: the template runs once. Raises the same errors."""
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    return RenderedChat(template, messages, _ending(messages, add_generation_prompt)).tokens


def message_ends(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> tuple[NDArray[np.int32], int, list[int]]:
    """The tokens of `render_chat`, and the message of each mark.

    Returns:
        Tokens; the end of the opening; and one end per message, unsorted: `ends[k]` belongs to `messages[: k + 1]`.
        The opening is what the template adds to the system prompt (a default one, a tool list), shared by all
        conversations that begin with the same system prompt and a user message. 0: not certain.
    """
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    chat = RenderedChat(template, messages, _ending(messages, add_generation_prompt))
    return chat.tokens, chat.opening, [chat.end(count) for count in range(1, len(messages) + 1)]


def _ending(messages: Sequence[Message], add_generation_prompt: bool) -> Ending:
    _validate(messages)
    return "reply" if add_generation_prompt and messages[-1]["role"] != "assistant" else "message"


def _validate(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is a {type(messages).__name__}; wanted a list of messages with role and content.")
    if not messages:
        raise ValueError("messages is empty; wanted at least one message with role and content.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = type(message).__name__
            raise ValueError(f"messages[{index}] is a {found}; wanted an object with role and content.")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"messages[{index}] has no role (keys: {', '.join(map(str, message)) or 'none'}).")


class RenderedChat:
    """A conversation as its template renders it: its tokens, and where its messages end.

    Ends are found in renderings with one tool at most, as a list of tools can be most of a prompt.
    """

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], ending: Ending) -> None:
        """ValueError: the template refuses the messages, or leaves out the last one, which is to be continued.

        Or a message has a control token's text, and the tokenizer cannot keep it text.
        """
        self._template, self._ending = template, ending
        given = [template.in_plain_text(dict(each)) for each in messages]
        self._given = [dict(message) for message in messages]
        fitted, self._places = template.fit(given)
        probed = fitted if ending != "continue" else _with_content(fitted, len(fitted) - 1, _PROBE_CONTENTS[0])
        form, rendering = choose_form(template, probed, ending == "reply")
        template.require_plain_text(form, rendering, ending == "reply")
        if ending == "continue":
            self._messages = [*form[:-1], {**form[-1], "content": form[-1]["content"].removesuffix(_PROBE_CONTENTS[0])}]
            rendering = self._cut(rendering, self._messages)
        else:
            self._messages = form
        self.rendering = rendering
        self._ends: dict[int, int] = {}
        # Text of the template between the ends of messages of one kind and the contents behind them.
        self._headers: dict[Any, str] = {}
        # Ends that are followed by text of the template, not by content of a message.
        self._complete: set[int] = set()

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        return np.asarray(self.rendering, dtype=np.int32) if self.spans is None else self.spans.tokens

    def end(self, count: int) -> int:
        """The end of `messages[:count]` in tokens; 0: not certain."""
        place = self._places[count - 1]
        if count == len(self._places) or self._places[count].turn != place.turn:
            return self._offset(self._message_end(place.turn + 1))
        return self._offset(self._inner_end(place.turn, place.end))

    def end_inside(self, index: int, characters: int) -> int:
        """The end of the first characters of a message's content in tokens; 0: not certain."""
        place = self._places[index]
        if place.start is None:
            return 0
        characters += self._template.breaks_before(self._given[index], characters)
        return self._offset(self._inner_end(place.turn, place.start + characters))

    @property
    def opening(self) -> int:
        """The end of all before the first user text, if that is more than the system prompt, in tokens."""
        system = self._messages[:1] if _is_system(self._messages[0]) else []
        system_end = self._in_full(self._message_end(1)) if system else 0
        parting = min(self._parting(system, ("user",)) or 0, self._lasting)
        end = self._in_full(parting)
        header_length = _HEADER_CHARS if isinstance(self._base, str) else _HEADER_TOKENS
        is_lost = bool(system) and not system_end
        return self._offset(parting) if is_lost or end - system_end > header_length else 0

    @cached_property
    def spans(self) -> TokenSpans | None:
        """Where the tokens stand in the rendering; None: the template gave tokens."""
        return TokenSpans(self._template, self.rendering) if isinstance(self.rendering, str) else None

    @cached_property
    def _with_one_tool(self) -> tuple[dict[str, Any], Rendering]:
        """Arguments for renderings with one tool, and the conversation's own with them."""
        tools = self._template.tools
        if tools and len(tools) > 1 and (base := self._render(self._messages, tools=tools[:1])) is not None:
            return {"tools": tools[:1]}, base
        return {}, self.rendering

    @property
    def _few(self) -> dict[str, Any]:
        return self._with_one_tool[0]

    @property
    def _base(self) -> Rendering:
        """The conversation with one tool. All ends are found in it."""
        return self._with_one_tool[1]

    @cached_property
    def _shared(self) -> tuple[int, int]:
        """How long the beginning and the end are that the rendering has with one tool and with all."""
        start = common_rendering(self.rendering, self._base)
        longest = min(len(self.rendering), len(self._base)) - start
        return start, min(longest, common_rendering(self.rendering[::-1], self._base[::-1]))

    def _in_full(self, end: int) -> int:
        """An end with all tools; 0: it lies inside of the tools."""
        start, rest = self._shared if self._few else (len(self._base), 0)
        if end <= start:
            return end
        return end + len(self.rendering) - len(self._base) if end >= len(self._base) - rest else 0

    def _render(self, messages: list[dict[str, Any]], **arguments: Any) -> Rendering | None:
        """Render messages as the conversation is rendered; None: the template refuses them."""
        if self._ending != "continue":
            return self._template.attempt(messages, self._ending == "reply", **arguments)
        probed = _with_content(messages, len(messages) - 1, _PROBE_CONTENTS[0])
        rendering = self._template.attempt(probed, **arguments)
        return None if rendering is None else self._cut(rendering, messages, **arguments)

    def _cut(self, rendering: Rendering, messages: list[dict[str, Any]], **arguments: Any) -> Rendering:
        """A rendering of messages, whose last content was continued, up to the continuation."""
        continued = _with_content(messages, len(messages) - 1, _PROBE_CONTENTS[1])
        end = common_rendering(rendering, self._template.render(continued, False, **arguments))
        if end == len(rendering):
            raise ValueError("the chat template leaves out the last message, so a reply cannot continue it.")
        return rendering[:end]

    @cached_property
    def _starts(self) -> dict[int, int]:
        """Where contents start in the rendering with one tool, as far as a mark in front of each shows it."""
        contents = {index: each["content"] for index, each in enumerate(self._messages) if each.get("content")}
        if not isinstance(self._base, str) or not all(isinstance(content, str) for content in contents.values()):
            return {}
        marked = [
            {**each, "content": MARK + contents[index]} if index in contents else each
            for index, each in enumerate(self._messages)
        ]
        rendering = self._render(marked, **self._few)
        pieces = rendering.split(MARK) if isinstance(rendering, str) else []
        if len(pieces) != len(contents) + 1 or "".join(pieces) != self._base:
            return {}
        return dict(zip(contents, accumulate(map(len, pieces)), strict=False))

    def _offset(self, end: int) -> int:
        """An end in tokens of the conversation; 0 stays 0."""
        found = self._in_full(end) if end else 0
        return found if not found or self.spans is None else self.spans.offset(found, self._is_closed(end))

    def _is_closed(self, end: int) -> bool:
        """Whether a control token of the template follows, so that no token reaches over the border."""
        text = self._base if end < len(self._base) else self._later
        assert self.spans is not None
        return end in self._complete and isinstance(text, str) and text.startswith(self.spans.control_texts, end)

    @cached_property
    def _lasting(self) -> int:
        """A later user turn does not change the rendering up to here."""
        return common_rendering(self._base, self._later) if self._later is not None else len(self._base)

    def _message_end(self, count: int) -> int:
        """The end of the first messages in the rendering with one tool; 0: not certain."""
        if count not in self._ends:
            self._ends[count] = min(self._own_end(count), self._lasting)
        return self._ends[count]

    def _own_end(self, count: int) -> int:
        if 1 < count == len(self._messages) and self._ending == "message":
            self._complete.add(len(self._base))
            return len(self._base)
        beginning, start = self._messages[:count], self._starts.get(count)
        # Where messages of one kind meet, a template writes one text, so it is rendered once.
        kind = (
            None
            if start is None
            else tuple((each["role"], *sorted(each)) for each in self._messages[count - 1 : count + 1])
        )
        header = self._headers.get(kind, "")
        if header and start is not None and self._base[start - len(header) : start] == header:
            self._complete.add(start - len(header))
            return start - len(header)
        alone = self._template.attempt(beginning, **self._few)
        if not alone or self._base[: len(alone)] != alone:
            # Refused, or rewritten by later messages: compare conversations that continue from here.
            end = self._parting(beginning, _next_roles(beginning[-1]))
            self._learn_header(kind, self._last_control(end or 0), start)
            return (common_rendering(self._base, alone) if alone else 0) if end is None else end
        if count == 1 and _is_held_back(beginning[0], alone):
            return 0
        self._complete.add(len(alone))
        self._learn_header(kind, len(alone), start)
        return len(alone)

    def _learn_header(self, kind: Any, end: int, start: int | None) -> None:
        if start is not None and 0 < end <= start and isinstance(self._base, str):
            self._headers[kind] = self._base[end:start]

    def _last_control(self, end: int) -> int:
        """Where the last control token before an end starts, if it belongs to a header; else 0."""
        if self.spans is None or not isinstance(self._base, str):
            return 0
        first = max(0, end - _HEADER_CHARS)
        return max([0, *(self._base.rfind(text, first, end) for text in self.spans.control_texts)])

    def _inner_end(self, turn: int, end: int | None) -> int:
        """The end of the first characters of a content in the rendering with one tool; 0: not certain."""
        if end is None:
            return 0
        content = self._messages[turn]["content"][:end]
        # A system prompt may be held back until the next message; few templates want all messages.
        for beginning in (self._messages[: turn + 2], self._messages):
            others = [_with_content(beginning, turn, probe, content) for probe in _PROBE_CONTENTS]
            found = [self._template.attempt(other, **self._few) for other in others]
            if ends := [common_rendering(self._base, other) for other in found if other is not None]:
                return min(ends)
        return 0

    def _parting(self, beginning: Sequence[dict[str, Any]], roles: Sequence[str]) -> int | None:
        """The common prefix of the conversation and of others that continue with one of these roles.

        None: the template accepts fewer than two of them.
        """
        probes = [[*beginning, _probe(role, content, beginning)] for role in roles for content in _PROBE_CONTENTS]
        attempts = [self._template.attempt(probe, **self._few) for probe in probes]
        others = [other for other in attempts if other is not None]
        # A single one may continue exactly as this conversation.
        return min(common_rendering(self._base, other) for other in others) if len(others) > 1 else None

    @cached_property
    def _later(self) -> Rendering | None:
        """The conversation with a later user turn."""
        for roles in (("user",), ("assistant", "user"), ("tool", "assistant", "user")):
            longer = list(self._messages)
            for role in roles:
                longer.append(_probe(role, _PROBE_CONTENTS[0], longer))
            later = self._template.attempt(longer, **self._few)
            if later is not None:
                return later
        return None


def _with_content(
    messages: Sequence[dict[str, Any]], index: int, more: str, content: str | None = None
) -> list[dict[str, Any]]:
    """The messages, one of which goes on differently behind its content, or behind another one."""
    content = messages[index]["content"] if content is None else content
    return [*messages[:index], {**messages[index], "content": content + more}, *messages[index + 1 :]]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _is_held_back(system: Mapping[str, Any], alone: Rendering) -> bool:
    """Whether the template writes a system prompt only together with the next message."""
    content = system.get("content")
    return _is_system(system) and isinstance(alone, str) and isinstance(content, str) and content.strip() not in alone


def _next_roles(message: Mapping[str, Any]) -> tuple[str, ...]:
    if _is_system(message):
        return ("user", "assistant")
    if message["role"] != "assistant":
        return ("assistant", "user")
    return ("tool", "user") if message.get("tool_calls") else ("user",)


def _probe(role: str, content: str, beginning: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A message that may follow; with the role "tool" it answers the call before it."""
    if role != "tool":
        return {"role": role, "content": content}
    calls = beginning[-1].get("tool_calls") if beginning else None
    call = calls[0] if calls and isinstance(calls[0], Mapping) else {}
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    answer = {"role": role, "content": content, "tool_call_id": call.get("id"), "name": name}
    return {key: value for key, value in answer.items() if value is not None}
