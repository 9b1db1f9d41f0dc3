"""Bytes per token and per checkpoint of a model, from its config.json alone: no weights.

One forward pass fills the model's caches with arrays that are never evaluated: MLX knows shape and dtype of an array
before it is computed. A checkpoint has full windows and recurrent state; the rest grows by the token. `kv_bits`
quantizes keys and values of full attention as mlx-lm does: packed elements, and a scale and a bias per group.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, List, get_type_hints  # noqa: UP035

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes

from radixcache.adapters.registry import adapter_for, leaves
from radixcache.adapters.span import stored_nbytes
from runner.files import read_json
from runner.models import INSTEAD, KV_BITS, KV_GROUP_SIZES, ModelBytes, ModelConfigError
from runner.models.tiny import text_args
from runner.text import shortened, shown

PROMPT_LENGTH = 40  # tokens of the forward pass; bytes per token do not depend on it
MOST_LAYERS = 10_000  # far more layers than any model has; building more takes too long
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
NUMBERS = (int, int | None)  # hints of a dataclass for a whole number; those below, for a list of kinds
TEXT_LISTS = (list[str], list[str] | None, List[str], List[str] | None)  # noqa: UP006
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class LayerState:
    """State of all layers."""

    # Heads, elements per head and bytes per element of each array that grows by the token.
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    windows: dict[int, int] = field(default_factory=dict)  # by their length in tokens: bytes of one token
    fixed_bytes: int = 0


def read_model_bytes(
    path: str | PathLike[str],
    *,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    stored_bits: int | None = None,
) -> ModelBytes:
    """`model_bytes` of a config.json, or of a folder that has one. ModelConfigError: also if it cannot be read."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "a model's config.json", ModelConfigError)
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file}: found {shown(config)}; wanted the object of a model's config.json.")
    try:
        return model_bytes(config, kv_bits=kv_bits, kv_group_size=kv_group_size, stored_bits=stored_bits)
    except ModelConfigError as error:
        raise ModelConfigError(f"{file}: {error}") from error


def model_bytes(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    stored_bits: int | None = None,
) -> ModelBytes:
    """Compute the bytes of the (text) model of a config.json. ModelConfigError: it is wrong, or not known.

    `dtype` is that of the activations, so of the cache; None: the configuration's own, else bfloat16.
    """
    dtype = dtype or _dtype(config)
    if dtype not in DTYPES:
        raise ModelConfigError(f"dtype is {dtype!r}; wanted one of {', '.join(DTYPES)}. {INSTEAD}")
    if kv_bits is not None and (kv_bits not in KV_BITS or kv_group_size not in KV_GROUP_SIZES):
        raise ModelConfigError(
            f"kv_bits is {kv_bits} in groups of {kv_group_size}; wanted one of {', '.join(map(str, KV_BITS))} in groups"
            f" of {', '.join(map(str, KV_GROUP_SIZES))}."
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelConfigError(f"model_type is {shown(model_type)}; wanted text. {INSTEAD}")
    state = layer_state(config, dtype)
    token_bytes = sum(_span_bytes(*span, kv_bits, kv_group_size) for span in state.spans)
    stored_bytes = None
    if stored_bits is not None and kv_bits is None:
        stored_bytes = sum(stored_nbytes([(h, width, getattr(mx, dtype))], stored_bits) for h, width, _ in state.spans)
    windows = tuple(sorted(state.windows.items()))
    found = ModelBytes(model_type, token_bytes, state.fixed_bytes, windows, dtype, stored_bytes)
    if found.token_bytes + found.checkpoint_bytes <= 0:
        raise ModelConfigError(f"{found}; wanted more than 0. {INSTEAD}")
    return found


def _span_bytes(heads: int, width: int, element_bytes: int, kv_bits: int | None, group_size: int) -> int:
    """Bytes of one token in a layer's array, whose heads have `width` elements each."""
    if kv_bits is None:
        return heads * width * element_bytes
    if width % group_size:
        raise ModelConfigError(f"a head has {width} elements; wanted whole groups of {group_size}, or other groups.")
    # A group of 32 elements or more always fills whole words of 32 bits.
    return heads * (width * kv_bits // 8 + 2 * (width // group_size) * element_bytes)


def _dtype(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config")
    sections = (inner if isinstance(inner, Mapping) else {}, config)
    found = (section.get(name) for section in sections for name in ("dtype", "torch_dtype"))
    return str(next((each for each in found if each is not None), "bfloat16")).removeprefix("torch.")


def layer_state(config: Mapping[str, Any], dtype: str) -> LayerState:
    """The state that a model of this configuration has in its caches. ModelConfigError: as for `model_bytes`."""
    try:
        with redirect_stdout(sys.stderr):
            model_class, args_class = _get_classes(config)
    except (Exception, SystemExit) as error:  # a module may end the process if a package is missing
        raise ModelConfigError(f"model_type {config['model_type']!r} is not known to this mlx-lm. {INSTEAD}") from error
    try:
        _check_fields(args_class, config)
        model = model_class(args_class.from_dict(deepcopy(dict(config))))
        model.set_dtype(getattr(mx, dtype))
        caches = make_prompt_cache(model)
        if caches:
            model(mx.zeros((1, PROMPT_LENGTH), mx.int32), cache=caches)
        found = _state_in(leaves(caches))
    except ModelConfigError as error:
        raise ModelConfigError(f"{error} {INSTEAD}") from error
    except Exception as error:  # mlx-lm checks no configuration
        raise ModelConfigError(f"{_what_is_wrong(args_class, config, error)} {INSTEAD}") from error
    if not (found.spans or found.windows or found.fixed_bytes):
        raise ModelConfigError(f"model_type {config['model_type']!r}: no layer keeps any state. {INSTEAD}")
    return found


def _state_in(caches: Sequence[Any]) -> LayerState:
    found = LayerState()
    for layer, cache in enumerate(caches):
        adapter = adapter_for(cache, layer)
        if adapter.is_empty(cache):  # a model may leave caches unused
            continue
        arrays = adapter.buffers(cache)
        if isinstance(cache, (RotatingKVCache, ChunkedKVCache)):
            tokens = cache.max_size if isinstance(cache, RotatingKVCache) else cache.chunk_size
            token_bytes = sum(array.nbytes // array.shape[2] for array in arrays)
            found.windows[tokens] = found.windows.get(tokens, 0) + token_bytes
        elif isinstance(cache, ArraysCache):
            found.fixed_bytes += sum(array.nbytes for array in arrays)
        elif adapter.is_point:
            raise ModelConfigError(f"layer {layer} is a {type(cache).__name__}, whose size is not known.")
        else:
            found.spans += [(array.shape[1], array.shape[3], array.itemsize) for array in arrays]
    return found


def _what_is_wrong(args_class: Any, config: Mapping[str, Any], error: Exception) -> str:
    model_type, text = config["model_type"], shortened(str(error), 200)
    said = re.search(r"missing \d+ required positional arguments?: (.+)", text)
    missing = said[1].replace("'", "") if said else _missing(args_class, config)
    if missing is not None:
        part = " or its text part" if config.get("text_config") else ""
        return f"model_type {model_type!r}{part} has no {missing}; wanted it."
    return f"model_type {model_type!r}: its fields do not fit together ({type(error).__name__}: {text})."


def _check_fields(args_class: Any, config: Mapping[str, Any]) -> None:
    """Refuse some wrong fields before a model is built. A field may be a list or null where its hint is a number."""
    for part_class, part in _parts(args_class, config):
        for name in LAYER_COUNTS:
            if isinstance(part.get(name), int) and part[name] > MOST_LAYERS:
                raise ModelConfigError(f"there are {part[name]} layers; wanted at most {MOST_LAYERS:,}.")
        for name, hint in get_type_hints(part_class).items():
            value = part.get(name)
            if hint in NUMBERS and isinstance(value, str):
                raise ModelConfigError(f"{name} is {shown(value)}; wanted a whole number.")
            is_text = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
            if hint in TEXT_LISTS and not (is_text or value is None):
                raise ModelConfigError(f"{name} is {shown(value)}; wanted a list of kinds.")


def _missing(args_class: Any, config: Mapping[str, Any]) -> str | None:
    for part_class, part in _parts(args_class, config):
        hints = get_type_hints(part_class)
        for each in fields(part_class):
            if hints[each.name] is int and each.default is MISSING and part.get(each.name, 0) is None:
                return each.name
    return None


def _parts(args_class: Any, config: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    yield args_class, config
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "text_config" in {each.name for each in fields(args_class)}:
        with suppress(ImportError):  # the model_type of a text part need not be a module of mlx-lm
            yield text_args(args_class.__module__.rpartition(".")[2], inner.get("model_type")), inner
