"""Grid: what exact mode resumes on, the multiples of `step_size` counted from offset 0.

A forward pass over other chunks adds the same numbers up in another order. So state is bit for bit that of a cold run
only where it was made by prefill in whole chunks from offset 0:

    0       2048      4096   4700  4711
    |--------|--------|------|---->          whole chunks, then a partial one, then decoded tokens
                      ^ grid end             stored and resumed up to here; the tail behind it is dropped

No state of the tail is kept, since nothing resumes on it; its keys are, in bounded number, so that a request that goes
on there is told what exactness cost it.

Invariants:

  X1  In exact mode every stored path was evaluated in whole chunks from offset 0, and ends where one ended when it was
      stored; every checkpoint stands at a multiple of `step_size`.
  X2  Tails take at most MAX_TAIL_KEYS keys, those that several begin with counted once and each node as NODE_KEYS
      more; the tail added longest ago goes first.

`matched` is O(length of the prompt) in NumPy and one look-up per branch on the way, however many tails a node has.

That one node may be shared by paths that part inside a chunk takes a causal model for granted: the state of a token is
the same to the bit whatever tokens follow it in its chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from radixcache.tokens.keys import Keys
from radixcache.tree.node_state import NodeState, StateNode
from radixcache.tree.radix_tree import Match, Node, RadixTree

#: Keys of dropped tails that are remembered, over all paths: 2 MiB.
MAX_TAIL_KEYS = 1 << 18
#: What a node of theirs takes besides its keys, in keys: about 500 bytes.
NODE_KEYS = 64


def floor(offset: int, step_size: int) -> int:
    """The largest multiple of `step_size` at or below `offset`."""
    return offset - offset % step_size


def stops_on_grid(stops: Mapping[int, str], step_size: int, position: int, last: int) -> dict[int, str]:
    """Move checkpoint stops to the multiples at or below them, in (position, last], and add the last multiple there.

    Of several that fall on one multiple the most lasting kind stays.
    """
    moved: dict[int, str] = {}
    for wanted in ("interval", "end", "tail", "mark", "branch"):
        moved.update((floor(offset, step_size), kind) for offset, kind in stops.items() if kind == wanted)
        if wanted == "end":
            moved[floor(last, step_size)] = "end"
    return {offset: kind for offset, kind in sorted(moved.items()) if position < offset <= last}


class Tails:
    """Keys that followed a stored path, and whose state was dropped because it is off the grid."""

    def __init__(self) -> None:
        self._tree: RadixTree[None] = RadixTree()  # a namespace for each place that tails hang on
        self._leaves: OrderedDict[int, Node[None]] = OrderedDict()  # by id(), the one added longest ago first

    def add(self, node: StateNode, tail: Keys) -> None:
        """Remember what followed the end of `node`, a root or not."""
        if len(tail) == 0 or len(tail) + NODE_KEYS > MAX_TAIL_KEYS:
            return
        tree = self._tree
        match = tree.match(tail, _place(node))
        leaf = match.node
        if match.offset < len(tail):
            if 0 < match.offset < leaf.end:
                leaf = tree.split(leaf, match.offset)
            if leaf.is_leaf and not leaf.is_root:
                tree.extend(leaf, tail[match.offset :])
            else:
                leaf = tree.append(leaf, tail[match.offset :])
        if leaf.is_leaf:
            self._leaves[id(leaf)] = leaf
            self._leaves.move_to_end(id(leaf))
        while tree.key_count + NODE_KEYS * tree.node_count > MAX_TAIL_KEYS:
            self._forget(self._leaves.popitem(last=False)[1])

    def matched(self, match: Match[NodeState], keys: Keys) -> int:
        """How many of the keys behind a match an earlier request had evaluated."""
        if match.offset != match.node.end or match.offset == len(keys):
            return 0
        return self._tree.match(keys[match.offset :], _place(match.node)).offset

    def clear(self) -> None:
        self._tree = RadixTree()
        self._leaves.clear()

    def check(self) -> None:
        """Assert X2, and that every leaf has its place in the order."""
        self._tree.check()
        assert self._tree.key_count + NODE_KEYS * self._tree.node_count <= MAX_TAIL_KEYS, self._tree.key_count
        leaves = {id(node) for node in self._tree.nodes() if node.is_leaf}
        assert leaves == set(self._leaves), (leaves, set(self._leaves))

    def _forget(self, leaf: Node[None]) -> None:
        """Remove a tail as far as no other begins with it."""
        above = self._tree.remove(leaf)
        if not above.is_root and len(above.children) == 1:
            self._tree.merge(above)


def _place(node: StateNode) -> str:
    """Names the end of a node for as long as it is there.

    The number of an entry is never given again, but a leaf that loses its tail keeps it and ends elsewhere.
    """
    entry_id = -1 if node.is_root else node.payload.entry.entry_id
    return f"{entry_id} {node.end} {node.namespace}"
