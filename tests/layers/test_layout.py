"""Layout: what it says of layers that a broken pass left apart, what it counts, and which foreign caches it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from radixcache import SnapshotError
from radixcache.layers.layout import Layout
from tests.adapters.cases import KV, ROTATING_4, Kind, feed_all, token_ids

IDS = token_ids(70)


def fed(kinds: list[Kind], lengths: list[int]) -> tuple[Layout, list[Any]]:
    """A layout of these layers, and its caches after forward passes of these lengths."""
    layout = Layout(lambda: [kind.make() for kind in kinds], None, 64)
    caches = layout.fresh()
    for cache, kind in zip(caches, kinds, strict=True):
        feed_all(kind, cache, IDS, lengths)
    layout.learn(caches)
    return layout, caches


def test_layers_that_a_broken_pass_reached_stand_ahead_of_the_others() -> None:
    layout, live = fed([KV, KV], [40])
    KV.feed(live[0], IDS[40:47])
    assert layout.offsets(live) == (40, 47)


def test_every_layer_is_rolled_back_also_behind_one_that_cannot_be() -> None:
    layout, live = fed([ROTATING_4, KV], [40, *[1] * 20])
    held = layout.hold(live, 1)
    for cache, kind in zip(live, (ROTATING_4, KV), strict=True):
        kind.feed(cache, IDS[60:61])
    assert not layout.roll_back(live, held)
    assert live[1].offset == 60


def test_paging_in_counts_only_what_was_not_live() -> None:
    layout, whole = fed([KV], [60])
    spans = layout.page_out(whole, 0, 60)
    _, live = fed([KV], [40])
    assert layout.page_in(live, spans, 60) == 20 * layout.token_bytes


def test_foreign_caches_of_other_classes_are_refused_with_what_differs() -> None:
    layout = Layout(lambda: [KVCache(), ArraysCache(2)], None, 64)
    with pytest.raises(SnapshotError, match="2 KVCache; wanted 1 KVCache, 1 ArraysCache"):
        layout.compare([KVCache(), KVCache()])
