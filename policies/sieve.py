"""SIEVE: a hand moves from the oldest key to the newest, clears marks of used keys and takes the first unmarked key.

Source: Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU", NSDI 2024. One queue in the order of arrival.
A use marks a key and moves nothing. After a victim the hand stays where it is, so new keys come last; after the newest
key it goes back to the oldest. On a tree the hand passes over keys that may not go, and does not clear their marks.
O(log n) per operation, amortised: each cleared mark was set by a use.
"""

from __future__ import annotations

from typing import Any

from sortedcontainers import SortedDict

from policies.entry import Entry
from policies.runs import Place, Run, RunPolicy, key_count


class SIEVE(RunPolicy):
    """Lazy promotion, quick demotion."""

    def __init__(self) -> None:
        super().__init__()
        #: The hand is at the first key from here on; None: at the oldest.
        self._hand: Place | tuple[float, int, int, int] | None = None
        #: How many keys of each tick are left.
        self._arrived: Any = SortedDict()

    def admit(self, entry: Entry) -> list[Run]:
        return [Run(key_count(entry), 0, entry.created)]

    def use(self, run: Run, entry: Entry) -> None:
        run.marks = 1

    def inserted(self, entry: Entry) -> None:
        super().inserted(entry)
        self._arrived[entry.created] = self._arrived.get(entry.created, 0) + key_count(entry)

    def evicted(self, entry: Entry) -> None:
        for run in self._runs[entry.entry_id]:
            self._arrived[run.place] -= run.tokens
            if not self._arrived[run.place]:
                del self._arrived[run.place]
        super().evicted(entry)

    def choose(self) -> Entry:
        queue = self._queues[0]
        while True:
            index = 0 if self._hand is None else queue.bisect_left(self._hand)
            place = queue[index if index < len(queue) else 0]
            entry = self._entries[place[2]]
            if not self._runs[entry.entry_id][-1].marks:
                self._hand = place
                return entry
            self.last_key(entry).marks = 0
            self._hand = (*place, 1)

    def lost(self, entry: Entry, runs: list[Run]) -> None:
        fresh = self._newest.created if self.is_serving and self._newest is not None else None
        latest = next((tick for tick in reversed(self._arrived) if tick != fresh), -1.0)
        if latest < runs[-1].place:
            self._hand = None  # Nothing newer is left.
