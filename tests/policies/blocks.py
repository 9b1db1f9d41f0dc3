"""A cache of blocks without arrays: requests as paths, a capacity in blocks, any policy, on the real tree.

The tree holds the same blocks in one of two ways: an edge for each run with equal history, as in a simulator, or a node
for each block (`is_chain`). By default the cache makes room first and adds a request's blocks then, with the matched
blocks guarded. With `adds_first` it adds first, with the whole request guarded. A policy with `bypass` adds first,
without the guard.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from policies import OFFLINE_POLICIES, CostModel, Entry, EvictionPolicy, make_policy
from radixcache.layers.layout import Layout
from radixcache.ledger import Ledger
from radixcache.tree.state_tree import StateNode, StateTree, Use

Block = tuple[int, ...]


class BlockCache:
    """What a request finds, and what goes, under a capacity in blocks."""

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity_blocks: int = 10**9,
        *,
        is_chain: bool = False,
        adds_first: bool = False,
        block_bytes: int = 1,
        cost: CostModel | None = None,
    ) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.is_chain = is_chain
        self.adds_first = adds_first
        self.block_bytes = block_bytes
        account = Ledger(1 << 40).open_account(lambda amount_bytes: 0)
        self.states = StateTree(Layout(list, None, 64), policy, account, cost or CostModel())
        self.tick = 0
        #: The evicted blocks, each as its whole prefix.
        self.gone: list[Block] = []

    def request(self, keys: Sequence[int], tick: int | None = None, turn: int | None = None, kind: str = "") -> int:
        """Serve a prompt; return how many of its blocks were stored."""
        self.tick = self.tick + 1 if tick is None else tick
        sequence = np.array(keys, dtype=np.int64)
        match = self.states.match(sequence, "")
        node, use = match.node, Use(self.tick, 0, turn, kind)
        if match.offset:
            if match.offset < node.end:
                node = self.states.split(node, match.offset)
            self.states.touch(node.path(), None, use)
        bypass = getattr(self.policy, "bypass", False)
        rest = sequence[match.offset : self.capacity_blocks if not bypass else None]
        self.states.guard(node, 1)
        if not (bypass or self.adds_first):
            self._make_room(len(rest))
        leaf = self._add(node, rest, use)
        self.states.guard(leaf, 1)
        self.states.guard(node, -1)
        if self.adds_first and not bypass:
            self._make_room(0)
        self.states.guard(leaf, -1)
        self._make_room(0)
        return match.offset

    def _add(self, node: StateNode, keys: np.ndarray[Any, np.dtype[np.int64]], use: Use) -> StateNode:
        for piece in keys.reshape(-1, 1) if self.is_chain else [keys] if len(keys) else []:
            node = self.states.add_leaf(node, piece, use)
            self.states.set_leaving(node, self.block_bytes * len(piece))
            self.states.guard(node, 1)
            self.states.guard(node, -1)
        return node

    def evict(self, blocks: int) -> list[int]:
        """Evict this many blocks, or all; return the last key of each."""
        before, left = len(self.gone), max(0, self.states.tree.key_count - blocks)
        self._evict_down_to(left)
        return [block[-1] for block in self.gone[before:]]

    def _make_room(self, blocks: int) -> None:
        self._evict_down_to(self.capacity_blocks - blocks)

    def _evict_down_to(self, blocks: int) -> None:
        while (excess := self.states.tree.key_count - blocks) > 0:
            found = self.states.victim()
            assert found is not None, "guarded blocks exceed the capacity"
            node, _ = found
            at_once = min(excess, node.end - node.start) if getattr(self.policy, "ranks_whole_edges", True) else 1
            prefix = node.prefix().tolist()
            self.gone += [tuple(prefix[:length]) for length in range(node.end, node.end - at_once, -1)]
            if node.end - node.start > at_once:
                self.states.truncate(node, node.end - at_once)
            else:
                self.states.remove(node)


def admit(policy: EvictionPolicy, *entries: Entry) -> None:
    """Announce entries that may all go."""
    for entry in entries:
        policy.inserted(entry)
        policy.evictable_changed(entry, True)


class Future:
    """When a block is used next: the `next_use` that an offline policy is made with."""

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        self.now = 0
        self._uses: dict[bytes, list[int]] = {}
        for tick, keys in enumerate(requests, 1):
            for digest in prefix_digests(keys):
                self._uses.setdefault(digest, []).append(tick)

    def __call__(self, entry: Entry) -> float:
        return next((tick for tick in self._uses[entry.digest] if tick > self.now), float("inf"))


def replay(cache: BlockCache, requests: Sequence[Sequence[int]], future: Future | None = None) -> list[int]:
    """Blocks found by each request."""
    found = []
    for tick, keys in enumerate(requests, 1):
        if future is not None:
            future.now = tick
        found.append(cache.request(keys))
    return found


def served(
    policy: str | EvictionPolicy, requests: Sequence[Sequence[int]], capacity_blocks: int, tick: int = 0, **more: Any
) -> tuple[list[int], BlockCache]:
    """Blocks found by each request behind a tick, and the cache behind them; the policy may be an offline one."""
    future = Future(requests)
    known = OFFLINE_POLICIES[policy](future) if policy in OFFLINE_POLICIES else make_policy(policy)
    cache = BlockCache(known, capacity_blocks, **more)
    cache.tick = tick
    return replay(cache, requests, future), cache


def conversations(seed: int, count: int) -> list[list[int]]:
    """Random prompts: new ones under a few system prompts, continuations, branches, repetitions."""
    draw = random.Random(seed)
    seen: list[list[int]] = []
    fresh = 1000
    for _ in range(count):
        if seen and draw.random() < 0.65:
            base = draw.choice(seen[-12:])
            base = base if draw.random() < 0.7 else base[: draw.randrange(1, len(base) + 1)]
        else:
            base = [draw.randrange(4), 100 + draw.randrange(3)]
        added = []
        for _ in range(draw.randrange(9)):
            fresh += 1
            added.append(fresh if draw.random() < 0.8 else draw.randrange(3))
        seen.append(base + added)
    return seen


def prefix_digests(keys: Sequence[int]) -> list[bytes]:
    """The digests of all prefixes of a sequence without a namespace, the shortest first."""
    blake = hashlib.blake2b((0).to_bytes(4, "little"), digest_size=16)
    digests = []
    for key in keys:
        blake.update(np.int64(key).tobytes())
        digests.append(blake.copy().digest())
    return digests
