"""Write a random model as a folder in mlx-lm's format, which any server loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from runner.models.tiny import TINY_KINDS, TinyKind, build, tiny_tokenizer


def write_model(folder: Path, kind: str | TinyKind = "llama", seed: int = 0, **config: Any) -> Path:
    """Write weights, configuration and tokenizer of a model; return the folder. `config` is added to config.json.

    KeyError: no tiny model has the name `kind`.
    """
    if isinstance(kind, str):
        kind = TINY_KINDS[kind]
    model = build(kind, seed)
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**kind.config, **config}), encoding="utf-8")
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
