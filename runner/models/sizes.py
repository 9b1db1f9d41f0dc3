"""Bytes per token and per checkpoint of a model, from its config.json alone: no weights.

What mlx-lm keeps in its caches, as the cache layer counts it: spans by the token; windows and recurrent state as one
checkpoint, with windows that are full (a prompt shorter than a window takes less). `kv_bits` quantizes the spans that
are keys and values of full attention, as mlx-lm does: packed elements, and a scale and a bias per group.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from runner.files.excerpt import shown
from runner.files.json_file import read_json
from runner.models.footprint import INSTEAD, ModelBytes, ModelConfigError
from runner.models.lazy_pass import kept_state

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_DTYPE = "bfloat16"
KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)


def read_model_bytes(
    path: str | PathLike[str], *, dtype: str | None = None, kv_bits: int | None = None, kv_group_size: int = 64
) -> ModelBytes:
    """Work out the bytes from a config.json, or from a folder that has one. See `model_bytes`.

    Raises:
        ModelConfigError: it cannot be read, or as for `model_bytes`.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "a model's config.json", ModelConfigError)
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file}: found {shown(config)}; wanted the object of a model's config.json.")
    try:
        return model_bytes(config, dtype=dtype, kv_bits=kv_bits, kv_group_size=kv_group_size)
    except ModelConfigError as error:
        raise ModelConfigError(f"{file}: {error}") from error


def model_bytes(
    config: Mapping[str, Any], *, dtype: str | None = None, kv_bits: int | None = None, kv_group_size: int = 64
) -> ModelBytes:
    """Work out the bytes.

    Args:
        config: as in config.json; the text part of a multimodal model counts.
        dtype: of the cache, which is the dtype of the activations; the configuration's own, else bfloat16, where None.
        kv_bits, kv_group_size: quantization of keys and values; None leaves them as they are.

    Raises:
        ModelConfigError: the type is not known, a field is missing or wrong, or a head does not fit the groups.
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
    kept = kept_state(config, dtype)
    token_bytes = sum(_span_bytes(*span, kv_bits, kv_group_size) for span in kept.spans)
    found = ModelBytes(model_type, token_bytes, kept.fixed_bytes, tuple(sorted(kept.windows.items())), dtype)
    if found.token_bytes + found.checkpoint_bytes <= 0:
        raise ModelConfigError(f"{found}; wanted more than 0. {INSTEAD}")
    return found


def _span_bytes(heads: int, width: int, element_bytes: int, kv_bits: int | None, group_size: int) -> int:
    """Bytes of one token in an array of a layer, whose heads have `width` elements each."""
    if kv_bits is None:
        return heads * width * element_bytes
    if width % group_size:
        raise ModelConfigError(f"a head has {width} elements; wanted whole groups of {group_size}, or other groups.")
    # Bits come in whole words of 32, which a group of 32 elements or more always fills.
    return heads * (width * kv_bits // 8 + 2 * (width // group_size) * element_bytes)


def _dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a configuration names, of the text part first."""
    inner = config.get("text_config")
    for fields in (inner if isinstance(inner, Mapping) else {}, config):
        for name in ("dtype", "torch_dtype"):
            if fields.get(name) is not None:
                return str(fields[name]).removeprefix("torch.")
    return DEFAULT_DTYPE
