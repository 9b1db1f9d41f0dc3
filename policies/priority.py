"""Priority: the lowest priority goes first, the least recently used of those, the deepest on ties.

Key (priority, last_used, -end). O(log n) per operation. A path takes the largest priority of its requests, so a prefix
is worth no less than its continuations. With equal priorities this is LRU.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class Priority(OrderedPolicy):
    """Lowest priority first."""

    def key(self, entry: Entry) -> Key:
        return (entry.priority, entry.last_used, -entry.end)
