"""AlphaSearch: which weight would have chosen the better victims, from the decisions of a bootstrap window.

Marconi's authors replay the requests of the window at each weight. A policy does not see requests, but it sees its own
decisions: for each it is noted which victim every weight on a grid would have named. A victim that is used again before
the window ends was a mistake and costs what it takes to prefill it again, per byte that it would have freed. That is
known of entries that stayed, by their touch, and of those that went, by their ghost. Decisions are noted in the first
half of the window and all of it is watched. The weight with the least cost wins, the smallest of equals.
What is remembered is no more than half the window's decisions times the weights of the grid, and ends with the window.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.entry import Entry
from policies.ghosts import Ghosts

#: The weights that are tried.
GRID = tuple(index / 4 for index in range(9))


class AlphaSearch:
    """The bootstrap window of one Marconi policy.

    Args:
        decisions: length of the window in victims.
    """

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
        """The weight with the least cost so far."""
        return GRID[self.costs.index(min(self.costs))]

    def decide(self, victims: Sequence[tuple[Entry, float]]) -> None:
        """A victim was needed: the one that each weight of the grid names, and its cost per byte."""
        self._decided += 1
        if 2 * self._decided <= self.decisions:
            for index, (entry, cost_per_byte) in enumerate(victims):
                self._waiting.setdefault(entry.entry_id, []).append((index, cost_per_byte))

    def touched(self, entry: Entry) -> None:
        """The last key of an entry was used."""
        self._charge(self._waiting.pop(entry.entry_id, []))

    def inserted(self, entry: Entry) -> None:
        """A new entry, perhaps one that went before."""
        for end, digest in self._ghosts.meet(entry):
            self._ghosts.take(entry.state, end, digest)
            self._charge(self._gone.pop((entry.state, digest), []))

    def split(self, upper: Entry, lower: Entry) -> None:
        """What waits is about the last key, which is in the lower part."""
        waiting = self._waiting.pop(upper.entry_id, None)
        if waiting is not None:
            self._waiting[lower.entry_id] = waiting

    def merged(self, gone: Entry, into: Entry) -> None:
        self._waiting.pop(gone.entry_id, None)

    def evicted(self, entry: Entry) -> None:
        """An entry goes; what waits for it waits for its ghost."""
        waiting = self._waiting.pop(entry.entry_id, None)
        if waiting is not None:
            self._ghosts.add(entry, max(1, entry.tokens))
            self._gone[entry.state, entry.digest] = waiting

    def _charge(self, waiting: list[tuple[int, float]]) -> None:
        for index, cost_per_byte in waiting:
            self.costs[index] += cost_per_byte
