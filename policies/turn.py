"""Turn: evict last the conversations that are likely to go on soon, by turn number and growth.

Every request becomes the last user of its path. How likely the path is to be used again depends on the request's class:
its kind ("main", "subagent"), its turn and its size: the length of a first turn (long prompts go on less often, and
later), "branch" if it leaves a stored path in the middle (a shared document rarely goes on), and the growth of a later
turn (a long pasted text is mostly the last question). Lengths are in units of the typical first turn, ages in units of
the typical interval. A ReuseModel gives the worth of a class at an age; the least worth goes.

    spent      almost without worth: the end of a prompt that its continuation does not share. A new end counts as spent
               if continuations cut such ends off and one eviction takes no more than that
    branching  each request that only passed through adds the worth once more, up to 4 times

Without turn numbers from the caller, a request is the next turn of another if it shares at least half of what the other
added and no third one has branched off; the prior then counts half. Before the model has seen 16 intervals, spent
entries go first, then the least recently used.

There is one queue per (class, branching, spent), the least recently used first. Worth does not grow with age, so only
the heads are candidates. A hook is O(log n) amortised; a victim is O(queues), a few dozen. A request is remembered
while it holds an entry, or until the request that may continue it is settled.

Based on LPC (NeurIPS 2025) and the workload-aware policy of arXiv 2506.02634, which have no classes by growth, no
Gittins index and no spent ends. The priors come from the first half of the Mooncake conversation trace, the other
constants from all of it (see benchmarks/results/turn-research.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from sortedcontainers import SortedList

from policies.conversations import UNSETTLED, Class, Ends, Request, Sizes
from policies.entry import Entry
from policies.reuse import ReuseModel

Queue = tuple[Class, int, bool, int]
Rank = tuple[float, int, int, int]

#: (probability of another use, median interval in units of the typical one) of a class, by turn and size.
_PRIORS = {
    "1": {"tiny": (0.02, 1.1), "short": (0.39, 1.0), "long": (0.29, 1.4), "huge": (0.24, 1.8), "branch": (0.14, 1.2)},
    "2": {"small": (0.54, 1.1), "large": (0.11, 1.2), "unknown": (0.42, 1.1)},
    "3": {"small": (0.59, 1.0), "large": (0.15, 0.9), "unknown": (0.48, 1.0)},
    "4-5": {"small": (0.65, 0.95), "large": (0.39, 1.2), "unknown": (0.60, 1.0)},
    "6+": {"small": (0.77, 0.75), "large": (0.60, 1.5), "unknown": (0.72, 0.9)},
    "checkpoint": {"fresh": (0.15, 1.0), "used": (0.50, 1.0)},
}
PRIOR = {(turn, size): prior for turn, sizes in _PRIORS.items() for size, prior in sizes.items()}
#: If a turn is inferred, the prior goes half of the way (in logarithms) to this.
COMMON_PROBABILITY = 0.35
SPENT_WORTH = 1e-6
MAX_BRANCHING = 4
#: The model is rebuilt after this many uses, or after an eighth of those watched.
REBUILD_USES = 100
#: Kinds of request that have their own classes: a server may have one kind for each user.
MAX_KINDS = 8
OTHER_KINDS = "(other)"


class Turn:
    """Least worth first."""

    #: The end of an edge may be spent while the rest is not.
    ranks_whole_edges: ClassVar[bool] = False

    def __init__(self) -> None:
        self.model = ReuseModel()
        self._now = 0
        self._requests: dict[int, Request] = {}
        self._unsettled: dict[int, Request] = {}
        self._user: dict[int, Request] = {}
        self._watched: dict[int, Request] = {}
        self._branching: dict[int, int] = {}
        self._filed: dict[int, tuple[Queue, tuple[int, int, int]]] = {}
        self._queues: dict[Queue, Any] = {}
        self._entries: dict[int, Entry] = {}
        self._ranks: dict[Queue, Rank] = {}
        self._ranked_at = 0
        self._sizes = Sizes()
        self._ends = Ends()
        self._uses_since_rebuild = 0
        self._kinds: set[str] = set()
        self._turns_are_given = False

    def inserted(self, entry: Entry) -> None:
        if entry.state == "checkpoint":
            self._use_checkpoint(entry, "fresh")
            return
        request = self._request(entry.created)
        if request.previous is None and not request.holds and entry.parent is not None:
            self._take_up(request, entry.parent)
        if not request.has_added:
            request.has_added, request.start = True, entry.start
        request.end, request.stored_end = max(request.end, entry.end), max(request.stored_end, entry.end)
        request.given_turn, request.kind = entry.turn, entry.kind
        self._turns_are_given = entry.turn is not None
        self._hold(request, entry)

    def touched(self, entry: Entry) -> None:
        if entry.state == "checkpoint":
            self._use_checkpoint(entry, "used")
            return
        request = self._request(entry.last_used)
        if self._user[entry.entry_id] is not request:
            if request.previous is None and not request.holds:
                self._take_up(request, entry)
            request.passed.append(entry)
            self._hold(request, entry)
        self._refile(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        old, new = (upper, lower) if upper.entry_id in self._user else (lower, upper)
        self._hold(self._user[old.entry_id], new)
        if old.entry_id in self._branching:
            self._branching[new.entry_id] = self._branching[old.entry_id]
        self._refile(old)

    def merged(self, gone: Entry, into: Entry) -> None:
        branching = max(self._branching.get(gone.entry_id, 0), self._branching.get(into.entry_id, 0))
        newer = max(self._user[gone.entry_id], self._user[into.entry_id], key=lambda request: request.tick)
        self._hold(newer, into)
        self._forget(gone)
        if branching:
            self._branching[into.entry_id] = branching
        self._refile(into)

    def evicted(self, entry: Entry) -> None:
        if entry.state == "span":
            request = self._user[entry.entry_id]
            self._ends.cut(entry.tokens)
            request.stored_end = min(request.stored_end, entry.start)
        self._forget(entry)

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        self._unfile(entry)
        if evictable:
            self._file(entry)

    def victim(self) -> Entry | None:
        if self._ranked_at != self._now:
            self._ranks.clear()
            self._ranked_at = self._now
        for queue, order in self._queues.items():
            if queue not in self._ranks:
                self._ranks[queue] = self._rank(queue, order[0])
        return self._entries[min(self._ranks.values())[-1]] if self._ranks else None

    def pass_over(self, entry: Entry, cuts: Sequence[int]) -> int:
        number = entry.entry_id
        queue, item = self._filed[number]
        others = [rank for each, rank in self._ranks.items() if each != queue]
        others += [self._rank(queue, each) for each in self._queues[queue][1:2]]
        # After the first cut the entry no longer has the end of a prompt, which may be spent.
        worth, tick, *_ = self._rank((*queue[:2], self._user[number].is_spent, queue[3]), item)
        nearest = min(others, default=(math.inf, math.inf))
        passed = 0
        while passed < len(cuts) - 1 and (worth, tick, -cuts[passed], number) < nearest:
            passed += 1
        for end, at in zip((entry.end, *cuts[:passed]), cuts[:passed], strict=False):
            self._ends.cut(end - at)
        return passed

    def weight_of(self, entry: Entry) -> int:
        """By how many half octaves a subclass scales an entry's worth; all entries of a queue have one weight."""
        return 0

    def _request(self, tick: int) -> Request:
        self._advance(tick)
        if tick not in self._requests:
            self._requests[tick] = Request(tick)
        self._unsettled[tick] = self._requests[tick]
        return self._requests[tick]

    def _advance(self, tick: int) -> None:
        """Settle the earlier requests at the first hook of a new tick."""
        if tick > self._now:
            self._now = tick
            unsettled, self._unsettled = self._unsettled, {}
            for each in unsettled.values():
                if each.holds:
                    self._settle(each)

    def _take_up(self, request: Request, entry: Entry) -> None:
        """Note how much a request shares of what the last user of its deepest found entry added."""
        previous = self._user[entry.entry_id]
        if previous is request:
            return
        matched, start, stored = entry.end, previous.start, previous.stored_end
        last = stored - 1
        request.previous, request.start, request.end, request.stored_end = previous, matched, matched, matched
        request.takes_up = 2 * (matched - start) >= stored - start if matched > start else matched == start == last
        request.reaches_end = matched >= last
        request.found_alone = entry.children <= 1
        previous.is_claimed = True

    def _settle(self, request: Request) -> None:
        # The caller's turn comes with added entries. If there are none, trust as for the last request.
        request.is_trusted = request.given_turn is not None if request.has_added else self._turns_are_given
        if request.previous is not None:
            self._judge(request, request.previous)
        request.turn = request.given_turn or request.turn
        size = self._sizes.classify(request.turn, request.start, request.end, request.continues)
        prior = PRIOR[size]
        if not request.is_trusted:
            size = (f"{size[0]}?", size[1])
            prior = (math.sqrt(prior[0] * COMMON_PROBABILITY), 1.0)
        self._classify(request, *size, prior=prior)
        request.passed = []
        if not request.is_watched:
            self._watch(request.tick, request)
        for each in list(request.holds.values()):
            self._refile(each)

    def _judge(self, request: Request, previous: Request) -> None:
        """Decide whether a request is the next turn of the previous one."""
        request.previous, previous.is_claimed = None, False
        request.continues = request.takes_up and request.found_alone
        if request.given_turn is not None:
            follows = request.given_turn == previous.turn + 1
            request.continues = follows and (request.takes_up or request.reaches_end)
        if request.continues:
            # A repeated prompt is no next turn.
            request.turn = previous.turn + (request.has_added or request.is_trusted)
            self._ends.cut_off(previous.end - request.start if previous.stored_end == previous.end else None)
            self._stop_watching(previous, request.tick, used=True)
            previous.is_spent = True
            for each in list(previous.holds.values()):
                self._refile(each)
        else:
            for each in request.passed:
                if self._user.get(each.entry_id) is request:
                    count = self._branching.get(each.entry_id, 0)
                    self._branching[each.entry_id] = min(MAX_BRANCHING, count + 1)
        self._drop_if_unused(previous, request.tick)

    def _use_checkpoint(self, entry: Entry, how: str) -> None:
        """Use a checkpoint: only requests that resume at it count."""
        self._advance(entry.last_used)
        old = self._user.get(entry.entry_id)
        if old is not None:
            self._stop_watching(old, entry.last_used, used=True)
        request = Request(entry.last_used, kind=entry.kind)
        self._classify(request, "checkpoint", how, prior=PRIOR["checkpoint", how])
        self._hold(request, entry)
        self._refile(entry)
        self._watch(-entry.entry_id, request)

    def _classify(self, request: Request, turn: str, size: str, prior: tuple[float, float]) -> None:
        """Give a request its class. All kinds beyond the first MAX_KINDS count as one."""
        if len(self._kinds) < MAX_KINDS:
            self._kinds.add(request.kind)
        request.class_key = (request.kind if request.kind in self._kinds else OTHER_KINDS, turn, size)
        self.model.declare(request.class_key, *prior)

    def _watch(self, number: int, request: Request) -> None:
        request.is_watched = True
        self._watched[number] = request
        self._uses_since_rebuild += 1
        if self._uses_since_rebuild >= max(REBUILD_USES, len(self._watched) // 8):
            self._rebuild()

    def _stop_watching(self, request: Request, tick: int, used: bool) -> None:
        if request.is_watched:
            request.is_watched = False
            (self.model.used_again if used else self.model.lost_sight)(request.class_key, tick - request.tick)

    def _rebuild(self) -> None:
        self._watched = {number: each for number, each in self._watched.items() if each.is_watched}
        watching = ((each.class_key, self._now - each.tick) for each in self._watched.values())
        self.model.rebuild(watching, self._uses_since_rebuild)
        self._uses_since_rebuild = 0
        self._ranks.clear()

    def _hold(self, request: Request, entry: Entry) -> None:
        old = self._user.get(entry.entry_id)
        if old is request:
            return
        self._user[entry.entry_id] = request
        request.holds[entry.entry_id] = entry
        if old is not None:
            del old.holds[entry.entry_id]
            self._drop_if_unused(old, self._now)

    def _drop_if_unused(self, request: Request, tick: int) -> None:
        if request.holds or request.is_claimed:
            return
        self._stop_watching(request, tick, used=False)
        if self._requests.get(request.tick) is request:
            del self._requests[request.tick]
        previous, request.previous = request.previous, None
        if previous is not None:
            previous.is_claimed = False
            self._drop_if_unused(previous, tick)

    def _forget(self, entry: Entry) -> None:
        self._unfile(entry)
        self._branching.pop(entry.entry_id, None)
        request = self._user.pop(entry.entry_id)
        del request.holds[entry.entry_id]
        request.passed = [each for each in request.passed if each is not entry]
        self._drop_if_unused(request, self._now)

    def _rank(self, queue: Queue, head: tuple[int, int, int]) -> Rank:
        class_key, branching, is_spent, weight = queue
        tick, deepest, number = head
        if class_key == UNSETTLED:
            return (math.inf, tick, deepest, number)
        if not self.model.is_warm:
            return (0.0 if is_spent else 1.0, tick, deepest, number)
        worth = self.model.value(class_key, self._now - tick) * (1 + branching) * 2.0 ** (weight / 2.0)
        return (worth * SPENT_WORTH if is_spent else worth, tick, deepest, number)

    def _file(self, entry: Entry) -> None:
        request = self._user[entry.entry_id]
        is_spent = entry.state == "span" and (
            request.is_spent or (entry.end == request.end > request.start and self._ends.are_spent)
        )
        queue = (request.class_key, self._branching.get(entry.entry_id, 0), is_spent, self.weight_of(entry))
        item = (request.tick, -entry.end, entry.entry_id)
        self._filed[entry.entry_id] = (queue, item)
        self._entries[entry.entry_id] = entry
        if queue not in self._queues:
            self._queues[queue] = SortedList()
        self._queues[queue].add(item)
        self._ranks.pop(queue, None)

    def _unfile(self, entry: Entry) -> None:
        if entry.entry_id not in self._filed:
            return
        queue, item = self._filed.pop(entry.entry_id)
        del self._entries[entry.entry_id]
        self._queues[queue].remove(item)
        self._ranks.pop(queue, None)
        if not self._queues[queue]:
            del self._queues[queue]

    def _refile(self, entry: Entry) -> None:
        if entry.entry_id in self._filed:
            self._unfile(entry)
            self._file(entry)
