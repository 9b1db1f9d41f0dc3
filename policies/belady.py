"""Belady: what is used again furthest in the future goes first, the deepest first on ties. Needs to know the future.

Key (-next use of the entry's last key, -end, last_used). Source: Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966. O(log n) per operation and one look into the future each.

A prefix is used again no later than its continuations, so the rule only ever names leaves. Where every key weighs the
same and a leaf can lose its tail key by key, it is exactly optimal. With checkpoints, leaves that go as a whole, or
unequal weights it is not the optimum, only this rule.

Two bounds. `Belady`: the path of the request being served stays, as in a real cache that must compute on it: the cache
makes room first and adds afterwards. `BeladyBypass`: a cache may also refuse what is new. It differs by nothing but
`bypass`, which tells the driver to add the request's path first, to hold none of it, and to make room afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class Belady(OrderedPolicy):
    """Furthest next use first.

    Args:
        next_use: when the last key of an entry is used next, seen from now; infinity for never.
    """

    #: Whether the driver offers the path of the request being served for eviction, too.
    bypass: ClassVar[bool] = False
    #: The keys of one edge are used next at different times: its tail is to go one key at a time.
    ranks_whole_edges: ClassVar[bool] = False

    def __init__(self, next_use: Callable[[Entry], float]) -> None:
        super().__init__()
        self._next_use = next_use

    def key(self, entry: Entry) -> Key:
        return (-self._next_use(entry), -entry.end, entry.last_used)

    # The future is only asked about what may go: every use of an entry makes it not evictable or is followed by a
    # touch, so an answer stays right for as long as it is filed.

    def inserted(self, entry: Entry) -> None:
        pass

    def touched(self, entry: Entry) -> None:
        if entry.entry_id in self._filed:
            self._rekey(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        for entry in (upper, lower):
            self.touched(entry)

    def merged(self, gone: Entry, into: Entry) -> None:
        self.evicted(gone)
        self.touched(into)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        if evictable and entry.entry_id not in self._filed:
            self._keys[entry.entry_id] = self.key(entry)
        super().evictable_changed(entry, evictable)
        if not evictable:
            self._keys.pop(entry.entry_id, None)


class BeladyBypass(Belady):
    """Furthest next use first, what was just asked for included."""

    bypass: ClassVar[bool] = True
