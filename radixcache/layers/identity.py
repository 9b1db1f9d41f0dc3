"""What stored state belongs to: the weights that made it, the caches that it is for, and versions on which it depends.

Digested of weights are their names, shapes and dtypes, and of each array `SAMPLES` elements spread evenly over it: what
fine-tuning, merging, quantizing or a LoRA adapter changes is among them, reading all bytes would take seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from radixcache.layers.layout import ArrayLayout
from radixcache.stores.block import Identity

#: Of what is in a block, and how: another number, and nothing that was stored before is found.
STATE_VERSION = 1
#: Elements of each array of weights.
SAMPLES = 64
DIGEST_BYTES = 32


def weights_identity(*models: Any, name: str = "") -> Identity:
    """The identity of models that state is made by together; of their classes, arguments and weights.

    Args:
        name: for people; by default the first one's type.
    """
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"rc weights")
    for model in models:
        arguments = getattr(model, "args", None)
        _update(digest, f"{type(model).__module__}.{type(model).__qualname__} {arguments!r}".encode())
        weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        samples = [array.reshape(-1)[:: max(1, array.size // SAMPLES)].view(mx.uint8) for _, array in weights]
        mx.eval(samples)
        for (label, array), sample in zip(weights, samples, strict=True):
            _update(digest, f"{label} {array.shape} {array.dtype}".encode(), np.array(sample).tobytes())
    types = (getattr(getattr(model, "args", None), "model_type", type(model).__name__) for model in models)
    return Identity(digest.digest(), name or next(types, ""))


def state_identity(
    layout: ArrayLayout, model: Any, given: Identity | bytes | str | None, *, exact: bool = False
) -> Identity:
    """The identity of a cache's state.

    Args:
        layout: of the caches, whose classes and parameters count, quantization among them.
        given: what stands for the weights; None: those of the model do.
        exact: whether all of a bit counts, and so MLX's version and the device.

    Raises:
        ValueError: there is neither a model nor anything given.
    """
    if given is None:
        if model is None:
            raise ValueError("a store needs a model, or identity= with bytes or a str that tells these caches' apart.")
        given = weights_identity(model)
    elif not isinstance(given, Identity):
        if not isinstance(given, (bytes, str)) or not given:
            raise ValueError(f"identity is {given!r:.80}; wanted bytes or a str that is not empty, or an Identity.")
        given = Identity(given, "") if isinstance(given, bytes) else Identity(given.encode(), given)
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"rc state")
    # The adapters are made for one minor version: what its classes hold may mean something else in the next.
    versions: list[Any] = [STATE_VERSION, version("mlx-lm").split(".")[:2]]
    versions += [version("mlx"), str(mx.default_device()), mx.device_info()["device_name"]] if exact else []
    caches = [[type(cache).__qualname__, _parameters(cache)] for cache, _ in layout.leaves(layout.fresh())]
    _update(digest, json.dumps([versions, caches]).encode(), given.digest)
    return Identity(digest.digest(), given.model)


def _parameters(cache: Any) -> dict[str, Any]:
    """The plain values in a cache that was never used."""
    found = getattr(cache, "__dict__", {})
    return {name: its for name, its in sorted(found.items()) if isinstance(its, (bool, int, float, str))}


def _update(digest: Any, *parts: Iterable[int]) -> None:
    """Each behind its length, so that no two sequences of parts are alike."""
    for part in map(bytes, parts):
        digest.update(len(part).to_bytes(8, "little") + part)
