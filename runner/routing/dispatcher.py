"""Dispatcher: what a router knows, kept up to date, and its decision. A server and a simulation both drive this.

    choose(ask) ──► Choice ──► send(request, choice) ──► end(request)            of each request
    tell(replica, added, removed), forget(replica), rates.prefilled(...), rates.decoded(...)     of each replica

`choose` changes nothing but the state of a router that draws or counts; `send` books the work and takes the prompt's
digests as stored there. So a server that may have to choose again, since a replica refused, sends once.

  DP1  A request is open at one replica at most.
  DP2  A forgotten replica has no digests and no open requests; `join` makes it known again.

Time is an argument, in seconds from any beginning. O(replicas x blocks) a choice. Not thread-safe. Never imports MLX.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from runner.routing.backlog import Backlog
from runner.routing.digests import BLOCK_TOKENS
from runner.routing.directory import MAX_DIGESTS, Directory
from runner.routing.rates import Rates
from runner.routing.routers import Ask, Router, View


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
        rates: Rates | None = None,
        block_tokens: int = BLOCK_TOKENS,
        max_digests: int = MAX_DIGESTS,
    ) -> None:
        self.router = router
        self.rates = rates or Rates()
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
