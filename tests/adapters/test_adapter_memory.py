"""What the adapter contract says about memory, measured by MLX's own counters: active bytes and their peak.

The layers here are megabytes long, so that a buffer kept alive or copied by mistake stands out against the slack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from mmap import PAGESIZE
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from radixcache.adapters.registry import adapter_for
from radixcache.adapters.span import owned
from tests.adapters.cases import (
    ARRAYS,
    CHUNKED,
    CONCATENATE,
    KV,
    LAYER,
    QUANTIZED_8,
    ROTATING_4,
    Case,
    attention_rows,
    feed_all,
)
from tests.memory import active_bytes

#: Allocators round up: by 8 bytes on CPU, to a page on Metal.
SLACK_BYTES = PAGESIZE

WIDE_WINDOW = replace(ROTATING_4, name="RotatingKVCache-wide", make=lambda: RotatingKVCache(4096, keep=4))
RING = replace(ROTATING_4, name="RotatingKVCache-ring", make=lambda: RotatingKVCache(2048, keep=4))
WIDE_CHUNK = replace(CHUNKED, name="ChunkedKVCache-wide", make=lambda: ChunkedKVCache(4096))


def feed_large_arrays(cache: Any, ids: Sequence[int]) -> None:
    """A recurrent layer with slots of a quarter of a megabyte, which are views of the activations of all tokens."""
    for slot, shape in enumerate(((1, len(ids), 256, 256), (1, 256, len(ids), 256))):
        activations = mx.random.normal(shape)
        mx.eval(activations)
        cache[slot] = activations[:, -1] if slot == 0 else activations[:, :, -1]


LARGE_ARRAYS = replace(ARRAYS, name="ArraysCache-large", feed=feed_large_arrays)

SPANS = [
    Case(KV, "batch", (3000,), True),
    Case(KV, "exactly-full", (3072,), True),
    Case(CONCATENATE, "singles", (3000, 1), True),
    Case(QUANTIZED_8, "exactly-full", (3072,), True),
]
#: Windows whose buffers hold most of their tokens.
WINDOWS = [
    Case(WIDE_WINDOW, "singles", (3000, 1), False),
    Case(RING, "gone-round", (3000, *(1,) * 20), False),
    Case(WIDE_CHUNK, "exactly-full", (3072,), False),
]
POINTS = [Case(LARGE_ARRAYS, "batch", (20,), False), Case(LAYER, "singles", (3000, 1), False)]
#: Layers that write a single token into their buffer in place, and hold megabytes.
IN_PLACE = [
    Case(KV, "", (3000, 1), True),
    Case(QUANTIZED_8, "", (3000, 1), True),
    Case(WIDE_WINDOW, "unwrapped", (3000, 1), False),
    Case(RING, "wrapped", (3000, 1), False),
    Case(WIDE_CHUNK, "", (3000, 1), False),
]
#: Windows whose buffers hold much that they read no more, or little.
SMALL_WINDOWS = [Case(ROTATING_4, "single", (3000, 1), False), Case(CHUNKED, "trimmed", (3000, 1), False)]
all_cases = pytest.mark.parametrize("case", SPANS + WINDOWS + SMALL_WINDOWS + POINTS, ids=str)
token_cases = pytest.mark.parametrize("case", SPANS + WINDOWS, ids=str)
in_place_cases = pytest.mark.parametrize("case", IN_PLACE, ids=str)


@token_cases
@pytest.mark.parametrize("at", [1536, 2600])
def test_a_split_copies_one_segment_and_a_merge_joins_one(case: Case, at: int) -> None:
    cache = _fresh(case)
    adapter = adapter_for(cache)
    snapshot = _snapshot(cache, 0, case.length)
    before = {id(array) for array in snapshot.arrays()}
    arrays_a_segment = len(adapter.buffers(cache))
    upper, lower = adapter.split(snapshot, at)
    fresh = [a for a in (*upper.arrays(), *lower.arrays()) if id(a) not in before]
    assert len(fresh) == (0 if at % 512 == 0 else 2 * arrays_a_segment)
    parts = {id(array) for array in (*upper.arrays(), *lower.arrays())}
    joined = [a for a in adapter.merge(upper, lower).arrays() if id(a) not in parts]
    assert len(joined) == (0 if at % 512 == 0 else arrays_a_segment)


SLICES: dict[str, tuple[tuple[int, ...], Callable[[mx.array], mx.array]]] = {
    "nearly-full-range-of-one-head": ((1, 1, 4096, 32), lambda a: a[..., :4090, :]),
    "one-head-one-token": ((1, 1, 4096, 32), lambda a: a[..., 7:8, :]),
    "last-row": ((1, 4096, 96), lambda a: a[:, -1]),
    "scalar": ((1 << 20,), lambda a: a[5]),
    "empty": ((1, 8, 4096, 32), lambda a: a[..., :0, :]),
}


@pytest.mark.parametrize("name", SLICES)
def test_an_owned_copy_has_a_buffer_of_its_own_and_of_its_size(name: str) -> None:
    shape, cut = SLICES[name]
    before = active_bytes()
    parent = mx.arange(int(np.prod(shape))).reshape(shape).astype(mx.bfloat16)
    mx.eval(parent)
    part = cut(parent)
    copy = owned(part)
    mx.eval(copy)
    assert (copy.dtype, copy.shape) == (part.dtype, part.shape)
    assert mx.array_equal(copy, part).item()
    del part, parent
    _assert_bytes(active_bytes() - before, copy.nbytes, 1)


@in_place_cases
def test_a_snapshot_does_not_make_the_next_write_copy_the_buffer(case: Case) -> None:
    cache = _fresh(case)
    write_bytes = _write_peak_bytes(cache, case)
    snapshot = _snapshot(cache, 0, case.length + 1)
    assert _write_peak_bytes(cache, case) <= write_bytes + SLACK_BYTES
    assert snapshot.nbytes > 30 * (write_bytes + SLACK_BYTES)


@pytest.mark.parametrize("case", [case for case in IN_PLACE if not case.kind.is_point], ids=str)
def test_paging_in_writes_only_what_is_missing(case: Case) -> None:
    cache = _fresh(case)
    adapter = adapter_for(cache)
    snapshot = _snapshot(cache, 2500, 3000)
    assert adapter.restore(cache, None, 2500)
    before = active_bytes()
    mx.reset_peak_memory()
    assert adapter.restore(cache, snapshot, 3000)
    mx.eval(adapter.buffers(cache))
    assert mx.get_peak_memory() - before <= 2 * snapshot.nbytes
    assert sum(b.nbytes for b in adapter.buffers(cache)) > 5 * snapshot.nbytes


@in_place_cases
def test_holding_what_a_rollback_needs_does_not_copy_the_buffer(case: Case) -> None:
    cache = _fresh(case)
    held = adapter_for(cache).hold(cache, 1)
    assert _write_peak_bytes(cache, case) <= SLACK_BYTES
    del held


@all_cases
def test_giving_room_up_gives_the_spare_bytes_back(case: Case) -> None:
    before = active_bytes()
    cache = _fresh(case)
    adapter = adapter_for(cache)
    if case.kind not in (KV, QUANTIZED_8):  # their arrays may be those of the forward pass
        mx.eval(adapter.own(cache))
    adapter.reserve(cache, case.length)
    mx.eval(adapter.buffers(cache))
    stated, count = sum(b.nbytes for b in adapter.buffers(cache)), len(adapter.buffers(cache))
    assert adapter.spare_nbytes(cache) <= stated // case.length + 1
    _assert_bytes(active_bytes() - before, stated, count)


def _fresh(case: Case) -> Any:
    """The case's cache, sharing nothing with any other, evaluated, with nothing else left over."""
    cache = feed_all(case.kind, case.kind.make(), case.ids, case.lengths)
    mx.eval(adapter_for(cache).buffers(cache))
    return cache


def _snapshot(cache: Any, start: int, end: int) -> Any:
    snapshot = adapter_for(cache).snapshot(cache, start, end)
    mx.eval(snapshot.arrays())
    return snapshot


def _write_peak_bytes(cache: Any, case: Case) -> int:
    """Write one token; returns how much memory that took at its peak, beyond what is held before."""
    dtype = mx.float32
    keys, values = (mx.contiguous(a) for a in attention_rows([5], cache.offset, dtype))
    mx.eval(keys, values)
    before = active_bytes()
    mx.reset_peak_memory()
    cache.update_and_fetch(keys, values)
    mx.eval(adapter_for(cache).buffers(cache))
    return mx.get_peak_memory() - before


def _assert_bytes(measured: int, stated: int, arrays: int) -> None:
    assert abs(measured - stated) <= stated // 100 + SLACK_BYTES * arrays, (measured, stated)
