"""Entry: one piece of state as an eviction policy sees it. The cache writes the fields; a policy reads them.

A tree node has up to two entries. The *span* entry is the edge; it can go while the node is a leaf and takes the node's
checkpoint along. The *checkpoint* entry is the point state at the node's end; it can go while the node has exactly one
child. A request refreshes the spans of its whole path, but only the one checkpoint that it resumed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

EntryState = Literal["span", "checkpoint"]


@dataclass(slots=True, eq=False)
class Entry:
    """One piece of state that may be evicted.

    Attributes:
        entry_id: creation order, unique within one cache; decides ties.
        state: "span" (a node's edge) or "checkpoint" (recurrent state or windows at a node's end).
        start, end: the span of the node, in tokens from the start of the sequence.
        weight_bytes: bytes that evicting the entry frees; for a leaf with a checkpoint, both.
        cost: prefill cost of the edge with its prefix cached, in the unit of the cache's CostModel.
        parent: span entry of the parent node; None below the root.
        children: number of child nodes.
        created, last_used: logical ticks, one per request.
        uses: 1 at creation, plus 1 for each request that used it.
        priority: the largest priority of the requests that used it.
        turn, kind: of the request, as given to begin(); None and "" if unknown. Turns count from 1.
        digests_of: computes `digests`; None: unknown.
    """

    entry_id: int
    state: EntryState
    start: int
    end: int
    weight_bytes: int
    cost: float
    created: int
    last_used: int
    parent: Entry | None = None
    children: int = 0
    has_checkpoint: bool = False
    uses: int = 1
    priority: int = 0
    turn: int | None = None
    kind: str = ""
    digests_of: Callable[[Entry, Sequence[int]], list[bytes]] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def digest(self) -> bytes:
        """16-byte digest of the namespace and all keys up to `end`, however edges are split or merged."""
        return self.digests([self.end])[0]

    def digests(self, offsets: Sequence[int]) -> list[bytes]:
        """Digests of the prefixes that end at these offsets, ascending, in (start, end]; b"" where unknown."""
        return [b""] * len(offsets) if self.digests_of is None else self.digests_of(self, offsets)
