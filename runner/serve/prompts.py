"""Prompts: the tokens of a Request, made by mlx_lm.server's own code, and the offsets worth a checkpoint.

An Anthropic tool result becomes a prompt in three steps: anthropic.py turns its block into a message with role "tool",
the model's chat template renders all messages, and the tokenizer makes tokens of the text.

All images of one size have the same tokens. In the tree, each image has its own keys.

If the number of characters shows that a prompt is longer than the context, it is refused before it is made. Other long
texts are tokenized in pieces until they exceed the context. So no prompt costs more than the longest that is served.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from PIL import Image, UnidentifiedImageError

from radixcache.chat import RenderedChat, Span, find_messages
from radixcache.chat_parts import TOOL_LIST, Chat, message_name
from radixcache.chat_template import ChatTemplate
from radixcache.speculate.drafting import MOST_PREDICTED, predicted_tokens
from runner.script.conversation import as_parts
from runner.serve import mlx_lm_border
from runner.serve.request import ApiError, Request
from runner.serve.schemas import ArgumentSchema, argument_schemas

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
#: The most of all images of a prompt. Decoding takes 3 bytes a pixel, and a file of a few KB can have so many pixels.
MAX_PIXELS = 1 << 27
MARKED_TEXTS = 4  # most marks in Anthropic's API
THINKING_TOKENS = 11  # the mark of reasoning is among the last tokens of a prompt, as in mlx_lm.server
#: A text with more than WHOLE_CHARACTERS for each token of the context is first counted in pieces.
PIECE_CHARACTERS, WHOLE_CHARACTERS = 1 << 16, 8
#: The most characters of a request for each token of the context; templates may leave out tools and reasoning.
LEFT_OUT_CHARACTERS = 64
UNBOUNDED_TOKENS = 1 << 20  # most tokens of a prompt for a model without a context length, or with --context
#: Types of content parts whose strings are not text.
IMAGES = ("image", "image_url", "input_image")
UNKNOWN_LONGEST = 256  # characters assumed for the longest token if a tokenizer does not show its vocabulary
_TEXT, _OPENING = "the text", "the opening of the reply"  # parts of a prompt


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt in tokens.

    Attributes:
        marks: where other prompts may diverge: the end of the system prompt and of messages.
        initial_state: of mlx-lm's text state machine.
        vision: mlx-lm's Vision of the images; None: there are none.
        parts: where each part ends, and its name; empty: not known, see `part_at`.
        chat: what the chat template was given; None: there is no template.
        echo: the text of the prompt, if the request wants it in the reply.
        prediction: the tokens of the reply that the client predicts, or the first of them that a reply can use; None:
            no reply is predicted, or there are images.
        arguments: for each function that the reply may call, the schemas of its arguments.
    """

    tokens: list[int]
    marks: tuple[int, ...]
    initial_state: str
    vision: Any = None
    parts: tuple[tuple[int, str], ...] = ()
    chat: Chat | None = None
    echo: str = ""
    prediction: list[int] | None = None
    arguments: Mapping[str, Mapping[str, ArgumentSchema]] = field(default_factory=dict)

    @property
    def keys(self) -> list[int] | None:
        """The keys for the tree, one for each token; None: the tokens themselves."""
        return None if self.vision is None else self.vision.cache_key

    def part_at(self, start: int) -> str:
        """Name the part that token `start` belongs to; "": not known."""
        return next((name for end, name in self.parts if start < end), _OPENING if self.parts else "")


def prompt_of(
    request: Request,
    tokenizer: Any,
    template_args: Mapping[str, Any],
    *,
    processor: Any = None,
    with_marks: bool = False,
    special_tokens: bool = False,
    most_tokens: int | None = None,
) -> RenderedPrompt:
    """Return the request's prompt in tokens.

    ApiError: template, tokenizer or processor refuse the request; the prompt is empty or longer than `most_tokens`.

    Args:
        template_args: of the server; the request's own take precedence.
        processor: of images; None: images are refused.
        with_marks: mark the ends of messages and of `request.marked_texts`, for models that resume only at checkpoints.
        special_tokens: read the text of a control token in a message as that token; else as plain text.
        most_tokens: only a prompt that is certainly longer is refused; None: there is no limit, or the caller counts.
    """
    is_chat = request.prompt is None
    if is_chat and not request.messages:
        raise ApiError(400, "messages is empty; wanted at least one message.", param="messages")
    try:
        if most_tokens is not None:
            require_short(request, tokenizer, most_tokens)
        if request.prompt is not None:
            is_text = isinstance(request.prompt, str)
            tokens = tokenizer.encode(request.prompt) if is_text else [*request.prompt]
            echo = tokenizer.decode(tokens) if request.echo else ""
            prompt = RenderedPrompt(tokens, (), "normal", parts=((len(tokens), _TEXT),), echo=echo)
        elif tokenizer.has_chat_template:
            kwargs = {**template_args, **(request.chat_template_kwargs or {})}
            template = ChatTemplate(tokenizer, request.tools, kwargs, is_plain_text=not special_tokens)
            chat = Chat(request.messages, request.tools, kwargs)
            prompt = _chat_prompt(request, tokenizer, template, processor, with_marks, most_tokens)
            prompt = replace(prompt, chat=chat)
        else:
            text = _text_without_template(with_text(request.messages, None), request.role_mapping)
            if most_tokens is not None:
                require_fitting([text], tokenizer, most_tokens)  # a small body may have a long role in many messages
            prompt = RenderedPrompt(tokenizer.encode(text), (), "normal")
        if request.tools:
            prompt = replace(prompt, arguments=argument_schemas(request.tools))
        if request.prediction and prompt.vision is None:
            longest = UNBOUNDED_TOKENS if most_tokens is None else most_tokens
            most_predicted = min(longest, MOST_PREDICTED * (request.max_tokens or longest))
            predicted = predicted_tokens(request.prediction, tokenizer, most_predicted)
            prompt = replace(prompt, prediction=predicted)
    except ApiError:
        raise
    except Exception as error:  # Templates and tokenizers are foreign code, and may raise anything.
        reason = f"the prompt cannot be made: {type(error).__name__}: {error}"
        raise ApiError(400, reason, param="messages" if is_chat else "prompt") from error
    if not prompt.tokens:
        raise ApiError(400, "the prompt has no tokens; wanted at least one.", param="messages" if is_chat else "prompt")
    return prompt


def _chat_prompt(
    request: Request, tokenizer: Any, template: ChatTemplate, processor: Any, with_marks: bool, most_tokens: int | None
) -> RenderedPrompt:
    require_images(request.messages, processor)
    messages = with_text(request.messages, processor)
    last = messages[-1]
    content = last["content"] if last["role"] == "assistant" and not last.get("tool_calls") else ""
    is_begun = isinstance(content, str) and content != ""
    chat = RenderedChat(template, messages, "continue" if is_begun else "reply")
    if most_tokens is not None and isinstance(chat.rendering, str):
        require_fitting([chat.rendering], tokenizer, most_tokens)
    vision = None
    if urls := [mlx_lm_border.image_url(part) for part in mlx_lm_border.image_parts(messages)]:
        if not isinstance(chat.rendering, str):
            raise ValueError("there is an image, and the tokenizer's chat template gives no text.")
        images = [mlx_lm_border.decode_image(url) for url in urls]
        chat.rendering, pixel_values = processor(chat.rendering, images=images)  # the token of an image becomes many
        token_id = tokenizer.convert_tokens_to_ids(processor.image_token)
        vision = mlx_lm_border.make_vision(
            chat.tokens.tolist(), urls=urls, pixel_values=pixel_values, token_id=token_id
        )
    tokens, spans = chat.tokens.tolist(), chat.spans
    parts = () if spans is None else tuple((spans.before(end), name) for end, name in _parts(request, *chat.places))
    marks = {*chat.marks(request.marked_texts[-MARKED_TEXTS:])} if with_marks else set[int]()
    initial_state = tokenizer.response_initial_state or "normal"
    if tokenizer.has_thinking:
        start, end = last_at(tokens, tokenizer.think_start_tokens), last_at(tokens, tokenizer.think_end_tokens)
        if start > end and not tokenizer.response_initial_state:
            initial_state = "reasoning"
        if with_marks and start >= len(tokens) - THINKING_TOKENS:
            marks.add(start)
    return RenderedPrompt(tokens, tuple(sorted(marks - {0})), initial_state, vision, parts)


def require_short(request: Request, tokenizer: Any, most_tokens: int) -> None:
    """Raise ApiError.of_length if the prompt is certainly too long, whatever the template leaves out."""
    if not isinstance(request.prompt, str | None):
        if len(request.prompt) > most_tokens:
            raise ApiError.of_length(len(request.prompt), most_tokens)
        return
    parts = (part for message in request.messages for part in as_parts(message.get("content") or ""))
    said = [request.prompt or "", *(part["text"] for part in parts if part["type"] == "text")]
    require_fitting(said, tokenizer, most_tokens)
    length = _characters([request.messages, request.tools, request.chat_template_kwargs])
    if length > most_tokens * (longest := max(_longest_token(tokenizer), LEFT_OUT_CHARACTERS)):
        raise ApiError.of_length(length // longest, most_tokens, is_least=True)


def require_fitting(texts: Sequence[str], tokenizer: Any, most_tokens: int) -> None:
    """Raise ApiError.of_length if these texts certainly have more tokens together."""
    length = sum(map(len, texts))
    if length <= most_tokens:
        return
    longest = _longest_token(tokenizer)
    if length > most_tokens * longest:
        raise ApiError.of_length(-(-length // longest), most_tokens, is_least=True)
    if length <= most_tokens * WHOLE_CHARACTERS:
        return
    text, counted = "".join(texts), 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = tokenizer.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False)
        counted += max(0, len(piece) - longest)  # tokens may reach over the ends of a piece
        if counted > most_tokens:
            raise ApiError.of_length(counted, most_tokens, is_least=True)


#: For each tokenizer, the characters of its longest token.
_LONGEST: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _longest_token(tokenizer: Any) -> int:
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    if (longest := _LONGEST.get(inner)) is None:
        vocabulary = inner.get_vocab() if hasattr(inner, "get_vocab") else ()
        longest = _LONGEST[inner] = max(map(len, vocabulary), default=UNKNOWN_LONGEST)
    return longest


def _characters(value: Any) -> int:
    """The characters of all strings in JSON values, except those of images."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 0 if value.get("type") in IMAGES else sum(len(key) + _characters(each) for key, each in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def with_text(messages: Sequence[dict[str, Any]], processor: Any) -> list[dict[str, Any]]:
    """The messages, their content joined to one text if there are no images. ValueError: a part has another type."""
    found = []
    for message in messages:
        content = message.get("content")
        has_images = processor is not None and any(mlx_lm_border.image_parts([message]))
        if isinstance(content, list) and not has_images:
            if foreign := next((part["type"] for part in content if part["type"] != "text"), None):
                raise ValueError(f"content of type {foreign!r} is not supported; wanted 'text'.")
            content = "".join(part["text"] for part in content)
        found.append({**message, "content": "" if content is None else content})
    return found


def _text_without_template(messages: list[dict[str, Any]], role_mapping: Mapping[str, str] | None) -> str:
    """The prompt of a model without a chat template, in mlx-lm's form. If a reply is last, continue it."""
    for message in messages:
        if message["role"] == "developer" and "developer" not in (role_mapping or {}):
            message["role"] = "system"  # mlx-lm has no prefix for developers
    is_begun = messages[-1]["role"] == "assistant"
    text: str = mlx_lm_border.convert_chat(messages[:-1] if is_begun else messages, role_mapping)
    # The prefix of a reply ends with a space, which the prompt leaves out.
    return f"{text} {messages[-1]['content']}" if is_begun else text


def last_at(tokens: list[int], sequence: Sequence[int]) -> int:
    """Where a sequence of tokens occurs last; -1: nowhere."""
    length = len(sequence)
    first = np.flatnonzero(np.asarray(tokens) == sequence[0])
    return next((int(at) for at in first[::-1] if tokens[at : at + length] == list(sequence)), -1)


def part_at(request: Request, tokenizer: Any, tokens: Sequence[int], start: int) -> str:
    """Name the part of a prompt that token `start` belongs to: the list of tools, or a message.

    The text of each part is searched in the text of the prompt. What is between two parts, such as the role of a
    message, belongs to the later part.
    """
    if request.prompt is not None:
        return _TEXT
    text, at = tokenizer.decode(tokens), len(tokenizer.decode(tokens[:start]))
    parts = _parts(request, *find_messages(text, request.messages, request.tools or ()))
    return next((name for end, name in parts if at < end), _OPENING)


def _parts(request: Request, places: Sequence[Span], tools: Span) -> list[tuple[int, str]]:
    """The end of each part in the text of a prompt, in order, and its name. A part that is not found is left out."""
    named = zip(places, map(message_name, request.messages, range(len(places))), strict=True)
    return sorted((end, name) for (_, end), name in [(tools, TOOL_LIST), *named] if end)


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
            raise ValueError(f"the images have more than {MAX_PIXELS} pixels in total.")


def embedder(model: Any, tokens: list[int], vision: Any) -> Callable[[int], mx.array]:
    """Return a function that gives the embeddings (T, D) of the prompt from an offset on. `vision`: of all images."""

    def embed(offset: int) -> mx.array:
        start = offset  # inside an image: the start of the image, which is embedded again
        while vision.cache_key[start] < 0 and start not in vision.starts:
            start -= 1
        images = vision.pixel_values[sum(first < start for first in vision.starts) :]
        embeddings: mx.array = model.embed_inputs(mx.array(tokens[start:]), pixel_values=images or None)
        return embeddings[offset - start :]

    return embed
