"""LivePath: one live cache and the path of the tree that it stands for.

    root ── a ── b ── tip          a, b, tip are LIVE: buffers hold [0, tip.end), nothing is copied for them
             \\
              c (PAGED)            moving to c: rewind to a.end, page out what c would overwrite, page c in

Invariants, asserted by `check` while no session is open:

  V1  Exactly the nodes from the root to `tip` are LIVE.
  V2  Every leaf that is in use stands at `tip.end`; with no tip the live cache is empty or stands at 0.
  V3  The account's live bytes are the bytes of the buffers.

The buffers are rewound and overwritten in place, and no reference to one is kept: MLX copies a buffer that is shared
when it is next written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixcache.evaluation import NATIVE_ERRORS
from radixcache.layout import Layout
from radixcache.snapshots import Checkpoint, Spans
from radixcache.state_tree import StateNode, StateTree, state_of


class LivePath:
    """The live caches of one slot and the node at which they stand."""

    def __init__(self, layout: Layout, states: StateTree) -> None:
        self._layout = layout
        self._states = states
        self.caches: list[Any] = layout.fresh()
        self.tip: StateNode | None = None
        self.is_open = False

    @property
    def offset(self) -> int:
        """Tokens that the live caches stand for."""
        return 0 if self.tip is None else self.tip.end

    def nodes(self) -> list[StateNode]:
        """The live nodes, root side first."""
        return [] if self.tip is None else self.tip.path()

    def common(self, path: list[StateNode], limit: int) -> int:
        """How far the live path and another path of the same tree, of which `limit` tokens count, go together."""
        offset = 0
        for mine, other in zip(self.nodes(), path, strict=False):
            if mine is not other:
                break
            offset = min(mine.end, limit)
        return offset

    def measure(self, replaced: Sequence[Any] = ()) -> None:
        """Book what the buffers hold now, and those of caches that were put in the place of ours."""
        held = self._layout.live_nbytes(self.caches) + self._layout.live_nbytes(replaced)
        self._states.account.set_live(held)

    def leave_from(self, keep: int) -> list[StateNode]:
        """Declare that the buffers beyond `keep` will be overwritten; returns the nodes that are no longer live.

        A node across `keep` is split. Nodes whose spans are nowhere else are LEAVING until `page_out`, or until they
        are dropped.
        """
        left = []
        for node in self.nodes():
            if node.end <= keep:
                continue
            if node.start < keep:
                self._states.split(node, keep)
            self._states.set_live(node, False)
            if state_of(node).spans is None:
                self._states.set_leaving(node, self._layout.token_bytes * (node.end - node.start))
            left.append(node)
        self.tip = self._node_at(keep)
        return left

    def page_out(self, node: StateNode) -> int:
        """Copy a leaving node's spans out of the buffers; returns the bytes copied."""
        spans = self._layout.page_out(self.caches, node.start, node.end)
        self._states.set_leaving(node, 0)
        self._states.set_spans(node, spans)
        return spans.nbytes

    def page_in(self, node: StateNode) -> int:
        """Write a node's spans behind what is live, and make it the tip; returns the bytes written."""
        state = state_of(node)
        assert state.spans is not None, node
        written = self._layout.page_in(self.caches, state.spans, node.end)
        self._states.set_live(node, True)
        self.tip = node
        return written

    def advance(self, node: StateNode) -> None:
        """The buffers have come to hold the path to `node` by a forward pass."""
        for each in node.path():
            self._states.set_live(each, True)
        self.tip = node

    def forget(self) -> None:
        """Give the live cache up without paging anything out: fresh caches, nothing live."""
        for node in self.nodes():
            self._states.set_live(node, False)
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
        live = {id(node) for node in self._states.tree.nodes() if state_of(node).live}
        assert live == {id(node) for node in self.nodes()}, (live, self.nodes())
        offsets = self._layout.offsets(self.caches)
        assert offsets is None or offsets == (self.offset, self.offset), (offsets, self.offset)
        held = self._layout.live_nbytes(self.caches)
        assert held == self._states.account.live_bytes, (held, self._states.account.live_bytes)

    def _node_at(self, offset: int) -> StateNode | None:
        for node in self.nodes():
            if node.end == offset:
                return node
        assert offset == 0, (offset, self.nodes())
        return None
