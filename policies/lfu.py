"""LFU: the least often used entry goes first, the least recently used of those, the deepest on ties.

Key (uses, last_used, -end). O(log n) per operation. Uses never fade, so a finished conversation outlives a new one.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class LFU(OrderedPolicy):
    """Least frequently used first."""

    def key(self, entry: Entry) -> Key:
        return (entry.uses, entry.last_used, -entry.end)
