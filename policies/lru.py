"""LRU: the least recently used entry goes first, the deepest on ties.

Key (last_used, -end). O(log n) per operation. A request gives its whole path one tick, so ties evict a path from its
leaf upwards.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class LRU(OrderedPolicy):
    """Least recently used first."""

    def key(self, entry: Entry) -> Key:
        return (entry.last_used, -entry.end)
