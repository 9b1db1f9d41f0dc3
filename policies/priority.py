"""Priority: the lowest priority goes first, the least recently used of it, the deepest first on ties.

Key (priority, last_used, -end). O(log n) per operation. A request's priority spreads over its path by max, so a prefix
is never worth less than what was built on it; a split inherits. With equal priorities this is LRU.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class Priority(OrderedPolicy):
    """Lowest priority first, least recently used within it."""

    def key(self, entry: Entry) -> Key:
        return (entry.priority, entry.last_used, -entry.end)
