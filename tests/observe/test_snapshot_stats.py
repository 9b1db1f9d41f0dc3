"""snapshot_stats(): every number agrees with stats, the tree, the pins and the slots; names, kinds, units, text."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from radixcache import CacheStats, PrefixCache
from radixcache.observe.tree_view import NodeView
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens


def serve(cache: PrefixCache, model: Any, prompt: list[int], namespace: str = "") -> None:
    with cache.begin(prompt, namespace=namespace) as session:
        session.prefill(model)
        session.step(model, prompt[-1:])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("nemotron_h")


@pytest.fixture
def cache(model: Any) -> PrefixCache:
    """A cache with branches, pins, an eviction and a slot of each kind."""
    cache = PrefixCache(model, budget_bytes=4 << 20, live_slots=3, policy="lfu")
    system = tokens(0, 40)
    for seed in (1, 2, 3):
        serve(cache, model, [*system, *tokens(seed, 30)])
    cache.warm(model, system, name="system")
    cache.pin(system)
    for seed in range(10, 20):
        serve(cache, model, tokens(seed, 300))
    return cache


def test_every_field_of_stats_is_a_metric_with_its_value_and_an_explanation(cache: PrefixCache) -> None:
    snapshot, stats = cache.snapshot_stats(), cache.stats
    metrics = {metric.name: metric for metric in snapshot.metrics}
    for field in fields(CacheStats):
        value = getattr(stats, field.name)
        found = metrics.get(f"radixcache_{field.name}") or metrics.get(f"radixcache_{field.name}_total")
        if isinstance(value, str):
            assert snapshot.value("radixcache_info", policy="lfu", **{field.name: value}) == 1
            continue
        assert found is not None, field.name
        assert found.kind == ("counter" if found.name.endswith("_total") else "gauge")
        assert len(found.help) > len("radixcache"), found
        if isinstance(value, dict):
            assert {dict(sample.labels)[field.metadata["label"]]: sample.value for sample in found.samples} == value
        else:
            assert [sample.value for sample in found.samples] == [value], field.name
    assert stats.evictions > 0
    ratio = stats.hit_tokens / (stats.hit_tokens + stats.miss_tokens)
    assert snapshot.value("radixcache_hit_ratio") == ratio > 0


def test_what_is_held_agrees_with_the_tree_the_pins_and_the_slots(cache: PrefixCache, model: Any) -> None:
    with cache.begin(tokens(30, 20)) as session:
        session.prefill(model)
        snapshot, stats, nodes = cache.snapshot_stats(), cache.stats, cache.view().nodes

        def summed(residency: str, value: str) -> int:
            return sum(getattr(node, value) for node in nodes if node.residency == residency)

        for place in ("live", "paged", "both"):
            assert snapshot.value("radixcache_resident_tokens", residency=place) == summed(place, "tokens")
            assert snapshot.value("radixcache_resident_bytes", residency=place) == summed(place, "span_bytes")
        named = {metric.name: metric for metric in snapshot.metrics}
        assert sum(sample.value for sample in named["radixcache_resident_nodes"].samples) == stats.nodes == len(nodes)
        assert sum(sample.value for sample in named["radixcache_resident_tokens"].samples) == stats.tokens
        paged = sum(snapshot.value("radixcache_resident_bytes", residency=place) for place in ("paged", "both"))
        points = sum(sample.value for sample in named["radixcache_node_checkpoint_bytes"].samples)
        held_by_session = sum(checkpoint.nbytes for checkpoint in inside.checkpoints(session))
        assert paged + points + held_by_session == stats.paged_bytes
        assert points + held_by_session == stats.checkpoint_bytes
        assert snapshot.value("radixcache_resident_bytes", residency="both") == stats.duplicate_bytes
        assert snapshot.value("radixcache_slots", state="open") == 1
        assert sum(sample.value for sample in named["radixcache_slots"].samples) == 3
        assert sum(sample.value for sample in named["radixcache_slot_bytes"].samples) == stats.live_bytes
        assert snapshot.value("radixcache_pins") == 2
        assert snapshot.value("radixcache_named_pins") == len(cache.names()) == 1
        assert snapshot.value("radixcache_longest_path_tokens") == max(node.end for node in nodes)
        assert snapshot.value("radixcache_depth_nodes") == max(depth_of(nodes, index) for index in range(len(nodes)))
        largest = sorted((node.nbytes for node in nodes), reverse=True)[:10]
        assert [node["bytes"] for node in snapshot.largest_nodes] == largest
        assert snapshot.value("radixcache_largest_node_bytes") == largest[0]


def depth_of(nodes: tuple[NodeView, ...], index: int) -> int:
    depth = 0
    while index >= 0:
        depth, index = depth + 1, nodes[index].parent
    return depth


def test_a_namespace_shows_its_own_nodes_and_pins_and_nothing_else(model: Any) -> None:
    cache = PrefixCache(model, budget_bytes=1 << 30)
    cache.warm(model, tokens(1, 30), "ours", name="a")
    alone = cache.snapshot_stats("ours").as_dict()["metrics"]
    serve(cache, model, tokens(2, 70), "theirs")
    cache.warm(model, tokens(3, 50), "theirs", name="secret-name")
    assert "theirs" not in cache.snapshot_stats().exposition()
    assert cache.snapshot_stats().value("radixcache_namespaces") == 2
    ours = cache.snapshot_stats("ours").as_dict()["metrics"]
    assert ours["radixcache_pins"]["samples"] == [{"labels": {}, "value": 1}]
    # Where our tokens are depends on who has the live slot; how many there are does not.
    for metrics in (ours, alone):
        assert sum(sample["value"] for sample in metrics["radixcache_resident_tokens"]["samples"]) == 30
    assert set(ours) == set(alone)
    assert not [name for name in ours if name.endswith("_total") or "ledger" in name or "slot" in name]


def test_a_number_that_is_not_there_is_a_key_error(model: Any) -> None:
    cache = PrefixCache(model, live_slots=2)
    assert cache.snapshot_stats().value("radixcache_hit_ratio") == 0
    serve(cache, model, tokens(1, 30))
    snapshot = cache.snapshot_stats()
    assert {snapshot.value("radixcache_slot_offset_tokens", slot=str(slot)) for slot in (0, 1)} == {30, 0}
    assert [snapshot.value("radixcache_slots", state=state) for state in ("open", "idle", "empty")] == [0, 1, 1]
    for labels in ({}, {"state": "shut"}):
        with pytest.raises(KeyError):
            snapshot.value("radixcache_slots", **labels)
    with pytest.raises(KeyError):
        snapshot.value("radixcache_nothing")
