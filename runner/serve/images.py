"""Images of a prompt: which are taken, and how a model is given them. What they are in tokens, mlx-lm's server says.

An image is some tokens, the same for all images of its size; in the tree a key of its own stands for each of them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from PIL import Image, UnidentifiedImageError  # matplotlib brings it, and mlx-lm decodes with it

from runner.serve import border

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
#: Of a prompt's images together: 3 bytes each while they are decoded. A file of a few KB can have as many.
MAX_PIXELS = 1 << 27


def require_images(messages: Iterable[dict[str, Any]], processor: Any) -> None:
    """Raise ValueError, or what Pillow raises, where an image of these messages is not taken."""
    pixels = 0
    for part in border.image_parts(messages):
        url = border.image_url(part)
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
