"""GDSF and LFUDA: the smallest H = L + uses * cost / bytes goes first, where L is the H of the last victim.

Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HPL-98-69R1,
after Cao and Irani's GreedyDual-Size. O(log n) per operation, plus the runs of equal L on the edge; ties go to the
least recently used, then the deepest.

A key takes L when it is added or used, and not when it becomes a leaf: else a shared prefix would be new again whenever
its last branch goes. A split inherits L. If a cache makes room for a whole request first, the new keys take the values
that L had meanwhile, the root side the first ones, as if room were made for one key after the other. So the keys of one
edge may differ in L: a run has its L as `place`. If a cache adds first, all new keys take the present L.

`cost / bytes` is read when the entry is filed, since a new entry has no bytes yet; without bytes it counts as 0. On an
edge of many keys it is the mean, which is exact where a key's cost does not depend on its position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from policies.entry import Entry
from policies.ordered import Key, SortedPolicy
from policies.runs import Run, cut, joined


class GDSF(SortedPolicy):
    """Greedy-Dual-Size-Frequency."""

    ranks_whole_edges: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        #: L, the H of the last victim.
        self.inflation = 0.0
        self._runs: dict[int, list[Run]] = {}
        #: How many keys went at each value of L since keys were last added.
        self._levels: list[Run] = []
        self._level_before = 0.0
        #: Entry and number of keys that the latest request added, root side first.
        self._fresh: list[tuple[int, int]] = []
        self._added_tick = -1
        self._is_new_burst = True
        self._chosen: set[int] = set()
        self._chosen_value = 0.0

    def value(self, entry: Entry) -> float:
        """What one use of an entry is worth: its cost per byte."""
        return entry.cost / entry.weight_bytes if entry.weight_bytes > 0 else 0.0

    def key(self, entry: Entry) -> Key:
        age = self._runs[entry.entry_id][-1].place
        return (age + entry.uses * self.value(entry), entry.last_used, -entry.end)

    def inserted(self, entry: Entry) -> None:
        self._runs[entry.entry_id] = [Run(max(1, entry.tokens), 0, self.inflation)]
        if entry.state == "span":
            self._add_fresh(entry)
        super().inserted(entry)

    def touched(self, entry: Entry) -> None:
        if entry.last_used > entry.created:  # Else it is the request that made it.
            self._runs[entry.entry_id] = [Run(max(1, entry.tokens), 0, self.inflation)]
        if entry.last_used > self._added_tick:
            self._fresh = []
        super().touched(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        old, new = (upper, lower) if upper.entry_id in self._runs else (lower, upper)
        self._runs[upper.entry_id], self._runs[lower.entry_id] = cut(self._runs[old.entry_id], lower.tokens)
        self._fresh = [(number, tokens) for number, tokens in self._fresh if number != old.entry_id]
        if old.entry_id in self._chosen:
            self._chosen.add(new.entry_id)
        super().split(upper, lower)

    def merged(self, gone: Entry, into: Entry) -> None:
        self._runs[into.entry_id] = joined(self._runs[gone.entry_id] + self._runs[into.entry_id])
        self._chosen.discard(gone.entry_id)
        self._fresh = []
        super().merged(gone, into)

    def evicted(self, entry: Entry) -> None:
        if entry.entry_id in self._chosen:
            self._note_level(entry, entry.tokens)
            self._chosen.discard(entry.entry_id)
        super().evicted(entry)
        self._runs.pop(entry.entry_id, None)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        if evictable:
            self._rekey(entry)
        super().evictable_changed(entry, evictable)

    def victim(self) -> Entry | None:
        while (first := super().victim()) is not None and self.key(first) != self._keys[first.entry_id]:
            self._rekey(first)
        self._chosen = set() if first is None else {first.entry_id}
        self._chosen_value = 0.0 if first is None else self._keys[first.entry_id][0]
        return first

    def pass_over(self, entry: Entry, cuts: Sequence[int]) -> int:
        number = entry.entry_id
        value, used, _ = self._keys[number]
        last = self._runs[number][-1]
        second = [*self._order[1:2], ((math.inf,), 0)][0]
        passed = 0
        while passed < len(cuts) - 1 and entry.end - cuts[passed] < last.tokens:
            if second < ((value, used, -cuts[passed]), number):
                break
            passed += 1
        if passed:
            tokens = entry.end - cuts[passed - 1]
            self._runs[number][-1] = Run(last.tokens - tokens, 0, last.place)
            self._fresh = [(each, count) for each, count in self._fresh if each != number]
            self._note_level(entry, tokens)
        return passed

    def _note_level(self, victim: Entry, tokens: int) -> None:
        """The H of a victim that goes, or loses its tail, is the new L."""
        if self._is_new_burst:
            self._is_new_burst = False
            self._levels = []
            self._level_before = self.inflation
        self.inflation = self._chosen_value
        newest = self._fresh[-1][0] if self._fresh else victim.entry_id
        is_serving = newest != victim.entry_id and newest in self._keys and newest not in self._filed
        if victim.state == "span" and not is_serving:
            self._levels.append(Run(tokens, 0, self.inflation))

    def _add_fresh(self, entry: Entry) -> None:
        """Give a request's keys the values that L went through to make room for them; the last key has the latest."""
        if entry.created != self._added_tick:
            self._added_tick = entry.created
            self._fresh = []
        self._fresh.append((entry.entry_id, entry.tokens))
        self._is_new_burst = True
        if not self._levels:
            return
        total = sum(tokens for _, tokens in self._fresh)
        noted = sum(run.tokens for run in self._levels)
        spare = [Run(total - noted, 0, self._level_before)] if noted < total else []
        _, runs = cut(spare + self._levels, total)
        for number, tokens in reversed(self._fresh):
            runs, self._runs[number] = cut(runs, tokens)


class LFUDA(GDSF):
    """Least frequently used with dynamic aging: GDSF for hits, not for the work they save.

    Source: Arlitt et al., "Evaluating content management techniques for web proxy caches", 2000.
    """

    def value(self, entry: Entry) -> float:
        return 1.0
