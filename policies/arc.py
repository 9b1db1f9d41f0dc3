"""ARC: two LRU lists, of keys used once and of keys used again; ghosts move the target size of the first.

Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. T1 holds keys used once, T2
keys used again, B1 and B2 the ghosts evicted from them; c is the capacity, p the target size of T1. A new key with a
ghost in B1 raises p by max(1, |B2| / |B1|), a new key with a ghost in B2 lowers p by max(1, |B1| / |B2|); both join T2.
The victim is the oldest key of T1 if |T1| > p, or if |T1| = p and the new key's ghost was in B2; else the oldest of T2.
|T1| + |B1| <= c, and all four together <= 2 c.

ARC moves p before it chooses. If a cache makes room before it adds, it uses the p of the request before. On a tree, the
policy passes over keys that may not go, and ghosts are digests of prefixes. O(log n) per operation.
"""

from __future__ import annotations

from typing import ClassVar

from policies.entry import Entry
from policies.ghosts import Ghosts
from policies.runs import Run, RunPolicy, runs_of

ONCE, AGAIN = 0, 1


class ARC(RunPolicy):
    """Adaptive replacement cache."""

    queue_count: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        #: The target p, in keys.
        self.target = 0.0
        self.ghosts = (Ghosts(), Ghosts())
        self._met_again = False

    def admit(self, entry: Entry) -> list[Run]:
        met = sorted((end, digest, queue) for queue in (ONCE, AGAIN) for end, digest in self.ghosts[queue].meet(entry))
        self._met_again = bool(met) and met[-1][0] == entry.end and met[-1][2] == AGAIN
        known = ((end, self._adapt(entry, end, digest, queue)) for end, digest, queue in met)
        return runs_of(entry, known, (ONCE, entry.created), (AGAIN, entry.created))

    def use(self, run: Run, entry: Entry) -> None:
        run.queue, run.place = AGAIN, entry.last_used

    def choose(self) -> Entry:
        once = self.counted(ONCE)
        prefers_once = once > self.target or (once == self.target and self.is_serving and self._met_again)
        order = (ONCE, AGAIN) if once >= 1 and prefers_once else (AGAIN, ONCE)
        found = self.oldest(order[0]) or self.oldest(order[1])
        assert found is not None, "something is evictable"
        return found

    def lost(self, entry: Entry, runs: list[Run]) -> None:
        self.ghosts[runs[-1].queue].add(entry, sum(run.tokens for run in runs))
        self._trim()

    def _adapt(self, entry: Entry, end: int, digest: bytes, queue: int) -> int:
        """Move the target for a ghost that a new entry meets, forget the ghost, return its length."""
        ours, other = self.ghosts[queue], self.ghosts[1 - queue]
        step = max(1.0, other.tokens / ours.tokens)
        known = ours.take(entry.state, end, digest)
        self.target += step * known if queue == ONCE else -step * known
        self.target = min(max(self.target, 0.0), float(self.capacity))
        return known

    def _advance(self, tick: int) -> None:
        if tick > self._now:  # Not earlier: a key must not push out the ghost that the request's next key meets.
            self._trim()
        super()._advance(tick)

    def _trim(self) -> None:
        if self.capacity:
            self.ghosts[ONCE].trim(self.capacity - self.tokens[ONCE])
            self.ghosts[AGAIN].trim(2 * self.capacity - sum(self.tokens) - self.ghosts[ONCE].tokens)
