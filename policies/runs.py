"""RunPolicy: base of the queue policies, which know each key and move one key at a time.

An entry stands for many keys; only its last key may go. A run is adjacent keys with the same queue, place and marks.
A queue holds the last run of each evictable entry, at (place, -end): of keys that came together the deepest is the
oldest. An entry that is not evictable is in no queue. So an edge of n keys goes through the same states as n nodes.

Sizes are in keys: a queue's `tokens` counts all its keys, evictable or not; a checkpoint counts as one key. The
capacity is the number of keys stored at the first victim of a request, without the request's own guarded keys.

  RU1  The runs of an entry have at least one key each, and together as many keys as the entry.
  RU2  `_filed[id]` says where an evictable entry's last run stands; nothing else is in a queue.
  RU3  `tokens[q]` is the sum over all runs in queue q.

O(log n) per operation, plus the runs of the edge; a victim takes O(log n) more for each mark that it clears.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sortedcontainers import SortedList

from policies.entry import Entry

Place = tuple[float, int, int]
QueuePlace = tuple[int, float]


@dataclass(slots=True)
class Run:
    """Adjacent keys of one entry with the same history."""

    tokens: int
    queue: int
    place: float
    marks: int = 0


def key_count(entry: Entry) -> int:
    return entry.end - entry.start if entry.state == "span" else 1


class RunPolicy:
    """Subclasses define `admit`, `use`, `choose` and `lost`."""

    #: The next key of an edge may be marked, or in another queue.
    ranks_whole_edges: ClassVar[bool] = False
    queue_count: ClassVar[int] = 1

    def __init__(self) -> None:
        self.tokens = [0] * self.queue_count
        self.capacity = 0
        self._queues: list[Any] = [SortedList() for _ in range(self.queue_count)]
        self._runs: dict[int, list[Run]] = {}
        self._filed: dict[int, tuple[int, Place]] = {}
        self._entries: dict[int, Entry] = {}
        self._evictable: set[int] = set()
        self._answer: Entry | None = None
        self._chosen: set[int] = set()
        self._now = 0
        self._newest: Entry | None = None
        self._fresh = [0] * self.queue_count
        self._asked = False

    def admit(self, entry: Entry) -> list[Run]:
        """The runs of a new entry, root side first."""
        raise NotImplementedError(f"{type(self).__name__} must define admit(entry).")

    def use(self, run: Run, entry: Entry) -> None:
        """Change the queue, place and marks of a used run."""
        raise NotImplementedError(f"{type(self).__name__} must define use(run, entry).")

    def choose(self) -> Entry:
        """The victim. Called only if an entry is evictable, and once between two hooks."""
        raise NotImplementedError(f"{type(self).__name__} must define choose().")

    def lost(self, entry: Entry, runs: list[Run]) -> None:
        """A victim or its tail goes; `tokens` no longer counts its runs."""

    def inserted(self, entry: Entry) -> None:
        self._advance(entry.created)
        self._entries[entry.entry_id] = entry
        self._runs[entry.entry_id] = runs = self.admit(entry)
        for run in runs:
            self.tokens[run.queue] += run.tokens
            self._fresh[run.queue] += run.tokens
        if entry.state == "span":
            self._newest = entry

    def touched(self, entry: Entry) -> None:
        self._advance(entry.last_used)
        if entry.last_used == entry.created:
            return  # The request that made it.
        filed = self._unfile(entry)
        runs = self._runs[entry.entry_id]
        for run in runs:
            self.tokens[run.queue] -= run.tokens
            self.use(run, entry)
            self.tokens[run.queue] += run.tokens
        self._runs[entry.entry_id] = joined(runs)
        if filed:
            self._file(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self._answer = None
        old, new = (upper, lower) if upper.entry_id in self._runs else (lower, upper)
        filed = self._unfile(old)
        self._runs[upper.entry_id], self._runs[lower.entry_id] = cut(self._runs[old.entry_id], lower.tokens)
        self._entries[new.entry_id] = new
        if old.entry_id in self._chosen:
            self._chosen.add(new.entry_id)
        if filed:
            self._file(old)

    def merged(self, gone: Entry, into: Entry) -> None:
        self._answer = None
        self._forget(gone)
        self._chosen.discard(gone.entry_id)
        filed = self._unfile(into)
        self._runs[into.entry_id] = joined(self._runs.pop(gone.entry_id) + self._runs[into.entry_id])
        if filed:
            self._file(into)

    def evicted(self, entry: Entry) -> None:
        self._answer = None
        self._forget(entry)
        runs = self._runs.pop(entry.entry_id)
        for run in runs:
            self.tokens[run.queue] -= run.tokens
        if entry.entry_id in self._chosen:
            self._chosen.discard(entry.entry_id)
            self.lost(entry, runs)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        self._answer = None
        if evictable:
            self._evictable.add(entry.entry_id)
            self._file(entry)
        else:
            self._unfile(entry)
            self._evictable.discard(entry.entry_id)

    def victim(self) -> Entry | None:
        if not self._evictable:
            return None
        if self._answer is None:
            if not self._asked:
                self._asked = True
                self.capacity = sum(self.counted(queue) for queue in range(self.queue_count))
            self._answer = self.choose()
            self._chosen = {self._answer.entry_id}
        return self._answer

    def check(self) -> None:
        """Assert RU1 to RU3."""
        tokens = [0] * self.queue_count
        for number, entry in self._entries.items():
            runs = self._runs[number]
            assert sum(run.tokens for run in runs) == key_count(entry), (entry, runs)
            assert all(run.tokens > 0 for run in runs), (entry, runs)
            for run in runs:
                tokens[run.queue] += run.tokens
            if number in self._evictable:
                place = (runs[-1].place, -entry.end, number)
                assert self._filed[number] == (runs[-1].queue, place), (entry, runs)
        assert tokens == self.tokens, (tokens, self.tokens)
        assert set(self._filed) == self._evictable, set(self._filed) ^ self._evictable
        assert set(self._runs) == set(self._entries), set(self._runs) ^ set(self._entries)
        filed = {(number, place) for number, queue in enumerate(self._queues) for place in queue}
        assert filed == set(self._filed.values()), filed ^ set(self._filed.values())

    # For subclasses

    def counted(self, queue: int) -> int:
        """Keys in a queue, without the guarded ones that the present request has added."""
        return self.tokens[queue] - (self._fresh[queue] if self.is_serving else 0)

    @property
    def is_serving(self) -> bool:
        """Whether the newest keys belong to a request that still guards them."""
        return self._newest is not None and self._newest.entry_id not in self._evictable

    def oldest(self, queue: int) -> Entry | None:
        return self._entries[self._queues[queue][0][2]] if self._queues[queue] else None

    def last_key(self, entry: Entry) -> Run:
        """Cut off the run of an entry's last key. Only `move` changes its queue and place."""
        runs = self._runs[entry.entry_id]
        if (last := runs[-1]).tokens > 1:
            last.tokens -= 1
            runs.append(Run(1, last.queue, last.place, last.marks))
        return runs[-1]

    def move(self, entry: Entry, queue: int, place: float, marks: int) -> None:
        self._unfile(entry)
        run = self.last_key(entry)
        self.tokens[run.queue] -= 1
        run.queue, run.place, run.marks = queue, place, marks
        self.tokens[queue] += 1
        self._file(entry)

    def _advance(self, tick: int) -> None:
        self._answer = None
        self._asked = False
        if tick > self._now:
            self._now = tick
            self._newest = None
            self._fresh = [0] * self.queue_count

    def _forget(self, entry: Entry) -> None:
        """Forget everything about a gone entry except its runs."""
        self._unfile(entry)
        self._evictable.discard(entry.entry_id)
        del self._entries[entry.entry_id]
        if self._newest is entry:
            self._newest = None

    def _file(self, entry: Entry) -> None:
        if entry.entry_id not in self._filed:
            run = self._runs[entry.entry_id][-1]
            place = (run.place, -entry.end, entry.entry_id)
            self._filed[entry.entry_id] = (run.queue, place)
            self._queues[run.queue].add(place)

    def _unfile(self, entry: Entry) -> bool:
        filed = self._filed.pop(entry.entry_id, None)
        if filed is not None:
            self._queues[filed[0]].remove(filed[1])
        return filed is not None


def runs_of(entry: Entry, known: Iterable[tuple[int, int]], fresh: QueuePlace, met: QueuePlace) -> list[Run]:
    """The runs of a new entry, root side first: for each (end, tokens) the last `tokens` keys before `end` met a ghost.

    `fresh` and `met` are queue and place of the keys without and with a ghost.
    """
    runs = []
    start = entry.end - key_count(entry)
    for end, tokens in known:
        tokens = min(tokens, end - start)
        runs += [Run(end - start - tokens, *fresh), Run(tokens, *met)]
        start = end
    runs.append(Run(entry.end - start, *fresh))
    return [run for run in runs if run.tokens]


def joined(runs: list[Run]) -> list[Run]:
    """Join neighbours that differ in length only. The runs themselves do not change."""
    found = runs[:1]
    for run in runs[1:]:
        last = found[-1]
        if (run.queue, run.place, run.marks) == (last.queue, last.place, last.marks):
            found[-1] = replace(last, tokens=last.tokens + run.tokens)
        else:
            found.append(run)
    return found


def cut(runs: list[Run], below_tokens: int) -> tuple[list[Run], list[Run]]:
    """Cut off the last `below_tokens` keys. The runs themselves do not change."""
    above = list(runs)
    below: list[Run] = []
    while below_tokens > 0:
        run = above.pop()
        if run.tokens > below_tokens:
            above.append(replace(run, tokens=run.tokens - below_tokens))
            run = replace(run, tokens=below_tokens)
        below.insert(0, run)
        below_tokens -= run.tokens
    return above, below
