"""Chat messages to tokens, and to the offsets ("marks") where other conversations may part from this one.

A template is foreign code: it may refuse part of a conversation, insert a default system prompt, merge the system
prompt into the first user message, or rewrite earlier turns. So a message's end is never computed from the message: it
is read off by rendering the conversation cut after the message, or, where the template refuses or rewrites that, by
rendering conversations that differ only in what follows. A mark is a promise, kept by these rules:

  M1  tokens are what the tokenizer's own `apply_chat_template` gives for the whole conversation.
  M2  tokens[:mark] begins the tokens of every conversation that shares the messages up to that mark and goes on after
      them: with the generation prompt, or with a message of another role.
  M3  0 < mark <= len(tokens); marks ascend and none comes twice. Messages that end at one offset share a mark; a
      message of which nothing is certain to come back has none.

M2 holds for text first, then for tokens: tokens that reach over the border are left out, and where no control token
closes the border, so are those that other text behind it could merge with. (Where a tokenizer does not cut text into
words, M2 holds for merges with the beginnings of text that TokenSpans tries.)

Cost: one tokenization of the whole text, and one rendering per message; with tokenizers without offsets, or that render
in their own way, one tokenization per message. Never imports MLX.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.chat.template import ChatTemplate, Message, Rendering, choose_form, common_rendering
from radixcache.chat.token_spans import TokenSpans

# What may follow a border: contents that differ from the first character on.
_PROBE_CONTENTS = ("alpha", "Zulu")
# What templates write before the user's first words at least; where it is more, it is a system prompt or a tool list.
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
        messages: OpenAI chat messages, left as they are. Arguments of tool calls may be JSON text or objects; the
            template gets what it can take.
        tools: function definitions in OpenAI form, or None.
        add_generation_prompt: end with the opening of the assistant's reply; ignored when the last message is a reply.
        template_kwargs: passed on to the template (`enable_thinking`, `documents`, ...).

    Returns:
        Tokens (int32) and marks: the offsets where the system prompt and each message end, as far as other
        conversations with the same messages have the same tokens there (M1 to M3).

    Raises:
        ValueError: no chat template, no messages, a message without role, or a conversation that the template refuses.
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
    """The tokens that `render_chat` gives, int32, without marks: the template runs once. Raises as there."""
    _validate(messages)
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    _, rendering = choose_form(template, messages, add_generation_prompt)
    return TokenSpans(template, rendering).tokens if isinstance(rendering, str) else np.asarray(rendering, np.int32)


def message_ends(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    counts: Container[int] | None = None,
    **template_kwargs: Any,
) -> tuple[NDArray[np.int32], int, list[int]]:
    """Tokens as `render_chat` gives them, and what each mark belongs to.

    Args:
        counts: numbers of messages after which an end is looked for, 1 among them; None: after each.

    Returns:
        Tokens; the opening's end, shared by all conversations with the same system prompt (or none) that begin with a
        user message, where the template adds to it (a default system prompt, a tool list); and one end per message,
        not sorted, where `ends[k]` belongs to `messages[: k + 1]`. 0 stands for an end that is not certain, or that
        nobody looked for.
    """
    _validate(messages)
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    chosen = choose_form(template, messages, add_generation_prompt)
    borders = _Borders(template, *chosen)
    text_ends = [
        borders.message_end(count) if counts is None or count in counts else 0 for count in range(1, len(messages) + 1)
    ]
    tokens, (opening, *ends) = borders.to_tokens([borders.opening_end(text_ends[0]), *text_ends])
    return tokens, opening, ends


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


class _Borders:
    """Where the messages of one rendered conversation end."""

    def __init__(self, template: ChatTemplate, messages: list[dict[str, Any]], full: Rendering) -> None:
        self._template = template
        self._messages = messages
        self._full = full
        self._later = self._render_with_a_later_turn()
        # Up to here the rendering stays as it is when another user turn follows.
        self._lasting = common_rendering(full, self._later) if self._later is not None else len(full)
        # Ends after which the template, not a message's content, goes on.
        self._complete: set[int] = set()

    def message_end(self, count: int) -> int:
        """Where `messages[:count]` end in the full rendering; 0: not certain."""
        beginning = self._messages[:count]
        alone = self._template.attempt(beginning)
        if not alone or self._full[: len(alone)] != alone:
            # Refused, or written otherwise once more follows: compare conversations that go on from here.
            end = self._parting(beginning, _next_roles(beginning[-1]))
            if end is None:
                end = common_rendering(self._full, alone) if alone else 0
        elif count == 1 and _is_held_back(beginning[0], alone):
            end = 0
        else:
            end = len(alone)
            self._complete.add(end)
        return min(end, self._lasting)

    def opening_end(self, first_end: int) -> int:
        """Where all before the user's first words ends, if more than the system prompt. `first_end`: of message 0."""
        system = self._messages[:1] if _is_system(self._messages[0]) else []
        system_end = first_end if system else 0
        end = min(self._parting(system, ("user",)) or 0, self._lasting)
        header_length = _HEADER_CHARS if isinstance(self._full, str) else _HEADER_TOKENS
        is_lost = bool(system) and not system_end
        return end if is_lost or end - system_end > header_length else 0

    def to_tokens(self, text_ends: list[int]) -> tuple[NDArray[np.int32], list[int]]:
        """Tokens of the whole conversation, and the ends as token offsets."""
        if not isinstance(self._full, str):
            return np.asarray(self._full, dtype=np.int32), text_ends
        spans = TokenSpans(self._template, self._full)
        return spans.tokens, [spans.offset(end, self._is_closed(end, spans)) if end else 0 for end in text_ends]

    def _is_closed(self, end: int, spans: TokenSpans) -> bool:
        """Whether the template goes on with a control token there, so that nothing merges over the border."""
        text = self._full if end < len(self._full) else self._later
        return end in self._complete and isinstance(text, str) and text.startswith(spans.control_texts, end)

    def _parting(self, beginning: Sequence[dict[str, Any]], roles: Sequence[str]) -> int | None:
        """How much of the full rendering conversations share that go on from this beginning with one of these roles.

        None where the template refuses every probe, or all but one.
        """
        probes = [[*beginning, _probe(role, content, beginning)] for role in roles for content in _PROBE_CONTENTS]
        others = [other for other in map(self._template.attempt, probes) if other is not None]
        # One alone could go on just as this conversation does.
        return min(common_rendering(self._full, other) for other in others) if len(others) > 1 else None

    def _render_with_a_later_turn(self) -> Rendering | None:
        for roles in (("user",), ("assistant", "user"), ("tool", "assistant", "user")):
            longer = list(self._messages)
            for role in roles:
                longer.append(_probe(role, _PROBE_CONTENTS[0], longer))
            later = self._template.attempt(longer)
            if later is not None:
                return later
        return None


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _is_held_back(system: Mapping[str, Any], alone: Rendering) -> bool:
    """Whether the template writes nothing of a system prompt before the message behind it."""
    content = system.get("content")
    return _is_system(system) and isinstance(alone, str) and isinstance(content, str) and content.strip() not in alone


def _next_roles(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Roles of the messages that may follow one."""
    if _is_system(message):
        return ("user", "assistant")
    if message["role"] != "assistant":
        return ("assistant", "user")
    return ("tool", "user") if message.get("tool_calls") else ("user",)


def _probe(role: str, content: str, beginning: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A message to put behind a beginning; as a tool's result it answers the call before it."""
    if role != "tool":
        return {"role": role, "content": content}
    calls = beginning[-1].get("tool_calls") if beginning else None
    call = calls[0] if calls and isinstance(calls[0], Mapping) else {}
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    answer = {"role": role, "content": content, "tool_call_id": call.get("id"), "name": name}
    return {key: value for key, value in answer.items() if value is not None}
