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

Templates want messages in different forms; `choose_form` finds the first form that a template accepts. Cost: one
tokenization of the whole text and one rendering per message. A tokenizer without offsets, or with its own renderer,
needs one tokenization per message. Never imports MLX.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from radixcache.turns import Place, Turns

Message = Mapping[str, Any]
Rendering = str | list[int]

# Arguments of `apply_chat_template` that would change what it returns; everything else belongs to the template.
_RESERVED_ARGUMENTS = (
    *("continue_final_message", "max_length", "padding", "return_assistant_tokens_mask", "return_dict"),
    *("return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
)


class ChatTemplate:
    """A tokenizer's chat template with the arguments of one call."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None, template_kwargs: dict[str, Any]):
        for name in filter(template_kwargs.__contains__, _RESERVED_ARGUMENTS):
            raise ValueError(
                f"{name} is not an argument of the chat template; render_chat sets it itself. Leave it out."
            )
        _require_template(tokenizer, template_kwargs)
        self._tokenizer = tokenizer
        # mlx-lm's wrapper forwards attributes, but a call needs the tokenizer inside.
        self._inner = tokenizer if callable(tokenizer) else getattr(tokenizer, "_tokenizer", tokenizer)
        self._kwargs: dict[str, Any] = {"tools": [dict(tool) for tool in tools] if tools else None, **template_kwargs}
        # mlx-lm may replace the tokenizer's Jinja template with a function.
        is_python = self._inner is not tokenizer and getattr(tokenizer, "_chat_template", None) is not None
        is_fast = getattr(self._inner, "is_fast", False) and not template_kwargs.get("sanitize_control_tokens")
        #: Whether the template gives text, which the tokenizer then tokenizes.
        self.as_text = bool(is_fast and (is_python or _has_stock_renderer(self._inner)))
        if not self.as_text and not is_python:
            self._kwargs["return_dict"] = False

    def render(self, messages: Sequence[Message], generation_prompt: bool, **arguments: Any) -> Rendering:
        """Render as text, or as tokens if the text does not determine them. Errors of the template pass through."""
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=generation_prompt,
            tokenize=not self.as_text,
            **{**self._kwargs, **arguments},
        )
        return str(rendered) if self.as_text else [int(token) for token in rendered]

    def attempt(self, messages: Sequence[Message], generation_prompt: bool = False) -> Rendering | None:
        """Render; None: the template refuses these messages."""
        try:
            return self.render(messages, generation_prompt)
        except Exception:  # A template may raise anything.
            return None

    def fit(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Place]]:
        """Give each turn the nearest role that the template takes; see `Turns`."""
        return Turns(self._probe, _known_turns(self._tokenizer, self._kwargs.get("chat_template"))).fit(messages)

    def _probe(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        try:
            rendering = self.render(messages, messages[-1]["role"] != "assistant", tools=tools)
            return rendering if isinstance(rendering, str) else str(self._tokenizer.decode(rendering))
        except Exception:  # A template may raise anything.
            return None

    def encode(self, texts: Sequence[str]) -> Any:
        return self._inner(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def control_tokens(self) -> dict[int, str]:
        """Ids and texts of the tokens that never merge with text beside them; white space does not count."""
        added = self._inner.added_tokens_decoder.items()
        return {int(token_id): token.content for token_id, token in added if token.content.strip()}


#: What is known of each tokenizer's templates; see `Turns`.
_KNOWN_TURNS: WeakKeyDictionary[Any, dict[str, dict[str, bool]]] = WeakKeyDictionary()


def _known_turns(tokenizer: Any, own_template: Any) -> dict[str, bool]:
    """What is known of the turns of a template; empty at first."""
    template = own_template or getattr(tokenizer, "chat_template", None)
    try:
        return _KNOWN_TURNS.setdefault(tokenizer, {}).setdefault(str(template), {})
    except TypeError:  # no weak references to it
        return {}


def _has_stock_renderer(tokenizer: Any) -> bool:
    """Whether `apply_chat_template` is that of transformers, which tokenizes its rendered text."""
    method = getattr(type(tokenizer), "apply_chat_template", None)
    return getattr(method, "__module__", None) == "transformers.tokenization_utils_base"


def _require_template(tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
    has_template = (
        callable(getattr(tokenizer, "apply_chat_template", None))
        and (not _has_stock_renderer(tokenizer) or getattr(tokenizer, "chat_template", None) is not None)
        and getattr(tokenizer, "has_chat_template", True)
    )
    if not has_template and template_kwargs.get("chat_template") is None:
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) has no chat template; wanted an instruct model's tokenizer."
            " Load one, or pass chat_template=."
        )


def choose_form(
    template: ChatTemplate, messages: Sequence[Message], add_generation_prompt: bool
) -> tuple[list[dict[str, Any]], Rendering]:
    """Find the first form of the messages that the template accepts, and render it.

    Most templates want the arguments of a tool call as an object and quote text twice; a few need text. Most accept a
    message without content if it calls tools; a few need a string.
    """
    generation_prompt = add_generation_prompt and messages[-1]["role"] != "assistant"
    accepted: list[tuple[list[dict[str, Any]], Rendering]] = []
    refusals: list[Exception] = []
    for form in _forms(messages):
        try:
            rendering = template.render(form, generation_prompt)
        except Exception as error:  # A template may raise anything; another form may work.
            refusals.append(error)
            continue
        if not _shows_python_objects(rendering, form):
            return form, rendering
        accepted.append((form, rendering))
    if accepted:
        return accepted[0]
    refusal = refusals[0]
    roles = ", ".join(message["role"] for message in messages[:8]) + (", ..." if len(messages) > 8 else "")
    reason = " ".join(str(refusal).split()) or type(refusal).__name__
    raise ValueError(f"the chat template refused {len(messages)} message(s) ({roles}): {reason}") from refusal


def _forms(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The messages with tool arguments as objects or as text, and with missing content left out or as ''."""
    parsed = [_plain(message, parse_arguments=True) for message in messages]
    written = [_plain(message, parse_arguments=False) for message in messages]
    for form in [parsed, written] if parsed != written else [parsed]:
        yield form
        if any("content" not in message for message in form):
            yield [{"content": "", **message} for message in form]


def _plain(message: Message, parse_arguments: bool) -> dict[str, Any]:
    """Copy a message, join its text parts, and leave out None values, which templates write as text."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        plain["content"] = "".join(str(part.get("text", "")) for part in content)
    calls = plain.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        plain["tool_calls"] = [_plain_call(call, parse_arguments) for call in calls]
    return plain


def _plain_call(call: Any, parse_arguments: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if parse_arguments and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    elif not parse_arguments and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _shows_python_objects(rendering: Rendering, form: Sequence[dict[str, Any]]) -> bool:
    """Whether the template wrote arguments with Python's quotes, so that it expects them as text."""
    calls = [call for message in form for call in message.get("tool_calls", ())]
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    arguments = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    objects = [each for each in arguments if isinstance(each, dict) and each]
    return isinstance(rendering, str) and any(str(each) in rendering for each in objects)


def common_rendering(left: Rendering, right: Rendering) -> int:
    """Length of the longest common prefix, by comparing whole slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Beginnings of text that a tokenizer may merge with the text before, one per character class.
_FOLLOWERS = ("a", "s", "B", " a", " ", "  ", "\n", "\na", "\t", "1", ".", "'", "<", "_", "é", "中")
# Characters before a border that are examined: merges reach back over a word, not over a page.
_WINDOW_CHARS = 256


class TokenSpans:
    def __init__(self, template: ChatTemplate, text: str) -> None:
        encoding = template.encode([text])
        spans = np.asarray(encoding["offset_mapping"][0], dtype=np.int64).reshape(-1, 2)
        self._template = template
        self._text = text
        self.tokens = np.asarray(encoding["input_ids"][0], dtype=np.int32)
        # Several tokens may stand for one character, and some omit their spaces: make both columns ascend.
        self._starts = np.maximum.accumulate(spans[:, 0])
        self._ends = np.maximum.accumulate(spans[:, 1])
        control = template.control_tokens()
        self.control_texts = tuple(control.values())
        self._control_indices = np.flatnonzero(np.isin(self.tokens, np.fromiter(control, dtype=np.int32)))

    def offset(self, end: int, closed: bool) -> int:
        """The number of tokens before the character at `end` that no later text can change."""
        if not closed and end not in self._ends[self._control_indices]:
            end = self._settled_end(end)
        return int(np.searchsorted(self._ends, end, "right"))

    def _settled_end(self, end: int) -> int:
        """The last offset before a border at which text after the border cannot change the tokens.

        The last word before the border (as the pre-tokenizer splits words) may grow, so it is left out. Tokenizing the
        text with each follower shows the other changes.
        """
        before = self._control_indices[self._ends[self._control_indices] <= end]
        control_start = int(self._starts[before[-1]]) if len(before) else -1
        start = max(control_start, end - _WINDOW_CHARS, 0)
        window = self._text[start:end]
        encoding = self._template.encode([window, *(window + follower for follower in _FOLLOWERS)])
        settled = min(_common_end(encoding, other, len(window)) for other in range(1, len(_FOLLOWERS) + 1))
        return start + min(settled, _last_word_start(encoding, len(window), skip=start == control_start))


def _common_end(encoding: Any, other: int, length: int) -> int:
    """The character offset in text 0 where its tokens diverge from those of another text of the batch."""
    spans, tokens = encoding["offset_mapping"][0], encoding["input_ids"][0]
    shared = common_rendering(tokens, encoding["input_ids"][other])
    return length if shared == len(tokens) else max((int(end) for _, end in spans[:shared]), default=0)


def _last_word_start(encoding: Any, length: int, skip: bool) -> int:
    """The start of the last word of text 0; its length if it is one word. `skip`: it starts with a control token."""
    words = encoding.word_ids(0)
    first = len(words)
    while first > 0 and words[first - 1] == words[-1]:
        first -= 1
    return int(encoding["offset_mapping"][0][first][0]) if first > int(skip) else length


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
    _validate(messages)
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    fitted, _ = template.fit([dict(message) for message in messages])
    _, rendering = choose_form(template, fitted, add_generation_prompt)
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
    """The tokens of `render_chat`, and the message of each mark.

    Args:
        counts: the numbers of messages after which to find an end, including 1; None: after each message.

    Returns:
        Tokens; the end of the opening; and one end per message, unsorted: `ends[k]` belongs to `messages[: k + 1]`.
        The opening is what the template adds to the system prompt (a default one, a tool list), shared by all
        conversations that begin with the same system prompt and a user message. 0: not certain, or not asked for.
    """
    _validate(messages)
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    fitted, places = template.fit([dict(message) for message in messages])
    borders = _Borders(template, *choose_form(template, fitted, add_generation_prompt))
    last = {place.turn: count for count, place in enumerate(places, 1)}
    text_ends = [
        0
        if counts is not None and count not in counts
        else borders.message_end(place.turn + 1)
        if last[place.turn] == count
        else borders.inner_end(place.turn, place.end)
        for count, place in enumerate(places, 1)
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
        # A later user turn does not change the rendering up to here.
        self._lasting = common_rendering(full, self._later) if self._later is not None else len(full)
        # Ends that are followed by text of the template, not by content of a message.
        self._complete: set[int] = set()

    def message_end(self, count: int) -> int:
        """The end of `messages[:count]` in the full rendering; 0: not certain."""
        beginning = self._messages[:count]
        alone = self._template.attempt(beginning)
        if not alone or self._full[: len(alone)] != alone:
            # Refused, or rewritten by later messages: compare conversations that continue from here.
            end = self._parting(beginning, _next_roles(beginning[-1]))
            if end is None:
                end = common_rendering(self._full, alone) if alone else 0
        elif count == 1 and _is_held_back(beginning[0], alone):
            end = 0
        else:
            end = len(alone)
            self._complete.add(end)
        return min(end, self._lasting)

    def inner_end(self, index: int, end: int | None) -> int:
        """The end of the first `end` characters of a message's content in the full rendering; 0: not certain."""
        if end is None:
            return 0
        message = self._messages[index]
        others = [{**message, "content": message["content"][:end] + content} for content in _PROBE_CONTENTS]
        later = self._messages[index + 1 :]
        found = [self._template.attempt([*self._messages[:index], other, *later], True) for other in others]
        return min((common_rendering(self._full, other) for other in found if other is not None), default=0)

    def opening_end(self, first_end: int) -> int:
        """The end of all before the first user text, if that is more than the system prompt."""
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
        """Whether a control token of the template follows, so that no token reaches over the border."""
        text = self._full if end < len(self._full) else self._later
        return end in self._complete and isinstance(text, str) and text.startswith(spans.control_texts, end)

    def _parting(self, beginning: Sequence[dict[str, Any]], roles: Sequence[str]) -> int | None:
        """The common prefix of the full rendering and of conversations that continue with one of these roles.

        None: the template accepts fewer than two of them.
        """
        probes = [[*beginning, _probe(role, content, beginning)] for role in roles for content in _PROBE_CONTENTS]
        others = [other for other in map(self._template.attempt, probes) if other is not None]
        # A single one may continue exactly as this conversation.
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
