"""What is asked, in tokens: exactly those that mlx_lm.server makes, by its own code, and offsets worth a checkpoint.

Images of a prompt: which are taken, and how a model is given them. What they are in tokens, mlx-lm's server says.

An image is some tokens, the same for all images of its size; in the tree a key of its own stands for each of them.
"""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from PIL import Image, UnidentifiedImageError

from radixcache.chat import common_rendering, message_ends
from runner.serve import mlx_lm_border
from runner.serve.request import ApiError, Request

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
#: Of a prompt's images together: 3 bytes each while they are decoded. A file of a few KB can have as many.
MAX_PIXELS = 1 << 27


def require_images(messages: Iterable[dict[str, Any]], processor: Any) -> None:
    """Raise ValueError, or what Pillow raises, where an image of these messages is not taken."""
    pixels = 0
    for part in mlx_lm_border.image_parts(messages):
        url = mlx_lm_border.image_url(part)
        if processor is None:
            raise ValueError("there is an image, and no image processor is loaded for this model.")
        if not isinstance(url, str) or not url.startswith("data:"):
            # Fetched from here, an address would reach what whoever asks cannot.
            raise ValueError("an image has to be a data URL (data:image/png;base64,...); addresses are not fetched.")
        data = io.BytesIO(base64.b64decode(url.partition(",")[2]))
        try:
            with Image.open(data, formats=FORMATS) as image:
                pixels += image.width * image.height  # as its header has it
        except UnidentifiedImageError as error:
            raise ValueError(f"an image is none of {', '.join(FORMATS)}.") from error
        if pixels > MAX_PIXELS:
            raise ValueError(f"the images have more than {MAX_PIXELS} pixels together.")


def embedder(model: Any, tokens: list[int], vision: Any) -> Callable[[int], mx.array]:
    """How the prompt's embeddings from an offset on are made, (T, D); an image that was resumed inside of, anew.

    Args:
        vision: mlx-lm's Vision, of all images of the prompt.
    """

    def embed(offset: int) -> mx.array:
        start = offset
        while vision.cache_key[start] < 0 and start not in vision.starts:
            start -= 1
        images = vision.pixel_values[sum(first < start for first in vision.starts) :]
        embeddings: mx.array = model.embed_inputs(mx.array(tokens[start:]), pixel_values=images or None)
        return embeddings[offset - start :]

    return embed


# Messages whose ends are marked: as many of the last ones, and as many spread over those before. Each is a rendering.
MARKED_MESSAGES = 16
# The Messages API takes no more marks than these.
MARKED_TEXTS = 4


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt in tokens.

    Attributes:
        marks: where others may part from it: the end of the system prompt and of messages.
        initial_state: of mlx-lm's text state machine.
        vision: mlx-lm's, of the images in it; None: there are none.
    """

    tokens: list[int]
    marks: tuple[int, ...]
    initial_state: str
    vision: Any = None

    @property
    def keys(self) -> list[int] | None:
        """What the tree goes by, one for each token; None: the tokens."""
        return None if self.vision is None else self.vision.cache_key


def prompt_of(
    asked: Request,
    tokenizer: Any,
    template_args: Mapping[str, Any],
    *,
    processor: Any = None,
    with_messages: bool = False,
) -> RenderedPrompt:
    """Return the tokens of what is asked.

    Args:
        template_args: of the server; the request's own go before them.
        processor: of images; None: they are refused.
        with_messages: mark the end of each message and of `asked.marked_texts` too, which renders the conversation once
            for each message and twice for each text. Models need that that cannot resume everywhere.

    Raises:
        ApiError: there is nothing to answer, or template, tokenizer or processor refuse it.
    """
    is_chat = asked.prompt is None
    if is_chat and not asked.messages:
        raise ApiError(400, "messages is empty; wanted at least one message.", param="messages")
    tools = list(asked.tools) if asked.tools else None
    provider = SimpleNamespace(processor=processor, cli_args=SimpleNamespace(chat_template_args=dict(template_args)))
    args = SimpleNamespace(chat_template_kwargs=asked.template_args)
    try:
        messages = copy.deepcopy(list(asked.messages))  # they are changed on the way
        request = mlx_lm_border.CompletionRequest(
            "chat" if is_chat else "text", asked.prompt or "", messages, tools, asked.role_mapping
        )
        require_images(messages, processor)
        tokens, segments, _, initial_state, vision = mlx_lm_border.tokenize(
            SimpleNamespace(model_provider=provider), tokenizer, request, args
        )
    except Exception as error:  # templates and tokenizers are foreign code, and may raise anything
        raise ApiError(400, f"the prompt cannot be made: {type(error).__name__}: {error}") from error
    if not tokens:
        raise ApiError(400, "the prompt has no tokens; wanted at least one.", param="messages" if is_chat else "prompt")
    marks = {sum(map(len, segments[: count + 1])) for count in range(len(segments) - 1)}
    if with_messages and is_chat and tokenizer.has_chat_template:
        kwargs = {**template_args, **(asked.template_args or {})}
        marks |= _message_marks(tokens, tokenizer, messages, tools, kwargs)
        marks |= _text_marks(tokens, asked.marked_texts[-MARKED_TEXTS:], tokenizer, messages, tools, kwargs)
    return RenderedPrompt(tokens, tuple(sorted(marks)), initial_state, vision)


def _message_marks(
    tokens: list[int], tokenizer: Any, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]
) -> set[int]:
    step = -(-len(messages) // MARKED_MESSAGES)
    last = range(len(messages) - MARKED_MESSAGES, len(messages))
    try:
        rendered, opening, ends = message_ends(
            tokenizer, messages, tools, counts={1 + each for each in (*range(0, len(messages), step), *last)}, **kwargs
        )
    except Exception:  # the template takes the conversation in one way only; see also _text_marks
        return set()
    # A reply that the client began is rendered as its end there.
    shared = common_rendering(rendered.tolist(), tokens)
    return {end for end in (opening, *ends) if 0 < end <= shared}


def _text_marks(
    tokens: list[int],
    ends: Sequence[tuple[int, int]],
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: Any,
    kwargs: dict[str, Any],
) -> set[int]:
    """How far the tokens are those of conversations in which a message goes on otherwise from one of its ends."""

    def shared(index: int, end: int, rest: str) -> int:
        other = {**messages[index], "content": messages[index]["content"][:end] + rest}
        others = [*messages[:index], other, *messages[index + 1 :]]
        return common_rendering(
            tokens,
            tokenizer.apply_chat_template(others, tools=tools, add_generation_prompt=True, tokenize=True, **kwargs),
        )

    try:
        return {min(shared(*end, rest) for rest in ("alpha", "Zulu")) for end in ends}
    except Exception:  # a template is foreign code; what is not marked is prefilled again at worst
        return set()
