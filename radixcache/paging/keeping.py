"""Keeping: state of the tree, into a store: a block up to each multiple of 512 tokens, each checkpoint, and the end.

    stored      |--------|--------|--|              as it was cut before
    path        |------------------------------| end
    put                              |-----|---|    behind it: each token is written once

Of several stores that are written at the same moment one may lack what another one has: that is put too.

Where the system prompt ends, and where the tree parts, a block ends too: it is not written again for each that goes on
from there. With recurrent layers nothing resumes but at a checkpoint: no more than up to the last one is stored.

The lock is held. Bytes are taken on the calling thread, without a copy where the tree has them in one piece; out of
live buffers they are copied, a block at a time, and only if the store takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from radixcache.adapters.snapshots import Checkpoint, Spans
from radixcache.adapters.span import segment_bounds
from radixcache.layers.layout import Layout
from radixcache.layers.stored import Buffers
from radixcache.paging.disk import Disk
from radixcache.paging.slots import Slots
from radixcache.stores.block import Block, Head
from radixcache.stores.index import Index
from radixcache.stores.keys import root_key
from radixcache.tokens.keys import Keys
from radixcache.tree.node_state import StateNode
from radixcache.tree.state_tree import StateTree


class Keeping:
    """Writing for one cache.

    Attributes:
        kept_blocks: blocks and checkpoints that were given to the store.
    """

    def __init__(self, disk: Disk, layout: Layout, states: StateTree, slots: Slots) -> None:
        self._disk, self._layout, self._states, self._slots = disk, layout, states, slots
        # What was put and may not be written yet.
        self._put = Index()
        self.kept_blocks = 0

    def keep(self, tip: StateNode, end: int, mark: int = 0, *, wait: bool = False) -> None:
        """Put what the store lacks of the path to a node, up to offset `end`; it stops where no more is taken.

        Args:
            mark: where many are likely to part from it.
        """
        path = tip.path()
        points: dict[int, Checkpoint] = {}
        if self._layout.has_states:
            found = ((node.end, node.payload.checkpoint) for node in path)
            points = {at: each for at, each in found if each is not None and at <= end}
            end = max(points, default=0)
        if end == 0:
            return
        keys = np.concatenate([node.edge for node in path])[:end]
        parent = root_key(self._disk.identity, tip.namespace)
        cuts = {mark, *points, *(node.end for node in path if len(node.children) > 1)}
        for low, high, key in self._bounds(keys, tip.namespace, parent, cuts):
            about = (self._disk.identity, tip.namespace, parent, low, keys[low:high], self._disk.grid)
            if key is None or not self._disk.store.holds(key):
                head = Head("block", *about)
                if not self._offer(head, lambda low=low, high=high: self._state(path, low, high), wait):  # type: ignore[misc]
                    return
                key = head.key
            point = points.get(high)
            if point is not None:
                self._offer(Head("checkpoint", *about), lambda its=point: self._layout.point_buffers(its), wait)  # type: ignore[misc]
            parent = key

    def _bounds(
        self, keys: Keys, namespace: str, root: bytes, wanted: Iterable[int]
    ) -> list[tuple[int, int, bytes | None]]:
        """How these keys are cut into blocks: as they are stored already, with their keys, then by segments and where
        it is wanted."""
        if self._disk.store.flush(0):
            self._put = Index()
        chain = self._disk.known(keys, namespace)
        found = [(each.start, each.end, each.key) for each in chain if each.end == each.block_end]
        _, start, last = found[-1] if found else (0, 0, root)
        waiting = self._put.match(last, keys[start:], self._disk.grid)
        new = [(start + each.start, start + each.end) for each in waiting if each.end == each.block_end]
        start = new[-1][1] if new else start
        cuts = [start, *sorted(at for at in wanted if start < at < len(keys))]
        cuts += [len(keys)] if start < len(keys) else []
        new += [bounds for low, high in pairwise(cuts) for bounds in segment_bounds(low, high, self._disk.block_tokens)]
        return [*found, *((low, high, None) for low, high in new)]

    def _offer(self, head: Head, state: Callable[[], Buffers | None], wait: bool) -> bool:
        """Put a block or a checkpoint, unless it is there; False: it is neither there nor taken."""
        if self._disk.store.holds(head.key, head.kind):
            return True
        windows = sum(map(self._layout.window_bytes, self._layout.windows))
        nbytes = len(head.tokens) * (self._layout.token_bytes + windows) if head.kind == "block" else 0
        if wait and not self._disk.store.accepts(nbytes):
            self._disk.store.flush()
        buffers = state() if self._disk.store.accepts(nbytes) else None
        if buffers is None or not self._disk.store.put(Block(head, buffers)):
            return False
        self.kept_blocks += 1
        if head.kind == "block":
            self._put.add(head, 1, 0)
        return True

    def _state(self, path: Sequence[StateNode], start: int, end: int) -> Buffers | None:
        """The state of the tokens [start, end) of a path; None: some of it cannot be read now."""
        nodes = [node for node in path if node.start < end and node.end > start]
        parts = [self._spans_at(node, max(start, node.start), min(end, node.end)) for node in nodes]
        whole = [each for each in parts if each is not None]
        if len(whole) < len(parts):
            return None
        return self._layout.block_buffers(whole, self._states.windows.stored(nodes), start, end)

    def _spans_at(self, node: StateNode, start: int, end: int) -> Spans | None:
        """A node's snapshot, or a copy of [start, end) out of buffers that have it and may be read."""
        state = node.payload
        if state.spans is not None:
            return state.spans
        caches = state.leaving_from
        if caches is None and state.live and self._slots.hidden([node], None) is None and self._layout.token_bytes:
            caches = self._slots.source(node).caches
        if caches is None:
            return None if self._layout.token_bytes else Spans(start, end, [None] * self._layout.leaf_count, 0)
        return self._layout.page_out(caches, start, end)
