"""The state of a node, and what of it is evicted first: the policy's entries, and thinning.

Each node has a NodeState. A policy sees it as one or two entries: one for the node's spans, one for the checkpoint at
its end. Entries makes them, mirrors changes of the node into them, and tells the policy which of them may go.

Thinning orders the checkpoints that go before the policy is asked, because there are too many or they are dear: first
interval checkpoints, then tails and ends; within a kind the least recently used. Of the interval checkpoints last used
in one tick, mostly on one path, the one with the closest neighbours goes first:

    0 ---- 2048 ---- 4096 ---- 6144 - 6200       6144 goes first, then 2048, then 4096

An interval checkpoint is dear if the spans between its neighbours weigh less than WORTH times its bytes. If room is
short, dear checkpoints go first, and a long prompt is left with a few. A checkpoint that is worth its bytes is checked
again only after its node is refreshed: O(checkpoints of one tick).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from policies import CostModel, Entry, EvictionPolicy
from policies.entry import EntryState
from radixcache.adapters.contract import NEVER, Checkpoint, Spans
from radixcache.tree.radix_tree import Node

#: The kinds of checkpoints that are thinned, with their order.
THINNED_FIRST = {"interval": 0, "tail": 1, "end": 1}
#: See above. From 7 to 14, the hit tokens of recorded coding agents differ by 3 %.
WORTH = 10


class Use(NamedTuple):
    """A use of state, as the caller of begin() or insert() described it; each request has a tick."""

    tick: int
    priority: int = 0
    turn: int | None = None
    kind: str = ""

    @classmethod
    def last_of(cls, entry: Entry) -> Use:
        return cls(entry.last_used, entry.priority, entry.turn, entry.kind)


@dataclass(slots=True, eq=False)
class NodeState:
    """The payload of a tree node."""

    entry: Entry
    checkpoint_entry: Entry | None = None
    spans: Spans | None = None
    checkpoint: Checkpoint | None = None
    windows: Spans | None = None
    nearest: int = NEVER  # offset of the first checkpoint at its end or below it
    live_mask: int = 0  # bit i: live in slot i
    leaving_bytes: int = 0
    leaving_from: Any = None  # the live caches that still have its spans, while it is LEAVING
    pins: int = 0
    guards: int = 0
    readers: int = 0  # rows of groups that stand on it, and may read its spans in place

    @property
    def live(self) -> bool:
        return self.live_mask != 0

    @property
    def is_kept(self) -> bool:
        return self.pins > 0 or self.guards > 0 or self.readers > 0

    def reweigh(self) -> None:
        """Write the bytes into the entry. Called some ten times a request."""
        weight_bytes = self.leaving_bytes if self.spans is None else self.spans.nbytes
        if self.checkpoint is not None:
            weight_bytes += self.checkpoint.nbytes
        if self.windows is not None:
            weight_bytes += self.windows.nbytes
        self.entry.weight_bytes = weight_bytes


StateNode = Node[NodeState]


class Entries:
    """The entries of one tree's nodes. The policy knows them."""

    def __init__(self, policy: EvictionPolicy, cost: CostModel) -> None:
        self._policy, self._cost = policy, cost
        self.thinning = Thinning()
        self._node_of: dict[int, StateNode] = {}
        self._evictable: set[int] = set()
        self._last_id = 0
        # A policy may pass over cuts only if all keys of an edge cost the same.
        self._pass_over = getattr(policy, "pass_over", None) if cost.per_pair == 0 else None
        self._cut: Callable[[Entry], object] | None = getattr(policy, "cut", None)

    def victim(self) -> tuple[StateNode, EntryState] | None:
        """The node that the policy evicts next, and whether its spans or its checkpoint."""
        entry = self._policy.victim()
        return None if entry is None else (self._node_of[entry.entry_id], entry.state)

    def last_key(self, entry: Entry) -> int | None:
        """The last key of an entry; None: the entry is gone."""
        node = self._node_of.get(entry.entry_id)
        return None if node is None else int(node.edge[entry.end - node.start - 1])

    def new(self, node: StateNode, state: EntryState, use: Use) -> Entry:
        """Make an entry of a node; the caller tells the policy."""
        entry = self._entry(state, node.start, node.end, _parent_entry(node), use)
        entry.digests_of = self._digests
        self._node_of[entry.entry_id] = node
        return entry

    def remove(self, entry: Entry) -> None:
        self._set_evictable(entry, False)
        if entry.state == "checkpoint":
            self.thinning.remove(entry)
        self._policy.evicted(entry)
        del self._node_of[entry.entry_id]
        entry.digests_of = None

    def merge(self, gone: Entry, into: Entry) -> None:
        """A node's spans were joined with those of its child, and the child's entry mirrors that."""
        gone.digests_of = lambda _, offsets: self._digests(into, offsets)
        into.created = min(into.created, gone.created)
        into.last_used = max(into.last_used, gone.last_used)
        into.uses = max(into.uses, gone.uses)
        into.priority = max(into.priority, gone.priority)
        self._policy.merged(gone, into)
        del self._node_of[gone.entry_id]

    def cut(self, leaf: StateNode, at: int, digests: Digests | None = None) -> None:
        """Tell the policy that a leaf loses its tokens from `at` on."""
        entry = leaf.payload.entry
        if self._cut is not None:
            self._shorten(entry, at)
            self._cut(entry)
            return
        its = digests or digests_on(leaf)
        lost = self._entry("span", at, entry.end, entry, Use.last_of(entry))
        lost.created, lost.uses = entry.created, entry.uses
        lost.digests_of = lambda _, offsets: its(offsets)
        self._shorten(entry, at)
        self._policy.split(entry, lost)
        self._policy.evicted(lost)
        lost.digests_of = None

    def trim(self, leaf: StateNode, cuts: Sequence[int]) -> int:
        """Tell the policy of each cut that it does not pass over, until it has another victim. Returns the last cut."""
        entry, digests = leaf.payload.entry, None if self._cut is not None else digests_on(leaf)
        while True:
            passed = 0 if self._pass_over is None else self._pass_over(entry, cuts)
            if passed:
                self._shorten(entry, cuts[passed - 1])
            at, cuts = cuts[passed], cuts[passed + 1 :]
            self.cut(leaf, at, digests)
            # Queues move on when they are asked for a victim, so they are asked after each cut.
            is_last = not cuts
            if (is_last and self._cut is not None) or self._policy.victim() is not entry or is_last:
                return at

    def mirror(self, node: StateNode) -> None:
        """Write a node's new span and parent into its entries."""
        state = node.payload
        for entry in (state.entry, state.checkpoint_entry):
            if entry is not None:
                entry.start, entry.end = node.start, node.end
                entry.cost = self._cost.cost(node.start, node.end)
                entry.parent = _parent_entry(node)
        state.reweigh()

    def refresh(self, node: StateNode) -> None:
        """Bring a node's entries up to date with the tree and tell the policy what may go now."""
        if node.parent is None:
            return
        state, children = node.payload, len(node.children)
        entry = state.entry
        entry.children, entry.has_checkpoint = children, state.checkpoint is not None
        # Called some ten times a request: no properties, and no call if nothing changes.
        free = not (children or state.live_mask or state.guards or state.pins or state.readers)
        if free != (entry.entry_id in self._evictable):
            self._set_evictable(entry, free)
        if state.checkpoint is not None and state.checkpoint_entry is not None:
            entry = state.checkpoint_entry
            entry.children, entry.has_checkpoint = children, True
            free = len(node.children) == 1 and not state.is_kept
            self._set_evictable(entry, free)
            self.thinning.file(entry, node, state.checkpoint.kind if free else "")

    def check(self, nodes: Sequence[StateNode]) -> None:
        """Assert S4 to S6 of StateTree for all of its nodes."""
        seen, thinned = set(), []
        for node in nodes:
            state = node.payload
            for entry in (state.entry, state.checkpoint_entry):
                if entry is None:
                    continue
                seen.add(entry.entry_id)
                assert self._node_of[entry.entry_id] is node, (node, entry)
                found = (entry.start, entry.end, entry.children, entry.has_checkpoint)
                wanted = (node.start, node.end, len(node.children), state.checkpoint is not None)
                assert found == wanted, (node, entry)
                assert entry.parent is _parent_entry(node), (node, entry.parent)
                free = not state.is_kept
                free &= node.is_leaf and not state.live if entry is state.entry else len(node.children) == 1
                assert (entry.entry_id in self._evictable) == free, (node, entry, free)
                if entry is not state.entry and free and state.checkpoint and state.checkpoint.kind in THINNED_FIRST:
                    thinned.append(node)
        assert seen == set(self._node_of), seen ^ set(self._node_of)
        assert self._evictable <= seen, self._evictable - seen
        self.thinning.check(thinned)

    def _digests(self, entry: Entry, offsets: Sequence[int]) -> list[bytes]:
        node = self._node_of.get(entry.entry_id)  # None: it was evicted; a policy still has what was merged into it
        return [b""] * len(offsets) if node is None else digests_on(node)(offsets)

    def _entry(self, state: EntryState, start: int, end: int, parent: Entry | None, use: Use) -> Entry:
        self._last_id += 1
        return Entry(
            entry_id=self._last_id,
            state=state,
            start=start,
            end=end,
            weight_bytes=0,
            cost=self._cost.cost(start, end),
            created=use.tick,
            last_used=use.tick,
            parent=parent,
            priority=use.priority,
            turn=use.turn,
            kind=use.kind,
        )

    def _shorten(self, entry: Entry, at: int) -> None:
        entry.weight_bytes = entry.weight_bytes * (at - entry.start) // (entry.end - entry.start)
        entry.end = at
        entry.cost = self._cost.cost(entry.start, at)

    def _set_evictable(self, entry: Entry, evictable: bool) -> None:
        if evictable != (entry.entry_id in self._evictable):
            (self._evictable.add if evictable else self._evictable.discard)(entry.entry_id)
            self._policy.evictable_changed(entry, evictable)


def _parent_entry(node: StateNode) -> Entry | None:
    return None if node.parent is None or node.parent.payload is None else node.parent.payload.entry


#: Returns the digests of the prefixes that end at these offsets, ascending.
Digests = Callable[[Sequence[int]], list[bytes]]


def digests_on(node: StateNode) -> Digests:
    """Digest prefixes that end on a node's edge, by its path at the first call."""
    beginning: hashlib.blake2b | None = None

    def digests(offsets: Sequence[int]) -> list[bytes]:
        nonlocal beginning
        if beginning is None:
            name = node.namespace.encode()
            beginning = hashlib.blake2b(len(name).to_bytes(4, "little") + name, digest_size=16)
            for each in node.path()[:-1]:
                beginning.update(each.edge.data)
        blake, found, done = beginning.copy(), [], 0
        for offset in offsets:
            blake.update(node.edge[done : offset - node.start].data)
            found.append(blake.digest())
            done = offset - node.start
        return found

    return digests


def is_dear(span_bytes: int, checkpoint_bytes: int) -> bool:
    """Whether a checkpoint with so many bytes of spans between its neighbours takes more than it is worth."""
    return span_bytes < WORTH * checkpoint_bytes


#: Order of the kind, whether it is worth its bytes, tick of the last use, offset, number of the entry.
Key = tuple[int, bool, int, int, int]


class Thinning:
    """Checkpoints that may be thinned, in order."""

    def __init__(self) -> None:
        self._order: Any = SortedList()
        self._filed: dict[int, tuple[Key, StateNode]] = {}

    def file(self, entry: Entry, node: StateNode, kind: str) -> None:
        """File a node's checkpoint after a change or a use, or take it out if its kind is not thinned."""
        self.remove(entry)
        if kind in THINNED_FIRST:
            self._add((THINNED_FIRST[kind], False, entry.last_used, entry.end, entry.entry_id), node)

    def remove(self, entry: Entry) -> None:
        if entry.entry_id in self._filed:
            self._order.remove(self._filed.pop(entry.entry_id)[0])

    def first(self) -> StateNode | None:
        """The node whose checkpoint goes first, if any may go."""
        if not self._order:
            return None
        kind, *_, entry_id = self._order[0]
        return self._filed[entry_id][1] if kind else self._closest()[1]

    def dear(self, token_bytes: int) -> StateNode | None:
        """A node with a dear interval checkpoint, if there is one."""
        while self._order and self._order[0][:2] == (0, False):
            gap, node = self._closest()
            entry = node.payload.checkpoint_entry
            assert entry is not None, node
            if is_dear(gap * token_bytes, entry.weight_bytes):
                return node
            for key in self._oldest():
                self._order.remove(key)
                self._add((key[0], True, *key[2:]), self._filed[key[-1]][1])
        return None

    def check(self, thinned: Collection[StateNode]) -> None:
        """Assert S6, of the nodes whose checkpoints may go."""
        assert len(self._order) == len(self._filed) == len(thinned), (len(self._order), len(thinned))
        for node in thinned:
            checkpoint, entry = node.payload.checkpoint, node.payload.checkpoint_entry
            assert checkpoint is not None and entry is not None, node
            key, filed = self._filed[entry.entry_id]
            assert filed is node and key[0] == THINNED_FIRST[checkpoint.kind], (node, key)
            assert key[2:] == (entry.last_used, entry.end, entry.entry_id), (node, key)

    def _add(self, key: Key, node: StateNode) -> None:
        self._filed[key[-1]] = key, node
        self._order.add(key)

    def _oldest(self) -> list[Key]:
        """The checkpoints with the kind, worth and last use of the first."""
        kind, is_worth, last_used, *_ = self._order[0]
        return list(self._order.irange((kind, is_worth, last_used), (kind, is_worth, last_used + 1)))

    def _closest(self) -> tuple[int, StateNode]:
        """Of `_oldest`, the node with the fewest tokens between its neighbours, and how many."""
        nodes = [self._filed[key[-1]][1] for key in self._oldest()]
        return min(((_gap(node), node) for node in nodes), key=lambda found: found[0])


def _gap(node: StateNode) -> int:
    """Tokens between the next checkpoints above and below a node, or the root, a branching, the end of the path."""
    above, below = node.parent, node
    while above is not None and not above.is_root and above.payload.checkpoint is None:
        above = above.parent
    while len(below.children) == 1 and (below is node or below.payload.checkpoint is None):
        (below,) = below.children.values()
    return below.end - (0 if above is None or above.is_root else above.end)
