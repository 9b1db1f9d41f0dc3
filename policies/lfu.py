"""LFU: the least often used entry goes first, the least recently used of those, the deepest first on ties.

Key (uses, last_used, -end). O(log n) per operation. Source: folklore, with the tie rule of in-cache LFU.

An entry never forgets its uses, so a conversation that is over outlives one that has just begun.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class LFU(OrderedPolicy):
    """Least frequently used first. A hit counts and refreshes."""

    def key(self, entry: Entry) -> Key:
        return (entry.uses, entry.last_used, -entry.end)
