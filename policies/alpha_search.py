"""AlphaSearch: find the weight that would have chosen the best victims in a bootstrap window.

Marconi's authors replay the window's requests at each weight. A policy sees no requests, so each decision records the
victim of every weight on a grid. If a victim is used again before the window ends, its weight pays the victim's prefill
per freed byte. A touch shows the use of an entry that stayed, a ghost the use of an evicted one. Decisions are recorded
in the first half of the window, uses in all of it. The weight with the least cost wins, the smallest of equals.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.entry import Entry
from policies.ghosts import Ghosts

GRID = tuple(index / 4 for index in range(9))


class AlphaSearch:
    """The bootstrap window of one Marconi policy, `decisions` victims long."""

    def __init__(self, decisions: int) -> None:
        self.decisions = decisions
        self.costs = [0.0] * len(GRID)
        self._decided = 0
        self._waiting: dict[int, list[tuple[int, float]]] = {}
        self._gone: dict[tuple[str, bytes], list[tuple[int, float]]] = {}
        self._ghosts = Ghosts()

    @property
    def is_over(self) -> bool:
        return self._decided >= self.decisions

    @property
    def best(self) -> float:
        return GRID[self.costs.index(min(self.costs))]

    def decide(self, victims: Sequence[tuple[Entry, float]]) -> None:
        """Record the victim that each weight of the grid names, and its cost per byte."""
        self._decided += 1
        if 2 * self._decided <= self.decisions:
            for index, (entry, cost_per_byte) in enumerate(victims):
                self._waiting.setdefault(entry.entry_id, []).append((index, cost_per_byte))

    def touched(self, entry: Entry) -> None:
        self._charge(self._waiting.pop(entry.entry_id, []))

    def inserted(self, entry: Entry) -> None:
        for end, digest in self._ghosts.meet(entry):
            self._ghosts.take(entry.state, end, digest)
            self._charge(self._gone.pop((entry.state, digest), []))

    def split(self, upper: Entry, lower: Entry) -> None:
        if (waiting := self._waiting.pop(upper.entry_id, None)) is not None:
            self._waiting[lower.entry_id] = waiting  # A victim is a last key.

    def merged(self, gone: Entry, into: Entry) -> None:
        self._waiting.pop(gone.entry_id, None)

    def evicted(self, entry: Entry) -> None:
        if (waiting := self._waiting.pop(entry.entry_id, None)) is not None:
            self._ghosts.add(entry, max(1, entry.tokens))
            self._gone[entry.state, entry.digest] = waiting

    def _charge(self, waiting: list[tuple[int, float]]) -> None:
        for index, cost_per_byte in waiting:
            self.costs[index] += cost_per_byte
