"""Bytes per token and per checkpoint of a model, worked out from its config.json alone: no weights, no MLX.

What mlx-lm keeps in its caches, as the cache layer counts it: spans by the token; windows and recurrent state as one
checkpoint, with windows that are full (a prompt shorter than a window takes less). `kv_bits` quantizes the spans that
are keys and values of full attention, as mlx-lm does: packed elements, and a scale and a bias per group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from runner.conversations.conversation import shown
from runner.json_file import read_json
from runner.layer_kinds import Heads, Span, State, Window
from runner.model_fields import INSTEAD, Config, ModelConfigError
from runner.model_layers import layers_of

__all__ = ["ModelBytes", "ModelConfigError", "model_bytes", "read_model_bytes"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_DTYPE = "bfloat16"
KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class ModelBytes:
    """What a model's state takes.

    Attributes:
        model_type: as the configuration names it, or what its layers are those of.
        token_bytes: of one token over all layers that grow by the token; 0 where none does.
        state_bytes: of recurrent state, linear attention and convolutions, whatever the length.
        windows: the sliding windows by their length, as (tokens, bytes of one token over all layers of that length).
        dtype: of the cache where it is not quantized.
    """

    model_type: str
    token_bytes: int
    state_bytes: int
    windows: tuple[tuple[int, int], ...]
    dtype: str

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint takes once all windows are full; 0 where there is nothing but spans."""
        return self.checkpoint_bytes_at(max((tokens for tokens, _ in self.windows), default=0))

    def checkpoint_bytes_at(self, offset: int) -> int:
        """What a checkpoint at this offset takes: windows hold no more tokens than there are."""
        return self.state_bytes + sum(min(tokens, offset) * token_bytes for tokens, token_bytes in self.windows)

    def __str__(self) -> str:
        checkpoint = f", {self.checkpoint_bytes:,} bytes per checkpoint" if self.checkpoint_bytes else ""
        return f"{self.model_type} in {self.dtype}: {self.token_bytes:,} bytes per token{checkpoint}"


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
    if dtype not in DTYPE_BYTES:
        raise ModelConfigError(f"dtype is {dtype!r}; wanted one of {', '.join(DTYPE_BYTES)}. {INSTEAD}")
    if kv_bits is not None and (kv_bits not in KV_BITS or kv_group_size not in KV_GROUP_SIZES):
        raise ModelConfigError(
            f"kv_bits is {kv_bits} in groups of {kv_group_size}; wanted one of {', '.join(map(str, KV_BITS))} in groups"
            f" of {', '.join(map(str, KV_GROUP_SIZES))}."
        )
    parsed = Config(config)
    layers = layers_of(parsed)
    element_bytes = DTYPE_BYTES[dtype]
    windows: dict[int, int] = {}
    for layer in layers:
        if isinstance(layer, Window):
            windows[layer.tokens] = windows.get(layer.tokens, 0) + _span_bytes(layer.heads, element_bytes, None, 0)
    found = ModelBytes(
        model_type=parsed.model_type,
        token_bytes=sum(
            _span_bytes(layer.heads, element_bytes, kv_bits, kv_group_size)
            for layer in layers
            if isinstance(layer, Span)
        ),
        state_bytes=sum(_state_bytes(layer, element_bytes) for layer in layers if isinstance(layer, State)),
        windows=tuple(sorted(windows.items())),
        dtype=dtype,
    )
    if found.token_bytes + found.checkpoint_bytes <= 0 or found.state_bytes < 0:
        raise ModelConfigError(f"{found}; wanted more than 0. {INSTEAD}")
    return found


def _span_bytes(heads: Heads, element_bytes: int, kv_bits: int | None, group_size: int) -> int:
    if kv_bits is None:
        return sum(count * dim for count, dim in heads) * element_bytes
    for _, dim in heads:
        if dim % group_size:
            raise ModelConfigError(f"a head has {dim} elements; wanted whole groups of {group_size}, or other groups.")
    # Bits come in whole words of 32, which a group of 32 elements or more always fills.
    return sum(count * (dim * kv_bits // 8 + 2 * (dim // group_size) * element_bytes) for count, dim in heads)


def _state_bytes(state: State, element_bytes: int) -> int:
    return state.elements * element_bytes + 4 * state.float32_elements + state.other_bytes


def _dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a configuration names, of the text part first."""
    inner = config.get("text_config")
    for fields in (inner if isinstance(inner, Mapping) else {}, config):
        for name in ("dtype", "torch_dtype"):
            if fields.get(name) is not None:
                return str(fields[name]).removeprefix("torch.")
    return DEFAULT_DTYPE
