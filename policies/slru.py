"""SLRU: entries used once go before entries used again; in each part the least recently used first, deepest on ties.

Key (uses >= 2, last_used, -end). O(log n) per operation. Source: Karedla, Love, Wherry, "Caching strategies to improve
disk system performance", IEEE Computer 27(3), 1994, where the protected part is a list of fixed size. Here, while the
protected part holds more than `protected_share` of all tokens, the order is plain LRU.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.ordered import Key, SortedPolicy


class SLRU(SortedPolicy):
    """Segmented LRU. `protected_share`: largest share of the tokens that may be protected; None: no cap."""

    def __init__(self, protected_share: float | None = None) -> None:
        if protected_share is not None and not 0 < protected_share <= 1:
            raise ValueError(f"protected_share is {protected_share}; wanted more than 0 and at most 1, or None.")
        super().__init__()
        # Under a cap, each key that goes changes the share.
        self.ranks_whole_edges = protected_share is None
        self.protected_share = protected_share
        self._tokens: dict[int, tuple[int, bool]] = {}
        self._held = [0, 0]

    def key(self, entry: Entry) -> Key:
        protected = entry.uses >= 2
        before, was_protected = self._tokens.get(entry.entry_id, (0, False))
        tokens = entry.tokens if entry.state == "span" else 0
        self._held[was_protected] -= before
        self._held[protected] += tokens
        self._tokens[entry.entry_id] = (tokens, protected)
        return (protected, entry.last_used, -entry.end)

    def evicted(self, entry: Entry) -> None:
        super().evicted(entry)
        tokens, protected = self._tokens.pop(entry.entry_id, (0, False))
        self._held[protected] -= tokens

    def victim(self) -> Entry | None:
        first = super().victim()
        if first is None or self.protected_share is None or self._order[0][0][0]:
            return first
        if self._held[True] <= self.protected_share * sum(self._held):
            return first
        index = self._order.bisect_left(((True,), 0))
        if index == len(self._order):
            return first
        protected = self._filed[self._order[index][1]]
        return min(first, protected, key=lambda entry: (entry.last_used, -entry.end, entry.entry_id))
