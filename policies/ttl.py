"""TTL: soft pins. What was used within its time to live goes last; everything else before it, LRU in both.

Key (unexpired, last_used, -end), where an entry is unexpired until the tick `last_used + ttl`. Its time to live is the
one given for its kind, else its priority: a request with priority 500 keeps what it used for 500 ticks, and every use
renews that. Without kinds and priorities nothing is pinned and this is LRU.

A soft pin yields when the budget cannot be met otherwise; for one that does not, see PrefixCache.pin.
Time is what the entries say: a tick is a request, or a millisecond where the ticks follow a clock.
O(log n) per operation, amortised: an entry expires at most once for each time it was used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sortedcontainers import SortedList

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy


class TTL(OrderedPolicy):
    """Unexpired entries last, then LRU.

    Args:
        ttl_ticks: time to live by kind of the request that made an entry; other kinds take their priority for it.
    """

    def __init__(self, ttl_ticks: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.ttl_ticks = dict(ttl_ticks or {})
        wrong = {kind: ticks for kind, ticks in self.ttl_ticks.items() if ticks < 0}
        if wrong:
            raise ValueError(f"ttl_ticks is {wrong}; wanted 0 or more for each kind.")
        self._now = 0
        #: The soft pins: when each expires, and of what; and (expiry, entry_id) of all of them.
        self._pinned: dict[int, tuple[int, Entry]] = {}
        self._expiries: Any = SortedList()

    def expiry(self, entry: Entry) -> int:
        """The tick from which an entry that is not used again may go."""
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
