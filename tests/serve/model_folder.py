"""Tiny random models as folders in mlx-lm's format, which servers load by their paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from runner.models.tiny import TINY_KINDS, tiny_model, tiny_tokenizer


def save_model(folder: Path, kind: str = "llama", seed: int = 0, **config: Any) -> Path:
    """Write the tiny model of a kind and its tokenizer; `config` goes into config.json besides."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: Any = tree_flatten(tiny_model(kind, seed).parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    (folder / "config.json").write_text(json.dumps({**TINY_KINDS[kind].config, **config}))
    tiny_tokenizer().save_pretrained(folder)
    return folder
