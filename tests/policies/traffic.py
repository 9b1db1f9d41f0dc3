"""Traffic: random requests on a real tree without arrays, with a Witness between the tree and its policy.

The Witness asserts the protocol on both sides. The tree announces an entry once and never mentions it after it is gone,
exactly one side of a split is new, and `evictable_changed` reports changes alone. The policy names a victim that is
evictable, and asking twice gives the same victim.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from policies import CostModel, Entry, EvictionPolicy
from radixcache.adapters.contract import Checkpoint
from radixcache.layers.layout import Layout
from radixcache.ledger import Ledger
from radixcache.tree.state_tree import StateNode, StateTree, Use

#: The documented order of the policies whose key is a function of the entry alone.
ORDER: dict[str, Callable[[Entry], tuple[float, ...]]] = {
    "lru": lambda entry: (entry.last_used, -entry.end),
    "fifo": lambda entry: (entry.created, -entry.end),
    "lfu": lambda entry: (entry.uses, entry.last_used, -entry.end),
    "priority": lambda entry: (entry.priority, entry.last_used, -entry.end),
    "slru": lambda entry: (entry.uses > 1, entry.last_used, -entry.end),
}


class Witness:
    """Passes every hook on, and asserts that both sides follow the protocol."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.known: dict[int, Entry] = {}
        self.evictable: set[int] = set()
        self.seen: set[int] = set()
        #: Digest of each entry that is gone, read in the hook that said so.
        self.left: dict[int, bytes] = {}
        self.hooks = 0
        #: Optional: a policy without it hears of a cut as a split and an eviction.
        self.cut = None if getattr(policy, "cut", None) is None else self._heard_cut

    def inserted(self, entry: Entry) -> None:
        self._enter(entry)
        self.policy.inserted(entry)

    def touched(self, entry: Entry) -> None:
        self._require(entry)
        self.policy.touched(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        fresh = [entry for entry in (upper, lower) if entry.entry_id not in self.known]
        assert len(fresh) == 1, "exactly one of the two is new"
        self._enter(fresh[0])
        assert upper.end == lower.start
        old = lower if fresh[0] is upper else upper
        for field in ("created", "last_used", "uses", "priority", "turn", "kind"):
            assert getattr(fresh[0], field) == getattr(old, field), field
        self.policy.split(upper, lower)

    def merged(self, gone: Entry, into: Entry) -> None:
        self._require(into)
        self._leave(gone)
        self.policy.merged(gone, into)

    def evicted(self, entry: Entry) -> None:
        self._leave(entry)
        self.policy.evicted(entry)

    def _heard_cut(self, entry: Entry) -> None:
        self._require(entry)
        assert entry.start < entry.end
        cut: Any = getattr(self.policy, "cut", None)
        cut(entry)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        self._require(entry)
        assert evictable != (entry.entry_id in self.evictable), "only a change is a change"
        (self.evictable.add if evictable else self.evictable.discard)(entry.entry_id)
        self.policy.evictable_changed(entry, evictable)

    def victim(self) -> Entry | None:
        victim = self.policy.victim()
        assert self.policy.victim() is victim, "asking twice gives the same answer"
        assert (victim is None) == (not self.evictable)
        if victim is not None:
            assert victim.entry_id in self.evictable
            assert self.known[victim.entry_id] is victim
        return victim

    def expected(self, name: str) -> Entry | None:
        """The victim by brute force over all that is evictable."""
        entries = (self.known[number] for number in self.evictable)
        return min(entries, key=lambda entry: (ORDER[name](entry), entry.entry_id), default=None)

    def _enter(self, entry: Entry) -> None:
        self.hooks += 1
        assert entry.entry_id not in self.seen, "an entry is announced once"
        self.seen.add(entry.entry_id)
        self.known[entry.entry_id] = entry

    def _require(self, entry: Entry) -> None:
        self.hooks += 1
        assert self.known.get(entry.entry_id) is entry, "a hook about an entry that was never announced, or is gone"

    def _leave(self, entry: Entry) -> None:
        self._require(entry)
        self.left[entry.entry_id] = entry.digest
        del self.known[entry.entry_id]
        self.evictable.discard(entry.entry_id)


class Traffic:
    """Random requests, branches, checkpoints, guards, pins and evictions on a real StateTree without arrays.

    Priorities, turns and kinds of request are of any value; a kind stands for one user each.
    """

    def __init__(self, policy: EvictionPolicy, seed: int = 0, tick: int = 0) -> None:
        self.witness = Witness(policy)
        layout = Layout(list, None, 64)
        account = Ledger(1 << 40).open_account(lambda amount_bytes: 0)
        self.states = StateTree(layout, self.witness, account, CostModel())
        self.random = random.Random(seed)
        self.tick = tick
        self.guarded: list[StateNode] = []
        self.pinned: list[StateNode] = []

    def request(
        self, keys: Sequence[int], namespace: str = "", checkpoint: bool = False, priority: int = 0
    ) -> StateNode:
        """Store a sequence as one request, as sessions do: touch the matched path, then append the rest."""
        self.tick += 1
        turn = self.random.choice([None, 0, -3, 1, 2, 7, 10**12])
        use = Use(self.tick, priority, turn, f"user {self.tick}")
        sequence = np.array(keys, dtype=np.int64)
        match = self.states.match(sequence, namespace)
        node = match.node
        if match.offset:
            if match.offset < node.end:
                node = self.states.split(node, match.offset)
            self.states.touch(node.path(), self.random.choice([None, *node.path()]), use)
        if match.offset < len(keys):
            node = self.states.add_leaf(node, sequence[match.offset :], use)
            self.states.set_leaving(node, 10 * (node.end - node.start))
        if checkpoint and node.payload.checkpoint is None:
            kind = self.random.choice(["branch", "mark", "interval", "tail", "end"])
            self.states.set_checkpoint(node, Checkpoint(node.end, [], 100, kind), use)
        return node

    def evict(self, whole: bool = False) -> Entry | None:
        """Evict the policy's victim, or sometimes only its tail unless `whole`; return the victim."""
        victim = self.witness.victim()
        found = self.states.victim()
        assert (victim is None) == (found is None)
        if victim is None or found is None:
            return None
        node, what = found
        if what == "checkpoint":
            self.states.set_checkpoint(node, None)
            self.states.coalesce(node)
        elif not whole and node.end - node.start > 2 and self.random.random() < 0.3:
            self.states.truncate(node, node.start + (node.end - node.start) // 2)
        else:
            self.states.coalesce(self.states.remove(node))
        return victim

    def step(self) -> None:
        """Do one random thing."""
        dice = self.random.random()
        nodes = list(self.states.tree.nodes())
        if dice < 0.45 or not nodes:
            priority = self.random.choice([0, 0, 3, 40, -5])
            namespace = self.random.choice(["", "", "tenant", f"salt {self.random.randrange(5)}"])
            self.request(self._keys(), namespace, self.random.random() < 0.4, priority)
        elif dice < 0.70:
            self.evict()
        elif dice < 0.78:
            self._hold(self.guarded, self.states.guard, self.random.choice(nodes))
        elif dice < 0.86:
            self._hold(self.pinned, self.states.pin, self.random.choice(nodes))
        elif dice < 0.93:
            node = self.random.choice(nodes)
            if node.end - node.start > 1:
                self.states.split(node, self.random.randrange(node.start + 1, node.end))
        else:
            self.states.coalesce(self.random.choice(nodes))

    def release(self) -> None:
        """Release all guards and pins."""
        for held, change in ((self.guarded, self.states.guard), (self.pinned, self.states.pin)):
            while held:
                change(held.pop(), -1)

    def _hold(self, held: list[StateNode], change: Callable[[StateNode, int], None], node: StateNode) -> None:
        if len(held) > 3:
            change(held.pop(0), -1)
        change(node, 1)
        held.append(node)

    def _keys(self) -> list[int]:
        return [self.random.randrange(3) for _ in range(self.random.randrange(1, 14))]
