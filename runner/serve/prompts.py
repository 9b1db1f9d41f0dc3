"""From a Request to prompt tokens, made by mlx_lm.server's own code, and offsets worth a checkpoint.

An Anthropic tool result becomes a prompt in three steps: anthropic.py turns its block into a message with role "tool",
the model's chat template renders all messages, and the tokenizer makes tokens of the text.

An image is a run of tokens that all images of its size share. In the tree each image has keys of its own.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image, UnidentifiedImageError

from radixcache.chat import ChatTemplate, common_rendering, message_ends
from runner.serve import mlx_lm_border
from runner.serve.request import ApiError, Request

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
#: Of all images of a prompt. Decoding takes 3 bytes a pixel, and a file of a few KB can have that many.
MAX_PIXELS = 1 << 27
#: Marked ends of messages, each of which is rendered: so many of the last messages, and as many spread over all.
MARKED_MESSAGES = 16
MARKED_TEXTS = 4  # most marks in Anthropic's API


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt in tokens.

    Attributes:
        marks: where other prompts may diverge: the end of the system prompt and of messages.
        initial_state: of mlx-lm's text state machine.
        vision: mlx-lm's Vision of its images; None: there are none.
    """

    tokens: list[int]
    marks: tuple[int, ...]
    initial_state: str
    vision: Any = None

    @property
    def keys(self) -> list[int] | None:
        """The tree's keys, one for each token; None: the tokens."""
        return None if self.vision is None else self.vision.cache_key


def prompt_of(
    request: Request,
    tokenizer: Any,
    template_args: Mapping[str, Any],
    *,
    processor: Any = None,
    with_marks: bool = False,
) -> RenderedPrompt:
    """Return the request's prompt in tokens. ApiError: it is empty, or template, tokenizer or processor refuse it.

    Args:
        template_args: of the server; the request's own take precedence.
        processor: of images; None: they are refused.
        with_marks: mark the ends of messages and of `request.marked_texts`, for models that cannot resume at any token.
    """
    is_chat = request.prompt is None
    if is_chat and not request.messages:
        raise ApiError(400, "messages is empty; wanted at least one message.", param="messages")
    tools = list(request.tools) if request.tools else None
    provider = SimpleNamespace(processor=processor, cli_args=SimpleNamespace(chat_template_args=dict(template_args)))
    try:
        kwargs = {**template_args, **(request.chat_template_kwargs or {})}
        messages, texts = fitted_messages(request, tokenizer, tools, kwargs)
        completion = mlx_lm_border.CompletionRequest(
            "chat" if is_chat else "text", request.prompt or "", messages, tools, request.role_mapping
        )
        require_images(messages, processor)
        tokens, segments, _, initial_state, vision = mlx_lm_border.tokenize(
            SimpleNamespace(model_provider=provider), tokenizer, completion, request
        )
    except Exception as error:  # Templates and tokenizers are foreign code, and may raise anything.
        raise ApiError(400, f"the prompt cannot be made: {type(error).__name__}: {error}") from error
    if not tokens:
        raise ApiError(400, "the prompt has no tokens; wanted at least one.", param="messages" if is_chat else "prompt")
    marks = {sum(map(len, segments[: count + 1])) for count in range(len(segments) - 1)}
    if with_marks and is_chat and tokenizer.has_chat_template:
        # Some templates refuse a part of a conversation. Without a mark, some tokens are prefilled again.
        with suppress(Exception):
            marks |= _message_marks(tokens, tokenizer, messages, tools, kwargs)
        with suppress(Exception):
            marks |= _text_marks(tokens, texts[-MARKED_TEXTS:], tokenizer, messages, tools, kwargs)
    return RenderedPrompt(tokens, tuple(sorted(marks)), initial_state, vision)


def fitted_messages(
    request: Request, tokenizer: Any, tools: Any, kwargs: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Copies of the messages with the roles that the template takes, and the marked texts in them."""
    messages, texts = copy.deepcopy(list(request.messages)), list(request.marked_texts)
    if not messages:
        return messages, texts
    if not tokenizer.has_chat_template:  # mlx-lm has a prefix for each role, and none for developers
        for message in messages:
            if message["role"] == "developer" and "developer" not in (request.role_mapping or {}):
                message["role"] = "system"
        return messages, texts
    fitted, places = ChatTemplate(tokenizer, tools, kwargs).fit(messages)
    starts = [(places[index], end) for index, end in texts]
    return fitted, [(place.turn, place.start + end) for place, end in starts if place.start is not None]


def digest_of(prompt: RenderedPrompt) -> bytes:
    return hashlib.blake2b(np.asarray(prompt.keys or prompt.tokens, np.int64).tobytes(), digest_size=16).digest()


def part_at(request: Request, tokenizer: Any, tokens: Sequence[int], start: int) -> str:
    """Name the part of a prompt that token `start` belongs to: the tools, the system prompt, a message by its number.

    The texts of the parts are looked for in the text of the prompt. What stands between two texts, such as the role of
    a message, belongs to the part behind it.
    """
    if request.prompt is not None:
        return "the text"
    text, at = tokenizer.decode(tokens), len(tokenizer.decode(tokens[:start]))
    count = len(request.messages)
    for end, index in _part_ends(request, text):
        if at < end:
            if index < 0:
                return "the tools"
            role = request.messages[index]["role"]
            is_system = index == 0 and role in ("system", "developer")
            return "the system prompt" if is_system else f"message {index + 1} of {count} ({role})"
    return "the opening of the reply"


def _part_ends(request: Request, text: str) -> Iterator[tuple[int, int]]:
    """Where each part ends in a prompt's text, in order, and the index of its message; -1: the tools.

    Parts whose text is not found, as templates rewrite some, end where the next one ends.
    """
    spans = [_span(text, _texts(message), 0) for message in request.messages[:1]]
    has_system = bool(spans) and request.messages[0]["role"] in ("system", "developer")
    system_end = spans[0][1] if has_system else 0
    tools = _tools_span(text, request.tools or (), system_end)
    position = max(system_end, tools[1])
    ends = [(tools[1], -1)] if tools[1] else []
    ends += [(system_end, 0)] if has_system else []
    yield from sorted(ends)
    for index, message in enumerate(request.messages):
        if index or not has_system:
            _, end = _span(text, _texts(message), position)
            if end:
                position = end
                yield end, index


def _span(text: str, wanted: Iterable[str], position: int) -> tuple[int, int]:
    """Where these texts stand in `text`, in order, behind `position`; (0, 0): nowhere."""
    start = end = 0
    for each in wanted:
        if each and (found := text.find(each, max(position, end))) >= 0:
            start, end = start or found, found + len(each)
    return start, end


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    yield str(message.get("reasoning_content") or "").strip()
    yield from (str(part.get("text", "")).strip() for part in parts)
    yield from (call["function"]["name"] for call in message.get("tool_calls") or ())


def _tools_span(text: str, tools: Sequence[Mapping[str, Any]], system_end: int) -> tuple[int, int]:
    """Templates show tools behind the system prompt or before it, mostly as JSON."""
    functions = [tool["function"] for tool in tools]
    shown = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    names = [f'"{function["name"]}"' for function in functions]
    forms = [form for form in (shown, names) if all(each in text for each in form)]
    spans = (_span(text, form, position) for form in forms for position in (system_end, 0))
    return next((span for span in spans if span[1]), (0, 0))


def require_images(messages: Iterable[dict[str, Any]], processor: Any) -> None:
    """Raise ValueError, or an error of Pillow, for an image that the server does not accept."""
    pixels = 0
    for part in mlx_lm_border.image_parts(messages):
        url = mlx_lm_border.image_url(part)
        if processor is None:
            raise ValueError("there is an image, and no image processor is loaded for this model.")
        if not isinstance(url, str) or not url.startswith("data:"):
            # The server may reach addresses that the client must not reach.
            raise ValueError("an image has to be a data URL (data:image/png;base64,...); addresses are not fetched.")
        data = io.BytesIO(base64.b64decode(url.partition(",")[2]))
        try:
            with Image.open(data, formats=FORMATS) as image:
                pixels += image.width * image.height  # as in its header
        except UnidentifiedImageError as error:
            raise ValueError(f"an image is none of {', '.join(FORMATS)}.") from error
        if pixels > MAX_PIXELS:
            raise ValueError(f"the images have more than {MAX_PIXELS} pixels together.")


def embedder(model: Any, tokens: list[int], vision: Any) -> Callable[[int], mx.array]:
    """Return a function from an offset to the embeddings (T, D) of the prompt behind it. `vision`: of all images."""

    def embed(offset: int) -> mx.array:
        start = offset  # or the start of the image there, which is embedded again
        while vision.cache_key[start] < 0 and start not in vision.starts:
            start -= 1
        images = vision.pixel_values[sum(first < start for first in vision.starts) :]
        embeddings: mx.array = model.embed_inputs(mx.array(tokens[start:]), pixel_values=images or None)
        return embeddings[offset - start :]

    return embed


def _message_marks(tokens: list[int], tokenizer: Any, messages: list[Any], tools: Any, kwargs: Any) -> set[int]:
    step = -(-len(messages) // MARKED_MESSAGES)
    last = range(len(messages) - MARKED_MESSAGES, len(messages))
    counts = {1 + each for each in (*range(0, len(messages), step), *last)}
    rendered, opening, ends = message_ends(tokenizer, messages, tools, counts=counts, **kwargs)
    # Only `rendered` has an end behind a reply that the client began.
    shared = common_rendering(rendered.tolist(), tokens)
    return {end for end in (opening, *ends) if 0 < end <= shared}


def _text_marks(
    tokens: list[int], ends: Sequence[tuple[int, int]], tokenizer: Any, messages: list[Any], tools: Any, kwargs: Any
) -> set[int]:
    """For each end, the common prefix with conversations in which that message goes on differently."""

    def shared(index: int, end: int, rest: str) -> int:
        other = {**messages[index], "content": messages[index]["content"][:end] + rest}
        others = [*messages[:index], other, *messages[index + 1 :]]
        render = tokenizer.apply_chat_template
        return common_rendering(
            tokens, render(others, tools=tools, add_generation_prompt=True, tokenize=True, **kwargs)
        )

    return {min(shared(*end, rest) for rest in ("alpha", "Zulu")) for end in ends}
