"""LivePath: one live cache, the path of the tree that it stands for, and what the session on it holds.

    root ── a ── b ── tip          a, b, tip are LIVE: buffers hold [0, tip.end), nothing is copied for them
             \\
              c (PAGED)            moving to c: rewind to a.end, page out what c would overwrite, page c in

Invariants, asserted by `check`; V2 and V3 while no session is open on it:

  V1  Exactly the nodes from the root to `tip` are LIVE in this slot.
  V2  Every leaf that is in use stands at `tip.end`; with no tip the live cache is empty or stands at 0.
  V3  `nbytes`, this slot's part of the account's live bytes, are the bytes of the buffers.

The buffers are rewound and overwritten in place, and no reference to one is kept: MLX copies a buffer that is shared
when it is next written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from radixcache.adapters.snapshots import Checkpoint, Spans
from radixcache.layers.evaluation import NATIVE_ERRORS
from radixcache.layers.layout import Layout
from radixcache.tree.events import PAGED_OUT
from radixcache.tree.state_tree import StateNode, StateTree, state_of


class LivePath:
    """The live caches of one slot and the node at which they stand.

    Attributes:
        slot: number of the slot, from 0.
        caches: the mlx-lm caches, one per layer.
        tip: the node at which they stand; None: at 0.
        nbytes: what the buffers held when they were last measured.
        is_open: a session runs on it, or is about to.
        guarded: the node whose path is held for that session.
        checkpoint_bytes: checkpoints that the session holds and the tree does not have yet.
        second_bytes: the state of the cold run that verifies the session.
        right_tokens: how many of the tokens that the session was begun on are right, where others were found wrong
            since; None: nothing was.
        used: tick of the last request that was served here.
    """

    def __init__(self, layout: Layout, states: StateTree, slot: int = 0) -> None:
        self._layout = layout
        self._states = states
        self.slot = slot
        self.caches: list[Any] = layout.fresh()
        self.tip: StateNode | None = None
        self.nbytes = 0
        self.is_open = False
        self.guarded: StateNode | None = None
        self.checkpoint_bytes = 0
        self.second_bytes = 0
        self.right_tokens: int | None = None
        self.used = 0

    @property
    def offset(self) -> int:
        """Tokens that the live caches stand for."""
        return 0 if self.tip is None else self.tip.end

    def nodes(self) -> list[StateNode]:
        """The live nodes, root side first."""
        return [] if self.tip is None else self.tip.path()

    def common(self, path: list[StateNode], limit: int) -> int:
        """How far the live path and another path of the same tree, of which `limit` tokens count, go together."""
        # V1: the nodes that are live here come first, and all others behind them.
        count = bisect_left(path, True, key=lambda node: not state_of(node).live_mask >> self.slot & 1)
        return min(path[count - 1].end, limit) if count else 0

    def measure(self, replaced: Sequence[Any] = ()) -> None:
        """Book what the buffers hold now, and those of caches that were put in the place of ours."""
        held = self._layout.live_nbytes(self.caches) + self._layout.live_nbytes(replaced)
        self._states.account.add_live(held - self.nbytes)
        self.nbytes = held

    def hold(self, node: StateNode | None) -> None:
        """Guard the path to `node` for the session, instead of the one guarded so far; None: let go."""
        before, self.guarded = self.guarded, node
        if node is not None:
            self._states.guard(node, 1)
        if before is not None:
            self._states.guard(before, -1)

    def hold_checkpoint(self, change_bytes: int) -> None:
        """Book checkpoints that the session holds and the tree does not have yet."""
        self.checkpoint_bytes += change_bytes
        self._states.hold_checkpoint(change_bytes)

    def hold_second(self, nbytes: int) -> None:
        """Book what the cold run that verifies the session holds now."""
        self._states.account.add_second(nbytes - self.second_bytes)
        self.second_bytes = nbytes

    def leave(self, keep: int) -> list[StateNode]:
        """Declare that the buffers beyond `keep` will be overwritten; returns the nodes that are to be paged out.

        A node across `keep` is split. Nodes whose spans are nowhere else are LEAVING until `page_out`, or until they
        are dropped; those that nothing can resume on are dropped here.
        """
        left = []
        for node in self.nodes():
            if node.end <= keep:
                continue
            if node.start < keep:
                self._states.split(node, keep)
            state = state_of(node)
            if state.spans is None and state.live_mask == 1 << self.slot:
                # First, so that a policy that is told of the node knows its bytes.
                self._states.set_leaving(node, self._layout.token_bytes * (node.end - node.start))
            self._states.set_live(node, self.slot, False)
            left.append(node)
        self.tip = self._node_at(keep)
        for node in reversed(left):
            if self._states.is_useless(node):
                self._states.remove(node)
        states = [(node, node.payload) for node in left]
        return [node for node, state in states if state is not None and state.spans is None and not state.live]

    def page_out(self, node: StateNode) -> None:
        """Copy a leaving node's spans out of the buffers, unless it was evicted meanwhile."""
        if node.payload is None:
            return
        spans = self._layout.page_out(self.caches, node.start, node.end)
        self._states.set_leaving(node, 0)
        self._states.set_spans(node, spans)
        self._states.paged_out_bytes += spans.nbytes
        if self._states.events.is_on:
            self._states.events.emit(PAGED_OUT, node.namespace, node.start, node.end, spans.nbytes, {})

    def page_in(self, spans: Spans, target: int) -> None:
        """Write spans behind what is live, up to offset `target`; `advance` says for which node."""
        self._states.paged_in_bytes += self._layout.page_in(self.caches, spans, target)

    def advance(self, node: StateNode) -> None:
        """The buffers have come to hold the path to `node`, by a forward pass or paged in."""
        for each in node.path():
            self._states.set_live(each, self.slot, True)
        self.tip = node

    def forget(self) -> None:
        """Give the live cache up without paging anything out: fresh caches, nothing live."""
        for node in self.nodes():
            self._states.set_live(node, self.slot, False)
        self.tip = None
        self.caches = self._layout.fresh()
        self.measure()

    def restore_points(self, checkpoint: Checkpoint | None, target: int) -> None:
        self._layout.restore_points(self.caches, checkpoint, target)

    def shrink(self, capacity_tokens: int) -> None:
        """Drop spare capacity beyond `capacity_tokens`; at offset 0 with nothing wanted the buffers go altogether.

        A smaller buffer has to be allocated beside the larger one; where that fails the larger one stays.
        """
        if self.tip is None and capacity_tokens == 0:
            self.forget()
            return
        try:
            self._layout.reserve(self.caches, capacity_tokens)
        except NATIVE_ERRORS:
            self._layout.release()
        self.measure()

    def reserve(self, capacity_tokens: int, like: Spans | None, exactly: bool = False) -> None:
        """Make room for `capacity_tokens` tokens if there is less; `exactly`: give up more as well."""
        capacity = self._layout.span_capacity(self.caches)
        if capacity < capacity_tokens or exactly or self._layout.is_empty(self.caches):
            self._layout.reserve(self.caches, capacity_tokens, like)
            self.measure()

    def check(self) -> None:
        """Assert V1 to V3."""
        live = {id(node) for node in self._states.tree.nodes() if state_of(node).live_mask >> self.slot & 1}
        assert live == {id(node) for node in self.nodes()}, (self.slot, live, self.nodes())
        if self.is_open:
            return
        assert self.guarded is None, (self.slot, self.guarded)
        assert (self.checkpoint_bytes, self.second_bytes) == (0, 0), (
            self.slot,
            self.checkpoint_bytes,
            self.second_bytes,
        )
        offsets = self._layout.offsets(self.caches)
        assert offsets is None or offsets == (self.offset, self.offset), (offsets, self.offset)
        held = self._layout.live_nbytes(self.caches)
        assert held == self.nbytes, (self.slot, held, self.nbytes)

    def _node_at(self, offset: int) -> StateNode | None:
        for node in self.nodes():
            if node.end == offset:
                return node
        assert offset == 0, (offset, self.nodes())
        return None
