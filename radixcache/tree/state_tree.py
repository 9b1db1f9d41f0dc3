"""StateTree: the radix tree joined with the state of its nodes, the policy's entries and the ledger's bytes.

Every restructuring of the tree restructures the state with it, in one method, so that the three never disagree.
A node's spans are in one of these places:

    LIVE    in the buffers of one live slot or several; costs nothing more
    PAGED   as snapshot arrays (`spans`); a node may be both, its snapshot is then a duplicate
    LEAVING neither: it is about to be paged out (`leaving_bytes` says what that will take), or dropped instead

Keys and values of layers with windows are kept for some of its tokens, wherever it is: see windows.py.

Invariants, asserted by `check`:

  S1  The tree's own invariants T1 to T5.
  S2  A node's spans cover exactly its edge; a checkpoint stands exactly at its end.
  S3  Account and `leaving_bytes`, `duplicate_bytes` equal the sums over the nodes and the sessions' checkpoints.
  S4  A span entry is evictable iff the node is a leaf, neither live nor kept; a checkpoint entry iff the node has
      exactly one child and is not kept. Kept: guarded by an open session, read by a row, or pinned.
  S5  Entries mirror their nodes: start, end, parent, child count, checkpoint, weight.
  S6  Filed for thinning are the checkpoint entries of its kinds that are evictable, as they were used last.
  S7  A node's `nearest` is the first checkpoint at its end or below it. State of windows lies inside the node's edge,
      and what a checkpoint needs of it is all there, on the path.

Every operation is O(length of the edge) for keys, at most one grid segment of arrays, and O(log n) in the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from policies import CostModel, Entry, EvictionPolicy
from policies.entry import EntryState
from radixcache.adapters.contract import SEGMENT_TOKENS, Checkpoint, Spans
from radixcache.counters import Tally
from radixcache.layers.layout import NATIVE_ERRORS, Layout
from radixcache.ledger import Account
from radixcache.tokens import Keys
from radixcache.tree.entries import THINNED_FIRST, NodeState, StateNode, Thinning
from radixcache.tree.history import Events
from radixcache.tree.radix_tree import RadixTree, below
from radixcache.tree.windows import Windows


@dataclass(frozen=True, slots=True)
class Use:
    """Who uses state, as the caller of begin() or insert() gave it; ticks are logical, one per request."""

    tick: int
    priority: int = 0
    turn: int | None = None
    kind: str = ""


class StateTree:
    """Tree, node states, policy entries and bytes, changed together."""

    def __init__(
        self,
        layout: Layout,
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
        #: Counters of CacheStats.
        self.tally = Tally()
        #: State is resumed at multiples of this many tokens only: 1, or in exact mode the chunk of prefill.
        self.grid_tokens = grid_tokens
        self.tree: RadixTree[NodeState] = RadixTree()
        self.match = self.tree.match
        self.leaving_bytes = 0
        self.duplicate_bytes = 0
        self.paged_in_bytes = 0
        self.paged_out_bytes = 0
        self.cut_bytes = 0
        self.copied_window_bytes = 0
        self._node_of: dict[int, StateNode] = {}
        self._evictable: set[int] = set()
        self.windows = Windows(layout, self._copied, self._windows_changed)
        self._next_entry_id = 0
        #: Called with a node that is about to lose state by which a request might have resumed, while it is all there.
        self._on_loss = on_loss
        #: Checkpoints that go before the policy is asked.
        self.thinning = Thinning()
        self._merges = merges
        #: The policy's own, where the keys of an edge are worth the same.
        self._pass_over = getattr(policy, "pass_over", None) if cost.per_pair == 0 else None

    # Reading

    def victim(self) -> tuple[StateNode, EntryState] | None:
        """The node the policy gives up first, and whether all of it or its checkpoint alone."""
        entry = self.policy.victim()
        return None if entry is None else (self._node_of[entry.entry_id], entry.state)

    def last_key(self, entry: Entry) -> int | None:
        """The last key on the edge that an entry stands for; None when the entry is gone."""
        node = self._node_of.get(entry.entry_id)
        return None if node is None else int(node.edge[entry.end - node.start - 1])

    def is_useless(self, node: StateNode) -> bool:
        """Whether this is a leaf that nothing can resume on, and nobody is on."""
        state = node.payload
        idle = node.is_leaf and not state.live and not state.is_kept
        bare = self.layout.has_points and state.checkpoint is None
        return idle and (bare or node.end - node.end % self.grid_tokens <= node.start)

    # Restructuring

    def add_leaf(self, parent: StateNode, keys: Keys, use: Use) -> StateNode:
        """Append a leaf without any state yet."""
        node = self.tree.append(parent, keys)
        entry = self._new_entry(node, "span", use)
        node.payload = NodeState(entry)
        self.policy.inserted(entry)
        self.refresh(node)
        self.refresh(parent)
        return node

    def split(self, node: StateNode, at: int) -> StateNode:
        """Cut a node at offset `at`, its spans with it; returns the upper node. The checkpoint stays with the lower.

        A live node's duplicate is dropped where its halves cannot be allocated; otherwise that is an error, and
        nothing was changed.
        """
        state = node.payload
        upper_spans = lower_spans = None
        if state.spans is not None:
            spare = state.live and not state.readers
            halves = self._copied(lambda spans=state.spans: self.layout.split(spans, at), spare)  # type: ignore[misc]
            if halves is not None:
                upper_spans, lower_spans = halves
        windows: tuple[Any, ...] | None = None
        if state.windows is not None:
            windows = self._copied(lambda its=state.windows: self.layout.split(its, at), False)  # type: ignore[misc]
        share = state.leaving_bytes * (at - node.start) // (node.end - node.start)
        self.set_spans(node, None)
        self.windows.set(node, None)
        upper = self.tree.split(node, at)
        old = state.entry
        entry = self._new_entry(upper, "span", Use(old.last_used, old.priority, old.turn, old.kind))
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
        self.set_spans(upper, upper_spans)
        self.set_spans(node, lower_spans)
        if windows is not None:
            self.windows.set(upper, windows[0])
            self.windows.set(node, windows[1])
        self._mirror(node)
        self._mirror(upper)
        self.policy.split(entry, old)
        self.refresh(node)
        self.refresh(upper)
        self.events.split(upper, node)
        return upper

    def coalesce(self, node: StateNode) -> StateNode:
        """Merge a node with its only child when nothing is lost by it; returns the node that covers the edge now.

        Where the seam's copy cannot be allocated the two stay as they are.
        """
        child = self._mergeable(node)
        if child is None:
            return node
        upper, lower = node.payload, child.payload
        if (upper.spans is None) != (lower.spans is None):
            # Both are live and one has a duplicate of at most one grid segment: not worth a seam.
            self.set_spans(node, None)
            self.set_spans(child, None)
        merged = None
        if upper.spans is not None and lower.spans is not None:
            pair = (upper.spans, lower.spans)
            joined = self._copied(lambda: self.layout.merge(*pair), spare=True)
            if joined is None:
                return node
            (merged,) = joined
        windows = self.windows.joined(node, child)
        self.windows.set(node, None)
        self.windows.set(child, None)
        self.set_spans(node, None)
        self.set_spans(child, None)
        self._set_evictable(upper.entry, False)
        gone, into = upper.entry, lower.entry
        digest_at, end = _digests_on(node), node.end
        gone.digest_of = lambda: digest_at(end)
        into.created = min(into.created, gone.created)
        into.last_used = max(into.last_used, gone.last_used)
        into.uses = max(into.uses, gone.uses)
        into.priority = max(into.priority, gone.priority)
        lower.leaving_bytes += upper.leaving_bytes
        self.tree.merge(node)
        self.set_spans(child, merged)
        self.windows.set(child, windows)
        self._mirror(child)
        self.policy.merged(gone, into)
        del self._node_of[gone.entry_id]
        self.refresh(child)
        self.events.merged(child, end)
        return child

    def coalesce_all(self, nodes: list[StateNode]) -> None:
        """Join each of these nodes that is still there with its only child where nothing keeps them apart."""
        for node in nodes:
            if node.payload is not None:
                self.coalesce(node)

    def remove(self, leaf: StateNode, was_wrong: bool = False) -> StateNode:
        """Take a leaf and all its state out; returns its former parent, refreshed but not merged."""
        state = leaf.payload
        if not was_wrong:
            self.about_to_lose(leaf)
        self._note_loss(leaf, leaf.start, was_wrong)
        self.set_checkpoint(leaf, None)
        self.set_spans(leaf, None)
        self.windows.set(leaf, None)
        self._set_leaving(state, 0)
        self._set_evictable(state.entry, False)
        self.policy.evicted(state.entry)
        del self._node_of[state.entry.entry_id]
        parent = self.tree.remove(leaf)
        if parent.parent is not None:
            self.refresh(parent)
        return parent

    def truncate(self, leaf: StateNode, at: int) -> None:
        """Cut a leaf's tail off at offset `at`; a checkpoint at its end goes with it. May fail as `split` does."""
        head = self._head(leaf, at)
        self._note_loss(leaf, at)
        self.set_checkpoint(leaf, None)
        self._tell_lost(leaf, at, _digests_on(leaf))
        self._shorten(leaf, at, head)

    def trim(self, leaf: StateNode, cuts: Sequence[int]) -> None:
        """Cut the tail of a leaf without a checkpoint at each of these offsets in turn, the deepest first.

        It stops where the policy has another victim. The policy hears of every cut that it does not pass over; keys and
        spans are cut once. May fail as `split` does, after the policy has heard of it: then all of the leaf has to go.
        """
        self.about_to_lose(leaf)
        digest_at = _digests_on(leaf)
        entry, is_victim = leaf.payload.entry, True
        while cuts and is_victim:
            passed = 0 if self._pass_over is None else self._pass_over(entry, cuts)
            if passed:
                self._cut_entry(entry, cuts[passed - 1])
            at, cuts = cuts[passed], cuts[passed + 1 :]
            self._tell_lost(leaf, at, digest_at)
            is_victim = self.policy.victim() is entry
        head = self._head(leaf, at)
        self._note_loss(leaf, at)
        self._shorten(leaf, at, head)

    # State of a node

    def set_spans(self, node: StateNode, spans: Spans | None) -> None:
        """Give a node its snapshot, or take it away."""
        state = node.payload
        if spans is state.spans:
            return
        before = 0 if state.spans is None else state.spans.nbytes
        after = 0 if spans is None else spans.nbytes
        state.spans = spans
        if after != before:
            self.account.add_spans(after - before)
            self.duplicate_bytes += after - before if state.live else 0
        self._reweigh(state)

    def set_live(self, node: StateNode, slot: int, live: bool) -> None:
        """Say whether a node's spans are in the live buffers of a slot."""
        state = node.payload
        before = state.live
        state.live_mask = state.live_mask | 1 << slot if live else state.live_mask & ~(1 << slot)
        if state.live != before:
            paged = 0 if state.spans is None else state.spans.nbytes
            self.duplicate_bytes += paged if live else -paged
            self.refresh(node)

    def set_leaving(self, node: StateNode, leaving_bytes: int, leaving_from: Any = None) -> None:
        """Announce that paging the node out of live caches will take that many bytes; 0: done or dropped."""
        self._set_leaving(node.payload, leaving_bytes)
        node.payload.leaving_from = leaving_from

    def set_checkpoint(self, node: StateNode, checkpoint: Checkpoint | None, use: Use | None = None) -> None:
        """Give a node its checkpoint (with the use it is made in), or take it away."""
        state = node.payload
        if state.checkpoint is not None:
            self.account.add_checkpoints(-state.checkpoint.nbytes)
            entry = state.checkpoint_entry
            assert entry is not None, node
            self._set_evictable(entry, False)
            self.thinning.remove(entry)
            self.policy.evicted(entry)
            del self._node_of[entry.entry_id]
            state.checkpoint_entry = None
        state.checkpoint = checkpoint
        if checkpoint is not None:
            assert use is not None and checkpoint.offset == node.end, (node, checkpoint.offset)
            self.account.add_checkpoints(checkpoint.nbytes)
            state.checkpoint_entry = self._new_entry(node, "checkpoint", use)
            self.windows.renear(node)
            self._weigh_checkpoint(node)
            self.policy.inserted(state.checkpoint_entry)
            self.events.stored(node, node.end, state.checkpoint_entry.weight_bytes, "checkpoint")
        else:
            self.windows.renear(node)
        self._reweigh(state)
        self.refresh(node)

    def drop_checkpoint(self, node: StateNode) -> None:
        """Evict a node's checkpoint and keep its tokens."""
        entry = node.payload.checkpoint_entry
        assert entry is not None, node
        self.about_to_lose(node)
        self._weigh_checkpoint(node)
        self.events.evicted_checkpoint(node, entry.weight_bytes)
        self.set_checkpoint(node, None)

    def remove_subtree(self, node: StateNode, was_wrong: bool = False) -> StateNode:
        """Take a node and everything below it out, pinned or not, as `remove` does; returns its former parent."""
        order = [node, *below(node)]
        for each in reversed(order):
            parent = self.remove(each, was_wrong)
        return parent

    def about_to_lose(self, node: StateNode) -> None:
        """Tell whoever wants to keep it that a node is about to lose state."""
        if self._on_loss is not None:
            self._on_loss(node)

    @contextmanager
    def losing_silently(self) -> Iterator[None]:
        """Nobody is told of what goes until the block ends."""
        on_loss, self._on_loss = self._on_loss, None
        try:
            yield
        finally:
            self._on_loss = on_loss

    @property
    def copied_bytes(self) -> int:
        """Spans copied: paged in, paged out, out of windows, and cut or joined at a split or merge."""
        return self.paged_in_bytes + self.paged_out_bytes + self.copied_window_bytes + self.cut_bytes

    def guard(self, node: StateNode, change: int) -> None:
        """Guard (+1) or release (-1) the path from the root to `node`."""
        for each in node.path():
            state = each.payload
            was_kept = state.is_kept
            state.guards += change
            assert state.guards >= 0, each
            if state.is_kept != was_kept:
                self.refresh(each)

    def read(self, node: StateNode, change: int) -> None:
        """A row comes to stand (+1) on the path from the root to `node`, or leaves it (-1)."""
        for each in node.path():
            each.payload.readers += change
            assert each.payload.readers >= 0, each
            self.refresh(each)

    @contextmanager
    def guarded(self, node: StateNode) -> Iterator[None]:
        """Guard the path to a node, or to a root nothing, until the block ends."""
        if node.parent is not None:
            self.guard(node, 1)
        try:
            yield
        finally:
            if node.payload is not None:
                self.guard(node, -1)

    def pin(self, node: StateNode, change: int) -> None:
        """Pin (+1) or unpin (-1) one node."""
        node.payload.pins += change
        assert node.payload.pins >= 0, node
        self.refresh(node)

    def touch(self, path: list[StateNode], resumed: StateNode | None, use: Use) -> None:
        """A request used the spans of `path` (root side first) and the checkpoint of `resumed`."""
        for node in reversed(path):
            state = node.payload
            entries = [state.entry]
            if node is resumed and state.checkpoint_entry is not None:
                entries.append(state.checkpoint_entry)
            for entry in entries:
                entry.last_used = use.tick
                entry.uses += 1
                entry.priority = max(entry.priority, use.priority)
                self.policy.touched(entry)
            if state.checkpoint_entry is not None:
                if node is resumed:
                    self._weigh_checkpoint(node)
                self.refresh(node)  # which checkpoint is thinned first goes by its last use

    def refresh(self, node: StateNode) -> None:
        """Bring a node's entries up to date with the tree and tell the policy what may go now."""
        if node.parent is None:
            return
        state = node.payload
        state.entry.children = len(node.children)
        state.entry.has_checkpoint = state.checkpoint is not None
        # Asked some ten times a request: without the properties, and without a call where nothing changes.
        free = not (node.children or state.live_mask or state.guards or state.pins or state.readers)
        if free != (state.entry.entry_id in self._evictable):
            self._set_evictable(state.entry, free)
        entry = state.checkpoint_entry
        if entry is not None and state.checkpoint is not None:
            entry.children, entry.has_checkpoint = len(node.children), True
            free = len(node.children) == 1 and not state.is_kept
            self._set_evictable(entry, free)
            self.thinning.file(entry, node, state.checkpoint.kind if free else "")

    # Checking and showing

    def check(self) -> None:
        """Assert S1 to S7."""
        self.tree.check()
        spans = checkpoints = leaving = duplicates = 0
        seen: set[int] = set()
        thinned = []
        for node in self.tree.nodes():
            state = node.payload
            seen.add(state.entry.entry_id)
            leaving += state.leaving_bytes
            if state.spans is not None:
                assert (state.spans.start, state.spans.end) == (node.start, node.end), (node, state.spans)
                held = [s for s in state.spans.leaves if s is not None]
                assert all((s.start, s.end) == (node.start, node.end) for s in held), node
                assert state.spans.nbytes == sum(s.nbytes for s in held), node
                spans += state.spans.nbytes
                duplicates += state.spans.nbytes if state.live else 0
            if state.checkpoint is not None:
                assert state.checkpoint.offset == node.end, (node, state.checkpoint.offset)
                assert state.checkpoint_entry is not None, node
                seen.add(state.checkpoint_entry.entry_id)
                checkpoints += state.checkpoint.nbytes
                if state.checkpoint.kind in THINNED_FIRST and state.checkpoint_entry.entry_id in self._evictable:
                    thinned.append(node)
            checkpoints += 0 if state.windows is None else state.windows.nbytes
            self.windows.check(node)
            self._check_entries(node, state)
        assert seen == set(self._node_of), seen ^ set(self._node_of)
        assert self._evictable <= seen, self._evictable - seen
        assert spans == self.account.span_bytes, (spans, self.account.span_bytes)
        total = checkpoints + self.account.booked_checkpoint_bytes
        assert total == self.account.checkpoint_bytes, (total, self.account.checkpoint_bytes)
        assert (leaving, duplicates) == (self.leaving_bytes, self.duplicate_bytes), (leaving, duplicates)
        self.thinning.check(thinned)

    # Private

    def _head(self, leaf: StateNode, at: int) -> Spans | None:
        """A copy of the spans that a leaf keeps when its tail goes, if it has any."""
        spans = leaf.payload.spans
        halves = None if spans is None else self._copied(lambda: self.layout.split(spans, at), spare=False)
        return None if halves is None else halves[0]

    def _shorten(self, leaf: StateNode, at: int, head: Spans | None) -> None:
        state = leaf.payload
        windows = None if state.windows is None else self.layout.split(state.windows, at)[0]
        self.windows.set(leaf, None)
        self.set_spans(leaf, None)
        self._set_leaving(state, state.leaving_bytes * (at - leaf.start) // (leaf.end - leaf.start))
        self.tree.truncate(leaf, at)
        self.set_spans(leaf, head)
        self.windows.set(leaf, windows)
        self._mirror(leaf)

    def _cut_entry(self, entry: Entry, at: int) -> None:
        entry.weight_bytes = entry.weight_bytes * (at - entry.start) // (entry.end - entry.start)
        entry.end = at
        entry.cost = self.cost.cost(entry.start, at)

    def _tell_lost(self, leaf: StateNode, at: int, digest_at: Callable[[int], bytes]) -> None:
        """Tell the policy that the part of a leaf's entry behind `at` goes."""
        kept = leaf.payload.entry
        end = kept.end
        self._next_entry_id += 1
        lost = Entry(
            entry_id=self._next_entry_id,
            state="span",
            start=at,
            end=end,
            weight_bytes=0,
            cost=self.cost.cost(at, end),
            created=kept.created,
            last_used=kept.last_used,
            parent=kept,
            uses=kept.uses,
            priority=kept.priority,
            turn=kept.turn,
            kind=kept.kind,
            digest_of=lambda: digest_at(end),
        )
        self._cut_entry(kept, at)
        self.policy.split(kept, lost)
        self.policy.evicted(lost)

    def _note_loss(self, leaf: StateNode, start: int, was_wrong: bool = False) -> None:
        """The tokens [start, leaf.end) are about to go: remember it, and tell."""
        state = leaf.payload
        nbytes = self.layout.token_bytes * (leaf.end - start)
        nbytes += sum(part.nbytes for part in (state.checkpoint, state.windows) if part is not None)
        self.events.evicted(leaf, start, nbytes, was_wrong)

    def _copied(self, make: Callable[[], tuple[*tuple[Any, ...], int]], spare: bool) -> tuple[Any, ...] | None:
        """Results of a copy that also says how many bytes it copied, tried twice; None: failed, and can be spared.

        Nothing is evicted for the second try: this runs in the middle of evictions.
        """
        try:
            *results, copied_bytes = make()
        except NATIVE_ERRORS:
            self.layout.release()
            try:
                *results, copied_bytes = make()
            except NATIVE_ERRORS:
                if spare:
                    return None
                raise
        self.cut_bytes += copied_bytes
        return tuple(results)

    def _new_entry(self, node: StateNode, state: EntryState, use: Use) -> Entry:
        self._next_entry_id += 1
        parent = node.parent
        entry = Entry(
            entry_id=self._next_entry_id,
            state=state,
            start=node.start,
            end=node.end,
            weight_bytes=0,
            cost=self.cost.cost(node.start, node.end),
            created=use.tick,
            last_used=use.tick,
            parent=None if parent is None or parent.payload is None else parent.payload.entry,
            priority=use.priority,
            turn=use.turn,
            kind=use.kind,
        )
        entry.digest_of = lambda: _digests(self._node_of[entry.entry_id], [entry.end])[0]
        entry.digests_of = lambda offsets: _digests(self._node_of[entry.entry_id], offsets)
        self._node_of[entry.entry_id] = node
        return entry

    def _mergeable(self, node: StateNode) -> StateNode | None:
        if not self._merges or node.is_root or len(node.children) != 1:
            return None
        (child,) = node.children.values()
        upper, lower = node.payload, child.payload
        # A guarded node is held by name: an open session resumes at its end.
        if upper.checkpoint is not None or upper.pins or upper.guards or lower.guards or upper.readers or lower.readers:
            return None
        if (upper.live_mask, upper.leaving_bytes > 0) != (lower.live_mask, lower.leaving_bytes > 0):
            return None
        if (upper.spans is None) != (lower.spans is None):
            paged = node if lower.spans is None else child
            if not upper.live or paged.end - paged.start > SEGMENT_TOKENS:
                return None
        return child

    def _mirror(self, node: StateNode) -> None:
        """Write the node's new span into its entries, and into its children the new parent."""
        state = node.payload
        parent = node.parent
        for entry in (state.entry, state.checkpoint_entry):
            if entry is not None:
                entry.start, entry.end = node.start, node.end
                entry.cost = self.cost.cost(node.start, node.end)
                entry.parent = None if parent is None or parent.payload is None else parent.payload.entry
        self._reweigh(state)

    def _reweigh(self, state: NodeState) -> None:
        # Asked some ten times a request: spelled out.
        weight_bytes = state.leaving_bytes if state.spans is None else state.spans.nbytes
        if state.checkpoint is not None:
            weight_bytes += state.checkpoint.nbytes
        if state.windows is not None:
            weight_bytes += state.windows.nbytes
        state.entry.weight_bytes = weight_bytes

    def _windows_changed(self, node: StateNode, change_bytes: int) -> None:
        self.account.add_checkpoints(change_bytes)
        self._reweigh(node.payload)

    def _weigh_checkpoint(self, node: StateNode) -> None:
        """A checkpoint weighs what nobody else needs; where others come and go, it is weighed again when it is used."""
        checkpoint, entry = node.payload.checkpoint, node.payload.checkpoint_entry
        if checkpoint is not None and entry is not None:
            entry.weight_bytes = checkpoint.nbytes + self.windows.bytes_only_for(node)

    def _set_leaving(self, state: NodeState, leaving_bytes: int) -> None:
        self.leaving_bytes += leaving_bytes - state.leaving_bytes
        state.leaving_bytes = leaving_bytes
        self._reweigh(state)

    def _set_evictable(self, entry: Entry, evictable: bool) -> None:
        if evictable != (entry.entry_id in self._evictable):
            (self._evictable.add if evictable else self._evictable.discard)(entry.entry_id)
            self.policy.evictable_changed(entry, evictable)

    def _check_entries(self, node: StateNode, state: NodeState) -> None:
        parent = node.parent
        for entry in (state.entry, state.checkpoint_entry):
            if entry is None:
                continue
            assert self._node_of[entry.entry_id] is node, (node, entry)
            assert (entry.start, entry.end, entry.children) == (node.start, node.end, len(node.children)), (node, entry)
            wanted = None if parent is None or parent.payload is None else parent.payload.entry
            assert entry.parent is wanted, (node, entry.parent, wanted)
            assert entry.has_checkpoint == (state.checkpoint is not None), (node, entry)
        free = node.is_leaf and not state.live and not state.is_kept
        assert (state.entry.entry_id in self._evictable) == free, (node, free)
        if state.checkpoint_entry is not None:
            free = len(node.children) == 1 and not state.is_kept
            assert (state.checkpoint_entry.entry_id in self._evictable) == free, (node, free)


def _digests_on(node: StateNode) -> Callable[[int], bytes]:
    """What gives the digest of the prefix up to an offset on a node's edge, as the path is now."""
    *above, edge = (each.edge for each in node.path())
    namespace, start = node.namespace, node.start
    beginning: hashlib.blake2b | None = None

    def digest_at(end: int) -> bytes:
        nonlocal beginning
        if beginning is None:
            beginning = _hashing(namespace)
            for each in above:
                beginning.update(each.data)
        blake = beginning.copy()
        blake.update(edge[: end - start].data)
        return blake.digest()

    return digest_at


def _digests(node: StateNode, offsets: Sequence[int]) -> list[bytes]:
    """Digests of the prefixes that end on a node's edge at these offsets, ascending."""
    blake = _hashing(node.namespace)
    for each in node.path()[:-1]:
        blake.update(each.edge.tobytes())
    digests, done = [], node.start
    for offset in offsets:
        blake.update(node.edge[done - node.start : offset - node.start].tobytes())
        digests.append(blake.digest())
        done = offset
    return digests


def _hashing(namespace: str) -> hashlib.blake2b:
    """What every digest of a prefix in this namespace begins with."""
    name = namespace.encode()
    return hashlib.blake2b(len(name).to_bytes(4, "little") + name, digest_size=16)
