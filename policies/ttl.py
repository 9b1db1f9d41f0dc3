"""TTL: soft pins. Entries within their time to live go last; LRU in both parts.

Key (unexpired, last_used, -end). An entry expires at `last_used + ttl`, so a use renews it. Its time to live comes from
its kind, else from its priority: a request with priority 500 pins for 500 ticks. Without either this is LRU. Unlike
PrefixCache.pin, a soft pin goes if the budget requires it. A tick is a request, or a millisecond if ticks follow a
clock. O(log n) per operation, amortised: an entry expires once per use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sortedcontainers import SortedList

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class TTL(OrderedPolicy):
    """Unexpired entries last, then LRU. `ttl_ticks`: time to live by kind; other kinds take their priority."""

    def __init__(self, ttl_ticks: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.ttl_ticks = dict(ttl_ticks or {})
        wrong = {kind: ticks for kind, ticks in self.ttl_ticks.items() if ticks < 0}
        if wrong:
            raise ValueError(f"ttl_ticks is {wrong}; wanted 0 or more for each kind.")
        self._now = 0
        #: The soft pins by entry_id, and (expiry, entry_id) of each.
        self._pinned: dict[int, tuple[int, Entry]] = {}
        self._expiries: Any = SortedList()

    def expiry(self, entry: Entry) -> int:
        return entry.last_used + self.ttl_ticks.get(entry.kind, entry.priority)

    def key(self, entry: Entry) -> Key:
        self._now = max(self._now, entry.last_used)
        self._unpin(entry)
        expiry = self.expiry(entry)
        if expiry > self._now:
            self._pinned[entry.entry_id] = (expiry, entry)
            self._expiries.add((expiry, entry.entry_id))
        return (expiry > self._now, entry.last_used, -entry.end)

    def evicted(self, entry: Entry) -> None:
        super().evicted(entry)
        self._unpin(entry)

    def victim(self) -> Entry | None:
        while self._expiries and self._expiries[0][0] <= self._now:
            self._rekey(self._pinned[self._expiries[0][1]][1])
        return super().victim()

    def _unpin(self, entry: Entry) -> None:
        if entry.entry_id in self._pinned:
            expiry, _ = self._pinned.pop(entry.entry_id)
            self._expiries.remove((expiry, entry.entry_id))
