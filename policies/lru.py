"""LRU: the least recently used entry goes first, the deepest first on ties.

Key (last_used, -end). A request gives its whole path one tick, so the tie rule evicts a path from its leaf upwards.
O(log n) per operation. Source: folklore; the tie rule is what keeps a prefix longer than its continuation.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class LRU(OrderedPolicy):
    """Least recently used first. A hit refreshes."""

    def key(self, entry: Entry) -> Key:
        return (entry.last_used, -entry.end)
