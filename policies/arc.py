"""ARC: two LRU lists, of what was used once and of what was used again, and a target between them that ghosts move.

Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. T1 holds what was used
once, T2 what was used again, B1 and B2 the ghosts of what went from them, c is the capacity. The target p is how much
of c T1 may have: a new key whose ghost is in B1 raises it by max(1, |B2| / |B1|), one whose ghost is in B2 lowers it by
max(1, |B1| / |B2|), and both join T2. A victim is the oldest of T1 if |T1| > p, or |T1| = p and the new key's ghost was
in B2, else of T2. |T1| + |B1| stays within c and everything together within 2 c.

ARC moves p before it chooses. That is exact where a cache adds a request's keys first and makes room for them
afterwards; where it makes room first, p is the one that the request before left. On a tree, keys that may not go are
passed over; ghosts are digests of prefixes. O(log n) per operation.
"""

from __future__ import annotations

from typing import ClassVar

from policies.entry import Entry
from policies.ghosts import Ghosts
from policies.runs import Run, RunPolicy, key_count

ONCE, AGAIN = 0, 1


class ARC(RunPolicy):
    """Adaptive replacement: recency and frequency share the capacity as past mistakes suggest."""

    queue_count: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        #: The target p, in keys.
        self.target = 0.0
        self.ghosts = (Ghosts(), Ghosts())
        self._met_again = False

    def admit(self, entry: Entry) -> list[Run]:
        met = [(end, digest, queue) for queue in (ONCE, AGAIN) for end, digest in self.ghosts[queue].meet(entry)]
        runs = []
        start = entry.end - key_count(entry)
        self._met_again = False
        for end, digest, queue in sorted(met):
            known = min(self._adapt(entry, end, digest, queue), end - start)
            if known < end - start:
                runs.append(Run(end - start - known, ONCE, entry.created))
            if known:
                runs.append(Run(known, AGAIN, entry.created))
            start = end
            self._met_again = queue == AGAIN
        if start < entry.end:
            runs.append(Run(entry.end - start, ONCE, entry.created))
            self._met_again = False
        return runs

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
        """Move the target for a ghost that a new entry has met, and forget the ghost; returns its length."""
        ours, other = self.ghosts[queue], self.ghosts[1 - queue]
        step = max(1.0, other.tokens / ours.tokens)
        known = ours.take(entry.state, end, digest)
        self.target += step * known if queue == ONCE else -step * known
        self.target = min(max(self.target, 0.0), float(self.capacity))
        return known

    def _advance(self, tick: int) -> None:
        if tick > self._now:  # Only now, so that no key of a request drives out the ghost of the next one.
            self._trim()
        super()._advance(tick)

    def _trim(self) -> None:
        if self.capacity:
            self.ghosts[ONCE].trim(self.capacity - self.tokens[ONCE])
            self.ghosts[AGAIN].trim(2 * self.capacity - sum(self.tokens) - self.ghosts[ONCE].tokens)
