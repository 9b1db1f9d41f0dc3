"""Stacks: layers with equal windows are stored as one, and each gets its own back. SizedLayout: sizes instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from radixcache.adapters.contract import Spans, Window
from radixcache.adapters.registry import adapter_for
from radixcache.layers.layout import Layout, LiveStateError
from radixcache.layers.sizes import SizedLayout

#: Heads of each layer.
HEADS = (2, 1, 2, 3, 2, 2)


def make() -> list[Any]:
    rings = RotatingKVCache(8), RotatingKVCache(8), RotatingKVCache(8), RotatingKVCache(5)
    return [rings[0], KVCache(), *rings[1:], ChunkedKVCache(8)]


def feed(caches: list[Any], lengths: Sequence[int], layers: Sequence[int] = range(6)) -> None:
    """Forward passes of these lengths; keys and values say which layer and token they are of."""
    for length in lengths:
        for layer in layers:
            cache = caches[layer]
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            keys, values = tagged(layer, range(cache.offset, cache.offset + length))
            cache.update_and_fetch(keys, values)
    mx.eval([cache.state[:2] for cache in caches if cache.keys is not None])


def tagged(layer: int, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
    tags = mx.array([[[1000.0 * layer + 100 * head + token] for token in tokens] for head in range(HEADS[layer])])[None]
    return tags, mx.concatenate([-tags, tags], axis=3)


def captured(layout: Layout, caches: list[Any], start: int, end: int) -> Spans:
    return layout.capture(caches, start, end, {window: [(start, end)] for window in layout.windows})


def assert_stands(caches: list[Any], layer: int, offset: int) -> None:
    cache = caches[layer]
    adapter: Any = adapter_for(cache)
    tokens = [token for low, high in adapter.window(cache).needs(offset) for token in range(low, high)]
    for found, wanted in zip(adapter.state(cache), tagged(layer, tokens), strict=True):
        assert mx.array_equal(found, wanted), (layer, found, wanted)


@pytest.mark.parametrize("lengths", [(20,), (3, 4, 11, 2), (6, *(1,) * 14)], ids=str)
def test_layers_with_equal_windows_and_shapes_are_stored_as_one_and_each_comes_back(lengths: tuple[int, ...]) -> None:
    layout, live = Layout(make, None, 64), make()
    stored = []
    for length in lengths:
        start = live[0].offset
        feed(live, [length])
        layout.learn(live)
        stored.append(captured(layout, live, start, start + length))
    arrays = [
        [array.shape[:2] for array in leaf.arrays()[:2]] if leaf is not None else None for leaf in stored[0].leaves
    ]
    assert arrays == [[(2, 2)] * 2, None, None, [(1, 3)] * 2, [(1, 2)] * 2, [(1, 2)] * 2]
    assert [layout.layers_of(window) for window in layout.windows] == [4, 1]
    assert sum(each.nbytes for each in stored) == 20 * sum(layout.window_bytes(window) for window in layout.windows)
    for target in (20, 13, 4):
        layout.restore_points(live, None, target, stored)
        for layer in (0, 2, 3, 4, 5):
            assert_stands(live, layer, target)


def test_a_layer_first_used_later_is_stored_beside_what_was_there_before() -> None:
    layout, first, second = Layout(make, None, 64), make(), make()
    feed(first, [12], [0, 1, 3])
    layout.learn(first)
    before = captured(layout, first, 0, 12)
    feed(second, [12])
    layout.learn(second)
    after = captured(layout, second, 0, 12)
    assert [leaf is not None for leaf in after.leaves] == [True, False, True, True, True, True]
    with pytest.raises(LiveStateError, match="the state at 10 is not complete"):
        layout.restore_points(second, None, 10, [before])  # without what a layer in use needs
    layout.restore_points(second, None, 10, [after])
    for layer in (0, 2):
        assert_stands(second, layer, 10)


def test_nothing_is_stored_of_a_stack_of_which_a_layer_was_not_written() -> None:
    layout, caches = Layout(make, None, 64), make()
    feed(caches, [12])
    layout.learn(caches)
    fewer = make()
    feed(fewer, [12], [0, 1, 3])
    assert layout.stored(captured(layout, fewer, 0, 12), Window(8)) == []
    assert layout.stored(captured(layout, caches, 0, 12), Window(8)) == [(0, 12)]


def test_of_windows_what_is_wanted_and_still_there_is_stored_once() -> None:
    layout = SizedLayout(4, windows=[(5, 3)])
    (window,) = layout.windows
    caches = layout.fresh()
    for keys in (20, 4):
        caches[0].advance(keys)
    # What the last pass saw: its 4 keys, and 4 in front of the first.
    assert layout.held(caches) == {window: [(16, 24)]}
    taken = layout.capture(caches, 10, 24, {window: [(10, 18), (22, 24)]})
    assert (layout.stored(taken, window), taken.nbytes) == ([(16, 18), (22, 24)], 12)
    upper, lower, _ = layout.split(taken, 17)
    assert [layout.stored(each, window) for each in (upper, lower)] == [[(16, 17)], [(17, 18), (22, 24)]]
    merged, _ = layout.merge(upper, lower)
    assert (layout.stored(merged, window), merged.nbytes) == ([(16, 18), (22, 24)], 12)
    kept, _ = layout.within(merged, {window: [(17, 23)]})
    assert (layout.stored(kept, window), kept.nbytes) == ([(17, 18), (22, 23)], 6)
