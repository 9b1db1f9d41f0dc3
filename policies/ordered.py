"""OrderedPolicy: base of the policies that order entries by a key, which only a touch changes.

The evictable entries stand in a heap of (key, entry_id), with old places that are passed over. Every hook is O(log n),
amortised.

  O1  The heap holds (_keys[id], id) of all entries in `_filed`, the evictable ones, and about as many old places.
  O2  An entry's key is computed when it is inserted, touched, or takes over another's history, not when it becomes
      evictable.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from sortedcontainers import SortedList

from policies.entry import Entry

Key = tuple[float, ...]
#: Old places that a heap may have beside those of as many entries.
SPARE_PLACES = 64


class OrderedPolicy:
    """Subclasses define `key`."""

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._filed: dict[int, Entry] = {}
        self._order: Any = []
        hooks, own = type(self), OrderedPolicy
        if not hasattr(hooks, "cut"):
            #: See EvictionPolicy. A subclass with a `split` or `evicted` of its own hears of each cut there.
            is_plain = hooks.split is own.split and hooks.evicted is own.evicted
            self.cut: Callable[[Entry], None] | None = self._rekey if is_plain else None

    def key(self, entry: Entry) -> Key:
        """The sort key of an entry; the smallest goes first."""
        raise NotImplementedError(f"{type(self).__name__} must define key(entry).")

    def inserted(self, entry: Entry) -> None:
        self._keys[entry.entry_id] = self.key(entry)

    def touched(self, entry: Entry) -> None:
        self._rekey(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        for entry in (upper, lower):
            self._rekey(entry)

    def merged(self, gone: Entry, into: Entry) -> None:
        self.evicted(gone)
        self._rekey(into)

    def evicted(self, entry: Entry) -> None:
        if entry.entry_id in self._filed:
            self.evictable_changed(entry, False)
        self._keys.pop(entry.entry_id, None)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        number = entry.entry_id
        if not evictable:
            self._filed.pop(number, None)
        elif number not in self._filed:
            self._filed[number] = entry
            self._place(number)

    def victim(self) -> Entry | None:
        order, filed, keys = self._order, self._filed, self._keys
        while order:
            key, number = order[0]
            if number in filed and keys[number] is key:
                return filed[number]
            heappop(order)
        return None

    def check(self) -> None:
        """Assert O1."""
        order = self._order
        assert {(self._keys[number], number) for number in self._filed} <= set(order), (self._filed, order)
        assert all(order[(index - 1) // 2] <= order[index] for index in range(1, len(order))), order

    def _rekey(self, entry: Entry) -> None:
        number = entry.entry_id
        self._keys[number] = self.key(entry)
        if number in self._filed:
            self._place(number)

    def _place(self, number: int) -> None:
        heappush(self._order, (self._keys[number], number))
        if len(self._order) > 2 * len(self._filed) + SPARE_PLACES:
            self._order = [(self._keys[each], each) for each in self._filed]
            heapify(self._order)


class SortedPolicy(OrderedPolicy):
    """An OrderedPolicy that sees the whole order: a SortedList without old places."""

    def __init__(self) -> None:
        super().__init__()
        self._order = SortedList()

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        number = entry.entry_id
        if not evictable and number in self._filed:
            self._order.remove((self._keys[number], number))
        super().evictable_changed(entry, evictable)

    def victim(self) -> Entry | None:
        return self._filed[self._order[0][1]] if self._order else None

    def check(self) -> None:
        assert list(self._order) == sorted((self._keys[number], number) for number in self._filed), self._order

    def _rekey(self, entry: Entry) -> None:
        if entry.entry_id in self._filed:
            self._order.remove((self._keys[entry.entry_id], entry.entry_id))
        super()._rekey(entry)

    def _place(self, number: int) -> None:
        self._order.add((self._keys[number], number))
