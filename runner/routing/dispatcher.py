"""Dispatcher: what a router knows, kept up to date, and its decision. A server and a simulation both drive this.

    choose(ask) ──► Choice ──► send(request, choice) ──► end(request)            of each request
    tell(replica, added, removed), forget(replica), rates.prefilled(...), rates.decoded(...)     of each replica

`choose` changes nothing but the state of a router that draws or counts; `send` books the work and takes the prompt's
digests as stored there. So a server that may have to choose again, since a replica refused, sends once.

  DP1  A request is open at one replica at most.
  DP2  A forgotten replica has no digests and no open requests; `join` makes it known again.

Time is an argument, in seconds from any beginning. O(replicas x blocks) a choice. Not thread-safe. Never imports MLX.

Backlog: the requests that were sent to one replica and have not ended, its work of late, and the seconds of both.

    sent ──► [ first │ second │ third ]  work_s each ──► ended
               └ at work since: what it has had by now is not waited for any more

A replica is taken to serve one after the other, in the order they were sent. Where it serves several together, their
sum is right and only the first one's progress is guessed. One that takes longer than expected counts for nothing.
Work of late is what it was sent, halved with every hour since.

  BA1  `waiting_s` and `recent_s` are 0 or more; `waiting_s` is 0 where nothing is open.

All in O(1). Time is an argument, in seconds from any beginning. Not thread-safe.

Directory: which prefixes each replica is thought to store, by their digests, bounded in size. Never imports MLX.

    sent, told as added ──► a replica's digests, oldest first ──► told as removed, beyond the bound, replica forgotten

What was sent to a replica counts as there at once, so that the next request with this prefix follows it; what the
replica tells later corrects that. A digest that is wrong sends a request to where it is prefilled: it costs a miss, and
nothing else.

  DI1  A replica has `max_digests` at most; the oldest went for room. Sending and telling make digests young again.
  DI2  Of digests that came together, the deepest is the oldest: a prefix loses its end first.

Matching takes O(blocks) of a replica, sending and telling O(digests). Not thread-safe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from runner.routing.digests import BLOCK_TOKENS
from runner.routing.routers import Ask, Router, RoutingRates, View

#: After which work counts for half of late.
HALF_LIFE_S = 3600.0


class Backlog:
    """The open requests of one replica.

    Args:
        recent_s: the work it is taken to have had of late as it comes, at `now_s`.
    """

    def __init__(self, recent_s: float = 0.0, now_s: float = 0.0) -> None:
        self._recent_s, self._recent_at_s = recent_s, now_s
        self._total_s = 0.0
        self._work_s: dict[Hashable, float] = {}
        self._began_s = 0.0

    def send(self, request: Hashable, work_s: float, now_s: float) -> None:
        """Add a request.

        Raises:
            ValueError: it is open already.
        """
        if request in self._work_s:
            raise ValueError(f"request {request!r} was sent here before, and has not ended.")
        if not self._work_s:
            self._began_s = now_s
        self._work_s[request] = work_s
        self._total_s += work_s
        self._add_recent(work_s, now_s)

    def end(self, request: Hashable, now_s: float, work_s: float | None = None) -> None:
        """Take a request out: answered, failed or cancelled.

        Args:
            work_s: what it turned out to be; None: what it was expected to be.

        Raises:
            KeyError: it is not open.
        """
        if self._first == request:
            self._began_s = now_s
        expected_s = self._work_s.pop(request)
        self._total_s = self._total_s - expected_s if self._work_s else 0.0  # whatever rounding has left
        if work_s is not None:
            self._add_recent(work_s - expected_s, now_s)

    def waiting_s(self, now_s: float) -> float:
        """Seconds of work before a request that comes now is looked at."""
        first_s = self._work_s.get(self._first, 0.0)
        return max(0.0, self._total_s - min(first_s, max(0.0, now_s - self._began_s)))

    def recent_s(self, now_s: float) -> float:
        """Seconds of work that it was sent of late."""
        age_s = max(0.0, now_s - self._recent_at_s)
        return self._recent_s * math.exp2(-age_s / HALF_LIFE_S)

    def __len__(self) -> int:
        return len(self._work_s)

    def _add_recent(self, work_s: float, now_s: float) -> None:
        self._recent_s = max(0.0, self.recent_s(now_s) + work_s)
        self._recent_at_s = max(now_s, self._recent_at_s)

    @property
    def _first(self) -> Hashable:
        return next(iter(self._work_s), None)


#: Of a replica: at 256 tokens a block 16 million tokens, in some 20 MB.
MAX_DIGESTS = 65_536


class Directory:
    """Replicas by name, each with its digests. Nobody need say that a replica is there before it has digests.

    Args:
        max_digests: the most that are kept of one replica.

    Raises:
        ValueError: `max_digests` is below 1.
    """

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        if max_digests < 1:
            raise ValueError(f"max_digests is {max_digests}; wanted at least 1.")
        self.max_digests = max_digests
        self._digests: dict[str, OrderedDict[int, None]] = {}

    def add(self, replica: str, digests: Sequence[int]) -> None:
        """Take digests as stored: they were sent there, or it told so.

        Args:
            digests: of one prompt, from its beginning on; or of several, one behind the other.
        """
        known = self._digests.setdefault(replica, OrderedDict())
        for digest in reversed(digests):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self.max_digests:
            known.popitem(last=False)

    def remove(self, replica: str, digests: Iterable[int]) -> None:
        """Take digests as gone: the replica told so. Unknown ones are passed over."""
        known = self._digests.get(replica, OrderedDict())
        for digest in digests:
            known.pop(digest, None)

    def forget(self, replica: str) -> None:
        """Take everything of a replica as gone: it died, or tells all anew."""
        self._digests.pop(replica, None)

    def matched_blocks(self, replica: str, digests: Iterable[int]) -> int:
        """How many blocks a prompt begins with that this replica has; 0 of one that is not known."""
        known = self._digests.get(replica, ())
        count = 0
        for digest in digests:
            if digest not in known:
                break
            count += 1
        return count

    def count(self, replica: str) -> int:
        """How many digests of a replica are known."""
        return len(self._digests.get(replica, ()))

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: DI1 does not hold.
        """
        for replica, known in self._digests.items():
            assert len(known) <= self.max_digests, (replica, len(known), self.max_digests)

    def dump(self) -> str:
        """A line per replica: its name and how many digests it has."""
        return "\n".join(f"{replica}: {len(known):,} digests" for replica, known in sorted(self._digests.items()))


class Choice(NamedTuple):
    """Where a request goes.

    Attributes:
        matched_tokens: tokens of its prompt that the replica is thought to have.
        waiting_s: seconds of work that it has to do first.
        work_s: seconds of work that the request is.
    """

    replica: str
    ask: Ask
    matched_tokens: int
    waiting_s: float
    work_s: float


class Dispatcher:
    """Sends requests to replicas.

    Args:
        router: what decides.
        replicas: those that are there from the beginning.
        rates: what tokens cost; for all replicas the same, and shared with whoever measures.
        block_tokens: tokens that a digest stands for.
        max_digests: kept of a replica.
    """

    def __init__(
        self,
        router: Router,
        replicas: Iterable[str] = (),
        *,
        rates: RoutingRates | None = None,
        block_tokens: int = BLOCK_TOKENS,
        max_digests: int = MAX_DIGESTS,
    ) -> None:
        self.router = router
        self.rates = rates or RoutingRates()
        self.block_tokens = block_tokens
        self.directory = Directory(max_digests)
        self._backlogs = {replica: Backlog() for replica in replicas}
        self._open: dict[Hashable, str] = {}
        self._now_s = 0.0

    @property
    def replicas(self) -> list[str]:
        return sorted(self._backlogs)

    def join(self, replica: str) -> None:
        """Make a replica known, as one with the mean work of late; one that is known already stays as it is."""
        if replica not in self._backlogs:
            recent_s = [backlog.recent_s(self._now_s) for backlog in self._backlogs.values()]
            self._backlogs[replica] = Backlog(fmean(recent_s) if recent_s else 0.0, self._now_s)

    def forget(self, replica: str) -> None:
        """Drop all that is known of a replica: it died."""
        self._backlogs.pop(replica, None)
        self.directory.forget(replica)
        self._open = {request: where for request, where in self._open.items() if where != replica}

    def tell(self, replica: str, added: Sequence[int] = (), removed: Iterable[int] = ()) -> None:
        """Learn what a replica has stored, and what it has given up, since it last told.

        Args:
            added: digests of prefixes, the shorter before the longer.
        """
        self.directory.remove(replica, removed)
        self.directory.add(replica, added)

    def views(self, ask: Ask, now_s: float, among: Iterable[str] | None = None) -> list[View]:
        """What is known of the replicas for a request; `among`: of these alone, which become known thereby."""
        self._now_s = max(now_s, self._now_s)
        for replica in among or ():
            self.join(replica)
        return [
            View(
                replica,
                backlog.waiting_s(now_s),
                min(ask.tokens, self.directory.matched_blocks(replica, ask.digests) * self.block_tokens),
                backlog.recent_s(now_s),
            )
            for replica, backlog in self._backlogs.items()
            if among is None or replica in among
        ]

    def choose(self, ask: Ask, now_s: float, among: Iterable[str] | None = None) -> Choice:
        """Decide where a request goes.

        Args:
            among: the replicas that can take it; None: all that are known.

        Raises:
            ValueError: there is no replica to choose.
        """
        views = self.views(ask, now_s, None if among is None else set(among))
        if not views:
            raise ValueError("there is no replica to choose; wanted at least one.")
        coefficients = self.rates.now
        view = self.router.choose(ask, views, coefficients)
        work_s = coefficients.work_s(max(0, ask.tokens - view.matched_tokens))
        return Choice(view.replica, ask, view.matched_tokens, view.waiting_s, work_s)

    def send(self, request: Hashable, choice: Choice, now_s: float) -> None:
        """Take it that a request was sent where it was chosen to go.

        Raises:
            ValueError: it is open already.
        """
        if request in self._open:
            raise ValueError(f"request {request!r} was sent to {self._open[request]}, and has not ended.")
        self.join(choice.replica)
        self._backlogs[choice.replica].send(request, choice.work_s, now_s)
        self._open[request] = choice.replica
        self.directory.add(choice.replica, choice.ask.digests)

    def end(self, request: Hashable, now_s: float, work_s: float | None = None) -> None:
        """Take it that a request is over, in whatever way; one that is not open is passed over.

        Args:
            work_s: the replica's work for it, in seconds, where it is known by now; None: what was expected.
        """
        replica = self._open.pop(request, None)
        if replica is not None:
            self._backlogs[replica].end(request, now_s, work_s)

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: DP1 or DP2 does not hold, or one of the directory.
        """
        self.directory.check()
        assert set(self._open.values()) <= self._backlogs.keys(), (self._open, self.replicas)
        assert len(self._open) == sum(map(len, self._backlogs.values())), self._open
