"""Render chat messages to tokens, and find the offsets ("marks") where other conversations may diverge from this one.

A mark is a hint: a wrong mark wastes a checkpoint and never changes an answer. So a search of the rendered text for the
messages' texts is good enough. A message ends between its last text and the first text of the next message:

    user: "Hi"                  Hi<|im_end|>▲<|im_start|>assistant: Fine.     between two special tokens
    assistant: "Fine."          Hi▲<|assistant|>Fine.                         before the last special token
                                Hi and Bye. Assistant: ▲Fine.                 before the next text

The tokens are exactly those of the tokenizer's own `apply_chat_template` for the whole conversation. The template runs
once, and the text is tokenized once. If a tokenizer gives tokens without their offsets in the text, each mark needs one
more rendering. Never imports MLX.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.chat_template import (
    BREAK,
    ChatTemplate,
    Ending,
    Message,
    choose_form,
    common_rendering,
    inner_of,
    learnt_of,
)

# Texts that are appended to a last message; they differ in the first character.
_CONTINUATIONS = ("alpha", "Zulu")
#: Most tokens between the texts of two messages: the end of the first message and the opening of the second.
HEADER_TOKENS = 24
# Most characters of white space before a text.
_WHITE_CHARS = 8
#: Most tokens of white space between two messages.
WHITE_TOKENS = 3
#: Up to this many tokens before the first question are no system prompt.
SHORT_TOKENS = 8
#: `RenderedChat.marks` has the ends of this many last messages, and of as many messages spread over all.
MARKED_MESSAGES = 16

Span = tuple[int, int]
NOWHERE: Span = (0, 0)


class TokenSpans:
    """The tokens of a text, and where they stand in it. A break (`BREAK`) splits the text and gives no token."""

    def __init__(self, template: ChatTemplate, text: str) -> None:
        self._template, self._text = template, text
        self._encoding = template.encode([text])[0]
        self._ids: list[int] = self._encoding.ids
        # Indices of the breaks' tokens, which are left out.
        self._breaks = np.asarray([*self._break_indices()] if template.is_plain_text else [], dtype=np.int64)
        #: The text without breaks.
        self.plain_text = text.replace(BREAK, "") if self._breaks.size else text
        self.tokens = np.delete(np.asarray(self._ids, dtype=np.int32), self._breaks)

    def before(self, end: int) -> int:
        """How many tokens end at the offset `end` of the plain text, or before it."""
        index = self._token_at(end + bisect_left(self._break_starts, end))
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
        """The index of the first token that ends after a position. The offsets of some tokens omit spaces."""
        for each in range(max(position, 0), len(self._text)):
            if (index := self._encoding.char_to_token(each)) is not None:
                return int(index)
        return len(self._ids)

    def _span(self, index: int) -> tuple[int, int]:
        start, end = self._encoding.token_to_chars(index)
        return start, end


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
        as they are found.

    Raises:
        ValueError: no chat template, no messages, a message without role, or the template refuses the conversation.
    """
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    chat = RenderedChat(template, messages, _ending(messages, add_generation_prompt))
    ends = {*chat.head_ends, *map(chat.end, range(1, len(messages) + 1))}
    return chat.tokens, tuple(sorted(ends - {0}))


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


def find_marks(tokenizer: Any, tokens: Sequence[int] | NDArray[np.int32]) -> tuple[int, ...]:
    """Find marks in a prompt if only its tokens are known: offsets between two different special tokens.

    White space may stand between them. Empty if the chat template writes no special tokens between messages. Use the
    marks of `render_chat` where the messages are known.
    """
    ids, special = np.asarray(tokens, dtype=np.int64), learnt_of(inner_of(tokenizer)).special_ids
    found = np.flatnonzero(np.isin(ids, [*special])).tolist()
    between = {
        right: tuple(ids[left + 1 : right].tolist())
        for left, right in pairwise(found)
        if right > SHORT_TOKENS and right - left <= WHITE_TOKENS + 1 and ids[left] != ids[right]
    }
    is_white = {each: not each or not str(tokenizer.decode([*each])).strip() for each in {*between.values()}}
    return tuple(right for right, each in between.items() if is_white[each])


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
    """A conversation as its template renders it: its tokens, and where its messages end."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], ending: Ending) -> None:
        """ValueError: the template refuses the messages, or leaves out the last message, which the reply continues.

        Also if a message contains a control token's text, and the tokenizer cannot keep it as text.
        """
        self._template, self._ending = template, ending
        self._messages = [dict(each) for each in messages]
        fitted = template.fit([template.in_plain_text(dict(each)) for each in messages])
        if ending == "continue":
            fitted = _with_content(fitted, fitted[-1]["content"] + _CONTINUATIONS[0])
        form, self.rendering = choose_form(template, fitted, ending == "reply")
        template.require_plain_text(form, self.rendering, ending == "reply")
        if ending == "continue":
            begun = form[-1]["content"].removesuffix(_CONTINUATIONS[0])
            other = template.render(_with_content(form, begun + _CONTINUATIONS[1]), False)
            end = common_rendering(self.rendering, other)
            if end == len(self.rendering):
                raise ValueError("the chat template leaves out the last message, so a reply cannot continue it.")
            self.rendering = self.rendering[:end]

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        return np.asarray(self.rendering, dtype=np.int32) if self.spans is None else self.spans.tokens

    @cached_property
    def spans(self) -> TokenSpans | None:
        """Where the tokens stand in the rendering; None: the template gave tokens."""
        return TokenSpans(self._template, self.rendering) if isinstance(self.rendering, str) else None

    @cached_property
    def places(self) -> tuple[list[Span], Span]:
        """Where the messages and the tools stand in the plain text of `spans`."""
        assert self.spans is not None
        return find_messages(self.spans.plain_text, self._messages, self._template.tools or ())

    def marks(self, texts: Iterable[tuple[int, int]] = ()) -> tuple[int, ...]:
        """Offsets worth a checkpoint: ends of some messages, and of `texts`, which are arguments of `end_inside`."""
        count = len(self._messages)
        spread, last = range(1, count + 1, -(-count // MARKED_MESSAGES)), range(count - MARKED_MESSAGES, count)
        ends = {*self.head_ends, *map(self.end, {*spread, *(each + 1 for each in last if each >= 0)})}
        ends |= {self.end_inside(index, end) for index, end in texts if index < count}
        return tuple(sorted(ends - {0}))

    def end(self, count: int) -> int:
        """The end of `messages[:count]` in tokens; 0: not found."""
        if count == len(self._messages) and self._ending != "reply":
            return len(self.tokens)
        if self.spans is None:
            return self.shared_with(self._messages[:count])
        start, end = self._between(count)
        text_end = self._text_end(start, end or len(self.tokens)) if start else 0
        # Some templates open the next reply in one way, and write a past reply in another way.
        least = 0 if count == len(self._messages) else start
        return text_end if text_end > least or not end else self._header_start(start, end)

    def end_inside(self, index: int, characters: int) -> int:
        """The offset in tokens after the first `characters` of a message's content; 0: not found."""
        message = self._messages[index]
        content = message.get("content")
        if not isinstance(content, str):
            return 0
        if self.spans is None:
            return self.shared_with([*self._messages[:index], {**message, "content": content[:characters]}])
        text = content.strip()
        start = self.spans.plain_text.find(text, *self.places[0][index])
        return self.spans.before(start + characters - content.index(text)) if start >= 0 else 0

    @cached_property
    def head_ends(self) -> tuple[int, ...]:
        """Ends before the first question: of the system prompt's text, of tools, of a default system prompt."""
        count = next((index for index, each in enumerate(self._messages) if not _is_system(each)), 0)
        if self.spans is None:
            ends = {self.shared_with([*self._messages[:count], {"role": "user", "content": "?"}])}
        else:
            ends = {self._header_start(*self._between(0))}
            for start, end in map(self._between, range(1, count + 1)):
                if end - start > HEADER_TOKENS:  # there are tools
                    ends |= {self._text_end(start, end), self._header_start(start, end)}
        return tuple(sorted(each for each in ends if each > SHORT_TOKENS))

    def _between(self, count: int) -> Span:
        """The range of tokens between the texts of `messages[count - 1]` and `messages[count]`; 0: not found.

        White space before a text is left out: it may share a token with the first word.
        """
        assert self.spans is not None
        (places, _), text = self.places, self.spans.plain_text
        start = places[count - 1][1] if count else 0
        end = places[count][0] if count < len(places) else len(text)
        head = text[max(0, end - _WHITE_CHARS) : end]
        return self.spans.before(start), self.spans.before(end - len(head) + len(head.rstrip()))

    def _text_end(self, start: int, end: int) -> int:
        """Where a message ends, in the tokens [start, end) after its text; `start`: no special token ends it."""
        return (self._borders(start, min(start + HEADER_TOKENS, end)) or [start])[0]

    def _header_start(self, start: int, end: int) -> int:
        """Where a message starts, in the tokens [start, end) before its text; `end`: no special token opens it."""
        return (self._borders(max(start, end - HEADER_TOKENS), end) or [end])[-1]

    def _borders(self, start: int, end: int) -> list[int]:
        """Offsets of special tokens right after another one (white space may stand between); else of the last one."""
        special = self._template.learnt.special_ids
        found = [index for index, token in enumerate(self.tokens[start:end].tolist(), start) if token in special]
        return [right for left, right in pairwise(found) if right - left <= 2] or found[-1:]

    def shared_with(self, messages: Sequence[Message]) -> int:
        """How many tokens the rendering of other messages, with no reply opened, shares with this; 0: it is refused."""
        try:
            shared = common_rendering(self.rendering, RenderedChat(self._template, messages, "message").rendering)
        except ValueError:
            return 0
        if self.spans is None or not isinstance(self.rendering, str):
            return shared
        return self.spans.before(shared - self.rendering.count(BREAK, 0, shared))


def find_messages(
    text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[Span], Span]:
    """Where the texts of each message stand in a prompt, in order, and where the tools stand; NOWHERE: not found.

    A template may leave out a text, and the same text may come later. So reasoning, or a text shorter than the next
    one, counts as not found if it only stands after the next text.
    """
    texts = [(index, *each) for index, message in enumerate(messages) for each in _texts(message) if each[0]]
    heads = [each for index, each, _ in texts if index == 0 and _is_system(messages[0])]
    hole = _find_tools(text, tools, max((text.find(each) + len(each) for each in heads), default=0))

    def find(wanted: str, start: int, end: int | None = None) -> int:
        at = text.find(wanted, start, end)
        return text.find(wanted, hole[1], end) if hole[0] <= at < hole[1] else at

    spans, position = [NOWHERE] * len(messages), 0
    for number, (index, each, is_reasoning) in enumerate(texts, 1):
        following = next((said for _, said, is_thought in texts[number : number + 3] if not is_thought), "")
        is_doubtful = is_reasoning or len(following) > len(each)
        after = find(following, position) if following and is_doubtful else -1
        at = find(each, position, None if after < 0 else after + len(each))
        if at >= 0:
            position = at + len(each)
            spans[index] = (at if spans[index] == NOWHERE else spans[index][0], position)
    return spans, hole


def _texts(message: Message) -> Iterator[tuple[str, bool]]:
    """The texts of a message that a template writes, and whether each is reasoning."""
    content, calls = message.get("content") or "", message.get("tool_calls") or ()
    yield str(message.get("reasoning_content") or "").strip(), True
    for part in content if isinstance(content, list) else [content]:
        *thoughts, said = str(part.get("text", "") if isinstance(part, Mapping) else part).split("</think>")
        yield from ((each.strip(), True) for each in thoughts)
        yield said.strip(), False
    yield from ((str(tool_function(call).get("name", "")), False) for call in calls if isinstance(call, Mapping))


def _find_tools(text: str, tools: Sequence[Mapping[str, Any]], behind: int) -> Span:
    """Where the tools stand: after the system prompt or before it, mostly as JSON."""
    shown = [json.dumps(tool, ensure_ascii=False, default=repr).replace(BREAK, "") for tool in tools]
    names = [f'"{tool_function(tool).get("name")}"' for tool in tools]
    for form, start in product((shown, names), (behind, 0)):
        end, starts = start, list[int]()
        for each in form:
            starts.append(text.find(each, end))
            end = starts[-1] + len(each)
        if starts and min(starts) >= 0:
            return starts[0], end
    return NOWHERE


def tool_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool, or of a call."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def _with_content(messages: Sequence[dict[str, Any]], content: str) -> list[dict[str, Any]]:
    """A copy of the messages, with `content` in the last one."""
    return [*messages[:-1], {**messages[-1], "content": content}]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")
