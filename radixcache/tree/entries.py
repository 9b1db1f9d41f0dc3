"""NodeState: what hangs on a node of the tree.

Thinning: which checkpoints go first, for the cap on them and where they are dear.

Those that were taken for the distance alone go before tails and ends, and those that were used longest ago first. Of
the former that were used last at the same tick, mostly on one path, the one goes whose neighbours are closest together:

    0 ---- 2048 ---- 4096 ---- 6144 - 6200       6144 goes first, then 2048, last 4096

They are there for requests that part from the path, and for the path itself once its end was evicted. Such a checkpoint
is dear while the spans between its neighbours weigh less than WORTH times what it takes. Where room is short a few are
left of a long prompt: others are not evicted for more of them, and a path that loses its end does not lose all of it.

What was found to be worth its bytes is not looked at again before its node is refreshed: O(checkpoints of one tick).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedList

from policies import Entry
from radixcache.adapters.contract import NEVER, Checkpoint, Spans
from radixcache.tree.radix_tree import Node


@dataclass(slots=True, eq=False)
class NodeState:
    """What hangs on a tree node."""

    entry: Entry
    checkpoint_entry: Entry | None = None
    spans: Spans | None = None
    checkpoint: Checkpoint | None = None
    windows: Spans | None = None
    nearest: int = NEVER  # where the first checkpoint at its end or below it stands
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
        """Whether a session or a row stands on it or a pin keeps it."""
        return self.pins > 0 or self.guards > 0 or self.readers > 0


StateNode = Node[NodeState]


#: Kinds of checkpoints that are thinned, and in which order.
THINNED_FIRST = {"interval": 0, "tail": 1, "end": 1}
#: Bytes of spans between a checkpoint's neighbours by its own: with fewer it is dear. From 7 to 14 recorded coding
#: agents find within 3 % as much.
WORTH = 10

#: Order of its kind, whether it is worth its bytes, when it was used last, its offset, its entry.
Key = tuple[int, bool, int, int, int]


def is_dear(span_bytes: int, checkpoint_bytes: int) -> bool:
    """Whether a checkpoint takes more than it is worth, with so many bytes of spans between its neighbours."""
    return span_bytes < WORTH * checkpoint_bytes


class Thinning:
    """Checkpoints that may be thinned, in order."""

    def __init__(self) -> None:
        self._order: Any = SortedList()
        self._filed: dict[int, tuple[Key, StateNode]] = {}

    def file(self, entry: Entry, node: StateNode, kind: str) -> None:
        """A node's checkpoint has changed, or been used; "" for its kind: it may not go now."""
        self.remove(entry)
        if kind in THINNED_FIRST:
            self._add((THINNED_FIRST[kind], False, entry.last_used, entry.end, entry.entry_id), node)

    def remove(self, entry: Entry) -> None:
        """A checkpoint is gone, or may not go."""
        if entry.entry_id in self._filed:
            self._order.remove(self._filed.pop(entry.entry_id)[0])

    def first(self) -> StateNode | None:
        """Whose checkpoint goes first; None when only branch points, marks and leaves are left."""
        if not self._order:
            return None
        kind, *_, entry_id = self._order[0]
        return self._filed[entry_id][1] if kind else self._closest()[1]

    def dear(self, token_bytes: int) -> StateNode | None:
        """Whose checkpoint for the distance alone takes more than it is worth; None: nobody's.

        Args:
            token_bytes: what a token of spans takes.
        """
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
        """Assert that these are the nodes whose checkpoints may go, each filed under its entry as it is now."""
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
        """Those of the first one's kind and worth that were used last when it was."""
        kind, is_worth, last_used, *_ = self._order[0]
        return list(self._order.irange((kind, is_worth, last_used), (kind, is_worth, last_used + 1)))

    def _closest(self) -> tuple[int, StateNode]:
        """Of these the one with the fewest tokens between its neighbours, and how many."""
        nodes = [self._filed[key[-1]][1] for key in self._oldest()]
        return min(((_gap(node), node) for node in nodes), key=lambda found: found[0])


def _gap(node: StateNode) -> int:
    """Tokens between a node's neighbours: checkpoints on its path, the root, or where the path parts or ends."""
    above, below = node.parent, node
    while above is not None and not above.is_root and above.payload.checkpoint is None:
        above = above.parent
    while len(below.children) == 1 and (below is node or below.payload.checkpoint is None):
        (below,) = below.children.values()
    return below.end - (0 if above is None or above.is_root else above.end)
