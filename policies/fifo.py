"""FIFO: the oldest entry goes first, the deepest on ties. A hit changes nothing.

Key (created, -end). O(log n) per operation. A baseline for what refreshing on a hit is worth.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class FIFO(OrderedPolicy):
    """First in, first out."""

    def key(self, entry: Entry) -> Key:
        return (entry.created, -entry.end)
