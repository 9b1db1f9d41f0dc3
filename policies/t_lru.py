"""T-LRU: entries that a conversation does not need for its latency goal go first, then LRU.

Source: Zhang, Li, Moallemi, Peng, "Tail-Optimized Caching for LLM Inference", arXiv 2510.15152. A request waits for the
tokens that it prefills: high_water + next_tokens - s, if the longest branch had `high_water` tokens, the next prompt
adds `next_tokens`, and [0, s) is cached. An entry is safe to evict if this number stays within `threshold_tokens`
without the entry's last key.

Key (0 if safe else 1, last_used, -end). A node's high-water length is that of the longest branch through it and never
shrinks. The branch of a checkpoint ends there, because later tokens have their own checkpoints. Lengths count keys. By
default the next prompt adds the average number of tokens, and the goal is four times that. O(log n) per operation, plus
the path of a new leaf that is longer than the branches before it.
"""

from __future__ import annotations

from typing import ClassVar

from policies.entry import Entry
from policies.ordered import Key, OrderedPolicy

#: The default goal, in average additions.
LEARNT_THRESHOLD = 4.0


class TLRU(OrderedPolicy):
    """Tail-optimized LRU.

    Args:
        threshold_tokens: most tokens that a request may have to prefill; None: learnt.
        next_tokens: tokens that the next prompt of a conversation will add; None: learnt.
    """

    #: A branch may need its middle and not its end.
    ranks_whole_edges: ClassVar[bool] = False

    def __init__(self, threshold_tokens: int | None = None, next_tokens: int | None = None) -> None:
        for name, tokens in (("threshold_tokens", threshold_tokens), ("next_tokens", next_tokens)):
            if tokens is not None and tokens < 0:
                raise ValueError(f"{name} is {tokens}; wanted 0 or more, or None.")
        super().__init__()
        self.threshold_tokens = threshold_tokens
        self.next_tokens = next_tokens
        self._high_water: dict[int, int] = {}
        self._added_tokens = 0
        self._requests = 0
        self._last_tick: int | None = None

    def key(self, entry: Entry) -> Key:
        mean = self._added_tokens / max(1, self._requests)
        threshold = LEARNT_THRESHOLD * mean if self.threshold_tokens is None else self.threshold_tokens
        expected = mean if self.next_tokens is None else self.next_tokens
        left = self._high_water[entry.entry_id] + expected - (entry.end - 1)
        return (left > threshold, entry.last_used, -entry.end)

    def inserted(self, entry: Entry) -> None:
        self._high_water[entry.entry_id] = entry.end
        if entry.state == "span":
            self._added_tokens += entry.tokens
            self._requests += entry.created != self._last_tick
            self._last_tick = entry.created
            above = entry.parent
            while above is not None and self._high_water.get(above.entry_id, entry.end) < entry.end:
                self._high_water[above.entry_id] = entry.end
                above = above.parent
        super().inserted(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        high_water = self._high_water
        known = upper if upper.entry_id in high_water else lower
        high_water[upper.entry_id] = high_water[lower.entry_id] = high_water[known.entry_id]
        if known is lower:  # Its last key is the same.
            self._keys[upper.entry_id] = self.key(upper)
        else:
            super().split(upper, lower)

    def merged(self, gone: Entry, into: Entry) -> None:
        high_water = self._high_water
        high_water[into.entry_id] = max(high_water[into.entry_id], high_water[gone.entry_id])
        super().merged(gone, into)

    def evicted(self, entry: Entry) -> None:
        super().evicted(entry)
        self._high_water.pop(entry.entry_id, None)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        if evictable:  # The averages and the branch's length may have changed.
            self._rekey(entry)
        super().evictable_changed(entry, evictable)
