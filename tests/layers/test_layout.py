"""Layout: a whole model's live cache of mixed layers, taken out and put back as one, CacheLists with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from radixcache import SnapshotError, UnsupportedCacheError
from radixcache.layers.layout import Layout
from tests.adapters.cases import (
    ARRAYS,
    CHUNK_LENGTH,
    CHUNKED,
    CONCATENATE,
    DIGEST,
    KV,
    LAYER,
    QUANTIZED_8,
    ROTATING_4,
    WINDOW_LENGTH,
    DigestCache,
    Kind,
    feed_all,
    picture,
    state_bits,
    token_ids,
)

IDS = token_ids(900)
#: Where a prompt is cut; 512 is an edge of the segment grid.
CUTS = (0, 30, 512, 700, 900)


class Model:
    """Layers in the shape of a model's cache: `shape` makes the list, `kinds` are its leaves in order, None unused."""

    def __init__(self, name: str, shape: Callable[[], list[Any]], kinds: Sequence[Kind | None]) -> None:
        self.name, self.shape, self.kinds = name, shape, kinds

    def layout(self) -> Layout:
        return Layout(self.shape, None, 64)

    def fed(self, layout: Layout, ids: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        caches = layout.fresh()
        self.feed(layout, caches, ids, lengths)
        return caches

    def feed(self, layout: Layout, caches: list[Any], ids: Sequence[int], lengths: Sequence[int]) -> None:
        for (cache, _), kind in zip(layout.leaves(caches), self.kinds, strict=True):
            if kind is not None:
                feed_all(kind, cache, ids, lengths)
        layout.own(caches)
        layout.learn(caches)

    def bits(self, layout: Layout, caches: list[Any]) -> list[Any]:
        pairs = zip(layout.leaves(caches), self.kinds, strict=True)
        return [None if kind is None else state_bits(kind, cache) for (cache, _), kind in pairs]

    def __str__(self) -> str:
        return self.name


MODELS = [
    Model(
        "mixed",
        lambda: [
            CacheList(ArraysCache(2), KVCache()),
            None,
            RotatingKVCache(WINDOW_LENGTH, keep=4),
            CacheList(CacheList(ConcatenateKVCache(), DigestCache()), QuantizedKVCache(32, 8)),
            KVCache(),
            ChunkedKVCache(CHUNK_LENGTH),
            LayerCache(WINDOW_LENGTH),
        ],
        [ARRAYS, KV, ROTATING_4, CONCATENATE, DIGEST, QUANTIZED_8, None, CHUNKED, LAYER],
    ),
    Model("spans-with-an-unused-layer", lambda: [KVCache(), KVCache(), ConcatenateKVCache()], [KV, None, CONCATENATE]),
    Model("points-without-offset", lambda: [ArraysCache(2), None], [ARRAYS]),
]
all_models = pytest.mark.parametrize("model", MODELS, ids=str)


def captured(layout: Layout, caches: list[Any], end: int) -> Any:
    """What windows need at their end."""
    return layout.capture(caches, 0, end, {window: window.needs(end) for window in layout.windows})


@all_models
def test_a_path_paged_out_in_parts_and_in_again_is_the_same_state(model: Model) -> None:
    layout = model.layout()
    live = model.fed(layout, IDS, [700, 1, 199])
    parts = [layout.page_out(live, start, end) for start, end in pairwise(CUTS)]
    checkpoint, windows = layout.checkpoint(live, 900, "end"), captured(layout, live, 900)
    caches = layout.fresh()
    for part in parts:
        assert layout.page_in(caches, part, part.end) == part.nbytes
    layout.restore_points(caches, checkpoint, 900, [windows])
    assert model.bits(layout, caches) == model.bits(layout, live)
    model.feed(layout, live, token_ids(12, seed=3), [1, 10, 1])
    model.feed(layout, caches, token_ids(12, seed=3), [1, 10, 1])
    assert model.bits(layout, caches) == model.bits(layout, live)


@all_models
def test_spans_split_and_merged_are_the_same_and_state_what_was_copied(model: Model) -> None:
    layout = model.layout()
    live = model.fed(layout, IDS, [900])
    before = picture(layout.page_out(live, 30, 900))
    spans = layout.page_out(live, 30, 900)
    for at in (31, 512, 513):
        upper, lower, split_bytes = layout.split(spans, at)
        assert [(s.start, s.end) for s in (upper, lower)] == [(30, at), (at, 900)]
        assert upper.nbytes + lower.nbytes == spans.nbytes
        spans, merged_bytes = layout.merge(upper, lower)
        assert picture(spans) == before
        # The segment of the grid that holds the cut is copied on the way out and on the way in, nothing else.
        low, high = max(30, at // 512 * 512), min(900, at // 512 * 512 + 512)
        copied = 0 if at == 512 else spans.nbytes * (high - low) // 870
        assert (split_bytes, merged_bytes) == (copied, copied)


@all_models
def test_a_layout_learns_what_a_token_takes_from_the_layers_in_use(model: Model) -> None:
    layout = model.layout()
    live = model.fed(layout, IDS, [900])
    spans = layout.page_out(live, 0, 900)
    assert layout.token_bytes == spans.nbytes // 900
    assert layout.has_points == any(kind is not None and kind.is_point for kind in model.kinds)
    assert layout.uses_points(live) == layout.has_points


@all_models
def test_a_forward_pass_that_broke_off_between_two_layers_is_undone(model: Model) -> None:
    layout = model.layout()
    for reached in range(len(model.kinds) + 1):
        live, undisturbed = (model.fed(layout, IDS[:60], [40, 20]) for _ in range(2))
        held = layout.hold(live, 7)
        for (cache, _), kind in list(zip(layout.leaves(live), model.kinds, strict=True))[:reached]:
            if kind is not None:
                kind.feed(cache, IDS[60:67])
        assert layout.roll_back(live, held)
        assert model.bits(layout, live) == model.bits(layout, undisturbed)
        model.feed(layout, live, IDS[60:70], [1, 9])
        model.feed(layout, undisturbed, IDS[60:70], [1, 9])
        assert model.bits(layout, live) == model.bits(layout, undisturbed)


def test_layers_that_a_broken_pass_reached_stand_ahead_of_the_others() -> None:
    model = Model("two layers", lambda: [KVCache(), KVCache()], [KV, KV])
    layout = model.layout()
    live = model.fed(layout, IDS[:40], [40])
    KV.feed(live[0], IDS[40:47])
    assert layout.offsets(live) == (40, 47)


def test_every_layer_is_rolled_back_also_behind_one_that_cannot_be() -> None:
    model = Model("ring and attention", lambda: [ROTATING_4.make(), KVCache()], [ROTATING_4, KV])
    layout = model.layout()
    live = model.fed(layout, IDS[:60], [40, *[1] * 20])
    held = layout.hold(live, 1)
    for cache, kind in zip(live, model.kinds, strict=True):
        assert kind is not None
        kind.feed(cache, IDS[60:61])
    assert not layout.roll_back(live, held)
    assert live[1].offset == 60


def test_paging_in_counts_only_what_was_not_live() -> None:
    model = Model("one layer", lambda: [KVCache()], [KV])
    layout = model.layout()
    spans = layout.page_out(model.fed(layout, IDS[:60], [60]), 0, 60)
    live = model.fed(layout, IDS[:40], [40])
    assert layout.page_in(live, spans, 60) == 20 * layout.token_bytes


def test_a_layer_of_an_unknown_class_is_refused_when_the_layout_is_made() -> None:
    with pytest.raises(UnsupportedCacheError, match="object"):
        Layout(lambda: [KVCache(), object()], None, 64)
    with pytest.raises(UnsupportedCacheError, match="object"):
        Layout(lambda: [CacheList(KVCache(), object())], None, 64)


def test_foreign_caches_that_do_not_fit_are_refused_with_what_differs() -> None:
    layout = Layout(lambda: [KVCache(), ArraysCache(2)], None, 64)
    model = Model("", lambda: [], [KV, ARRAYS])
    layout.compare(model.fed(layout, IDS[:20], [20]))
    with pytest.raises(SnapshotError, match="2 KVCache; wanted 1 KVCache, 1 ArraysCache"):
        layout.compare([KVCache(), KVCache()])
    for shape, message in (((1, 3, 8, 32), "layer 0 has shapes"), ((2, 2, 8, 32), "batch 2; wanted 1")):
        odd = layout.fresh()
        odd[0].update_and_fetch(mx.zeros(shape), mx.zeros((*shape[:3], 64)))
        with pytest.raises(SnapshotError, match=message):
            layout.compare(odd)
    half = layout.fresh()
    half[0].update_and_fetch(mx.zeros((1, 2, 8, 32), mx.float16), mx.zeros((1, 2, 8, 64), mx.float16))
    with pytest.raises(SnapshotError, match="float16"):
        layout.compare(half)
