"""State as named buffers and back: every dtype and every nest comes back as it was; what cannot be stored says so."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache.adapters.contract import Checkpoint, Spans
from radixcache.adapters.point import PointSnapshot
from radixcache.layers import stored
from radixcache.stores.block import DTYPES, Buffer


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
