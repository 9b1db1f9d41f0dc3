"""OrderedPolicy: base of the policies that order entries by a key, which only a touch changes.

The evictable entries stand in a SortedList of (key, entry_id). Every hook is O(log n), `victim` is O(1).

  O1  The SortedList holds (_keys[id], id) of exactly the entries in `_filed`, the evictable ones.
  O2  An entry's key is computed when it is inserted, touched, or takes over another's history, not when it becomes
      evictable.
"""

from __future__ import annotations

from typing import Any

from sortedcontainers import SortedList

from policies.entry import Entry

Key = tuple[float, ...]


class OrderedPolicy:
    """Subclasses define `key`."""

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._filed: dict[int, Entry] = {}
        self._order: Any = SortedList()

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
        self.evictable_changed(entry, False)
        self._keys.pop(entry.entry_id, None)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        number = entry.entry_id
        if not evictable:
            if self._filed.pop(number, None) is not None:
                self._order.remove((self._keys[number], number))
        elif number not in self._filed:
            self._filed[number] = entry
            self._order.add((self._keys[number], number))

    def victim(self) -> Entry | None:
        return self._filed[self._order[0][1]] if self._order else None

    def _rekey(self, entry: Entry) -> None:
        number, key = entry.entry_id, self.key(entry)
        if number in self._filed:
            self._order.remove((self._keys[number], number))
            self._order.add((key, number))
        self._keys[number] = key
