"""A model's state as named buffers of a stored block, and back. Nothing here is cut or restored: adapters do that.

    span.LEAF.I             array I of a layer's keys and values, of all tokens of the block
    window.LEAF.START.I     the same of a stack of windows, of some tokens from START on
    point.LEAF.I            an array of a point layer's state; point.LEAF is the JSON that says where in it they belong
    shapes                  JSON of what a layout has learnt of its leaves

Arrays are taken and made on the thread that they belong to. Taking one copies it only where it does not lie in one
piece: what stores it holds on to the array itself.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx

from radixcache.adapters.contract import Checkpoint, Spans, WindowSnapshot
from radixcache.adapters.point import PointSnapshot
from radixcache.adapters.span import SpanSnapshot
from radixcache.stores.block import DTYPES, Buffer

#: Arrays by their names.
Arrays = dict[str, mx.array]
Buffers = Mapping[str, Buffer]

_DTYPE_OF: dict[str, mx.Dtype] = {name: getattr(mx, "bool_" if name == "bool" else name) for name in DTYPES}


# Into buffers


def span_arrays(parts: Sequence[Spans], start: int, end: int) -> Arrays:
    """Keys and values of the tokens [start, end), which these spans have, one behind the other.

    TypeError: a layer's snapshots are of a kind that cannot be stored.
    """
    found = {}
    for leaf, snapshots in enumerate(zip(*(spans.leaves for spans in parts), strict=True)):
        pieces = [arrays for each in snapshots if each is not None for arrays in _parts(each, start, end)]
        for index, arrays in enumerate(zip(*pieces, strict=True)):
            found[f"span.{leaf}.{index}"] = arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=2)
    return found


def window_arrays(spans: Spans, start: int, end: int) -> Arrays:
    """What these have of the tokens [start, end) of layers with windows. TypeError: as above."""
    found = {}
    for leaf, snapshot in enumerate(spans.leaves):
        for piece in [] if snapshot is None else _required(snapshot, WindowSnapshot).pieces:
            for first, _, arrays in _required(piece, SpanSnapshot).parts(start, end):
                found.update({f"window.{leaf}.{first}.{index}": array for index, array in enumerate(arrays)})
    return found


def buffers_of(arrays: Arrays) -> dict[str, Buffer]:
    """The bytes of arrays, which are evaluated and held for as long as the buffers are."""
    flat = {name: mx.contiguous(array).reshape(-1).view(mx.uint8) for name, array in arrays.items()}
    mx.eval(flat)
    return {
        name: Buffer(memoryview(cast(Any, flat[name])), str(array.dtype).rpartition(".")[2], array.shape)
        for name, array in arrays.items()
    }


def point_buffers(checkpoint: Checkpoint) -> dict[str, Buffer]:
    """State of point layers. TypeError: some of it is neither arrays nor plain values."""
    arrays: Arrays = {}
    packed = {}
    for leaf, snapshot in enumerate(checkpoint.leaves):
        if snapshot is not None:
            its: list[mx.array] = []
            packed[f"point.{leaf}"] = _json(_packed(_required(snapshot, PointSnapshot).state, its))
            arrays.update({f"point.{leaf}.{index}": array for index, array in enumerate(its)})
    return {**packed, **buffers_of(arrays)}


def shapes_buffer(shapes: Sequence[Any]) -> Buffer:
    """What a layout has learnt, as `ArrayLayout.shapes` has it."""
    return _json([None if its is None else [list(map(_plain, each)) for each in its] for its in shapes])


# Out of buffers


def spans_in(buffers: Buffers, start: int, end: int, leaf_count: int) -> list[Any]:
    """Snapshots of the tokens [start, end), one per leaf, not evaluated."""
    leaves: list[Any] = [None] * leaf_count
    for (leaf,), segment in _grouped(buffers, "span").items():
        leaves[leaf] = SpanSnapshot(start, end, [segment])
    return leaves


def windows_in(buffers: Buffers, start: int, end: int, leaf_count: int) -> list[Any]:
    """Of layers with windows what is there of the tokens [start, end), not evaluated."""
    leaves: list[Any] = [None] * leaf_count
    for (leaf, first), segment in sorted(_grouped(buffers, "window").items(), key=lambda each: each[0]):
        piece = SpanSnapshot(first, first + segment[0].shape[2], [segment])
        leaves[leaf] = WindowSnapshot(start, end, [*(leaves[leaf].pieces if leaves[leaf] else ()), piece])
    return leaves


def points_in(buffers: Buffers, end: int, leaf_count: int) -> list[Any]:
    """State of point layers at offset `end`, not evaluated."""
    arrays = _grouped(buffers, "point")
    return [
        PointSnapshot(end, _unpacked(json.loads(bytes(its.data)), arrays.get((leaf,), ()))) if its is not None else None
        for leaf, its in enumerate(buffers.get(f"point.{leaf}") for leaf in range(leaf_count))
    ]


def shapes_in(buffer: Buffer) -> list[Any]:
    """What another layout of the same caches had learnt."""
    found = json.loads(bytes(buffer.data))
    return [
        None
        if its is None
        else tuple(tuple(_DTYPE_OF.get(item, item) if isinstance(item, str) else item for item in each) for each in its)
        for its in found
    ]


# Private


def _required(snapshot: Any, kind: type[Any]) -> Any:
    if not isinstance(snapshot, kind):
        raise TypeError(f"a {type(snapshot).__name__} cannot be stored; wanted a {kind.__name__}.")
    return snapshot


def _parts(snapshot: Any, start: int, end: int) -> Iterable[tuple[mx.array, ...]]:
    return (arrays for _, _, arrays in _required(snapshot, SpanSnapshot).parts(start, end))


def _json(value: Any) -> Buffer:
    text = json.dumps(value, separators=(",", ":")).encode()
    return Buffer(text, "uint8", (len(text),))


def _plain(item: Any) -> Any:
    return str(item).rpartition(".")[2] if isinstance(item, mx.Dtype) else item


def _grouped(buffers: Buffers, kind: str) -> dict[tuple[int, ...], tuple[mx.array, ...]]:
    """Arrays of one kind by all numbers in their names but the last, which puts those of a group in order."""
    groups: dict[tuple[int, ...], dict[int, mx.array]] = defaultdict(dict)
    depth = 3 if kind == "window" else 2
    for name, buffer in buffers.items():
        first, *numbers = name.split(".")
        if first == kind and len(numbers) == depth:
            *group, index = map(int, numbers)
            # MLX copies: the array shares nothing with the file's bytes.
            array = mx.array(buffer.octets).view(_DTYPE_OF[buffer.dtype])
            groups[tuple(group)][index] = array.reshape(buffer.shape)
    return {group: tuple(its[index] for index in range(len(its))) for group, its in groups.items()}


def _packed(tree: Any, arrays: list[mx.array]) -> Any:
    """A nest as JSON; its arrays go to `arrays`, in order."""
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_packed(item, arrays) for item in tree]}
    if type(tree) is dict:
        return {"dict": [[key, _packed(item, arrays)] for key, item in tree.items()]}
    if tree is None or type(tree) in (bool, int, float, str):
        return {"value": tree}
    raise TypeError(f"state with a {type(tree).__name__} in it cannot be stored.")


def _unpacked(packed: Any, arrays: Sequence[mx.array]) -> Any:
    ((kind, its),) = packed.items()
    if kind == "array":
        return arrays[its]
    if kind == "dict":
        return {key: _unpacked(item, arrays) for key, item in its}
    if kind in ("list", "tuple"):
        items = [_unpacked(item, arrays) for item in its]
        return items if kind == "list" else tuple(items)
    return its
