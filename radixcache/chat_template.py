"""ChatTemplate: a tokenizer's chat template, called with messages in the form that it accepts. Never imports MLX.

Templates want messages in different forms; `choose_form` finds the first form that a template accepts. In some, the
text of a control token in a message becomes the token; a break (`BREAK`) after its first character keeps it text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal
from weakref import WeakKeyDictionary

from radixcache.turns import Turns

Message = Mapping[str, Any]
Rendering = str | list[int]

# Arguments of `apply_chat_template` that would change what it returns; everything else belongs to the template.
_RESERVED_ARGUMENTS = (
    *("continue_final_message", "max_length", "padding", "return_assistant_tokens_mask", "return_dict"),
    *("return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
)
_REASONING_ARGUMENTS = ("reasoning_effort", "thinking")
# Types of message parts whose strings are no text.
_IMAGES = ("image", "image_url", "input_image")


#: How a rendering ends: with the opening of the next reply, after the last message, or inside the last message.
Ending = Literal["reply", "message", "continue"]

# Stands after the first character of a control token's text, so that this stays text. A noncharacter: in no real text.
BREAK = "\ufdd0"


class _Learnt:
    """Facts that are found once for a tokenizer: its control tokens, and what its chat templates do."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        texts = [(token_id, token.content) for token_id, token in added.items()]
        if not texts:  # not a tokenizer of transformers
            names = ("all_special_ids", "all_special_tokens")
            texts = [*zip(*(getattr(tokenizer, name, ()) for name in names), strict=True)]
        #: Ids and texts of the tokens that never merge with adjacent text, except those of white space.
        self.control = {int(token_id): text for token_id, text in texts if text.strip()}
        self.special_ids = {each for each in self.control if each not in added or added[each].special}
        self.special = {self.control[each] for each in self.special_ids}
        self.patterns: dict[tuple[str, bool], re.Pattern[str]] = {}
        #: What `Turns` found, by template.
        self.turns: dict[str, dict[str, bool]] = {}

    def starts(self, template: str, *, special_only: bool) -> re.Pattern[str]:
        """A pattern that finds the first character of each control token's text that the template can write."""
        if (known := self.patterns.get((template, special_only))) is not None:
            return known
        texts = [each for each in self.control.values() if each in self.special or (each in template)]
        rests: dict[str, set[str]] = {}
        for text in texts:
            if len(text) > 1 and (text in self.special or not special_only):
                # Some tokenizers have thousands of numbered tokens. A match of a number without a token is harmless.
                rests.setdefault(text[0], set()).add(re.sub(r"\d+", r"\\d+", re.escape(text[1:])))
        parts = [f"{re.escape(first)}(?={'|'.join(sorted(each))})" for first, each in sorted(rests.items())]
        return self.patterns.setdefault((template, special_only), re.compile("|".join(parts) or "(?!)"))


_LEARNT: WeakKeyDictionary[Any, _Learnt] = WeakKeyDictionary()


def inner_of(tokenizer: Any) -> Any:
    """The tokenizer inside mlx-lm's wrapper. The wrapper forwards attributes, but it cannot be called."""
    return tokenizer if callable(tokenizer) else getattr(tokenizer, "_tokenizer", tokenizer)


def learnt_of(inner: Any) -> _Learnt:
    try:
        if (learnt := _LEARNT.get(inner)) is None:
            learnt = _LEARNT[inner] = _Learnt(inner)
        return learnt
    except TypeError:  # a tokenizer without support for weak references
        return _Learnt(inner)


class ChatTemplate:
    """A tokenizer's chat template with the arguments of one call.

    `is_plain_text`: if a message or a tool contains a control token's text, this stays text. In messages of the
    assistant, this holds only for special tokens: templates find reasoning and calls by the other control tokens.

    Breaks keep such texts as text. A tokenizer with offsets tokenizes the rendered text with its breaks, others the
    pieces between them. A tokenizer that renders tokens itself gets no breaks; `require_plain_text` checks its tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: dict[str, Any],
        *,
        is_plain_text: bool = False,
    ):
        for name in filter(template_kwargs.__contains__, _RESERVED_ARGUMENTS):
            raise ValueError(
                f"{name} is not an argument of the chat template; render_chat sets it itself. Leave it out."
            )
        _require_template(tokenizer, template_kwargs)
        self._tokenizer = tokenizer
        self._inner = inner_of(tokenizer)
        # mlx-lm may replace the tokenizer's Jinja template with a function.
        is_python = self._inner is not tokenizer and getattr(tokenizer, "_chat_template", None) is not None
        if is_python:  # the function refuses unknown arguments, but requests may have some for other templates
            template_kwargs = {key: template_kwargs[key] for key in template_kwargs if key not in _REASONING_ARGUMENTS}
        is_fast = getattr(self._inner, "is_fast", False) and not template_kwargs.get("sanitize_control_tokens")
        is_own = not is_python and not _has_stock_renderer(self._inner)
        #: Whether the template gives text, which the tokenizer then tokenizes with offsets.
        self.as_text = bool(is_fast and not is_own)
        self._has_breaks = is_plain_text and not (is_own or template_kwargs.get("sanitize_control_tokens"))
        self._source = str(template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None))
        self.is_plain_text = is_plain_text
        self.tools = [dict(tool) for tool in tools] if tools else None
        if self._has_breaks and self.tools:
            starts = self.learnt.starts(self._source, special_only=False)
            if starts.search(json.dumps(self.tools, ensure_ascii=False)):
                self.tools = self._plain_text(self.tools, special_only=False)
        self._kwargs: dict[str, Any] = {"tools": self.tools, **template_kwargs}
        if not self.as_text and not is_python:
            self._kwargs["return_dict"] = False

    @property
    def learnt(self) -> _Learnt:
        return learnt_of(self._inner)

    def render(self, messages: Sequence[Message], generation_prompt: bool, **arguments: Any) -> Rendering:
        """Render as text, or as tokens if the text does not determine them. Errors of the template pass through."""
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=generation_prompt,
            **{"tokenize": not (self.as_text or self._has_breaks), **self._kwargs, **arguments},
        )
        if isinstance(rendered, str) and not self.as_text:
            pieces = [self._inner.encode(text, add_special_tokens=False) for text in rendered.split(BREAK)]
            rendered = [token for piece in pieces for token in piece]
        return rendered if isinstance(rendered, str) else [int(token) for token in rendered]

    def attempt(
        self, messages: Sequence[Message], generation_prompt: bool = False, **arguments: Any
    ) -> Rendering | None:
        """Render; None: the template refuses these messages."""
        try:
            return self.render(messages, generation_prompt, **arguments)
        except Exception:  # A template may raise anything.
            return None

    def fit(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give each turn the nearest role that the template takes; see `Turns`."""
        return Turns(self._probe, self.learnt.turns.setdefault(self._source, {})).fit(messages)

    def _probe(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        rendering = self.attempt(messages, messages[-1]["role"] != "assistant", tools=tools)
        if rendering is None or isinstance(rendering, str):
            return rendering
        try:
            return str(self._tokenizer.decode(rendering))
        except Exception:  # an unknown tokenizer may raise anything
            return None

    def in_plain_text(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with breaks in the texts of control tokens; see `TokenSpans`."""
        if not self._has_breaks:
            return message
        plain: dict[str, Any] = self._plain_text(message, special_only=message["role"] == "assistant")
        return plain

    def require_plain_text(self, messages: Sequence[Message], rendering: Rendering, generation_prompt: bool) -> None:
        """Raise ValueError if the tokenizer's own rendering makes a control token of the text of a message or a tool.

        With breaks in these texts, none becomes a control token. So both renderings must have equally many of these.
        """
        if not self.is_plain_text or self._has_breaks or isinstance(rendering, str):
            return
        plain = [self._plain_text(each, special_only=each["role"] == "assistant") for each in messages]
        tools = self._plain_text(self.tools, special_only=False)
        if not _differs(plain, messages) and tools is self.tools:
            return
        broken = self.attempt(plain, generation_prompt, tools=tools)
        if broken is None or self._control_count(broken) < self._control_count(rendering):
            texts = json.dumps([*messages, self.tools], ensure_ascii=False)
            found = next((text for text in self.learnt.control.values() if text in texts), "")
            raise ValueError(
                f"a message or a tool contains {found!r}, and this model's tokenizer cannot keep that text apart from "
                "its control token. Leave it out, or allow special tokens in text."
            )

    def _control_count(self, rendering: Rendering) -> int:
        return sum(token in self.learnt.control for token in rendering)

    def _plain_text(self, value: Any, *, special_only: bool) -> Any:
        """A JSON value with breaks; the same object if it needs none, so that long values are not copied."""
        if isinstance(value, str):
            return self.learnt.starts(self._source, special_only=special_only).sub(rf"\g<0>{BREAK}", value)
        changed: Any
        if isinstance(value, Mapping):
            if value.get("type") in _IMAGES:
                return value
            changed = {
                self._plain_text(key, special_only=special_only): self._plain_text(each, special_only=special_only)
                for key, each in value.items()
            }
            return changed if _differs(changed, value) or _differs(changed.values(), value.values()) else value
        if isinstance(value, list | tuple):
            changed = [self._plain_text(each, special_only=special_only) for each in value]
            return changed if _differs(changed, value) else value
        return value

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """`Encoding` objects of the library `tokenizers`: they hold ids and offsets, and give them one by one."""
        encoded = self._inner(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        encodings: list[Any] = encoded.encodings
        return encodings


def _differs(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return any(each is not other for each, other in zip(left, right, strict=True))


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
    template: ChatTemplate, messages: Sequence[Message], generation_prompt: bool
) -> tuple[list[dict[str, Any]], Rendering]:
    """Find the first form of the messages that the template accepts, and render it.

    Most templates want the arguments of a tool call as an object and quote text twice; a few need text. Most accept a
    message without content if it calls tools; a few need a string. Arguments that are no JSON stay text; a template
    that lists the arguments one by one gets this text as one argument. Arguments null and "" count as no arguments.
    """
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
    """The messages with tool arguments as JSON values, as text, or as objects; missing content left out or ''."""
    forms: list[list[dict[str, Any]]] = []
    for arguments in ("parsed", "written", "named"):
        form = [plain(message, arguments) for message in messages]
        if form not in forms:
            forms.append(form)
            yield form
            if any("content" not in message for message in form):
                yield [{"content": "", **message} for message in form]


def plain(message: Message, arguments: str = "parsed") -> dict[str, Any]:
    """Copy a message, join its text parts, and leave out None values, which templates write as text."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        plain["content"] = "".join(str(part.get("text", "")) for part in content)
    calls = plain.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        plain["tool_calls"] = [_plain_call(call, arguments) for call in calls]
    return plain


def _plain_call(call: Any, form: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"] or {}
    if form != "written" and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    elif form == "written" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if form == "named" and not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments} if arguments else {}
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
