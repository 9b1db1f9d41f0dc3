"""What a policy is told of the entries that it ranks: who used them, how often, when last and with what priority."""

from __future__ import annotations

from typing import Any

from policies import LRU
from policies.entry import Entry
from radixcache import PrefixCache
from radixcache.layers.sizes import SizedCache, SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache

MODEL = SizedModel()
SYSTEM = list(range(100))


class Noting(LRU):
    """LRU that keeps the entries that it was told of, and the order in which they were touched."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Entry] = {}
        self.touches: list[tuple[str, int]] = []

    def inserted(self, entry: Entry) -> None:
        super().inserted(entry)
        self.held[entry.entry_id] = entry

    def touched(self, entry: Entry) -> None:
        super().touched(entry)
        self.touches.append((entry.state, entry.end))

    def split(self, upper: Entry, lower: Entry) -> None:
        super().split(upper, lower)
        self.held[upper.entry_id] = upper
        self.held[lower.entry_id] = lower

    def evicted(self, entry: Entry) -> None:
        super().evicted(entry)
        self.held.pop(entry.entry_id, None)

    def at(self, end: int, state: str = "span") -> Entry:
        """The entry of this kind that ends there."""
        (entry,) = (each for each in self.held.values() if (each.end, each.state) == (end, state))
        return entry


def cache_of(*sizes: int) -> tuple[PrefixCache, Noting]:
    policy = Noting()
    return sized_cache(SizedLayout(*sizes), budget_bytes=1 << 20, policy=policy), policy


def serve(cache: PrefixCache, prompt: list[int], **about: Any) -> int:
    """Evaluate all of a prompt; returns how many of its tokens were cached."""
    with cache.begin(prompt, **about) as session:
        session.prefill(MODEL)
        session.step(MODEL, prompt[-1:])
        cached = session.cached_tokens
    cache.check()
    return cached


def test_a_prefix_keeps_its_age_and_its_uses_when_another_request_branches_off() -> None:
    cache, policy = cache_of(1)
    serve(cache, [*SYSTEM, 7, 7, 7])
    serve(cache, [*SYSTEM, 7, 7, 7, 8])
    serve(cache, [*SYSTEM, 9, 9, 9])
    entry = policy.at(len(SYSTEM))
    assert (entry.created, entry.uses, entry.last_used) == (1, 3, 3)


def test_what_insert_stores_is_used_by_the_next_who_goes_on_from_it_and_not_by_insert_itself() -> None:
    cache, policy = cache_of(1)
    longer = [*SYSTEM, 7, 7]
    for tokens in (SYSTEM, longer):
        cache.insert(tokens, [SizedCache(spans=len(tokens))])
        assert policy.at(len(tokens)).uses == (1 if tokens is SYSTEM else 2)
    assert policy.held.keys() == {policy.at(len(longer)).entry_id}


def test_a_request_touches_its_path_from_the_deepest_node_up() -> None:
    cache, policy = cache_of(1)
    for branch in (7, 8):
        serve(cache, [*SYSTEM, branch, branch, branch])
    policy.touches.clear()
    serve(cache, [*SYSTEM, 7, 7, 7, 1])
    assert policy.touches == [("span", len(SYSTEM) + 3), ("span", len(SYSTEM))]


def test_the_highest_priority_of_all_who_used_a_prefix_stays() -> None:
    cache, policy = cache_of(1)
    serve(cache, [*SYSTEM, 7, 7], priority=5)
    serve(cache, [*SYSTEM, 8, 8], priority=1)
    assert policy.at(len(SYSTEM)).priority == 5


def test_nodes_that_are_joined_were_used_when_either_of_them_was() -> None:
    cache, policy = cache_of(1)
    serve(cache, [*SYSTEM, 7, 7])
    serve(cache, [*SYSTEM, 8, 8, 8])
    cache.fetch([*SYSTEM, 9])
    cache.reclaim(cache.stats.live_bytes + cache.stats.paged_bytes - 1)  # what went longest unused is the first leaf
    entry = policy.at(len(SYSTEM) + 3)
    assert (entry.start, entry.created, entry.last_used, entry.uses) == (0, 1, 3, 3)


def test_of_a_paths_checkpoints_only_the_one_that_a_request_resumed_on_was_used() -> None:
    cache, policy = cache_of(1, 10)
    prompt = [*SYSTEM, 7]
    serve(cache, prompt)
    assert serve(cache, [*prompt, 8, 8]) == len(prompt)
    tail, end = policy.at(len(prompt) - 16, "checkpoint"), policy.at(len(prompt), "checkpoint")
    assert (tail.uses, tail.last_used) == (1, 1)
    assert (end.uses, end.last_used) == (2, 2)


def test_the_same_prefix_in_another_namespace_has_another_digest() -> None:
    cache, policy = cache_of(1)
    for namespace in ("", "a", "b"):
        serve(cache, SYSTEM, namespace=namespace)
    assert len({entry.digest for entry in policy.held.values()}) == 3


def test_an_entry_that_has_gone_has_no_digest() -> None:
    """Not that of what took its place, also if a policy keeps the entry."""
    cache, policy = cache_of(1)
    kept: list[Entry] = []
    policy_evicted = policy.evicted
    policy.evicted = lambda entry: kept.append(entry) or policy_evicted(entry)  # type: ignore[method-assign, func-returns-value]
    policy_merged = policy.merged
    policy.merged = lambda gone, into: kept.append(gone) or policy_merged(gone, into)  # type: ignore[method-assign, func-returns-value]
    for tail in (1, 2):
        serve(cache, [*SYSTEM, *([tail] * 20)])
    cache.reclaim(110)
    cache.reclaim(0)
    assert len(kept) > 2
    assert {entry.digest for entry in kept} == {b""}


class LongestFirst(Noting):
    """Gives up what is longest, wherever that is once a tail has gone."""

    ranks_whole_edges = False

    def victim(self) -> Entry | None:
        return max(self._filed.values(), key=lambda entry: (entry.tokens, entry.entry_id), default=None)


def test_where_a_policy_ranks_the_keys_of_an_edge_apart_it_is_asked_again_after_every_step() -> None:
    policy = LongestFirst()
    cache = sized_cache(SizedLayout(1), budget_bytes=1 << 20, policy=policy, trim_tokens=10)
    for user in range(3):
        serve(cache, list(range(1000 * user, 1000 * user + 100)))
    cache.reclaim(300 - 40)
    cache.check()
    assert sorted(entry.tokens for entry in policy.held.values()) == [80, 80, 100]  # the last one is live
