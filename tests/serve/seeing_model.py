"""A tiny llama that sees, as a folder in mlx-lm's format: Muse Spark's own processor, and patches as embeddings.

mlx-lm's one model that takes images, Muse Spark, goes through kernels that a CPU does not have.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.muse_spark import _splice_vision_embeddings
from PIL import Image

from benchmarks.harness.model_folder import write_model
from runner.models.tiny import SPECIAL_TOKENS

NAMES = {3: "<|image_start|>", 4: "<|patch|>", 5: "<|image_end|>"}
PATCH, TOKEN_PIXELS = 4, 4
#: What makes mlx-lm load Muse Spark's processor; an image token is a square of TOKEN_PIXELS pixels.
CONFIG = {"processor_type": "muse_spark", "vision_config": {"patch_size": 2, "merge_size": TOKEN_PIXELS // 2}}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|patch|>' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_seeing_model(folder: Path) -> Path:
    """Write it, with reserved tokens named as above; returns the folder."""
    write_model(folder, **CONFIG)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text(encoding="utf-8")
        for token, name in NAMES.items():
            text = text.replace(json.dumps(SPECIAL_TOKENS[token]), json.dumps(name))
        file.write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def open_eyes(patch: pytest.MonkeyPatch) -> list[int]:
    """Have llamas see; returns the list in which each call of theirs notes how many images it looked at."""
    looked: list[int] = []
    weight = mx.array(np.random.default_rng(3).standard_normal((3 * TOKEN_PIXELS**2, 64)), mx.float32)

    def embed_inputs(self: Any, inputs: mx.array, *, pixel_values: list[mx.array] | None = None) -> mx.array:
        looked.append(len(pixel_values or ()))
        embeddings = self.model.embed_tokens(inputs)
        if pixel_values is None:
            return embeddings
        squares = [
            image.reshape(3, image.shape[1] // TOKEN_PIXELS, TOKEN_PIXELS, -1, TOKEN_PIXELS)
            .transpose(1, 3, 0, 2, 4)
            .reshape(-1, 3 * TOKEN_PIXELS**2)
            for image in pixel_values
        ]
        rows = mx.concatenate(squares) @ weight
        return _splice_vision_embeddings(embeddings, inputs, vision_embeds=rows, patch_token_id=PATCH)

    patch.setattr(llama.Model, "embed_inputs", embed_inputs, raising=False)
    return looked


def picture(seed: int, width: int = 32, height: int = 16, file_format: str = "PNG") -> bytes:
    """An image file of random pixels; 32 tokens for 32 x 16."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


def shown(*files: bytes) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]
