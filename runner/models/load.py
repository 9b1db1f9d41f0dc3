"""Load the language model that a specification names. ModelError, in one line: it cannot be loaded.

demo                 SmolLM2-135M-Instruct, fetched once (demo.py)
tiny, tiny:KIND      random weights and a tokenizer of bytes (tiny.py); tiny is tiny:llama
PATH                 a folder in mlx-lm's format
OWNER/NAME           a repository of the model hub, fetched by mlx-lm
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from huggingface_hub import snapshot_download, try_to_load_from_cache
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from runner.models.cpu_layers import use_cpu_layers
from runner.models.demo import FetchError, ModelError, demo_model_folder, demo_model_place
from runner.models.tiny import TINY_KINDS, tiny_model, tiny_tokenizer
from runner.text import ProgressLines

__all__ = ["DEMO", "FetchError", "LoadedModel", "ModelError", "ModelOutline", "load_model", "load_outline"]

DEMO = "demo"
TINY = "tiny"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Files of a tokenizer, and the model's configuration.
TOKENIZER_FILES = ["*.json", "*.jinja", "*.py", "*.tiktoken", "*.txt", "tokenizer.model"]


@dataclass(frozen=True)
class LoadedModel:
    model: nn.Module
    tokenizer: Any
    name: str
    context_length: int | None  # in tokens; None: no bound (recurrent models)
    vocabulary_length: int
    processor: Any = None  # mlx-lm's processor of images, for models that take them


@dataclass(frozen=True)
class ModelOutline:
    """A model without its weights. `context_length` is in tokens, None where there is no bound."""

    tokenizer: Any
    name: str
    config: Mapping[str, Any]
    context_length: int | None


def load_model(
    spec: str = DEMO,
    *,
    show_progress: bool = True,
    adapter_path: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load the model that `spec` names, with mlx_lm.load's options, of which tiny models take none.

    `show_progress` shows the download of the demo model on stderr. ModelError: there is no such model, or it cannot be
    loaded. FetchError: the demo model cannot be downloaded.
    """
    if (kind := _tiny_kind(spec)) is not None:
        if adapter_path is not None:
            raise ModelError(f"adapter {adapter_path}: model {spec} has random weights, so no adapter fits it.")
        return _describe(tiny_model(kind), tiny_tokenizer(), TINY_KINDS[kind].config, f"{TINY}:{kind}")
    folder = model_folder(spec, show_progress=show_progress)
    assert folder is not None, "only tiny models have none"
    try:
        model, tokenizer, config = mlx_lm.load(
            str(folder),
            return_config=True,
            adapter_path=adapter_path,
            tokenizer_config=dict(tokenizer_config or {}),
            **({"trust_remote_code": True} if trust_remote_code else {}),
        )
    except Exception as error:  # files and networks fail in more ways than mlx-lm, the hub and the tokenizers name
        raise _cannot_be_loaded(folder, error) from error
    return _describe(model, tokenizer, config, _name(spec, folder))


def model_folder(spec: str, *, show_progress: bool = True) -> Path | None:
    """The folder of a model, fetched if it is not there; None: a tiny model has none. Raises as `load_model`."""
    if _tiny_kind(spec) is not None:
        return None
    if spec == DEMO:
        return _demo_folder(show_progress)
    if (folder := _folder(spec)) is not None:
        _read_config(folder)
        if not any(folder.glob("model*.safetensors")):
            raise ModelError(f"model {folder}: has no model*.safetensors; convert it with mlx_lm.convert first.")
        return folder
    return _fetch(spec, mlx_lm.utils._download)


def stored_folder(spec: str) -> Path | None:
    """The folder of a model that is on this machine; nothing is fetched. None: it is not, or a tiny model has none."""
    if spec == DEMO:
        return demo_model_place() if demo_model_place().is_dir() else None
    if (folder := _folder(spec)) is not None or not HUB_ID.fullmatch(spec):
        return folder
    config = try_to_load_from_cache(spec, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def is_downloaded(spec: str) -> bool:
    """Whether a model is used without a download, as far as its name and this machine say."""
    is_fetched = spec == DEMO or HUB_ID.fullmatch(spec) is not None
    return _tiny_kind(spec) is not None or stored_folder(spec) is not None or not is_fetched


def parameter_count(folder: Path) -> int:
    """Count the parameters of a model from the heads of its files. A quantized weight counts as what it was made of."""
    quantization = _read_config(folder).get("quantization") or {}
    count = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            head = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, tensor in head.items():
            layer, _, kind = name.rpartition(".")
            if name == "__metadata__" or (quantization and kind in ("scales", "biases")):
                continue
            about = quantization.get(layer)
            bits = about["bits"] if isinstance(about, dict) else quantization.get("bits")
            count += math.prod(tensor["shape"]) * (32 // bits if bits and tensor["dtype"] == "U32" else 1)
    return count


def load_outline(
    spec: str = DEMO, *, show_progress: bool = True, tokenizer_config: Mapping[str, Any] | None = None
) -> ModelOutline:
    """Load a model without its weights; a hub id downloads a few small files. The rest is as for `load_model`."""
    if (kind := _tiny_kind(spec)) is not None:
        config = {**TINY_KINDS[kind].config, "dtype": "float32"}
        return ModelOutline(tiny_tokenizer(), f"{TINY}:{kind}", config, _context_length(config))
    if spec == DEMO:
        folder = _demo_folder(show_progress)
    else:
        folder = _folder(spec) or _fetch(spec, partial(snapshot_download, allow_patterns=TOKENIZER_FILES))
    config = _read_config(folder)
    try:
        tokenizer = mlx_lm.utils.load_tokenizer(folder, dict(tokenizer_config or {}))
    except Exception as error:
        raise _cannot_be_loaded(folder, error) from error
    return ModelOutline(tokenizer, _name(spec, folder), config, _context_length(config))


def _name(spec: str, folder: Path) -> str:
    if spec == DEMO:
        return "SmolLM2-135M-Instruct"
    return spec if _folder(spec) is None else folder.resolve().name


def _tiny_kind(spec: str) -> str | None:
    """The kind of a tiny model; None: `spec` names no tiny model."""
    if spec != TINY and not spec.startswith(f"{TINY}:"):
        return None
    kind = spec.partition(":")[2] or "llama"
    if kind not in TINY_KINDS:
        raise ModelError(f"model {TINY}:{kind}: no such kind. Known: {', '.join(sorted(TINY_KINDS))}.")
    return kind


def _folder(spec: str) -> Path | None:
    path = os.path.expanduser(spec)
    return Path(path) if spec and os.path.exists(path) else None


def _fetch(spec: str, fetch: Callable[[str], str | Path]) -> Path:
    if not HUB_ID.fullmatch(spec):
        raise ModelError(
            f"model {spec!r:.200}: no such folder. "
            f"Give {DEMO}, {TINY}, {TINY}:KIND, a folder in mlx-lm's format, or a hub id OWNER/NAME."
        )
    try:
        return Path(fetch(spec))
    except Exception as error:  # files and networks fail in more ways than the hub's client names
        reason = _cannot_be_loaded(spec, error)
        raise ModelError(f"model {spec!r}: no such folder, and as a hub id: {reason}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"model {folder}: is a file, wanted a folder in mlx-lm's format.")
    config = folder / "config.json"
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model {folder}: has no config.json; wanted a folder in mlx-lm's format.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{config}: not readable as JSON: {_one_line(error)}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelError(f"{config}: names no model_type; wanted the configuration of a model that mlx-lm knows.")
    return content


def _describe(model: nn.Module, tokenizer: Any, config: Mapping[str, Any], name: str) -> LoadedModel:
    vocabulary_length = _first(config, ["vocab_size"]) or len(tokenizer)
    try:
        from mlx_lm.processors import load_processor
    except ImportError:  # mlx-lm before 0.32, which takes no images
        processor = None
    else:
        processor = load_processor(model, config)
    use_cpu_layers(model)
    return LoadedModel(model, tokenizer, name, _context_length(config), vocabulary_length, processor)


def _context_length(config: Mapping[str, Any]) -> int | None:
    # What architectures call the longest sequence that they were made for, the strictest first.
    keys = ["max_position_embeddings", "n_positions", "model_max_length", "max_sequence_length", "max_seq_len", "n_ctx"]
    return _first(config, keys)


def local_context_length(spec: str) -> int | None:
    """The context in tokens of a model that is on this machine, from its configuration; None: no bound, or not here."""
    try:
        if (kind := _tiny_kind(spec)) is not None:
            return _context_length(TINY_KINDS[kind].config)
        folder = stored_folder(spec)
        return None if folder is None else _context_length(_read_config(folder))
    except (ModelError, OSError, TypeError, ValueError):  # a name that no model can have, or a broken configuration
        return None


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """The first of these fields that a configuration, or its text part, sets."""
    sources = config, config.get("text_config") or {}
    return next((int(source[key]) for source in sources for key in keys if source.get(key)), None)


def _cannot_be_loaded(what: str | Path, error: Exception) -> ModelError:
    return ModelError(f"{what} cannot be loaded: {type(error).__name__}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no reason given"


def _demo_folder(show_progress: bool) -> Path:
    """The demo model's folder. If it must be made, each stage has a bar on stderr."""
    if not show_progress:
        return demo_model_folder()
    amount, description = TextColumn("{task.fields[amount]}"), TextColumn("demo model: {task.description}")
    progress = Progress(description, BarColumn(), amount, TimeElapsedColumn(), console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}
    lines = ProgressLines()

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        if stage not in tasks:
            progress.start()
            for earlier in tasks.values():
                progress.stop_task(earlier)
            tasks[stage] = progress.add_task(stage, total=total_bytes or None, amount="")
        shown = f"{done_bytes >> 20} of {total_bytes >> 20} MiB" if total_bytes else ""
        progress.update(tasks[stage], completed=done_bytes, amount=shown)
        lines.tell(lambda: f"demo model: {stage} {shown}".rstrip())

    try:
        return demo_model_folder(on_progress=report)
    finally:
        if tasks:
            progress.stop()
