"""What can be read off a Core at one moment: its counters, its tree, its metrics, and what a prompt would find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from radixcache.paging.core import Core
from radixcache.tokens.ids import TokenIds
from radixcache.tokens.keys import Keys
from radixcache.view.collect import collect
from radixcache.view.description import TreeView
from radixcache.view.words import bytes_words
from radixcache.watch.explain import Explanation, explain, with_text
from radixcache.watch.metrics import Metric, SlotState, StatsSnapshot, metrics_of_cache, snapshot
from radixcache.watch.stats import CacheStats


class About(NamedTuple):
    """What is told of a cache: its policy's name, where its budget came from, and what decodes its tokens."""

    policy: str
    budget_source: str
    tokenizer: Any


def in_a_line(core: Core | None, about: About) -> str:
    """A cache in a few words; None: it is closed."""
    if core is None:
        return "closed"
    ledger, slots = core.ledger, core.slots.paths
    taken = sum(path.is_open for path in slots)
    held = f"{bytes_words(core.account.total_bytes)} of {bytes_words(ledger.budget_bytes)}"
    return f"{about.policy}: {core.states.tree.node_count} nodes, {held}, {taken} of {len(slots)} live slots taken"


def stats_of(core: Core, about: About) -> CacheStats:
    """What a cache has done and holds now; the lock is held."""
    account, states, tally, verifier, tier = core.account, core.states, core.tally, core.verifier, core.tier
    return CacheStats(
        requests=tally.requests,
        hit_tokens=tally.hit_tokens,
        miss_tokens=tally.miss_tokens,
        off_grid_tokens=tally.off_grid_tokens,
        short_reasons=dict(tally.short_reasons),
        evictions=core.evictor.evictions,
        evicted_bytes=core.evictor.evicted_bytes,
        copied_bytes=states.copied_bytes,
        paged_in_bytes=states.paged_in_bytes,
        paged_out_bytes=states.paged_out_bytes,
        brought_tokens=0 if tier is None else tier.bringing.brought_tokens,
        kept_blocks=0 if tier is None else tier.kept_blocks,
        brought_bytes={} if tier is None else dict(tier.bringing.read_bytes),
        store_decisions={} if tier is None else dict(tier.decisions),
        live_bytes=account.live_bytes,
        paged_bytes=account.paged_bytes,
        checkpoint_bytes=account.checkpoint_bytes,
        window_bytes=states.windows.nbytes,
        duplicate_bytes=states.duplicate_bytes,
        spare_bytes=core.slots.spare_nbytes(),
        pinned_bytes=core.pins.nbytes,
        nodes=states.tree.node_count,
        tokens=states.tree.key_count,
        budget_bytes=core.ledger.budget_bytes,
        budget_source=about.budget_source,
        peak_bytes=core.ledger.peak_bytes,
        verified_requests=verifier.verified,
        verify_skipped=verifier.skipped,
        verify_mismatches=verifier.mismatch_count,
        verify_largest_error=verifier.largest_error,
        verify_bytes=account.second_bytes,
        quarantined=len(core.quarantine),
        event_failures=core.events.failures,
        dropped_events=core.events.dropped,
    )


def view_of(
    core: Core, namespace: str | None, about: About, tokenizer: Any = None, meanwhile: Callable[[], object] = dict
) -> TreeView:
    """A description of the tree; None: of all namespaces. `meanwhile` is called under the lock too."""
    budget_bytes = core.ledger.budget_bytes
    told = [("policy", about.policy), ("budget", bytes_words(budget_bytes) if budget_bytes < 1 << 60 else "no limit")]
    return collect(
        core.lock,
        lambda: core.states.tree.roots(namespace),
        token_bytes=core.layout.token_bytes,
        windows_of=lambda spans: core.layout.stored(spans, max(core.layout.windows)),
        pin_names=core.pins.names_at,
        tokenizer=tokenizer or about.tokenizer,
        about=told if namespace is None else [],
        slot_count=len(core.slots.paths),
        meanwhile=meanwhile,
    )


def snapshot_of(core: Core, namespace: str | None, about: About) -> StatsSnapshot:
    """All metrics; of one namespace only what its nodes and pins come to."""
    of_cache: list[Metric] = []
    counts: list[int] = []

    def meanwhile() -> None:
        counts.extend((core.pins.count(namespace), core.pins.count(namespace, named=True)))
        if namespace is None:
            slots = [SlotState(path.is_open, path.offset, path.booking.live_bytes) for path in core.slots.paths]
            stats, namespaces = stats_of(core, about), len(core.states.tree.roots())
            of_cache.extend(metrics_of_cache(stats, slots, about.policy, core.ledger.total_bytes, namespaces))

    view = view_of(core, namespace, about._replace(tokenizer=None), meanwhile=meanwhile)
    return snapshot(of_cache, view, *counts)


def explanation_of(core: Core, prompt: TokenIds, keys: Keys, namespace: str, about: About) -> Explanation:
    """What a request for a prompt would find, and why not more."""
    with core.lock:
        quarantined_from = core.quarantine.offset(keys, namespace)
        seen = core.foresee(keys[:quarantined_from], len(prompt) - 1, namespace)
        found = explain(prompt, keys, namespace, seen, core.events.history, core.states.cost, quarantined_from)
        if core.tier is not None:
            stored = core.tier.foresee(keys[:quarantined_from][: len(prompt) - 1], namespace)
            found = replace(found, disk_tokens=stored.tokens, read_tokens=stored.read_tokens, tiers=stored.tiers)
    return with_text(found, about.tokenizer)
