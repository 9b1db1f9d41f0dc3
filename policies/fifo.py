"""FIFO: the oldest entry goes first, whatever happened to it since; the deepest first on ties.

Key (created, -end). O(log n) per operation. The baseline that shows what refreshing on a hit is worth.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class FIFO(OrderedPolicy):
    """First in, first out. A hit changes nothing."""

    def key(self, entry: Entry) -> Key:
        return (entry.created, -entry.end)
