"""Marconi: recency weighed against compute saved per byte.

Source: Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025, arXiv 2411.19379. The value of a
candidate is minmax(1 / age) + alpha * minmax(cost / bytes), both terms scaled to 0..1 over the candidates; the smallest
value goes first. Candidates are leaves and the checkpoints of single-child nodes.

The order of two entries changes as they age, so a sorted list cannot hold it. A victim is the worst of at most
`candidates` entries, drawn one each from equal slices of the LRU order. O(candidates * log n) per victim, O(log n) per
other operation. On an edge of many keys `cost / bytes` is the mean. If all entries save the same per byte, this is LRU
among the candidates. A learnt alpha is 0 for the first `bootstrap` victims (see AlphaSearch).
"""

from __future__ import annotations

from policies.alpha_search import GRID, AlphaSearch
from policies.entry import Entry
from policies.ordered import Key
from policies.random_choice import Random


class Marconi(Random):
    """Recency plus compute saved per byte. Like Random, one draw per victim.

    Args:
        alpha: weight of compute saved per byte, 0 or more; 0 is LRU; None: learnt.
        candidates: entries compared for a victim.
        bootstrap: victims from which alpha is learnt.
    """

    def __init__(self, alpha: float | None = None, candidates: int = 48, bootstrap: int = 2000, seed: int = 0) -> None:
        if (alpha is not None and alpha < 0) or candidates < 1 or bootstrap < 1:
            raise ValueError(
                f"alpha is {alpha}, candidates {candidates}, bootstrap {bootstrap}; wanted 0 or more, 1 or more, and "
                "1 or more."
            )
        super().__init__(seed)
        self.alpha = 0.0 if alpha is None else alpha
        self.candidates = candidates
        self._is_learning = alpha is None
        self._search = AlphaSearch(bootstrap if self._is_learning else 0)
        self._decided_draw: float | None = None
        self._now = 0
        self._answer: Entry | None = None

    def key(self, entry: Entry) -> Key:
        return (entry.last_used, -entry.end)

    def inserted(self, entry: Entry) -> None:
        self._now = max(self._now, entry.last_used)
        self._answer = None
        super().inserted(entry)
        self._search.inserted(entry)

    def touched(self, entry: Entry) -> None:
        self._now = max(self._now, entry.last_used)
        self._answer = None
        super().touched(entry)
        self._search.touched(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self._answer = None
        super().split(upper, lower)
        self._search.split(upper, lower)

    def merged(self, gone: Entry, into: Entry) -> None:
        self._search.merged(gone, into)
        super().merged(gone, into)

    def evicted(self, entry: Entry) -> None:
        self._answer = None
        was_chosen = entry.entry_id in self._chosen
        super().evicted(entry)
        self._search.evicted(entry)
        if was_chosen and self._is_learning and self._search.is_over:
            self.alpha, self._search, self._is_learning = self._search.best, AlphaSearch(0), False

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        self._answer = None
        super().evictable_changed(entry, evictable)

    def victim(self) -> Entry | None:
        if self._answer is None and self._order:
            self._answer = self._worst([self._filed[number] for _, number in self._sample()])
            self._chosen = {self._answer.entry_id}
        return self._answer

    def _sample(self) -> list[tuple[Key, int]]:
        """All evictable entries, or one of each slice."""
        count = len(self._order)
        if count <= self.candidates:
            return list(self._order)
        return [self._order[int((index + self._draw) * count / self.candidates)] for index in range(self.candidates)]

    def _worst(self, entries: list[Entry]) -> Entry:
        recency = _scaled([1.0 / (1 + self._now - entry.last_used) for entry in entries])
        rates = [entry.cost / entry.weight_bytes if entry.weight_bytes > 0 else 0.0 for entry in entries]
        saved = _scaled(rates)

        def worst(alpha: float) -> int:
            values = [recent + alpha * save for recent, save in zip(recency, saved, strict=True)]
            return values.index(min(values))

        if self._is_learning and self._decided_draw != self._draw:
            self._decided_draw = self._draw
            self._search.decide([(entries[index], rates[index]) for index in map(worst, GRID)])
        return entries[worst(self.alpha)]


def _scaled(numbers: list[float]) -> list[float]:
    """Scale numbers to 0 for the smallest and 1 for the largest; all 0 if they are equal."""
    low, high = min(numbers), max(numbers)
    return [(number - low) / (high - low) if high > low else 0.0 for number in numbers]
