"""Edges: with them whoever is told knows every prefix that a cache has stored."""

from __future__ import annotations

import numpy as np

from radixcache import PrefixCache
from runner.models.tiny import tiny_model


def stored(cache: PrefixCache) -> set[tuple[str, tuple[int, ...]]]:
    """The whole sequences to the end of each edge, by namespace."""
    ends: list[tuple[str, tuple[int, ...]]] = []
    for edge in cache.edges():
        before = ends[edge.parent][1] if edge.parent >= 0 else ()
        assert edge.parent < len(ends)
        ends.append((edge.namespace, (*before, *edge.keys.tolist())))
    return set(ends)


def test_edges_spell_what_was_stored_in_each_namespace_and_nothing_else() -> None:
    model = tiny_model("llama")
    with PrefixCache(model, budget_bytes=64 << 20) as cache:
        assert cache.edges() == []
        one, other = np.arange(10, 50), np.array([*range(10, 30), *range(60, 90)])
        cache.warm(model, one)
        cache.warm(model, other)
        cache.warm(model, one, "ann")
        assert stored(cache) == {
            ("", tuple(range(10, 30))), ("", tuple(one)), ("", tuple(other)), ("ann", tuple(one)),
        }  # fmt: skip
        cache.clear()
        assert cache.edges() == []
