"""State in a store: the identity of a model's state, and snapshots to and from the named buffers of a block.

    span.LEAF.I             array I of a layer's keys and values, of all tokens of the block
    window.LEAF.START.I     the same for a layer with a window, of some tokens from START on
    point.LEAF.I            array I of a point layer's state; point.LEAF is JSON: the lists that hold the arrays
    shapes                  JSON: `Layout.shapes`
    forms                   JSON: `SpanSnapshot.forms` by leaf, if any is quantized

Arrays that are contiguous in memory go into a store without a copy. The thread that reads a block makes the arrays,
unevaluated.

An identity names the weights, settings, cache classes, versions and bits that state depends on. The digest of weights
covers names, shapes, dtypes, the sum of each row's bits and `SAMPLES` elements spread over each array. Fine-tuning of
one row, merging, quantization and LoRA adapters change the digest. So do the arguments of the model and the settings of
its modules, such as an adapter's scale.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from hashlib import blake2b
from importlib.metadata import version
from operator import itemgetter
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from radixcache.adapters.contract import Checkpoint, Spans, WindowSnapshot
from radixcache.adapters.point import PointSnapshot
from radixcache.adapters.registry import OWN, adapter_for
from radixcache.adapters.span import Forms, Segment, SpanSnapshot, StoredForm
from radixcache.settings import STORED_BITS
from radixcache.stores.block import DTYPES, Buffer, Identity
from radixcache.tokens import arguments_of

#: Version of the buffers' format. A new number makes all stored state a miss.
STATE_VERSION = 1
#: Elements of each array of weights in the digest.
SAMPLES = 64
DIGEST_BYTES = 32

Buffers = Mapping[str, Buffer]

_DTYPE_OF: dict[str, mx.Dtype] = {name: getattr(mx, "bool_" if name == "bool" else name) for name in DTYPES}


def weights_identity(*models: Any, name: str = "") -> Identity:
    """The identity of models that make state together. `name` is for people; by default the first model's type."""
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"rc weights")
    for model in models:
        arguments = re.sub(" at 0x[0-9a-f]+", "", repr(arguments_of(model)))
        _update(digest, f"{type(model).__module__}.{type(model).__qualname__} {arguments}".encode())
        for label, module in sorted(getattr(model, "named_modules", list)(), key=itemgetter(0)):
            _update(digest, f"{label} {sorted(_settings_of(module).items())}".encode())
        weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        found = [_digest(array) for _, array in weights]
        mx.eval(found)
        for (label, array), its in zip(weights, found, strict=True):
            its_bytes = (np.array(each).tobytes() for each in its)
            _update(digest, f"{label} {array.shape} {array.dtype}".encode(), *its_bytes)
    types = (getattr(arguments_of(model), "model_type", type(model).__name__) for model in models)
    return Identity(digest.digest(), name or next(types, ""))


def _settings_of(module: Any) -> dict[str, str]:
    """The attributes of a module that are plain values, tuples or lists of these, or dataclasses (its arguments)."""
    given = {key: value for key, value in (*vars(module).items(), *module.items()) if key != "_training"}
    return {key: repr(value) for key, value in given.items() if _is_plain(value) or is_dataclass(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _digest(array: mx.array) -> tuple[mx.array, mx.array]:
    """The sums of an array's rows, and samples; both as bits, not evaluated."""
    flat = array.reshape(-1)
    # Do not sum words of 32 bits: an even number of changed signs would not change the sum.
    bits = flat.view(mx.uint8 if array.dtype.size == 1 else mx.uint16)
    sums = bits.reshape(*array.shape[:-1], -1).sum(axis=-1) if array.size else bits
    return sums, flat[:: max(1, array.size // SAMPLES) | 1].view(mx.uint8)


def state_identities(
    leaves: Iterable[Any],
    model: Any,
    given: Identity | bytes | str | None,
    *,
    exact: bool = False,
    stored_bits: int | None = None,
) -> list[Identity]:
    """The identities of a cache's state, made of its empty leaves and of `given` (None: of the model's weights).

    The first identity is the cache's own. The next ones name the same state in more bits: the cache may read it and
    round it.
    `exact`: state must be equal bit by bit, so the identity also names MLX's version and the device.
    """
    if given is None:
        if model is None:
            raise ValueError("a store needs a model, or identity= with bytes or a str that names these caches.")
        given = weights_identity(model)
    elif not isinstance(given, Identity):
        if not isinstance(given, (bytes, str)) or not given:
            raise ValueError(f"identity is {given!r:.80}; wanted bytes or a str that is not empty, or an Identity.")
        given = Identity(given, "") if isinstance(given, bytes) else Identity(given.encode(), given)
    # What an adapter of radixcache stores is the same with every mlx-lm; what a class itself hands out may not be.
    caches, classes = [], [*leaves]
    versions: list[Any] = [STATE_VERSION]
    if exact or any(adapter_for(cache) not in OWN for cache in classes):
        versions += version("mlx-lm").split(".")[: 3 if exact else 2]
    versions += [version("mlx"), str(mx.default_device()), mx.device_info()["device_name"]] if exact else []
    for cache in classes:
        plain = {k: v for k, v in getattr(cache, "__dict__", {}).items() if isinstance(v, (bool, int, float, str))}
        caches.append([type(cache).__qualname__, dict(sorted(plain.items()))])
    found = []
    for bits in STORED_BITS[STORED_BITS.index(stored_bits) :]:
        digest = blake2b(digest_size=DIGEST_BYTES, person=b"rc state")
        form = [] if bits is None else [f"stored in {bits} bits"]
        _update(digest, json.dumps([versions + form, caches]).encode(), given.digest)
        found.append(Identity(digest.digest(), given.model, f"mlx-lm {version('mlx-lm')}"))
    return found


def _update(digest: Any, *parts: bytes) -> None:
    """Add parts, each after its length, so that different sequences of parts differ."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)


def block_buffers(
    parts: Sequence[Spans], windows: Sequence[Spans], start: int, end: int, shapes: Sequence[Any] | None
) -> dict[str, Buffer]:
    """The buffers of the tokens [start, end) of adjacent spans and of windows, and of a layout's shapes if given.

    TypeError: a snapshot is of a kind that cannot be stored.
    """
    arrays: dict[str, mx.array] = {}
    forms: dict[int, Forms] = {}

    def cuts_of(leaf: int, snapshot: Any) -> list[tuple[int, int, Segment]]:
        forms[leaf] = _require(snapshot, SpanSnapshot).forms
        return cast(SpanSnapshot, snapshot).cuts(start, end)

    for leaf, snapshots in enumerate(zip(*(spans.leaves for spans in parts), strict=True)):
        found = [cuts_of(leaf, each) for each in snapshots if each is not None]
        pieces = [segment for cuts in found for _, _, segment in cuts]
        for index, column in enumerate(zip(*pieces, strict=True)):
            arrays[f"span.{leaf}.{index}"] = column[0] if len(column) == 1 else mx.concatenate(list(column), axis=2)
    for spans in windows:
        for leaf, snapshot in enumerate(spans.leaves):
            for piece in [] if snapshot is None else _require(snapshot, WindowSnapshot).pieces:
                for first, _, segment in cuts_of(leaf, piece):
                    arrays |= {f"window.{leaf}.{first}.{index}": array for index, array in enumerate(segment)}
    buffers = _buffers_of(arrays)
    if any(forms.values()):
        buffers["forms"] = _json({leaf: its for leaf, its in forms.items() if its})
    if shapes is not None:
        plain = [None if its is None else [list(map(_plain, each)) for each in its] for its in shapes]
        buffers["shapes"] = _json(plain)
    return buffers


def point_buffers(checkpoint: Checkpoint) -> dict[str, Buffer]:
    """The buffers of the state of point layers. TypeError: some of it is neither arrays nor plain values."""
    arrays: dict[str, mx.array] = {}
    packed = {}
    for leaf, snapshot in enumerate(checkpoint.leaves):
        if snapshot is not None:
            its: list[mx.array] = []
            packed[f"point.{leaf}"] = _json(_pack(_require(snapshot, PointSnapshot).state, its))
            arrays.update({f"point.{leaf}.{index}": array for index, array in enumerate(its)})
    return {**packed, **_buffers_of(arrays)}


def _buffers_of(arrays: dict[str, mx.array]) -> dict[str, Buffer]:
    """Evaluate arrays and return their bytes. A buffer keeps its array alive."""
    flat = {name: mx.contiguous(array).reshape(-1).view(mx.uint8) for name, array in arrays.items()}
    mx.eval(flat)
    return {
        name: Buffer(memoryview(cast(Any, flat[name])), str(array.dtype).rpartition(".")[2], array.shape)
        for name, array in arrays.items()
    }


def _require(snapshot: Any, kind: type[Any]) -> Any:
    if not isinstance(snapshot, kind):
        raise TypeError(f"a {type(snapshot).__name__} cannot be stored; wanted a {kind.__name__}.")
    return snapshot


def _json(value: Any) -> Buffer:
    text = json.dumps(value, separators=(",", ":")).encode()
    return Buffer(text, "uint8", (len(text),))


def _plain(item: Any) -> Any:
    return str(item).rpartition(".")[2] if isinstance(item, mx.Dtype) else item


def _pack(tree: Any, arrays: list[mx.array]) -> Any:
    """Nested state as JSON values; appends its arrays to `arrays`."""
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_pack(item, arrays) for item in tree]}
    if type(tree) is dict:
        return {"dict": [[key, _pack(item, arrays)] for key, item in tree.items()]}
    if tree is None or type(tree) in (bool, int, float, str):
        return {"value": tree}
    raise TypeError(f"state with a {type(tree).__name__} in it cannot be stored.")


def spans_in(buffers: Buffers, start: int, end: int, leaf_count: int) -> list[Any]:
    leaves: list[Any] = [None] * leaf_count
    forms = _forms_in(buffers)
    for (leaf,), segment in _group(buffers, "span").items():
        leaves[leaf] = SpanSnapshot(start, end, [segment], forms.get(leaf, ()))
    return leaves


def windows_in(buffers: Buffers, start: int, end: int, leaf_count: int) -> list[Any]:
    leaves: list[Any] = [None] * leaf_count
    forms = _forms_in(buffers)
    for (leaf, first), segment in sorted(_group(buffers, "window").items(), key=lambda each: each[0]):
        piece = SpanSnapshot(first, first + segment[0].shape[2], [segment], forms.get(leaf, ()))
        leaves[leaf] = WindowSnapshot(start, end, [*(leaves[leaf].pieces if leaves[leaf] else ()), piece])
    return leaves


def points_in(buffers: Buffers, end: int, leaf_count: int) -> list[Any]:
    arrays, leaves = _group(buffers, "point"), [buffers.get(f"point.{leaf}") for leaf in range(leaf_count)]
    return [
        its and PointSnapshot(end, _unpack(json.loads(bytes(its.data)), arrays.get((leaf,), ())))
        for leaf, its in enumerate(leaves)
    ]


def shapes_in(buffer: Buffer) -> list[Any]:
    return [
        None if its is None else tuple(tuple(_DTYPE_OF.get(item, item) for item in each) for each in its)
        for its in json.loads(bytes(buffer.data))
    ]


def _forms_in(buffers: Buffers) -> dict[int, Forms]:
    found = json.loads(bytes(buffers["forms"].data)) if "forms" in buffers else {}
    return {int(leaf): tuple(each and StoredForm(*each) for each in forms) for leaf, forms in found.items()}


def _group(buffers: Buffers, kind: str) -> dict[tuple[int, ...], tuple[mx.array, ...]]:
    """Arrays of one kind by the numbers in their names. The last number is the place in the group."""
    groups: dict[tuple[int, ...], dict[int, mx.array]] = defaultdict(dict)
    depth = 3 if kind == "window" else 2
    for name, buffer in buffers.items():
        first, *numbers = name.split(".")
        if first == kind and len(numbers) == depth:
            *group, index = map(int, numbers)
            # MLX copies here, so the array shares nothing with the file's bytes.
            array = mx.array(buffer.octets).view(_DTYPE_OF[buffer.dtype])
            groups[tuple(group)][index] = array.reshape(buffer.shape)
    return {group: tuple(its[index] for index in range(len(its))) for group, its in groups.items()}


def _unpack(packed: Any, arrays: Sequence[mx.array]) -> Any:
    ((kind, its),) = packed.items()
    if kind == "array":
        return arrays[its]
    if kind == "dict":
        return {key: _unpack(item, arrays) for key, item in its}
    if kind in ("list", "tuple"):
        items = [_unpack(item, arrays) for item in its]
        return items if kind == "list" else tuple(items)
    return its
