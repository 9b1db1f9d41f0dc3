"""State as named buffers and back: every dtype and every nest comes back as it was; what cannot be stored says so."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache.adapters.contract import Checkpoint, Spans, WindowSnapshot
from radixcache.adapters.point import PointSnapshot
from radixcache.adapters.span import SpanSnapshot
from radixcache.layers import stored
from radixcache.layers.layout import Layout
from radixcache.stores.block import DTYPES, Buffer
from runner.models.tiny import tiny_model


def as_read(buffers: dict[str, Buffer]) -> dict[str, Buffer]:
    """The same out of bytes that nobody else holds."""
    return {name: Buffer(bytes(each.octets), each.dtype, each.shape) for name, each in buffers.items()}


def bits(array: mx.array) -> bytes:
    return stored._buffers_of({"it": array})["it"].octets.tobytes()


def numbered(shape: tuple[int, ...], dtype: Any = mx.float32) -> mx.array:
    return (mx.arange(int(np.prod(shape))) + 1).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float64"])  # a GPU has none
def test_arrays_of_every_dtype_come_back_bit_equal(dtype: str) -> None:
    for shape in ((1, 2, 3, 4), (), (0, 5)):
        array = numbered(shape, getattr(mx, "bool_" if dtype == "bool" else dtype))
        buffers = stored.point_buffers(Checkpoint(7, [PointSnapshot(7, [array])], 0, "end"))
        (snapshot,) = stored.points_in(as_read(buffers), 7, 1)
        (found,) = snapshot.state
        assert (found.dtype, found.shape, snapshot.end) == (array.dtype, array.shape, 7)
        assert bits(found) == bits(array)


def test_a_nest_comes_back_with_its_lists_tuples_and_plain_values() -> None:
    array = numbered((2,))
    state = ([array, None], {"offset": 3, 4: (True, 0.5, "text", numbered((1,)))})
    leaves = [None, PointSnapshot(9, state), None]
    none, snapshot, other = stored.points_in(as_read(stored.point_buffers(Checkpoint(9, leaves, 0, "end"))), 9, 3)
    assert (none, other) == (None, None)
    (first, second), about = snapshot.state
    assert isinstance(snapshot.state, tuple) and second is None  # noqa: PT018
    assert mx.array_equal(first, array)
    assert (about["offset"], about[4][:3]) == (3, (True, 0.5, "text"))
    assert mx.array_equal(about[4][3], mx.array([1.0]))


@pytest.mark.parametrize("state", [[np.zeros(3)], [{1, 2}], [object()]])
def test_state_that_is_neither_arrays_nor_plain_values_is_refused(state: Any) -> None:
    with pytest.raises(TypeError, match="cannot be stored"):
        stored.point_buffers(Checkpoint(9, [PointSnapshot(9, state)], 0, "end"))


def test_snapshots_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="a str cannot be stored"):
        stored.block_buffers([Spans(0, 4, ["state"], 0)], [], 0, 4, None)


def test_a_block_has_its_tokens_of_several_spans_in_order() -> None:
    whole = numbered((1, 2, 20, 3))
    cuts = [(0, 6), (6, 7), (7, 20)]
    parts = [Spans(a, b, [None, SpanSnapshot(a, b, [(whole[..., a:b, :], -whole[..., a:b, :])])], 0) for a, b in cuts]
    for low, high in ((0, 20), (3, 18), (6, 7), (8, 9)):
        its = [each for each in parts if each.start < high and each.end > low]
        buffers = stored.block_buffers(its, [], low, high, None)
        none, found = stored.spans_in(as_read(buffers), low, high, 2)
        assert (none, found.start, found.end) == (None, low, high)
        ((keys, values),) = found.segments
        assert mx.array_equal(keys, whole[..., low:high, :])
        assert mx.array_equal(values, -whole[..., low:high, :])


def test_an_array_that_lies_in_one_piece_is_not_copied() -> None:
    array = numbered((1, 2, 512, 8))
    mx.eval(array)
    before = mx.get_active_memory()
    buffers = stored._buffers_of({"span.0.0": array})
    assert mx.get_active_memory() == before
    assert buffers["span.0.0"].octets.tobytes() == np.array(array).tobytes()


def test_windows_come_back_with_their_gaps() -> None:
    whole = numbered((3, 2, 40, 4))
    pieces = [SpanSnapshot(a, b, [(whole[..., a:b, :],)]) for a, b in ((2, 8), (8, 12), (20, 30))]
    spans = Spans(0, 40, [WindowSnapshot(0, 40, pieces), None], 0)
    buffers = as_read(stored.block_buffers([], [spans], 5, 25, None))
    found, none = stored.windows_in(buffers, 5, 25, 2)
    assert none is None
    assert [(piece.start, piece.end) for piece in found.pieces] == [(5, 8), (8, 12), (20, 25)]
    assert all(mx.array_equal(p.segments[0][0], whole[..., p.start : p.end, :]) for p in found.pieces)


@pytest.mark.parametrize("kind", ["llama", "gemma4_text", "falcon_h1", "deepseek_v41"])
def test_what_a_layout_learnt_another_one_knows(kind: str) -> None:
    model = tiny_model(kind)
    make = model.make_cache if hasattr(model, "make_cache") else None
    from mlx_lm.models.cache import make_prompt_cache

    layouts = [Layout(make or (lambda: make_prompt_cache(model)), None, 64) for _ in range(2)]
    caches = layouts[0].fresh()
    model(mx.array([[1, 2, 3]]), cache=caches)
    layouts[0].learn(caches)
    layouts[1].take_over(stored.shapes_in(as_read(stored.block_buffers([], [], 0, 0, layouts[0].shapes))["shapes"]))
    layouts[1].take_over([None] * layouts[1].leaf_count)  # it knows already
    one, other = ({**vars(layout), "_factory": None, "_blind": None} for layout in layouts)
    for found in (one, other):
        found["_flat_classes"] = found["_leaf_classes"] = found["_leaf_adapters"] = None
    assert one == other
