"""Belady: the entry used again furthest in the future goes first, the deepest on ties. It knows the future.

Key (-next use of the entry's last key, -end, last_used). Source: Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966. O(log n) per operation, with one look into the future.

A prefix is used again no later than its continuations, so the victim is always a leaf. Where every key weighs the same
and a leaf loses its tail key by key, the rule is optimal; with checkpoints, whole leaves or unequal weights it is not.

Two bounds. `Belady`: the path of the present request stays, as in a real cache, which makes room and then adds.
`BeladyBypass`: the driver adds the request's path without a guard and makes room afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class Belady(OrderedPolicy):
    """Furthest next use first. `next_use` tells when an entry's last key is used next; infinity: never."""

    bypass: ClassVar[bool] = False
    #: The keys of one edge have different next uses.
    ranks_whole_edges: ClassVar[bool] = False

    def __init__(self, next_use: Callable[[Entry], float]) -> None:
        super().__init__()
        self._next_use = next_use

    def key(self, entry: Entry) -> Key:
        return (-self._next_use(entry), -entry.end, entry.last_used)

    # Only evictable entries have a key. Any use touches an entry or makes it unevictable, so the key stays right.

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
    """Furthest next use first; the present request may go, too."""

    bypass: ClassVar[bool] = True
