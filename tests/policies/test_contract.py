"""Every eviction policy under the traffic of the real tree: hooks in their order, victims that are evictable.

What a policy remembers is bounded by what is stored, and no hash of a string decides anything.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sortedcontainers import SortedDict, SortedList

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
from policies.conversations import FIRST_TURNS
from policies.reuse import _Learnt
from policies.runs import RunPolicy
from policies.turn import MAX_KINDS, PRIOR
from radixcache.layers.layout import Layout
from radixcache.ledger import Ledger
from radixcache.tree.state_tree import StateNode, StateTree, Use
from tests.policies.blocks import BlockCache, conversations, served
from tests.policies.traffic import ORDER, Traffic, Witness

ROOT = Path(__file__).resolve().parents[2]
NOW_MS = 1_700_000_000_000
MOST_NODES = 12

all_policies = pytest.mark.parametrize("name", sorted(POLICIES))


@all_policies
def test_victims_are_evictable_and_the_books_agree_until_the_last_entry_has_gone(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, EvictionPolicy)
    traffic = Traffic(policy)
    witness = traffic.witness
    for step in range(900):
        traffic.step()
        witness.victim()
        if name in ORDER:
            assert policy.victim() is witness.expected(name)
        if step % 5 == 0:
            _check_books(policy, witness)
        if step % 50 == 0:
            traffic.states.check()
    assert witness.hooks > 2000
    assert _entries_in(policy) <= set(witness.known)
    traffic.release()
    gone = []
    while (victim := traffic.evict(whole=True)) is not None:
        gone.append(victim.entry_id)
    traffic.states.check()
    assert traffic.states.tree.node_count == 0
    assert len(gone) == len(set(gone)) > 10
    assert witness.known == {}
    assert _entries_in(policy) == set()


def _check_books(policy: EvictionPolicy, witness: Witness) -> None:
    """A policy knows the entries that it was told of, and files those that may go."""
    match policy:
        case OrderedPolicy():
            policy.check()
            assert set(policy._filed) == witness.evictable
            assert set(policy._keys) == set(witness.known)
        case RunPolicy():
            policy.check()
            assert policy._evictable == witness.evictable
            assert set(policy._entries) == set(witness.known)
        case Turn():
            requests = set(policy._user.values())
            held = sorted(number for request in requests for number in request.holds)
            assert held == sorted(policy._user) == sorted(witness.known)
            assert all(request in requests or request.is_claimed for request in policy._requests.values())
            filed = [(queue, item) for queue, order in policy._queues.items() for item in order]
            assert sorted(filed) == sorted(policy._filed.values())
            assert {item[-1] for _, item in filed} == witness.evictable
            assert all(policy._queues.values())
        case _:
            raise AssertionError(f"nothing checks the books of {type(policy).__name__}")


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


VARIANTS = {
    "slru capped": lambda: SLRU(protected_share=0.4),
    "t_lru strict": lambda: TLRU(threshold_tokens=6, next_tokens=3),
    "marconi 1": lambda: Marconi(alpha=1.0, candidates=5),
}
#: Blocks that 90 conversations find in a cache that makes room first, and in a larger one that adds first.
FOUND = {
    "arc": (284, 443),
    "belady": (370, 484),
    "belady-bypass": (446, 484),
    "benefit": (261, 456),
    "fifo": (263, 476),
    "gdsf": (274, 453),
    "lfu": (302, 371),
    "lfuda": (274, 453),
    "lru": (263, 476),
    "marconi": (263, 476),
    "marconi 1": (263, 471),
    "priority": (263, 476),
    "random": (280, 434),
    "s3fifo": (300, 370),
    "sieve": (315, 369),
    "slru": (313, 368),
    "slru capped": (277, 475),
    "t_lru": (268, 459),
    "t_lru strict": (264, 416),
    "ttl": (263, 476),
    "turn": (261, 456),
}


@pytest.mark.parametrize(("adds_first", "seed"), [(False, 0), (True, 3)], ids=["room-first", "adds-first"])
@pytest.mark.parametrize("name", [*sorted([*POLICIES, *OFFLINE_POLICIES]), *VARIANTS])
def test_an_edge_of_many_blocks_goes_like_nodes_of_one_block(name: str, adds_first: bool, seed: int) -> None:
    """Wherever ticks begin."""
    requests, outcomes = conversations(seed, 90), []
    for is_chain, tick in ((False, 0), (True, NOW_MS)):
        policy = VARIANTS[name]() if name in VARIANTS else name
        found, cache = served(policy, requests, 25 + 20 * seed, tick, is_chain=is_chain, adds_first=adds_first)
        cache.states.check()
        outcomes.append((found, cache.gone))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][1]) > 100
    assert sum(outcomes[0][0]) == FOUND[name][adds_first]


@pytest.mark.parametrize("name", sorted(name for name, its in POLICIES.items() if hasattr(its, "pass_over")))
def test_what_is_passed_over_ends_where_a_leaf_of_the_same_tick_is_deeper(name: str) -> None:
    asked: Any = make_policy(name)
    asked.pass_over = lambda entry, cuts: 0
    gone = _trimmed(make_policy(name))
    assert gone == _trimmed(asked)
    assert len(gone) == 59


def _trimmed(policy: EvictionPolicy) -> list[int]:
    """The evicted keys in order: of two leaves of one request, then of one request's chain and of the next one's."""
    account = Ledger(1).open_account(lambda amount_bytes: 0)
    states = StateTree(Layout(list, None, 64), policy, account, CostModel())
    gone: list[int] = []

    def add(parent: StateNode, first: int, length: int, tick: int) -> StateNode:
        node = states.add_leaf(parent, np.arange(first, first + length), Use(tick))
        states.set_leaving(node, length)
        return node

    def trim(count: int) -> None:
        while count > 0 and (victim := states.victim()) is not None:
            leaf, left = victim[0], 0
            keys = leaf.edge.tolist()
            if len(keys) > 1:
                states.trim(leaf, range(leaf.end - 1, max(leaf.start, leaf.end - count - 1), -1))
                left = leaf.end - leaf.start
            else:
                states.remove(leaf)
            gone.extend(reversed(keys[left:]))
            count -= len(keys) - left

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


@all_policies
def test_a_policy_keeps_less_or_as_much_as_it_may_and_all_of_the_request_served(name: str) -> None:
    cache = BlockCache(make_policy(name), 20)
    for request in conversations(1, 120):
        cache.request(request)
        assert cache.states.tree.key_count <= 20
        assert cache.request(request) == min(len(request), 20)


# What a policy remembers


def _bounded(name: str, seed: int, asks: bool = True) -> Iterator[tuple[Traffic, Entry | None]]:
    """Random traffic without end on a tree of at most MOST_NODES nodes: the traffic, and each evicted entry."""
    # Marconi remembers the decisions of a window; here the window is a short one.
    traffic = Traffic(Marconi(bootstrap=50) if name == "marconi" else make_policy(name), seed, tick=NOW_MS)
    states = traffic.states
    while True:
        traffic.tick += traffic.random.choice([0, 0, 50, 60_000])
        traffic.step()
        traffic.release()
        yield traffic, None
        while states.tree.node_count > MOST_NODES:
            if asks:
                yield traffic, traffic.evict()
            else:
                leaf = traffic.random.choice([node for node in states.tree.nodes() if node.is_leaf])
                states.coalesce_all([states.remove(leaf)])


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        # Turn remembers so many first turns that its walk is a long one.
        pytest.param(name, asks, marks=[pytest.mark.slow] * isinstance(make_policy(name), Turn))
        for name in sorted(POLICIES)
        for asks in (True, False)
    ],
)
def test_what_a_policy_remembers_is_bounded_by_what_is_stored(name: str, asks: bool) -> None:
    # Beside ghosts, Turn remembers first turns and classes.
    remembered = FIRST_TURNS + 3 * MAX_KINDS * len(PRIOR) if isinstance(make_policy(name), Turn) else 50
    most_held = requests = 0
    for traffic, _ in _bounded(name, 1, asks):
        tree = traffic.states.tree
        most_held = max(most_held, 2 * tree.node_count + tree.key_count)  # entries and keys
        requests += 1
        if requests == 1000 + 3 * remembered:
            break
    traffic.states.check()
    # Ghosts stand for no more keys than two capacities.
    most = 3 * most_held + remembered
    assert most < requests // 2
    lengths: Counter[str] = Counter()
    for where, each in _reachable(traffic.witness.policy):
        if isinstance(each, dict | list | set | deque | SortedList | SortedDict):
            lengths[where] += len(each)
    assert {where: count for where, count in lengths.items() if count > most} == {}


def victims() -> str:
    """A digest of what each policy evicts on a walk."""
    gone = []
    for name in sorted(POLICIES):
        for (_, entry), _ in zip(_bounded(name, 2), range(300), strict=False):
            if entry is not None:
                gone.append((entry.start, entry.end))
    assert len(gone) > 50 * len(POLICIES)
    return hashlib.sha256(repr(gone).encode()).hexdigest()


def test_another_process_under_another_hash_seed_evicts_the_same() -> None:
    # This process has a seed of its own, drawn when it started.
    program = "from tests.policies.test_contract import victims; print(victims())"
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == victims()


def _reachable(thing: Any) -> Iterator[tuple[str, Any]]:
    """Every object inside a policy, with the path to it; not what lies inside an entry."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", thing)]
    while stack:
        where, each = stack.pop()
        if id(each) in seen or isinstance(each, random.Random | type | str | bytes | _Learnt):
            continue
        seen.add(id(each))
        yield where, each
        if isinstance(each, dict):
            stack += [(f"{where}[]"[:200], part) for pair in each.items() for part in pair]
        elif isinstance(each, list | tuple | set | frozenset | deque | SortedList):
            stack += [(f"{where}[]"[:200], part) for part in each]
        elif not isinstance(each, Entry):
            names = [*getattr(each, "__dict__", ()), *getattr(type(each), "__slots__", ())]
            stack += [(f"{where}.{name}"[:200], getattr(each, name)) for name in names]


def _entries_in(policy: EvictionPolicy) -> set[int]:
    return {each.entry_id for _, each in _reachable(policy) if isinstance(each, Entry)}
