"""Routing: what is known of each replica, and which replica gets a request. A server and a simulation both use it.

    choose(ask) ──► Choice ──► send(request, choice) ──► end(request)            for each request
    tell(replica, added, removed), forget(replica), rates.prefilled(...), rates.decoded(...)     for each replica

`choose` changes only the state of a random or round-robin router. `send` notes the work and the prompt's digests at the
replica, so that a next request with this prefix finds it there. A digest of 64 bits stands for the model, the namespace
and the whole prefix up to a block border. A wrong digest costs one miss.

    root_digest(model, namespace) ── digest of [0, 256) ── digest of [0, 512) ── ...

The routers:

    random        any replica, by a seed
    round-robin   one after the other
    hash          always the same replica, by the session, or by the first blocks of the prompt (rendezvous hashing: if
                  a replica joins or dies, only its own requests move)
    prefix        the replica with the least cost, in seconds:

                      work that waits there
                    + PREFILL_WEIGHT times the prefill of the rest of the prompt there
                    + if work waits there: EVENING_WEIGHT times the recent work there above UNEVEN times the mean

With weight 1 the first two terms are TTFT. But prefill also delays later requests and evicts other prefixes. Measured
on an hour of a chat service with 8 replicas, weight 1 finds 0.81 to 0.87 of what can be cached, and weight 3 0.92 to
0.94. Waiting times are equal (benchmarks/results/routing-parts.json). The third term moves long conversations off a
busy replica. Of replicas with equal costs, the one that did less work recently gets the request, then one by a hash.

Invariants:

  DP1  A request is open at one replica at most.
  DP2  A forgotten replica has no digests and no open requests; `join` makes it known again.
  BA1  `waiting_s` and `recent_s` are 0 or more; `waiting_s` is 0 if no request is open.
  DI1  A replica has at most `max_digests`. The oldest are removed first; `send` and `tell` make digests the newest.
  DI2  Of digests that were added together, that of the longest prefix is the oldest. So a prefix loses its end first.

Time is an argument, in seconds from any start. The only randomness is the seed of a router. A choice takes
O(replicas x blocks). Not thread-safe. Never imports MLX.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b
from itertools import count, takewhile
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 256  # of one block
DIGEST_BYTES = 8
MAX_DIGESTS = 65_536  # of one replica: 16 million tokens, in about 20 MB
HALF_LIFE_S = 3600.0  # after this time, recent work has half the weight
HALF_LIFE = 32  # after so many measurements, an old one has half the weight
HASH_BLOCKS = 4  # the first blocks of a prompt, for `hash`: more than a common system prompt has
PREFILL_WEIGHT = 3.0
UNEVEN, EVENING_WEIGHT = 1.1, 2.0


class Coefficients(NamedTuple):
    """Cost of tokens on a replica, in seconds."""

    prefill_s: float
    decode_s: float  # if several requests decode together, the request's share of a step
    output_tokens: float  # of a reply, on average

    def work_s(self, prefill_tokens: float, output_tokens: float | None = None) -> float:
        """Seconds of work for a request; None: the reply has average length."""
        output_tokens = self.output_tokens if output_tokens is None else output_tokens
        return prefill_tokens * self.prefill_s + output_tokens * self.decode_s


#: Values before the first measurement: roughly those of a model of 8 billion parameters on a laptop.
FIRST = Coefficients(prefill_s=1e-3, decode_s=2.5e-2, output_tokens=256.0)


class RoutingRates:
    """Measured coefficients. ValueError: a value of `first` is negative or not a number."""

    def __init__(self, first: Coefficients = FIRST) -> None:
        if not all(0 <= each < float("inf") for each in first):
            raise ValueError(f"{first}; wanted numbers of 0 or more.")
        self._prefill, self._decode, self._replies = (_Ratio(each) for each in first)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Learn from a prefill; `seconds` are without waiting."""
        self._prefill.add(seconds, tokens)

    def decoded(self, tokens: int, seconds: float) -> None:
        """Learn from a reply; `seconds` are without prefill."""
        self._decode.add(seconds, tokens)
        self._replies.add(tokens, 1)

    @property
    def now(self) -> Coefficients:
        return Coefficients(self._prefill.value, self._decode.value, self._replies.value)


class _Ratio:
    """The quotient of two sums. Both sums are halved every `HALF_LIFE` measurements."""

    _DECAY = 0.5 ** (1 / HALF_LIFE)

    def __init__(self, first: float) -> None:
        self.value = first
        self._upper = self._lower = 0.0

    def add(self, upper: float, lower: float) -> None:
        self._upper = self._upper * self._DECAY + upper
        self._lower = self._lower * self._DECAY + lower
        if self._lower > 0:
            self.value = self._upper / self._lower


class Ask(NamedTuple):
    """A new request."""

    digests: Sequence[int]  # of its prompt, at the block borders
    tokens: int
    session: str = ""  # names the conversation, if it is known


class View(NamedTuple):
    """What is known of a replica for a request."""

    replica: str
    waiting_s: float  # work that it has to do first
    matched_tokens: int  # tokens of the prompt that it probably has
    recent_s: float  # its recent work


#: Chooses a replica. There is at least one view; the order of views has no meaning.
Router = Callable[[Ask, Sequence[View], Coefficients], View]


def random_router(seed: int = 0) -> Router:
    draw = random.Random(seed)
    return lambda ask, views, coefficients: draw.choice(_by_name(views))


def round_robin_router(seed: int = 0) -> Router:
    turns = count(seed)
    return lambda ask, views, coefficients: _by_name(views)[next(turns) % len(views)]


def hash_router(seed: int = 0) -> Router:
    def choose(ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        what = ask.session or f"{list(ask.digests[:HASH_BLOCKS])}"
        return max(views, key=lambda view: (_hash(seed, what, view.replica), view.replica))

    return choose


def prefix_router(
    seed: int = 0, prefill_weight: float = PREFILL_WEIGHT, evening_weight: float = EVENING_WEIGHT
) -> Router:
    """Weights other than the defaults are for benchmarks."""

    def choose(ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        what = f"{list(ask.digests[:HASH_BLOCKS])}"
        even_s = UNEVEN * sum(view.recent_s for view in views) / len(views)

        def order(view: View) -> tuple[float, float, int, str]:
            cost_s = weighed_s(ask, view, coefficients, even_s, prefill_weight, evening_weight)
            return (cost_s, view.recent_s, _hash(seed, what, view.replica), view.replica)

        return min(views, key=order)

    return choose


#: Functions that make a router from a seed, by the router's name.
ROUTERS: dict[str, Callable[[int], Router]] = {
    "random": random_router,
    "round-robin": round_robin_router,
    "hash": hash_router,
    "prefix": prefix_router,
}


def make_router(name: str, seed: int = 0) -> Router:
    """A router by its name. ValueError: no router has that name."""
    if name not in ROUTERS:
        raise ValueError(f"router {name!r} is not known. Known: {', '.join(ROUTERS)}.")
    return ROUTERS[name](seed)


def weighed_s(
    ask: Ask,
    view: View,
    coefficients: Coefficients,
    even_s: float,
    prefill_weight: float = PREFILL_WEIGHT,
    evening_weight: float = EVENING_WEIGHT,
) -> float:
    """The cost of a replica for `prefix`, in seconds. Recent work up to `even_s` adds no cost."""
    prefill_s = coefficients.prefill_s * max(0, ask.tokens - view.matched_tokens)
    uneven_s = max(0.0, view.recent_s - even_s) if view.waiting_s > 0 else 0.0
    return view.waiting_s + prefill_weight * prefill_s + evening_weight * uneven_s


def _by_name(views: Sequence[View]) -> list[View]:
    return sorted(views, key=lambda view: view.replica)


def _hash(seed: int, what: str, replica: str) -> int:
    content = f"{seed}\0{what}\0{replica}".encode()
    return int.from_bytes(blake2b(content, digest_size=8, person=b"rc route hash").digest(), "little")


class Choice(NamedTuple):
    replica: str
    ask: Ask
    matched_tokens: int  # tokens of the prompt that the replica probably has
    waiting_s: float  # work that the replica has to do first
    work_s: float  # expected work of this request


class Dispatcher:
    """Sends requests to replicas. `rates` are for all replicas; the caller updates them with measured times."""

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
        """Make a replica known, with the mean recent work of all. A replica that is known already does not change."""
        if replica not in self._backlogs:
            recent_s = [backlog.recent_s(self._now_s) for backlog in self._backlogs.values()]
            self._backlogs[replica] = Backlog(fmean(recent_s) if recent_s else 0.0, self._now_s)

    def forget(self, replica: str) -> None:
        self._backlogs.pop(replica, None)
        self.directory.forget(replica)
        self._open = {request: where for request, where in self._open.items() if where != replica}

    def tell(self, replica: str, added: Sequence[int] = (), removed: Iterable[int] = ()) -> None:
        """Learn what a replica has stored and evicted since the last call; `added` has shorter prefixes first."""
        self.directory.remove(replica, removed)
        self.directory.add(replica, added)

    def views(self, ask: Ask, now_s: float, among: Iterable[str] | None = None) -> list[View]:
        """What is known of the replicas for a request. `among`: only of these replicas; new ones join."""
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
        """Choose one of the replicas `among`, or of all. ValueError: there is no replica."""
        views = self.views(ask, now_s, None if among is None else set(among))
        if not views:
            raise ValueError("there is no replica to choose; wanted at least one.")
        coefficients = self.rates.now
        view = self.router(ask, views, coefficients)
        work_s = coefficients.work_s(max(0, ask.tokens - view.matched_tokens))
        return Choice(view.replica, ask, view.matched_tokens, view.waiting_s, work_s)

    def send(self, request: Hashable, choice: Choice, now_s: float) -> None:
        """Note that a request is open at the chosen replica. ValueError: the request is open already."""
        if request in self._open:
            raise ValueError(f"request {request!r} was sent to {self._open[request]}, and has not ended.")
        self.join(choice.replica)
        self._backlogs[choice.replica].send(request, choice.work_s, now_s)
        self._open[request] = choice.replica
        self.directory.add(choice.replica, choice.ask.digests)

    def end(self, request: Hashable, now_s: float, work_s: float | None = None) -> None:
        """End a request that took `work_s` (None: as expected). A request that is not open is ignored."""
        replica = self._open.pop(request, None)
        if replica is not None:
            self._backlogs[replica].end(request, now_s, work_s)

    def check(self) -> None:
        """Assert the invariants DP1, DP2 and DI1."""
        self.directory.check()
        assert set(self._open.values()) <= self._backlogs.keys(), (self._open, self.replicas)
        assert len(self._open) == sum(map(len, self._backlogs.values())), self._open


class Backlog:
    """The open requests of one replica, in the order they were sent, and the seconds of its work. All in O(1).

    The replica is assumed to serve one request after the other. The first request has run since `_began_s`, and only
    the rest of its work waits; the rest is 0 if it takes longer than expected. If the replica runs several requests
    together, the sum is right, but the progress of the first is a guess.
    """

    def __init__(self, recent_s: float = 0.0, now_s: float = 0.0) -> None:
        self._recent_s, self._recent_at_s = recent_s, now_s
        self._total_s = 0.0
        self._work_s: dict[Hashable, float] = {}
        self._began_s = 0.0

    def send(self, request: Hashable, work_s: float, now_s: float) -> None:
        if not self._work_s:
            self._began_s = now_s
        self._work_s[request] = work_s
        self._total_s += work_s
        self._add_recent(work_s, now_s)

    def end(self, request: Hashable, now_s: float, work_s: float | None = None) -> None:
        """Remove an open request; `work_s`: its measured work, if any."""
        if self._first == request:
            self._began_s = now_s
        expected_s = self._work_s.pop(request)
        self._total_s = self._total_s - expected_s if self._work_s else 0.0  # exactly 0, without rounding
        if work_s is not None:
            self._add_recent(work_s - expected_s, now_s)

    def waiting_s(self, now_s: float) -> float:
        first_s = self._work_s.get(self._first, 0.0)
        return max(0.0, self._total_s - min(first_s, max(0.0, now_s - self._began_s)))

    def recent_s(self, now_s: float) -> float:
        """Seconds of recent work, halved with every HALF_LIFE_S."""
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


class Directory:
    """The digests of each replica. ValueError: `max_digests` is below 1."""

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        if max_digests < 1:
            raise ValueError(f"max_digests is {max_digests}; wanted at least 1.")
        self.max_digests = max_digests
        self._digests: dict[str, OrderedDict[int, None]] = {}

    def add(self, replica: str, digests: Sequence[int]) -> None:
        """Add the digests of a prompt, in the order of its blocks."""
        known = self._digests.setdefault(replica, OrderedDict())
        for digest in reversed(digests):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self.max_digests:
            known.popitem(last=False)

    def remove(self, replica: str, digests: Iterable[int]) -> None:
        """Remove digests; unknown ones are ignored."""
        known = self._digests.get(replica, OrderedDict())
        for digest in digests:
            known.pop(digest, None)

    def forget(self, replica: str) -> None:
        self._digests.pop(replica, None)

    def matched_blocks(self, replica: str, digests: Iterable[int]) -> int:
        """How many of a prompt's first blocks the replica has."""
        known = self._digests.get(replica, ())
        return sum(1 for _ in takewhile(known.__contains__, digests))

    def count(self, replica: str) -> int:
        return len(self._digests.get(replica, ()))

    def check(self) -> None:
        for replica, known in self._digests.items():
            assert len(known) <= self.max_digests, (replica, len(known), self.max_digests)


def root_digest(model: str, namespace: str = "", secret: bytes = b"") -> int:
    """The digest that precedes a prompt's first block. Only with `secret`, at most 64 bytes, can it be computed."""
    inner = blake2b(model.encode(), digest_size=DIGEST_BYTES, key=secret, person=b"rc route model").digest()
    return _number(blake2b(inner + namespace.encode(), digest_size=DIGEST_BYTES, key=secret, person=b"rc route root"))


def chain_digests(tokens: NDArray[np.integer], root: int, block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """The digests at the block borders of `tokens` (T,). `root`: the digest at the border where the tokens begin."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; wanted at least 1.")
    step = 8 * block_tokens
    content = memoryview(tokens[: len(tokens) // block_tokens * block_tokens].astype("<i8").tobytes())
    digests = []
    for start in range(0, len(content), step):
        block = blake2b(root.to_bytes(DIGEST_BYTES, "little"), digest_size=DIGEST_BYTES, person=b"rc route block")
        block.update(content[start : start + step])
        root = _number(block)
        digests.append(root)
    return digests


def _number(content: blake2b) -> int:
    return int.from_bytes(content.digest(), "little")
