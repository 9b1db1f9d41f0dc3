"""Keeping: state of the tree, into a store: a block up to each multiple of 512 tokens, each checkpoint, and the end.

    stored      |--------|--------|--|              as it was cut before
    path        |------------------------------| end
    put                              |-----|---|    behind it: each token is written once

Of several stores that are written at the same moment one may lack what another one has: that is put too.

Where the system prompt ends, and where the tree parts, a block ends too: it is not written again for each that goes on
from there. What parts in the second half of a block that is stored goes on from inside of it. Layers that resume at
checkpoints alone need a block that ends at each, so theirs is written again; no more than up to the last one is.

The lock is held. Bytes are taken on the calling thread, without a copy where the tree has them in one piece; out of
live buffers they are copied, a block at a time, and only if the store takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, takewhile

import numpy as np

from radixcache.adapters.snapshots import Checkpoint, Spans
from radixcache.adapters.span import segment_bounds
from radixcache.layers.layout import Layout
from radixcache.layers.stored import Buffers
from radixcache.paging.disk import Disk
from radixcache.paging.slots import Slots
from radixcache.stores.block import Block, Head
from radixcache.stores.index import Index, Link, chain_end
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
        # An exact cache's blocks begin where its prefill does, and those of others have to end at each checkpoint.
        self._cuts = disk.store.takes_cuts and not disk.grid and not layout.has_points
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
        cut = 0
        for low, high, link in self._bounds(keys, tip.namespace, parent, cuts):
            if link is not None and not link.is_whole:
                parent, cut = link.key, high - low
                continue
            about = (self._disk.identity, tip.namespace, parent, low, keys[low:high], self._disk.grid, cut)
            if link is not None and self._disk.store.holds(link.key):
                parent = link.key
            else:
                head = Head("block", *about)
                if not self._offer(head, lambda low=low, high=high: self._state(path, low, high), wait):  # type: ignore[misc]
                    return
                parent = head.key
            point = points.get(high)
            if point is not None:
                self._offer(Head("checkpoint", *about), lambda its=point: self._layout.point_buffers(its), wait)  # type: ignore[misc]
            cut = 0

    def _bounds(
        self, keys: Keys, namespace: str, root: bytes, wanted: Iterable[int]
    ) -> list[tuple[int, int, Link | None]]:
        """How these keys are cut into blocks: as they are stored already, then by segments and where it is wanted."""
        found = self._chain(keys, namespace, root)
        start = chain_end(found)
        cuts = [start, *sorted(at for at in wanted if start < at < len(keys))]
        cuts += [len(keys)] if start < len(keys) else []
        new = [bounds for low, high in pairwise(cuts) for bounds in segment_bounds(low, high, self._disk.block_tokens)]
        return [*((each.start, each.end, each) for each in found), *((low, high, None) for low, high in new)]

    def _chain(self, keys: Keys, namespace: str, root: bytes) -> list[Link]:
        """The longest chain of blocks that these keys follow, stored or put: whole ones, where the store takes nothing
        else, and a last one in part if it is at least half."""
        if self._disk.store.flush(0):
            self._put = Index()
        stored = self._disk.known(keys, namespace)
        if not self._cuts:
            stored = list(takewhile(lambda link: link.is_whole, stored))
        # A stored block that these leave inside may have an unwritten sibling that they follow longer.
        found = max((self._with_put(chain, keys, root) for chain in (stored, stored[:-1])), key=chain_end)
        if found and not found[-1].is_whole:
            last = found[-1]
            if not self._cuts or 2 * (last.end - last.start) < last.block_end - last.start:
                found.pop()
        return found

    def _with_put(self, chain: Sequence[Link], keys: Keys, root: bytes) -> list[Link]:
        """A chain, and what was put that goes on from there."""
        parent, cut, at = root, 0, chain_end(chain)
        if chain:
            parent, cut = chain[-1].key, 0 if chain[-1].is_whole else at - chain[-1].start
        behind = self._put.match(parent, keys[at:], self._disk.grid, cut=cut)
        return [*chain, *(each.moved(at) for each in behind)]

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
