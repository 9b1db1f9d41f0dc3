"""FIFO, LFU, LRU and Priority: policies that are one key. O(log n) per operation; ties go to the deepest entry."""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class FIFO(OrderedPolicy):
    """First in, first out. A hit changes nothing: a baseline that shows what refreshing on a hit is worth."""

    def key(self, entry: Entry) -> Key:
        return (entry.created, -entry.end)


class LFU(OrderedPolicy):
    """Least frequently used first, then least recently used. Uses never fade: a finished conversation stays long."""

    def key(self, entry: Entry) -> Key:
        return (entry.uses, entry.last_used, -entry.end)


class LRU(OrderedPolicy):
    """Least recently used first. A request gives its whole path one tick, so a path goes from its leaf upwards."""

    def key(self, entry: Entry) -> Key:
        return (entry.last_used, -entry.end)


class Priority(OrderedPolicy):
    """Lowest priority first, then least recently used; with equal priorities this is LRU.

    A path has the largest priority of its requests, so a prefix is worth no less than its continuations.
    """

    def key(self, entry: Entry) -> Key:
        return (entry.priority, entry.last_used, -entry.end)
