"""ChatTemplate: a tokenizer's chat template as foreign code that may refuse part of a conversation. Never imports MLX.

Templates differ in the form they want messages in: the arguments of tool calls as text or as objects, an empty content
or none. The first form that a template takes is the one it gets.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
        self.as_text = self._renders_text_that_it_tokenizes()
        if not self.as_text and not self._has_python_template():
            self._kwargs["return_dict"] = False

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> Rendering:
        """Render as text, or as tokens where text does not tell them; raises whatever the template raises."""
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=generation_prompt,
            tokenize=not self.as_text,
            **self._kwargs,
        )
        return str(rendered) if self.as_text else [int(token) for token in rendered]

    def attempt(self, messages: Sequence[Message], generation_prompt: bool = False) -> Rendering | None:
        """Render, or None where the template refuses these messages."""
        try:
            return self.render(messages, generation_prompt)
        except Exception:  # a template may raise anything: each of them is a refusal, and the caller has another way
            return None

    def encode(self, texts: Sequence[str]) -> Any:
        """Tokenize rendered texts, with the character span of each token."""
        return self._inner(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def control_tokens(self) -> dict[int, str]:
        """Ids and texts of the tokens that no text beside them can change; more white space changes white space."""
        added = self._inner.added_tokens_decoder.items()
        return {int(token_id): token.content for token_id, token in added if token.content.strip()}

    def _has_python_template(self) -> bool:
        """Whether mlx-lm brings a function in place of the tokenizer's Jinja template."""
        return self._inner is not self._tokenizer and getattr(self._tokenizer, "_chat_template", None) is not None

    def _renders_text_that_it_tokenizes(self) -> bool:
        if not getattr(self._inner, "is_fast", False) or self._kwargs.get("sanitize_control_tokens"):
            return False
        return self._has_python_template() or _has_stock_renderer(self._inner)


def _has_stock_renderer(tokenizer: Any) -> bool:
    """Whether `apply_chat_template` is the one of transformers, which tokenizes the text that it renders."""
    method = getattr(type(tokenizer), "apply_chat_template", None)
    return getattr(method, "__module__", None) == "transformers.tokenization_utils_base"


def _require_template(tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
    has_template = callable(getattr(tokenizer, "apply_chat_template", None))
    if has_template and _has_stock_renderer(tokenizer):
        has_template = getattr(tokenizer, "chat_template", None) is not None
    if has_template:
        has_template = bool(getattr(tokenizer, "has_chat_template", True))
    if not has_template and template_kwargs.get("chat_template") is None:
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) has no chat template; wanted an instruct model's tokenizer."
            " Load one, or pass chat_template=."
        )


def choose_form(
    template: ChatTemplate, messages: Sequence[Message], add_generation_prompt: bool
) -> tuple[list[dict[str, Any]], Rendering]:
    """Find the form of the messages that the template takes, and what it makes of it.

    Most templates want the arguments of a tool call as an object and would write text quoted twice; a few need text.
    Most do without the content of a message that only calls tools; a few need it to be a string.
    """
    generation_prompt = add_generation_prompt and messages[-1]["role"] != "assistant"
    accepted: list[tuple[list[dict[str, Any]], Rendering]] = []
    refusals: list[Exception] = []
    for form in _forms(messages):
        try:
            accepted.append((form, template.render(form, generation_prompt)))
        except Exception as error:  # a template may raise anything: another form may still do
            refusals.append(error)
            continue
        if not _shows_python_objects(accepted[-1][1], form):
            return accepted[-1]
    if accepted:
        return accepted[0]
    refusal = refusals[0]
    roles = ", ".join(message["role"] for message in messages[:8]) + (", ..." if len(messages) > 8 else "")
    reason = " ".join(str(refusal).split()) or type(refusal).__name__
    raise ValueError(f"the chat template refused {len(messages)} message(s) ({roles}): {reason}") from refusal


def _forms(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The same messages, with tool arguments as objects or as text, and missing content as missing or as ''."""
    parsed = [_plain(message, parse_arguments=True) for message in messages]
    written = [_plain(message, parse_arguments=False) for message in messages]
    for form in [parsed, written] if parsed != written else [parsed]:
        yield form
        if any("content" not in message for message in form):
            yield [{"content": "", **message} for message in form]


def _plain(message: Message, parse_arguments: bool) -> dict[str, Any]:
    """A copy without the keys whose value is None (templates write them as text), with text parts joined."""
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
        arguments = _parse_object(arguments)
    elif not parse_arguments and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_object(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _shows_python_objects(rendering: Rendering, form: Sequence[dict[str, Any]]) -> bool:
    """Whether the template wrote an arguments object with Python's quotes: it expects them as text then."""
    calls = [call for message in form for call in message.get("tool_calls", ())]
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    arguments = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    objects = [each for each in arguments if isinstance(each, dict) and each]
    return isinstance(rendering, str) and any(str(each) in rendering for each in objects)


def common_rendering(left: Rendering, right: Rendering) -> int:
    """Length of the longest common beginning, by comparing whole slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
