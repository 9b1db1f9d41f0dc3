"""Every eviction policy under the traffic of the real tree: hooks in the order they come, victims that may go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from policies import (
    OFFLINE_POLICIES,
    POLICIES,
    SLRU,
    TLRU,
    CostModel,
    Entry,
    EvictionPolicy,
    Marconi,
    OrderedPolicy,
    Turn,
    make_policy,
)
from policies.runs import RunPolicy
from radixcache.layers.layout import Layout
from radixcache.ledger import Ledger
from radixcache.tree.entries import StateNode, Use
from radixcache.tree.state_tree import StateTree
from tests.policies.blocks import BlockCache, Future, conversations, replay
from tests.policies.traffic import ORDER, Traffic, Witness

all_policies = pytest.mark.parametrize("name", sorted(POLICIES))


@all_policies
def test_a_policy_follows_the_protocol(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, EvictionPolicy)
    assert policy.victim() is None


@all_policies
def test_victims_are_evictable_after_each_of_2500_random_hooks(name: str) -> None:
    traffic = Traffic(make_policy(name))
    steps = 0
    while traffic.witness.hooks < 2500:
        traffic.step()
        traffic.witness.victim()
        if name in ORDER:
            assert traffic.witness.policy.victim() is traffic.witness.expected(name)
        steps += 1
        if steps % 50 == 0:
            traffic.states.check()
    traffic.states.check()
    assert traffic.states.tree.node_count > 10


@all_policies
def test_what_may_go_goes_to_the_last_entry_and_nothing_twice(name: str) -> None:
    traffic = Traffic(make_policy(name), seed=7)
    while traffic.witness.hooks < 1200:
        traffic.step()
    traffic.release()
    gone = []
    while (victim := traffic.evict(whole=True)) is not None:
        gone.append(victim.entry_id)
        traffic.states.check()
    assert traffic.states.tree.node_count == 0
    assert traffic.witness.known == {}
    assert len(gone) == len(set(gone)) > 10


@all_policies
def test_a_policy_remembers_no_entry_that_is_gone(name: str) -> None:
    policy = make_policy(name)
    traffic = Traffic(policy, seed=3)
    while traffic.witness.hooks < 1200:
        traffic.step()
    assert _entries_in(policy) <= set(traffic.witness.known)
    traffic.release()
    while traffic.evict() is not None:
        pass
    assert _entries_in(policy) == set()


@all_policies
def test_the_same_traffic_gives_the_same_victims(name: str) -> None:
    def victims() -> list[tuple[int, int, int]]:
        traffic = Traffic(make_policy(name), seed=11)
        found = []
        while traffic.witness.hooks < 700:
            traffic.step()
            victim = traffic.witness.victim()
            found.append((victim.entry_id, victim.start, victim.end) if victim else (0, 0, 0))
        return found

    assert victims() == victims()


@all_policies
def test_what_an_open_session_or_a_pin_holds_is_never_the_victim(name: str) -> None:
    traffic = Traffic(make_policy(name))
    held, free = traffic.request([1, 2, 3]), traffic.request([4, 5, 6])
    for hold in (traffic.states.guard, traffic.states.pin):
        hold(held, 1)
        assert traffic.witness.victim() is free.payload.entry
        hold(free, 1)
        assert traffic.witness.victim() is None
        hold(held, -1)
        assert traffic.witness.victim() is held.payload.entry
        hold(free, -1)


@all_policies
def test_an_entry_becomes_evictable_when_its_last_child_goes(name: str) -> None:
    traffic = Traffic(make_policy(name))
    parent = traffic.request([1, 2])
    traffic.request([1, 2, 3], checkpoint=False)
    traffic.request([1, 2, 4])
    entry = parent.payload.entry
    assert entry.entry_id not in traffic.witness.evictable
    for leaf in list(parent.children.values()):
        traffic.states.remove(leaf)
    assert traffic.witness.victim() is entry


@all_policies
def test_a_checkpoint_may_go_alone_while_its_node_has_exactly_one_child(name: str) -> None:
    traffic = Traffic(make_policy(name))
    node = traffic.request([1, 2], checkpoint=True)
    checkpoint = node.payload.checkpoint_entry
    assert checkpoint is not None
    assert checkpoint.entry_id not in traffic.witness.evictable
    traffic.request([1, 2, 3])
    assert checkpoint.entry_id in traffic.witness.evictable
    traffic.request([1, 2, 4])
    assert checkpoint.entry_id not in traffic.witness.evictable


@all_policies
def test_an_entry_that_goes_while_it_is_evictable_is_the_victim_no_more(name: str) -> None:
    policy = make_policy(name)
    first, second, third = (Entry(number, "span", 0, 10, 1, 1.0, created=1, last_used=1) for number in (1, 2, 3))
    for entry in (first, second, third):
        policy.inserted(entry)
        policy.evictable_changed(entry, True)
    policy.evicted(first)
    policy.merged(second, third)
    assert policy.victim() is third
    policy.evicted(third)
    assert policy.victim() is None


@all_policies
@pytest.mark.parametrize("fresh", ["upper", "lower"])
def test_either_side_of_a_split_may_be_the_new_one(name: str, fresh: str) -> None:
    policy = make_policy(name)
    old = Entry(1, "span", 0, 9, 1, 1.0, created=1, last_used=1)
    policy.inserted(old)
    if fresh == "upper":
        upper, lower = Entry(2, "span", 0, 5, 1, 1.0, created=1, last_used=1), old
        old.start = 5
    else:
        upper, lower = old, Entry(2, "span", 5, 9, 1, 1.0, created=1, last_used=1)
        old.end = 5
    policy.split(upper, lower)
    for entry in (upper, lower):
        policy.evictable_changed(entry, True)
        assert policy.victim() is entry
        policy.evictable_changed(entry, False)
    assert policy.victim() is None


@all_policies
def test_asking_for_a_victim_many_times_changes_nothing(name: str) -> None:
    traffic = Traffic(make_policy(name), seed=5)
    while traffic.witness.hooks < 300:
        traffic.step()
    assert len({id(traffic.witness.victim()) for _ in range(50)}) == 1


@pytest.mark.parametrize("name", [name for name in sorted(POLICIES) if isinstance(make_policy(name), OrderedPolicy)])
def test_the_order_of_a_static_key_policy_is_consistent_after_each_step(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, OrderedPolicy)
    for witness in _steps(policy):
        policy._order._check()
        assert set(policy._filed) == witness.evictable
        assert set(policy._keys) == set(witness.known)
        assert list(policy._order) == sorted((policy._keys[number], number) for number in witness.evictable)


@pytest.mark.parametrize("name", [name for name in sorted(POLICIES) if isinstance(make_policy(name), RunPolicy)])
def test_the_runs_of_a_queue_policy_are_consistent_after_each_step(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, RunPolicy)
    for witness in _steps(policy):
        policy.check()
        assert policy._evictable == witness.evictable
        assert set(policy._entries) == set(witness.known)


@pytest.mark.parametrize("name", [name for name in sorted(POLICIES) if isinstance(make_policy(name), Turn)])
def test_each_entry_is_held_by_one_request_and_filed_in_one_queue_after_each_step(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, Turn)
    for witness in _steps(policy):
        assert set(policy._user) == set(witness.known)
        requests = set(policy._user.values())
        assert sorted(number for request in requests for number in request.holds) == sorted(witness.known)
        assert all(request in requests or request.is_claimed for request in policy._requests.values())
        filed = [(queue, item) for queue, order in policy._queues.items() for item in order]
        assert sorted(filed) == sorted(policy._filed.values())
        assert {item[-1] for _, item in filed} == witness.evictable
        assert all(policy._queues.values())


def test_each_policy_has_a_structure_that_is_looked_into() -> None:
    assert all(isinstance(make_policy(name), OrderedPolicy | RunPolicy | Turn) for name in POLICIES)


@pytest.mark.parametrize(("adds_first", "seed"), [(False, 0), (True, 3)], ids=["room-first", "adds-first"])
@pytest.mark.parametrize("name", [*sorted([*POLICIES, *OFFLINE_POLICIES]), "slru capped", "t_lru strict", "marconi 1"])
def test_the_same_blocks_go_whether_an_edge_stands_for_many_or_a_node_for_each(
    name: str, adds_first: bool, seed: int
) -> None:
    requests = conversations(seed, 90)
    outcomes = []
    for is_chain in (False, True):
        future = Future(requests)
        policy = _policy(name, future)
        cache = BlockCache(policy, 25 + 20 * seed, is_chain=is_chain, adds_first=adds_first)
        found = replay(cache, requests, future)
        cache.states.check()
        outcomes.append((found, cache.gone))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][1]) > 100


@pytest.mark.parametrize("name", sorted(name for name, its in POLICIES.items() if hasattr(its, "pass_over")))
def test_what_is_passed_over_ends_where_a_leaf_of_the_same_tick_is_deeper(name: str) -> None:
    asked: Any = make_policy(name)
    asked.pass_over = lambda entry, cuts: 0
    gone = _trimmed(make_policy(name))
    assert gone == _trimmed(asked)
    assert len(gone) == 59


@all_policies
def test_ticks_that_begin_far_from_zero_give_the_same_victims(name: str) -> None:
    outcomes = []
    for start in (0, 1_700_000_000_000):
        cache = BlockCache(make_policy(name), 40)
        found = [cache.request(keys, start + 7 * number) for number, keys in enumerate(conversations(3, 100), 1)]
        outcomes.append((found, cache.gone))
    assert outcomes[0] == outcomes[1]


@all_policies
def test_a_policy_keeps_less_or_as_much_as_it_may_and_all_of_the_request_served(name: str) -> None:
    cache = BlockCache(make_policy(name), 20)
    for request in conversations(1, 120):
        cache.request(request)
        assert cache.states.tree.key_count <= 20
        assert cache.request(request) == min(len(request), 20)


def _steps(policy: EvictionPolicy) -> Iterator[Witness]:
    """Random traffic on a policy, step by step."""
    traffic = Traffic(policy, seed=2)
    while traffic.witness.hooks < 1200:
        traffic.step()
        yield traffic.witness


def _trimmed(policy: EvictionPolicy) -> list[int]:
    """The keys that go, in order: of two leaves of one request, then of a request's own chain and one behind it."""
    account = Ledger(1).open_account(lambda amount_bytes: 0)
    states = StateTree(Layout(list, None, 64), policy, account, CostModel())
    gone: list[int] = []

    def add(parent: StateNode, first: int, length: int, tick: int) -> StateNode:
        node = states.add_leaf(parent, np.arange(first, first + length), Use(tick))
        states.set_leaving(node, length)
        return node

    def trim(count: int) -> None:
        while count > 0 and (victim := states.victim()) is not None:
            leaf, kept = victim[0], 0
            keys = leaf.edge.tolist()
            if len(keys) > 1:
                states.trim(leaf, range(leaf.end - 1, max(leaf.start, leaf.end - count - 1), -1))
                kept = leaf.end - leaf.start
            else:
                states.remove(leaf)
            gone.extend(reversed(keys[kept:]))
            count -= len(keys) - kept

    trunk = add(states.tree.root(), 0, 3, 1)
    add(trunk, 10, 9, 1)
    add(trunk, 30, 12, 1)
    trim(100)
    trunk = add(states.tree.root(), 50, 3, 2)
    add(trunk, 60, 12, 2)
    trim(4)
    add(trunk, 80, 20, 3)
    trim(100)
    states.check()
    return gone


def _policy(name: str, future: Future) -> EvictionPolicy:
    """A policy by its name, or one of the variants that only a constructor gives."""
    if name in OFFLINE_POLICIES:
        return OFFLINE_POLICIES[name](future)
    variants = {
        "slru capped": lambda: SLRU(protected_share=0.4),
        "t_lru strict": lambda: TLRU(threshold_tokens=6, next_tokens=3),
        "marconi 1": lambda: Marconi(alpha=1.0, candidates=5),
    }
    return variants[name]() if name in variants else make_policy(name)


def _entries_in(thing: Any) -> set[int]:
    """Ids of the entries that can be reached from an object."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [thing]
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Entry):
            found.add(each.entry_id)
        elif isinstance(each, dict):
            stack += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            stack += list(each)
        else:
            stack += vars(each).values() if hasattr(each, "__dict__") else ()
            stack += [getattr(each, name) for name in getattr(type(each), "__slots__", ())]
    return found
