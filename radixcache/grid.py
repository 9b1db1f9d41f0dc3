"""Grid: what exact mode resumes on, the multiples of `step_size` counted from offset 0.

A forward pass over other chunks adds the same numbers up in another order. So state is bit for bit that of a cold run
only where it was made by prefill in whole chunks from offset 0:

    0       2048      4096   4700  4711
    |--------|--------|------|---->          whole chunks, then a partial one, then decoded tokens
                      ^ grid end             stored and resumed up to here; the tail behind it is dropped

No state of the tail is kept, since nothing resumes on it; its keys are, in bounded number, so that a request that goes
on there is told what exactness cost it.

Invariants:

  G1  In exact mode every stored path was evaluated in whole chunks from offset 0, and ends where one ended when it was
      stored; every checkpoint stands at a multiple of `step_size`.
  G2  Tails hold at most MAX_TAIL_KEYS keys; the one used longest ago goes first.

That one node may be shared by paths that part inside a chunk takes a causal model for granted: the state of a token is
the same to the bit whatever tokens follow it in its chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from radixcache.state_tree import NodeState, StateNode, state_of
from radixcache.tree import Keys, Match, common_length

#: Keys of dropped tails that are remembered, over all paths: 2 MiB.
MAX_TAIL_KEYS = 1 << 18
#: Tails remembered at one node.
TAILS_PER_NODE = 8

Place = tuple[str, int, int]


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
        self._tails: OrderedDict[Place, list[Keys]] = OrderedDict()
        self._count = 0

    def add(self, node: StateNode, tail: Keys) -> None:
        """Remember what followed the end of `node`, a root or not."""
        if len(tail) == 0 or len(tail) > MAX_TAIL_KEYS:
            return
        place = _place(node)
        before = self._tails.pop(place, [])
        longest = next((other for other in before if common_length(other, tail) == len(tail)), tail.copy())
        kept = [other for other in before if common_length(other, longest) < len(other)]
        after = [*kept, longest][-TAILS_PER_NODE:]
        self._tails[place] = after
        self._count += _length(after) - _length(before)
        while self._count > MAX_TAIL_KEYS:
            self._count -= _length(self._tails.popitem(last=False)[1])

    def matched(self, match: Match[NodeState], keys: Keys) -> int:
        """How many of the keys behind a match an earlier request had evaluated."""
        if match.offset != match.node.end or match.offset == len(keys):
            return 0
        rest = keys[match.offset :]
        return max((common_length(tail, rest) for tail in self._tails.get(_place(match.node), [])), default=0)

    def clear(self) -> None:
        self._tails.clear()
        self._count = 0


def _length(tails: list[Keys]) -> int:
    return sum(map(len, tails))


def _place(node: StateNode) -> Place:
    """Names the end of a node for as long as it is there.

    The number of an entry is never given again, but a leaf that loses its tail keeps it and ends elsewhere.
    """
    return node.namespace, -1 if node.is_root else state_of(node).entry.entry_id, node.end
