"""Random: any evictable entry, all equally likely, from a seed. On cyclic scans it loses no hits at once, as LRU does.

O(log n) per operation. The draw is an index into the evictable entries in the order (created, -end). There is one draw
per eviction, so the same traffic gives the same victims, however often the cache asks for one.
"""

from __future__ import annotations

import random
from typing import ClassVar

from policies.entry import Entry
from policies.ordered import Key, SortedPolicy


class Random(SortedPolicy):
    """Uniformly random victim."""

    ranks_whole_edges: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._draw = self._random.random()
        self._chosen: set[int] = set()

    def key(self, entry: Entry) -> Key:
        return (entry.created, -entry.end)

    def split(self, upper: Entry, lower: Entry) -> None:
        if not self._chosen.isdisjoint((upper.entry_id, lower.entry_id)):
            self._chosen |= {upper.entry_id, lower.entry_id}
        super().split(upper, lower)

    def merged(self, gone: Entry, into: Entry) -> None:
        self._chosen.discard(gone.entry_id)  # A merge is no eviction.
        super().merged(gone, into)

    def evicted(self, entry: Entry) -> None:
        super().evicted(entry)
        if entry.entry_id in self._chosen:
            self._draw = self._random.random()
            self._chosen = set()

    def victim(self) -> Entry | None:
        if not self._order:
            return None
        chosen = self._filed[self._order[int(self._draw * len(self._order))][1]]
        self._chosen = {chosen.entry_id}
        return chosen
