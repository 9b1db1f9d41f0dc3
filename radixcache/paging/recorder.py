"""Recorder: writes evaluated sequences into the tree, from a session or a row that closes, or from foreign caches.

A session's tokens are LIVE: nothing is copied for them. Foreign caches are copied out, and only what the tree lacks. Of
a row the group has copied that out of its tails already: `put` takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixcache.adapters.contract import Checkpoint, Spans
from radixcache.errors import SnapshotError
from radixcache.layers.layout import Layout
from radixcache.paging.evictor import Evictor
from radixcache.paging.live_path import LivePath
from radixcache.paging.own_state import OwnState
from radixcache.paging.pager import Pager
from radixcache.tokens import Keys
from radixcache.tree.entries import StateNode
from radixcache.tree.state_tree import StateTree, Use


class Recorder:
    """Storing for one cache."""

    def __init__(self, layout: Layout, states: StateTree, evictor: Evictor, pager: Pager) -> None:
        self._layout = layout
        self._states = states
        self._evictor = evictor
        self._pager = pager

    def record_live(self, live: LivePath, keys: Keys, namespace: str, own: OwnState, use: Use) -> None:
        """The live caches have come to stand for `keys`: make that a path of the tree, with what was kept."""
        if len(keys) == 0:
            return
        tip = self._path_for(keys, namespace, use)
        live.advance(tip)
        self._layout.learn(live.caches)
        self._add(tip, own.windows, own.checkpoints, use)
        self._pager.keep_point_state(live, use)

    def record_foreign(self, caches: Sequence[Any], keys: Keys, namespace: str, use: Use) -> int:
        """Copy what the tree lacks of foreign caches; returns how many of the keys the tree holds afterwards.

        Raises:
            SnapshotError: the caches do not fit the tree or the keys; nothing was changed.
        """
        self._layout.compare(caches)
        self._layout.evaluate(caches)
        end = self._storable_end(caches, len(keys))
        if end == 0:
            return 0
        self._layout.learn(caches)
        match = self._states.match(keys[:end], namespace)
        try:
            with self._states.guarded(match.node):
                start = match.offset
                end = self._fitting_end(start, end)
                points = caches if self._layout.has_points else None
                spans = None
                if end > start:
                    spans = self._pager.allocating(lambda: self._layout.page_out(caches, start, end))
                self.put(keys[:end], namespace, spans, points, use)
        finally:
            self._evictor.tidy(match.node)
        return end

    def put(
        self,
        keys: Keys,
        namespace: str,
        spans: Spans | None,
        points: Sequence[Any] | None,
        use: Use,
        windows: Sequence[Spans] = (),
        checkpoints: Sequence[Checkpoint] = (),
    ) -> None:
        """Give the path to `keys`, whose end may be new, this state.

        Args:
            spans: of all that the tree does not hold yet; None: it holds all.
            points: caches whose point layers stand at the end, for a checkpoint there; None: it takes none.
            windows, checkpoints: what was kept on the way.
        """
        if len(keys) == 0:
            return
        held = self._states.match(keys, namespace).offset
        node = self._path_for(keys, namespace, use)
        if spans is not None:
            self._states.set_spans(node, spans)
            self._states.paged_out_bytes += spans.nbytes
        with self._states.guarded(node):
            self._add(node, windows, checkpoints, use)
            if points is not None and node.payload.checkpoint is None:
                self._pager.add_checkpoint(node, points, "end", use)
        # What is new was made by this use, and is not used a second time.
        self._states.touch([each for each in node.path() if each.end <= held], node, use)
        self._evictor.tidy(node)

    def _path_for(self, keys: Keys, namespace: str, use: Use) -> StateNode:
        """The node that ends where `keys` end, made by splitting and appending as needed."""
        match = self._states.match(keys, namespace)
        node = match.node
        if 0 < match.offset < node.end:
            node = self._states.split(node, match.offset)
        if match.offset < len(keys):
            node = self._states.add_leaf(node, keys[match.offset :], use)
            self._states.events.stored(node, match.offset, self._layout.token_bytes * (len(keys) - match.offset))
        return node

    def _add(self, tip: StateNode, windows: Sequence[Spans], checkpoints: Sequence[Checkpoint], use: Use) -> None:
        """Give the path to a node what a request kept: windows first, then the checkpoints that need them."""
        for spans in windows:
            self._states.windows.store(tip, spans)
        for checkpoint in checkpoints:
            self._attach(tip, checkpoint, use)

    def _attach(self, tip: StateNode, checkpoint: Checkpoint, use: Use) -> None:
        """Give the path a checkpoint, unless it has one at that offset, or not all that windows need there."""
        for node in tip.path():
            if node.start < checkpoint.offset <= node.end:
                if self._states.windows.lacking(node.path(), checkpoint.offset):
                    return
                if node.end != checkpoint.offset:
                    node = self._states.split(node, checkpoint.offset)
                if node.payload.checkpoint is None:
                    self._states.set_checkpoint(node, checkpoint, use)
                return

    def _storable_end(self, caches: Sequence[Any], length: int) -> int:
        """How many of `length` tokens foreign caches can be stored for."""
        if self._layout.is_empty(caches):
            return 0
        offsets = self._layout.offsets(caches, trusted=True)
        if offsets is None:
            return length
        low, high = offsets
        has_points = self._layout.uses_points(caches)
        if low != high and has_points:
            raise SnapshotError(f"layers stand at offsets {low} to {high}; point state needs one offset for all.")
        if high > length and has_points and not self._layout.can_rewind(caches, high, length):
            raise SnapshotError(f"caches stand at {high}, beyond the {length} tokens given, and cannot be cut back.")
        return min(low, length)

    def _fitting_end(self, start: int, end: int) -> int:
        """Make room for the tokens [start, end); where they do not fit, how far they do for span layers alone."""
        need = (end - start) * self._layout.token_bytes
        if self._evictor.make_room(need) or self._layout.has_points:
            return end
        return max(start, end - -(-self._evictor.over_bytes(need) // self._layout.token_bytes))
