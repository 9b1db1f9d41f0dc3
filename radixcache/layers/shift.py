"""Shift: rotate keys that RoPE has rotated, when their tokens move to other positions.

Rotations add up: a key at position p, rotated by d, is the key at p + d. So no token is evaluated again. If a RoPE
scales keys before it rotates them (YaRN, longrope), the stored key is scaled already, and a shift only rotates.

A layer's rotation is measured, because modules may hold a RoPE that they do not use, or share one, or have one per
layer. The model evaluates one token alone, at position 0 and at position 500:

    the token sees only itself  so attention returns its value, for any query and key
    hidden states are equal     or positions enter elsewhere: then values differ, and the model is refused
    keys differ by a rotation   of a RoPE in the model, or not at all; otherwise the layer is refused

Later tokens that saw a removed range still depend on it. No shift changes that.

Precision: in float32, an angle of a radians has an error of about a / 2^24. So keys made 10,000 positions apart differ
by about 1e-3, shifted or not. In half precision, each shift rounds by up to half of the dtype's eps, and smaller
rotations are lost. So a few large shifts are better than many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from radixcache.errors import ShiftError

#: Caches of keys and values, one per token.
_ORDINARY = (KVCache, RotatingKVCache, ChunkedKVCache, ConcatenateKVCache)

#: Classes with fixed frequencies, and the attribute that has them. The last two rotate without a RoPE module.
_FREQUENCIES = {
    "mlx_lm.models.rope_utils.Llama3RoPE": "_freqs",
    "mlx_lm.models.rope_utils.ProportionalRoPE": "_freqs",
    "mlx_lm.models.rope_utils.SuScaledRoPE": "_freqs",
    "mlx_lm.models.rope_utils.YarnRoPE": "_freqs",
    "mlx_lm.models.hunyuan.DynamicNTKAlphaRoPE": "_freqs",
    "mlx_lm.models.hunyuan_v1_dense.DynamicNTKAlphaRoPE": "_freqs",
    "mlx_lm.models.nanochat.Attention": "_rope_freqs",
    "mlx_lm.models.talkie.Attention": "_rope_freqs",
}

#: The evaluated token (any token whose keys are not zero would do), and the distance of its two positions. Models with
#: learned position embeddings have the second position; slow frequencies already show at this distance.
_TOKEN = 100
_DISTANCE = 500
#: Largest relative error of the rotated keys: a part for the rounding of angles, and this many times the dtype's eps.
_TOLERANCE = 3e-4
_ROUNDINGS = 4


@dataclass(frozen=True, slots=True)
class Rotation:
    """The arguments of `mx.fast.rope` for the keys of a layer. Two objects that rotate the same way are equal."""

    dims: int
    traditional: bool
    base: float | None = None
    scale: float = 1.0
    frequencies: tuple[float, ...] | None = None

    def shift(self, keys: mx.array, delta: int) -> mx.array:
        """Rotate keys (B, H, T, D >= dims) by `delta` positions (negative: towards the beginning), in float32."""
        # Each key is a head with one token, at offset |delta|. The scale takes the sign of `delta`: Metal's kernel adds
        # the offset to an unsigned index.
        rows = keys.astype(mx.float32).reshape(1, -1, 1, keys.shape[-1])
        rotated = mx.fast.rope(
            rows,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=-self.scale if delta < 0 else self.scale,
            offset=abs(delta),
            freqs=None if self.frequencies is None else mx.array(self.frequencies),
        )
        return rotated.reshape(keys.shape).astype(keys.dtype)


def rotation_of(rope: nn.Module) -> Rotation:
    """The rotation of a RoPE module of MLX or mlx-lm, or of a class whose `stands_for` is nn.RoPE.

    Raises:
        ShiftError: its base depends on the length of the sequence, or its class is not known.

    Source: mlx.nn.RoPE, mlx 0.32.4; mlx_lm.models.rope_utils, mlx-lm 0.32.2.
    """
    if getattr(rope, "stands_for", type(rope)) is nn.RoPE:
        return Rotation(rope.dims, rope.traditional, float(rope.base), float(rope.scale))
    name = _class_path(rope)
    if name in _FREQUENCIES:
        frequencies = tuple(getattr(rope, _FREQUENCIES[name]).tolist())
        return Rotation(2 * len(frequencies), getattr(rope, "traditional", False), frequencies=frequencies)
    if type(rope).__name__ == "DynamicNTKScalingRoPE":
        why = "no rotation turns a key of one length into a key of another"
        raise ShiftError(f"{name}: its base depends on the length of the sequence, so {why}.")
    raise ShiftError(f"{name} is not known. Known: mlx.nn.RoPE, {', '.join(_FREQUENCIES)}.")


def rotations(model: Any, layers: Sequence[Any]) -> list[Rotation | None]:
    """Measure the rotation of the keys in each cache of a model, in two forward passes of one token.

    Args:
        layers: the caches, in any state; only their classes count.

    Returns:
        A rotation per cache; None: its keys are the same at every position, or it holds none.

    Raises:
        ShiftError: a layer cannot be shifted: recurrent state, latent attention, learned positions, a RoPE without
            fixed frequencies, or anything unknown.
    """
    for index, layer in enumerate(layers):
        if layer is not None and type(layer) not in _ORDINARY:
            raise ShiftError(f"layer {index}: {_describe(layer)}")
    ropes, found = _ropes(model)
    here, there = (_record(model, layers, offset) for offset in (0, _DISTANCE))
    measured: list[Rotation | None] = []
    for index, (before, after) in enumerate(zip(here, there, strict=True)):
        try:
            measured.append(_rotation_between(before, after, ropes) if before.stored else None)
        except ShiftError as error:
            raise ShiftError(f"layer {index} ({type(layers[index]).__name__}): {error} RoPEs: {found}.") from None
    return measured


class _Recorder:
    """A cache at `offset` that lets a token see only itself, and records keys and values."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.start_position = offset
        self.stored: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.stored.append((keys, values))
        self.offset += keys.shape[-2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.stored[-1]

    def arrays(self) -> list[mx.array]:
        return [mx.concatenate(list(column), axis=2) for column in zip(*self.stored, strict=True)]

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def maybe_trim_front(self) -> None:
        pass


def _record(model: Any, layers: Sequence[Any], offset: int) -> list[_Recorder]:
    """Evaluate the token at `offset`; returns a recorder per layer, empty for a layer without a cache."""
    recorders = [_Recorder(offset) for _ in layers]
    caches = [None if layer is None else recorder for layer, recorder in zip(layers, recorders, strict=True)]
    model(mx.array([[_TOKEN]]), cache=caches)
    mx.eval([recorder.stored for recorder in recorders])
    return recorders


def _rotation_between(before: _Recorder, after: _Recorder, ropes: list[Rotation]) -> Rotation | None:
    """The rotation between a layer's keys at both positions. ShiftError: there is none."""
    (keys, values), (keys_after, values_after) = before.arrays(), after.arrays()
    rotation, keys_fit = _closest(keys, keys_after, [None, *ropes])
    of_values, values_fit = _closest(values, values_after, [None, *ropes])
    if not values_fit:
        raise ShiftError("values depend on the position, as with learned position embeddings.")
    if of_values is not None:
        raise ShiftError("values are rotated, as in latent attention (MLA); only keys can be shifted.")
    if not mx.any(keys):
        raise ShiftError(f"keys of token {_TOKEN} are zero, and show no rotation.")
    if not keys_fit:
        raise ShiftError("keys depend on the position, but no known RoPE of the model explains how.")
    return rotation


def _closest(before: mx.array, after: mx.array, candidates: list[Rotation | None]) -> tuple[Rotation | None, bool]:
    """The candidate that best turns `before` into `after` (None: no rotation), and whether it does up to rounding."""
    errors = {}
    for each in candidates:
        if each is None or each.dims <= before.shape[-1]:
            made = before if each is None else each.shift(before, _DISTANCE)
            errors[each] = _norm(after.astype(mx.float32) - made.astype(mx.float32))
    best = min(errors, key=lambda each: errors[each])
    allowed = (_TOLERANCE + _ROUNDINGS * mx.finfo(before.dtype).eps) * _norm(after)
    return best, errors[best] <= allowed


def _norm(a: mx.array) -> float:
    return float(mx.linalg.norm(a.astype(mx.float32)))


def _ropes(model: nn.Module) -> tuple[list[Rotation], str]:
    """The distinct rotations of a model's modules; and a text that names each RoPE or says why it has no rotation."""
    ropes: dict[Rotation, None] = {}
    found: dict[str, None] = {}
    for _, module in model.named_modules():
        path = _class_path(module)
        if any(word in type(module).__name__.lower() for word in ("rope", "rotary")) or path in _FREQUENCIES:
            try:
                ropes[rotation_of(module)] = None
                found[path] = None
            except ShiftError as error:
                found[str(error).rstrip(".")] = None
    return list(ropes), "; ".join(found) or "none"


def _describe(layer: Any) -> str:
    """Why a cache cannot be shifted."""
    leaves = layer.caches if isinstance(layer, CacheList) else [layer]
    inner = f"({', '.join(type(leaf).__name__ for leaf in leaves)})" if isinstance(layer, CacheList) else ""
    name = type(layer).__name__ + inner
    if any(isinstance(leaf, ArraysCache) for leaf in leaves):
        return f"{name} holds recurrent state, which cannot forget removed tokens."
    known = ", ".join(each.__name__ for each in _ORDINARY)
    return f"{name} is not known to hold a key and a value per token. Known: {known}."


def _class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
