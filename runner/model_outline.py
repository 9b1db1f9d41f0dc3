"""ModelOutline: what can be known of a model without its weights: its tokenizer, its configuration, its layers' sizes.

Takes the same specifications as `load_model`, and of a hub id fetches a few small files.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.demo_model import ModelError, demo_model_folder
from runner.models import DEFAULT_TINY_KIND, DEMO, HUB_ID, TINY, context_length
from runner.tiny import TINY_KINDS, tiny_tokenizer

#: What a tokenizer, its template and a configuration may be made of.
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "tokenizer*"]


@dataclass(frozen=True)
class ModelOutline:
    """A model's tokenizer and configuration. `context_length` is in tokens, None where the model has no such bound."""

    tokenizer: Any
    name: str
    config: dict[str, Any]
    context_length: int | None


def read_outline(spec: str) -> ModelOutline:
    """Read what `spec` names: demo, tiny, tiny:KIND, a folder in mlx-lm's format (weights or not), or a hub id.

    Raises:
        ModelError: `spec` names nothing, or what it names cannot be read.
    """
    if spec == TINY or spec.startswith(f"{TINY}:"):
        kind = spec.partition(":")[2] or DEFAULT_TINY_KIND
        if kind not in TINY_KINDS:
            raise ModelError(f"model {TINY}:{kind}: no such kind. Known: {', '.join(sorted(TINY_KINDS))}.")
        return _outline(tiny_tokenizer(), dict(TINY_KINDS[kind].config), f"{TINY}:{kind}")
    if spec == DEMO:
        return _read_folder(demo_model_folder(), "SmolLM2-135M-Instruct")
    folder = Path(spec).expanduser()
    if spec and folder.exists():
        return _read_folder(folder, folder.resolve().name)
    if not HUB_ID.fullmatch(spec):
        raise ModelError(
            f"model {spec!r}: no such folder. "
            f"Give {DEMO}, {TINY}, {TINY}:KIND, a folder in mlx-lm's format, or a hub id OWNER/NAME."
        )
    return _read_folder(_fetched(spec), spec)


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=SMALL_FILES))
    except Exception as error:  # networks fail in more ways than the hub's client names
        why = " ".join(str(error).split())
        raise ModelError(f"model {hub_id!r}: no such folder, and as a hub id: {type(error).__name__}: {why}") from error


def _read_folder(folder: Path, name: str) -> ModelOutline:
    from mlx_lm.utils import load_tokenizer

    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read ({error}); wanted a folder in mlx-lm's format.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: found a {type(config).__name__}; wanted the object of a model's config.json.")
    try:
        tokenizer = load_tokenizer(folder)
    except Exception as error:  # tokenizers fail in more ways than they name
        why = " ".join(str(error).split())
        raise ModelError(f"{folder}: has no tokenizer that can be read: {type(error).__name__}: {why}") from error
    return _outline(tokenizer, config, name)


def _outline(tokenizer: Any, config: dict[str, Any], name: str) -> ModelOutline:
    return ModelOutline(tokenizer, name, config, context_length(config))
