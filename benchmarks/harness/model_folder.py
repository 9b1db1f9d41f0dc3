"""Write a random model as a folder in mlx-lm's format, which any server loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from runner.models.demo import demo_model_folder
from runner.models.tiny import TINY_KINDS, TinyKind, build, tiny_tokenizer

DEMO_VOCABULARY = 49_152


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


def write_word_model(folder: Path, kind: TinyKind) -> Path:
    """Write a random model with the demo model's tokenizer, for which most words are one token; return the folder."""
    vocabulary = replace(kind, overrides={**kind.overrides, "vocab_size": DEMO_VOCABULARY})
    write_model(folder, vocabulary, bos_token_id=1, eos_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_folder() / name, folder / name)
    return folder
