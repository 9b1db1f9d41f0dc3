"""S3-FIFO: a small, a main and a ghost queue. A key not used again in the small queue goes soon and leaves a ghost.

Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023. New keys join the
small queue, a tenth of the capacity; keys with a ghost join the main queue. The victim is the oldest key of the small
queue if that queue is full, else of the main queue. A key used twice moves from the small to the main queue instead; a
used key of the main queue joins its end again with one use less. Uses count up to three. Ghosts stand for as many keys
as the main queue's share of the capacity.

Keys that came before the first victim fill the small queue, then the main queue. On a tree, the policy passes over keys
that may not go, and ghosts are digests of prefixes. O(log n) per operation, amortised.
"""

from __future__ import annotations

from typing import ClassVar

from policies.entry import Entry
from policies.ghosts import Ghosts
from policies.runs import Run, RunPolicy, runs_of

SMALL, MAIN = 0, 1
MOST_MARKS = 3
#: More moves than ever happen: places are numbered by request, then by move.
MOST_MOVES = 1 << 60


class S3FIFO(RunPolicy):
    """Small, main and ghost queue. `marks_to_promote` uses move a key from the small to the main queue."""

    queue_count: ClassVar[int] = 2

    def __init__(self, small_share: float = 0.1, marks_to_promote: int = 2) -> None:
        if not 0 < small_share < 1:
            raise ValueError(f"small_share is {small_share}; wanted more than 0 and less than 1.")
        if not 1 <= marks_to_promote <= MOST_MARKS:
            raise ValueError(f"marks_to_promote is {marks_to_promote}; wanted 1 to {MOST_MARKS}.")
        super().__init__()
        self.small_share = small_share
        self.marks_to_promote = marks_to_promote
        self.ghosts = Ghosts()
        self._moves = 0
        self._request = 0
        self._last_tick: int | None = None
        self._warming = True

    def admit(self, entry: Entry) -> list[Run]:
        if entry.created != self._last_tick:
            self._last_tick = entry.created
            self._request += 1
        known = ((end, self.ghosts.take(entry.state, end, digest)) for end, digest in self.ghosts.meet(entry))
        return runs_of(entry, known, (SMALL, entry.created), (MAIN, (self._request + 1) * MOST_MOVES - 1))

    def use(self, run: Run, entry: Entry) -> None:
        run.marks = min(MOST_MARKS, run.marks + 1)

    def choose(self) -> Entry:
        if self._warming:
            self._warm_up()
        if self.counted(SMALL) >= int(self.capacity * self.small_share) or not self._queues[MAIN]:
            while (entry := self.oldest(SMALL)) is not None:
                if self._runs[entry.entry_id][-1].marks < self.marks_to_promote:
                    return entry
                self.move(entry, MAIN, self._end_of_main(), 0)
        while True:
            entry = self.oldest(MAIN)
            assert entry is not None, "something is evictable"
            marks = self._runs[entry.entry_id][-1].marks
            if marks == 0:
                return entry
            self.move(entry, MAIN, self._end_of_main(), marks - 1)

    def lost(self, entry: Entry, runs: list[Run]) -> None:
        if runs[-1].queue == SMALL:
            self.ghosts.add(entry, sum(run.tokens for run in runs))
            self.ghosts.trim(int(self.capacity * (1 - self.small_share)))

    def _end_of_main(self) -> int:
        """The end of the main queue, before the keys of the request that needs room."""
        self._moves += 1
        return (self._request if self.is_serving else self._request + 1) * MOST_MOVES + self._moves

    def _warm_up(self) -> None:
        """Once, when the capacity is known: move keys that came after the small queue was full to the main queue."""
        self._warming = False
        room = int(self.capacity * self.small_share)
        for place, _, number in sorted(self._arrivals()):
            if not (self.is_serving and place == self._now):
                room = self._fill(self._entries[number], place, room)

    def _arrivals(self) -> list[tuple[float, int, int]]:
        """Place, end and entry of all runs. Within a request, keys at the root side came first."""
        arrivals = []
        for number, runs in self._runs.items():
            end = self._entries[number].end
            for run in reversed(runs):
                arrivals.append((run.place, end, number))
                end -= run.tokens
        return arrivals

    def _fill(self, entry: Entry, place: float, room: int) -> int:
        """Leave at most `room` keys that came at `place` in the small queue; return the remaining room."""
        filed = self._unfile(entry)
        runs = self._runs[entry.entry_id]
        for index in range(len(runs) - 1, -1, -1):
            run = runs[index]
            if run.place != place or run.queue != SMALL:
                continue
            rest = Run(max(0, run.tokens - room), MAIN, place, run.marks)
            run.tokens -= rest.tokens
            room -= run.tokens
            runs[index : index + 1] = [each for each in (run, rest) if each.tokens]
            self.tokens[SMALL] -= rest.tokens
            self.tokens[MAIN] += rest.tokens
        if filed:
            self._file(entry)
        return room
