"""A cache of blocks without arrays: requests as paths, a capacity in blocks, any policy, on the real tree.

Two ways to hold the same blocks: an edge for each run with equal history, as a simulator does, or a node for each block
(`is_chain`). A policy must not care. Room is made before a request's blocks are added, with what matched held, as the
classic definitions have it; `adds_first` is the other order, with all of the request held; a policy with `bypass` gets
the second without the hold.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from policies import CostModel, Entry, EvictionPolicy
from radixcache.layers.layout import Layout
from radixcache.ledger import Ledger
from radixcache.tree.entries import StateNode, Use
from radixcache.tree.state_tree import StateTree

Block = tuple[int, ...]


class BlockCache:
    """What a request finds, and what goes, under a capacity in blocks."""

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity_blocks: int,
        *,
        is_chain: bool = False,
        adds_first: bool = False,
        block_bytes: int = 1,
    ) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.is_chain = is_chain
        self.adds_first = adds_first
        self.block_bytes = block_bytes
        account = Ledger(1 << 40).open_account(lambda amount_bytes: 0)
        self.states = StateTree(Layout(list, None, 64), policy, account, CostModel())
        self.tick = 0
        #: The blocks that went, each as its whole prefix.
        self.gone: list[Block] = []

    def request(self, keys: Sequence[int], tick: int | None = None) -> int:
        """Serve a prompt; returns how many of its blocks were there."""
        self.tick = self.tick + 1 if tick is None else tick
        sequence = np.array(keys, dtype=np.int64)
        match = self.states.match(sequence, "")
        node, use = match.node, Use(self.tick)
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

    def _make_room(self, blocks: int) -> None:
        while self.states.tree.key_count + blocks > self.capacity_blocks:
            found = self.states.victim()
            assert found is not None, "what is held is not above the capacity"
            node, _ = found
            at_once = 1
            if getattr(self.policy, "ranks_whole_edges", True):
                at_once = min(self.states.tree.key_count + blocks - self.capacity_blocks, node.end - node.start)
            prefix = node.prefix().tolist()
            self.gone += [tuple(prefix[:length]) for length in range(node.end, node.end - at_once, -1)]
            if node.end - node.start > at_once:
                self.states.truncate(node, node.end - at_once)
            else:
                self.states.remove(node)


def star_hits(policy: EvictionPolicy, keys: Sequence[int], capacity: int, adds_first: bool = True) -> str:
    """Which requests hit, as 0 and 1, when every key is a child of the root."""
    cache = BlockCache(policy, capacity, adds_first=adds_first)
    return "".join(str(cache.request([key])) for key in keys)


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
