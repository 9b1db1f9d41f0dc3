"""StateTree, the state of its nodes, and the order of eviction: the policy's entries, and thinning.

Each node has a NodeState. A policy sees it as one or two entries: one for the node's spans, one for the checkpoint at
its end. `Entries` makes the entries, updates them when the node changes, and tells the policy which are evictable.

Thinning evicts checkpoints before the policy is asked, if there are too many or they are costly. Interval checkpoints
go first, then tails and ends; within a kind, the least recently used. Several interval checkpoints can have one tick of
last use, mostly on one path. Of these, the one with the closest neighbours goes first:

    0 ---- 2048 ---- 4096 ---- 6144 - 6200       6144 goes first, then 2048, then 4096

An interval checkpoint is costly if the spans between its neighbours weigh less than WORTH times its bytes. If room is
short, costly checkpoints go first, so that a long prompt keeps only a few. A checkpoint that is worth its bytes is
checked again only after its node is refreshed: O(checkpoints of one tick).

StateTree: the radix tree joined with the state of its nodes, the policy's entries and the ledger's bytes.

Each method changes tree, state, entries and bytes together, so that they always agree. The spans of a node are in one
of these places:

    LIVE    in the buffers of one or more live slots; takes no more bytes
    PAGED   in snapshot arrays (`spans`); if the node is live too, its snapshot is a duplicate
    LEAVING neither, and about to be paged out, which takes `leaving_bytes`, or to be dropped

See windows.py for the tokens of sliding windows.

Invariants, asserted by `check`:

  S1  The tree's own invariants T1 to T5.
  S2  A node's spans cover exactly its edge; a checkpoint stands exactly at its end.
  S3  Account, `leaving_bytes` and `duplicate_bytes` equal the sums over the nodes and the sessions' checkpoints.
  S4  A span entry is evictable iff the node is a leaf, neither live nor kept; a checkpoint entry iff the node has
      exactly one child and is not kept. Kept: guarded by an open session, read by a row, or pinned.
  S5  Entries mirror their nodes: start, end, parent, child count, checkpoint, weight.
  S6  Thinning holds the evictable checkpoint entries of its kinds, by their last use.
  S7  A node's `nearest` is the first checkpoint at its end or below it. A node's window tokens lie inside its edge. The
      path to a checkpoint has all window tokens that the checkpoint needs.

Every operation copies at most the keys of an edge and one grid segment of arrays, and is O(log n) in the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from policies import CostModel, Entry, EvictionPolicy
from policies.entry import EntryState
from radixcache.adapters.contract import NEVER, SEGMENT_TOKENS, Checkpoint, Spans
from radixcache.counters import Tally
from radixcache.layers.layout import NATIVE_ERRORS
from radixcache.layers.sizes import AnyLayout
from radixcache.ledger import Account
from radixcache.tokens import Keys
from radixcache.tree.history import EVICTED, MERGED, PAGED_OUT, SPLIT, Events
from radixcache.tree.radix_tree import Node, RadixTree, below
from radixcache.tree.windows import Windows

#: The kinds of checkpoints that are thinned, with their order.
THINNED_FIRST = {"interval": 0, "tail": 1, "end": 1}
#: See above. Between the values 7 and 14, the hit tokens of recorded coding agents differ by 3 %.
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
    readers: int = 0  # rows of groups whose path has this node; they may read its spans in place

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
    """The policy's entries for the nodes of one tree."""

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
        """Merge a node's entry into the entry of its child, which has taken over the node's spans."""
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
        """Cut a leaf's entry at `cuts`, in order, until the policy has another victim. Returns the last cut made."""
        entry, digests = leaf.payload.entry, None if self._cut is not None else digests_on(leaf)
        while True:
            passed = 0 if self._pass_over is None else self._pass_over(entry, cuts)
            if passed:
                self._shorten(entry, cuts[passed - 1])
            at, cuts = cuts[passed], cuts[passed + 1 :]
            self.cut(leaf, at, digests)
            # A policy may change its queues whenever it is asked for a victim, so ask after each cut.
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
        """Update a node's entries from the tree, and tell the policy which are evictable now."""
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
        node = self._node_of.get(entry.entry_id)  # None: evicted, but a policy has an entry merged into it
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


def is_costly(span_bytes: int, checkpoint_bytes: int) -> bool:
    """Whether a checkpoint costs more than it is worth. `span_bytes`: of the spans between its neighbours."""
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
        """The node whose checkpoint is evicted first, or None."""
        if not self._order:
            return None
        kind, *_, entry_id = self._order[0]
        return self._filed[entry_id][1] if kind else self._closest()[1]

    def costly(self, token_bytes: int) -> StateNode | None:
        """A node with a costly interval checkpoint, if there is one."""
        while self._order and self._order[0][:2] == (0, False):
            gap, node = self._closest()
            entry = node.payload.checkpoint_entry
            assert entry is not None, node
            if is_costly(gap * token_bytes, entry.weight_bytes):
                return node
            for key in self._oldest():
                self._order.remove(key)
                self._add((key[0], True, *key[2:]), self._filed[key[-1]][1])
        return None

    def check(self, thinned: Collection[StateNode]) -> None:
        """Assert S6. `thinned`: the nodes whose checkpoints may be thinned."""
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
        """The checkpoints that have the same kind, worth and last use as the first one."""
        kind, is_worth, last_used, *_ = self._order[0]
        return list(self._order.irange((kind, is_worth, last_used), (kind, is_worth, last_used + 1)))

    def _closest(self) -> tuple[int, StateNode]:
        """Of `_oldest`, the node with the fewest tokens between its neighbours, and how many."""
        nodes = [self._filed[key[-1]][1] for key in self._oldest()]
        return min(((_gap(node), node) for node in nodes), key=lambda found: found[0])


def _gap(node: StateNode) -> int:
    """Tokens between the next checkpoints above and below a node. Root, branch or end of the path count as one too."""
    above, below = node.parent, node
    while above is not None and not above.is_root and above.payload.checkpoint is None:
        above = above.parent
    while len(below.children) == 1 and (below is node or below.payload.checkpoint is None):
        (below,) = below.children.values()
    return below.end - (0 if above is None or above.is_root else above.end)


class StateTree:
    """Tree, node states, policy entries and bytes, changed together.

    Args:
        grid_tokens: requests resume at multiples of this: 1, or in exact mode the chunk of prefill.
        on_loss: called with a node that is about to lose state on which a request might have resumed.
    """

    def __init__(
        self,
        layout: AnyLayout,
        policy: EvictionPolicy,
        account: Account,
        cost: CostModel,
        events: Events | None = None,
        *,
        grid_tokens: int = 1,
        merges: bool = True,
        on_loss: Callable[[StateNode], object] | None = None,
    ) -> None:
        self.layout = layout
        self.policy = policy
        self.account = account
        self.cost = cost
        self.events = events or Events()
        self.tally = Tally()
        self.grid_tokens = grid_tokens
        self._merges = merges
        self.tree: RadixTree[NodeState] = RadixTree()
        self.match = self.tree.match
        self.entries = Entries(policy, cost)
        self.victim, self.last_key, self.thinning = self.entries.victim, self.entries.last_key, self.entries.thinning
        self._refresh = self.entries.refresh
        self.windows = Windows(layout, self._copy, account)
        self.on_loss = on_loss or _ignore
        self.leaving_bytes = self.duplicate_bytes = 0
        self.paged_in_bytes = self.paged_out_bytes = self.cut_bytes = self.copied_window_bytes = 0

    def is_useless(self, node: StateNode) -> bool:
        """Whether this is a leaf that no request can resume on, neither live nor kept."""
        state = node.payload
        if node.children or state.live_mask or state.guards or state.pins or state.readers:
            return False
        bare = self.layout.has_points and state.checkpoint is None
        return bare or node.end - node.end % self.grid_tokens <= node.start

    @property
    def copied_bytes(self) -> int:
        return self.paged_in_bytes + self.paged_out_bytes + self.copied_window_bytes + self.cut_bytes

    def add_leaf(self, parent: StateNode, keys: Keys, use: Use, slot: int | None = None) -> StateNode:
        """Add a leaf, which is live in a slot if one is given."""
        node = self.tree.append(parent, keys)
        entry = self.entries.new(node, "span", use)
        node.payload = NodeState(entry, live_mask=0 if slot is None else 1 << slot)
        self.policy.inserted(entry)
        if slot is None:
            self._refresh(node)
        self._refresh(parent)
        return node

    def split(self, node: StateNode, at: int) -> StateNode:
        """Cut a node with its state at offset `at`; returns the upper node. The lower node has the checkpoint.

        If the halves cannot be allocated, a live node loses its duplicate. Other nodes raise and do not change.
        """
        state = node.payload
        halves = windows = None
        if state.spans is not None:
            is_spare = state.live and not state.readers
            halves = self._copy(self.layout.split, state.spans, at, is_spare=is_spare)
        if state.windows is not None:
            windows = self._copy(self.layout.split, state.windows, at)
        (upper_spans, lower_spans), (upper_windows, lower_windows) = halves or (None, None), windows or (None, None)
        share = state.leaving_bytes * (at - node.start) // (node.end - node.start)
        upper = self.tree.split(node, at)
        old = state.entry
        entry = self.entries.new(upper, "span", Use.last_of(old))
        entry.created, entry.uses = old.created, old.uses
        upper.payload = NodeState(
            entry,
            nearest=state.nearest,
            live_mask=state.live_mask,
            leaving_bytes=share,
            leaving_from=state.leaving_from,
            guards=state.guards,
            readers=state.readers,
        )
        state.leaving_bytes -= share
        self._set(node, lower_spans, lower_windows)  # before `upper`: bytes are never counted twice
        self._set(upper, upper_spans, upper_windows)
        self.entries.mirror(node)
        upper.payload.reweigh()
        self.policy.split(entry, old)
        self._refresh(node)
        self._refresh(upper)
        if self.events.is_on:
            self.events.emit(SPLIT, node.namespace, upper.start, node.end, 0, {"at": at})
        return upper

    def coalesce(self, node: StateNode) -> StateNode:
        """Merge a node with its only child if no state is lost by it; returns the node of the edge."""
        child = self._mergeable(node)
        if child is None:
            return node
        upper, lower = node.payload, child.payload
        merged = None
        # If only one of two live nodes has a duplicate, it is dropped: it has at most a segment of tokens.
        if upper.spans is not None and lower.spans is not None:
            joined = self._copy(self.layout.merge, upper.spans, lower.spans, is_spare=True)
            if joined is None:
                return node
            (merged,) = joined
        windows = self.windows.joined(node, child)
        self._set(node, None, None)
        self._set(child, None, None)
        end = node.end
        lower.leaving_bytes += upper.leaving_bytes
        self.tree.merge(node)
        self._set(child, merged, windows)
        self.entries.mirror(child)
        self.entries.merge(upper.entry, lower.entry)
        self._refresh(child)
        self.events.emit(MERGED, child.namespace, child.start, child.end, 0, {"at": end})
        return child

    def coalesce_all(self, nodes: list[StateNode]) -> None:
        """Coalesce each of these nodes that is still in the tree."""
        for node in nodes if self._merges else ():
            if node.payload is not None and len(node.children) == 1:
                self.coalesce(node)

    def coalesce_path(self, node: StateNode) -> None:
        """Coalesce the nodes from the root down to `node`."""
        if self._merges:
            self.coalesce_all(node.path())

    def remove(self, leaf: StateNode, was_wrong: bool = False) -> StateNode:
        """Take out a leaf with its state; returns its former parent, refreshed but not merged."""
        state = leaf.payload
        if not was_wrong:
            self.on_loss(leaf)
        self._note_loss(leaf, leaf.start, was_wrong)
        if state.checkpoint is not None:
            self.set_checkpoint(leaf, None)
        self._set(leaf, None, None)
        if state.leaving_bytes or state.leaving_from is not None:
            self.set_leaving(leaf, 0)
        self.entries.remove(state.entry)
        parent = self.tree.remove(leaf)
        if parent.parent is not None:
            self._refresh(parent)
        return parent

    def remove_subtree(self, node: StateNode, was_wrong: bool = False) -> StateNode:
        """`remove` a node and all nodes below it, also pinned ones; returns its former parent."""
        for each in reversed([node, *below(node)]):
            parent = self.remove(each, was_wrong)
        return parent

    def truncate(self, leaf: StateNode, at: int) -> None:
        """Cut off a leaf's tail at offset `at`, with the checkpoint. May fail as `split` does."""
        head = self._head(leaf, at)
        self._note_loss(leaf, at)
        self.set_checkpoint(leaf, None)
        self.entries.cut(leaf, at)
        self._shorten(leaf, at, head)

    def trim(self, leaf: StateNode, cuts: Sequence[int]) -> None:
        """Cut a leaf without a checkpoint at these offsets, deepest first, while it is the policy's victim.

        Keys and spans are cut once. If this raises, as `split` may, remove the whole leaf: the policy was told already.
        """
        self.on_loss(leaf)
        at = self.entries.trim(leaf, cuts)
        head = self._head(leaf, at)
        self._note_loss(leaf, at)
        self._shorten(leaf, at, head)

    def set_spans(self, node: StateNode, spans: Spans | None) -> None:
        """Set or remove a node's snapshot."""
        state = node.payload
        if spans is state.spans:
            return
        more_bytes = (0 if spans is None else spans.nbytes) - (0 if state.spans is None else state.spans.nbytes)
        state.spans = spans
        if more_bytes:
            self.account.add("span_bytes", more_bytes)
            if state.live_mask:
                self.duplicate_bytes += more_bytes
        state.reweigh()

    def set_live(self, node: StateNode, slot: int, live: bool) -> None:
        """Note whether a node's spans are in the live buffers of a slot."""
        state = node.payload
        was_live = state.live_mask != 0
        state.live_mask = state.live_mask | 1 << slot if live else state.live_mask & ~(1 << slot)
        if (state.live_mask != 0) != was_live:
            paged = 0 if state.spans is None else state.spans.nbytes
            self.duplicate_bytes += paged if live else -paged
            if not node.children:
                self._refresh(node)

    def set_leaving(self, node: StateNode, leaving_bytes: int, leaving_from: Any = None) -> None:
        """Note how many bytes paging the node out of live caches will take; 0: done, or dropped."""
        state = node.payload
        if leaving_bytes != state.leaving_bytes or leaving_from is not state.leaving_from:
            self.leaving_bytes += leaving_bytes - state.leaving_bytes
            state.leaving_bytes, state.leaving_from = leaving_bytes, leaving_from
            state.reweigh()

    def page_out(self, node: StateNode, spans: Spans) -> None:
        """Give a node that was LEAVING its snapshot."""
        state = node.payload
        self.leaving_bytes -= state.leaving_bytes
        state.leaving_bytes, state.leaving_from = 0, None
        self.set_spans(node, spans)
        self.paged_out_bytes += spans.nbytes
        if self.events.is_on:
            self.events.emit(PAGED_OUT, node.namespace, node.start, node.end, spans.nbytes, {})

    def set_checkpoint(self, node: StateNode, checkpoint: Checkpoint | None, use: Use | None = None) -> None:
        """Set a node's checkpoint, with the use that made it, or remove it."""
        state = node.payload
        if checkpoint is state.checkpoint:
            return
        if state.checkpoint is not None:
            assert state.checkpoint_entry is not None, node
            self.account.add("checkpoint_bytes", -state.checkpoint.nbytes)
            self.entries.remove(state.checkpoint_entry)
            state.checkpoint_entry = None
        state.checkpoint = checkpoint
        self.windows.renear(node)
        if checkpoint is not None:
            assert use is not None and checkpoint.offset == node.end, (node, checkpoint.offset)
            self.account.add("checkpoint_bytes", checkpoint.nbytes)
            entry = state.checkpoint_entry = self.entries.new(node, "checkpoint", use)
            self._weigh_checkpoint(node)
            self.policy.inserted(entry)
            self.events.stored(node, node.end, entry.weight_bytes, "checkpoint")
        state.reweigh()
        self._refresh(node)

    def drop_checkpoint(self, node: StateNode) -> None:
        entry = node.payload.checkpoint_entry
        assert entry is not None, node
        self.on_loss(node)
        self._weigh_checkpoint(node)
        self.events.evicted_checkpoint(node, entry.weight_bytes)
        self.set_checkpoint(node, None)

    @contextmanager
    def losing_silently(self) -> Iterator[None]:
        """Do not call `on_loss` inside the block."""
        on_loss, self.on_loss = self.on_loss, _ignore
        try:
            yield
        finally:
            self.on_loss = on_loss

    def guard(self, node: StateNode, change: int) -> None:
        """Guard (+1) or release (-1) the path from the root to `node`."""
        each = node
        while each.parent is not None:
            state = each.payload
            state.guards += change
            assert state.guards >= 0, each
            # Only the first guard and the last one change what is evictable, and only if no child prevents eviction.
            if state.guards == (change > 0) and (not each.children or state.checkpoint is not None):
                self._refresh(each)
            each = each.parent

    @contextmanager
    def guarding(self, node: StateNode) -> Iterator[None]:
        """Guard the path to a node inside the block."""
        if node.parent is not None:
            self.guard(node, 1)
        try:
            yield
        finally:
            if node.payload is not None:
                self.guard(node, -1)

    def read(self, node: StateNode, change: int) -> None:
        """Count (+1) or discount (-1) a row as a reader of the path from the root to `node`."""
        for each in node.path():
            each.payload.readers += change
            assert each.payload.readers >= 0, each
            if not each.payload.readers and each.payload.spans is not None:
                self.set_spans(each, self.layout.without_plain(each.payload.spans))
            self._refresh(each)

    def pin(self, node: StateNode, change: int) -> None:
        """Pin (+1) or unpin (-1) one node."""
        node.payload.pins += change
        assert node.payload.pins >= 0, node
        self._refresh(node)

    def touch(self, path: list[StateNode], resumed: StateNode | None, use: Use) -> None:
        """Note that a request used the spans of `path`, from the root down, and the checkpoint of `resumed`."""
        for node in reversed(path):
            state = node.payload
            for entry in (state.entry, state.checkpoint_entry if node is resumed else None):
                if entry is not None:
                    entry.last_used = use.tick
                    entry.uses += 1
                    entry.priority = max(entry.priority, use.priority)
                    self.policy.touched(entry)
            if state.checkpoint_entry is not None:
                if node is resumed:
                    self._weigh_checkpoint(node)
                if not state.is_kept:
                    self._refresh(node)  # the order of thinning is by last use

    def check(self) -> None:
        """Assert S1 to S7."""
        self.tree.check()
        spans = checkpoints = leaving = duplicates = 0
        nodes = list(self.tree.nodes())
        for node in nodes:
            state = node.payload
            leaving += state.leaving_bytes
            if state.spans is not None:
                assert (state.spans.start, state.spans.end) == (node.start, node.end), (node, state.spans)
                held = [s for s in state.spans.leaves if s is not None]
                assert all((s.start, s.end) == (node.start, node.end) for s in held), node
                assert state.spans.nbytes == sum(s.nbytes for s in held), node
                spans += state.spans.nbytes
                duplicates += state.spans.nbytes if state.live else 0
            assert (state.checkpoint is None) == (state.checkpoint_entry is None), node
            if state.checkpoint is not None:
                assert state.checkpoint.offset == node.end, (node, state.checkpoint.offset)
                checkpoints += state.checkpoint.nbytes
            checkpoints += 0 if state.windows is None else state.windows.nbytes
            self.windows.check(node)
        self.entries.check(nodes)
        assert spans == self.account.span_bytes, (spans, self.account.span_bytes)
        total = checkpoints + self.account.booked_checkpoint_bytes
        assert total == self.account.checkpoint_bytes, (total, self.account.checkpoint_bytes)
        assert (leaving, duplicates) == (self.leaving_bytes, self.duplicate_bytes), (leaving, duplicates)

    def _set(self, node: StateNode, spans: Spans | None, windows: Spans | None) -> None:
        self.set_spans(node, spans)
        if windows is not node.payload.windows:
            self.windows.set(node, windows)

    def _head(self, leaf: StateNode, at: int) -> Spans | None:
        """A copy of a leaf's spans before `at`, if it has any."""
        spans = leaf.payload.spans
        halves = None if spans is None else self._copy(self.layout.split, spans, at)
        return None if halves is None else halves[0]

    def _shorten(self, leaf: StateNode, at: int, head: Spans | None) -> None:
        state = leaf.payload
        windows = None if state.windows is None else self.layout.split(state.windows, at)[0]
        if state.leaving_bytes:
            share = state.leaving_bytes * (at - leaf.start) // (leaf.end - leaf.start)
            self.set_leaving(leaf, share, state.leaving_from)
        self.tree.truncate(leaf, at)
        self._set(leaf, head, windows)

    def _note_loss(self, leaf: StateNode, start: int, was_wrong: bool = False) -> None:
        """Report that the tokens [start, leaf.end) are about to go."""
        events = self.events
        if events.remembers:
            events.history.evicted(leaf, start, events.tick, was_wrong)
        if not events.is_on:
            return
        state = leaf.payload
        spans, length = state.spans, leaf.end - leaf.start
        token_bytes = self.layout.token_bytes if spans is None else spans.nbytes // length
        nbytes = token_bytes * (leaf.end - start)
        for part in (state.checkpoint, state.windows):
            nbytes += 0 if part is None else part.nbytes
        detail = {"state": "tokens", "was_wrong": was_wrong}
        events.emit(EVICTED, leaf.namespace, start, leaf.end, nbytes, detail)

    def _copy(self, copy: Callable[..., Any], *args: Any, is_spare: bool = False) -> tuple[Any, ...] | None:
        """Call `copy`, again if it fails, and count its last result, the bytes copied. None: `is_spare`, and it failed.

        The second try evicts nothing, because this may run during an eviction.
        """
        try:
            results = copy(*args)
        except NATIVE_ERRORS:
            self.layout.release()
            try:
                results = copy(*args)
            except NATIVE_ERRORS:
                if is_spare:
                    return None
                raise
        self.cut_bytes += results[-1]
        return tuple(results[:-1])

    def _mergeable(self, node: StateNode) -> StateNode | None:
        """A node's only child, if no state is lost when the two are merged."""
        if not self._merges or node.is_root or len(node.children) != 1:
            return None
        (child,) = node.children.values()
        upper, lower = node.payload, child.payload
        # A guard's session refers to the node.
        if upper.checkpoint is not None or upper.pins or upper.guards or lower.guards or upper.readers or lower.readers:
            return None
        if (upper.live_mask, upper.leaving_bytes > 0) != (lower.live_mask, lower.leaving_bytes > 0):
            return None
        if upper.entry.priority != lower.entry.priority:  # One entry cannot have two priorities.
            return None
        if (upper.spans is None) != (lower.spans is None):
            paged = node if lower.spans is None else child
            if not upper.live or paged.end - paged.start > SEGMENT_TOKENS:
                return None
        return child

    def _weigh_checkpoint(self, node: StateNode) -> None:
        """Set a checkpoint's weight: its bytes, and window bytes that only it needs. Each use sets the weight again."""
        checkpoint, entry = node.payload.checkpoint, node.payload.checkpoint_entry
        if checkpoint is not None and entry is not None:
            entry.weight_bytes = checkpoint.nbytes + self.windows.bytes_only_for(node)


def _ignore(node: StateNode) -> None:
    """The `on_loss` that does nothing."""
