"""Entry: the view that an eviction policy has of one evictable piece of state.

A tree node gives up to two entries. Its *span* entry stands for the edge itself and can go while the node is
a leaf, taking the node's checkpoint along. Its *checkpoint* entry stands for the point state at the node's end
alone and can go while the node has exactly one child. They age apart: a request refreshes the spans of its whole
path, but only the one checkpoint that it resumed from.

Numbers only: no arrays, no clock. The cache layer writes the fields, a policy reads them.
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
        entry_id: creation order, unique within one cache; the last word on ties.
        state: "span" (a node's edge) or "checkpoint" (point state at a node's end).
        start, end: the half-open token span [start, end) of the node, counted from the start of the sequence.
        weight_bytes: bytes that evicting this entry frees. For the span entry of a leaf with a checkpoint: both.
        cost: prefill cost of the edge with its prefix cached, in the unit of the cache's CostModel.
        parent: span entry of the parent node; None below the root.
        children: child nodes of the node.
        has_checkpoint: whether the node holds a checkpoint.
        created, last_used: logical ticks, one per request.
        uses: 1 at creation, plus 1 for each request that used it.
        priority: the largest priority of the requests that used it.
        turn, kind: as the caller of begin() gave them: the conversation's turn, from 1, and the kind of request; None
            and "" where that is not known.
        digest_of, digests_of: where `digest` and `digests` come from.
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
    digest_of: Callable[[], bytes] = field(default=bytes, repr=False)
    digests_of: Callable[[Sequence[int]], list[bytes]] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Length of the edge in tokens."""
        return self.end - self.start

    @property
    def digest(self) -> bytes:
        """16-byte digest of namespace and all keys up to `end`; the same after any split or merge."""
        return self.digest_of()

    def digests(self, offsets: Sequence[int]) -> list[bytes]:
        """Digests of the prefixes that end at these offsets, ascending, in (start, end]; b"" where none is to be had.

        Without `digests_of` only the one at `end` is known, which is all there is of an edge with a single key.
        """
        if self.digests_of is not None:
            return self.digests_of(offsets)
        return [self.digest if offset == self.end else b"" for offset in offsets]
