"""Routers: which replica a request goes to. Each decides by plain data alone, in a server as in a simulation.

    random        any replica, by a seed
    round-robin   one after the other
    hash          always the same replica, by the session, or by the first blocks of the prompt (rendezvous hashing: if
                  a replica joins or dies, only its own requests move)
    prefix        the replica with the least cost, in seconds:

                      work that waits there
                    + PREFILL_WEIGHT times the prefill of the rest of the prompt there
                    + if work waits there: EVENING_WEIGHT times the recent work there beyond UNEVEN times the mean

With weight 1 the first two terms are TTFT. But prefill also delays later requests and evicts other prefixes: on an hour
of a chat service with 8 replicas, weight 1 finds 0.81 to 0.87 of all that can be cached and weight 3 finds 0.92 to
0.94, at the same waiting times (benchmarks/results/routing-parts.json). The third term moves long conversations off a
busy replica. Ties go to the replica with the least recent work, then by a hash.

A router has no clock, and no randomness but its seed. Never imports MLX.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

HALF_LIFE = 32  # measurements after which an old one counts for half
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


#: Before the first measurement: about those of a model of 8 billion parameters on a laptop.
FIRST = Coefficients(prefill_s=1e-3, decode_s=2.5e-2, output_tokens=256.0)


class RoutingRates:
    """Measured coefficients. ValueError: a first one is negative or not a number."""

    def __init__(self, first: Coefficients = FIRST) -> None:
        if not all(0 <= each < float("inf") for each in first):
            raise ValueError(f"{first}; wanted numbers of 0 or more.")
        self._prefill, self._decode, self._replies = (_Ratio(each) for each in first)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Learn from a prefill, whose seconds are without waiting."""
        self._prefill.add(seconds, tokens)

    def decoded(self, tokens: int, seconds: float) -> None:
        """Learn from a reply, whose seconds are without prefill."""
        self._decode.add(seconds, tokens)
        self._replies.add(tokens, 1)

    @property
    def now(self) -> Coefficients:
        return Coefficients(self._prefill.value, self._decode.value, self._replies.value)


class _Ratio:
    """Two sums, one over the other. Both are halved every `HALF_LIFE` measurements."""

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
    session: str = ""  # tells conversations apart, if it is known


class View(NamedTuple):
    """What is known of a replica for a request."""

    replica: str
    waiting_s: float  # work that it has to do first
    matched_tokens: int  # of the prompt, that it probably has
    recent_s: float  # its recent work


class Router(Protocol):
    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        """Choose a replica. There is at least one view, and the order of views is any."""


class RandomRouter:
    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        return self._draw.choice(_by_name(views))


class RoundRobinRouter:
    def __init__(self, seed: int = 0) -> None:
        self._next = seed

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        chosen = _by_name(views)[self._next % len(views)]
        self._next += 1
        return chosen


class HashRouter:
    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        what = ask.session or f"{list(ask.digests[:HASH_BLOCKS])}"
        return max(views, key=lambda view: (_hash(self._seed, what, view.replica), view.replica))


class PrefixRouter:
    """Weights other than the defaults are for benchmarks."""

    def __init__(
        self, seed: int = 0, prefill_weight: float = PREFILL_WEIGHT, evening_weight: float = EVENING_WEIGHT
    ) -> None:
        self._seed, self._weights = seed, (prefill_weight, evening_weight)

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        what = f"{list(ask.digests[:HASH_BLOCKS])}"
        even_s = UNEVEN * sum(view.recent_s for view in views) / len(views)

        def order(view: View) -> tuple[float, float, int, str]:
            spread = _hash(self._seed, what, view.replica)
            return (weighed_s(ask, view, coefficients, even_s, *self._weights), view.recent_s, spread, view.replica)

        return min(views, key=order)


#: Each is made from a seed.
ROUTERS: dict[str, Callable[[int], Router]] = {
    "random": RandomRouter,
    "round-robin": RoundRobinRouter,
    "hash": HashRouter,
    "prefix": PrefixRouter,
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
    """The cost of a replica for `prefix`, in seconds. `even_s` is the recent work that is not too much."""
    prefill_s = coefficients.prefill_s * max(0, ask.tokens - view.matched_tokens)
    uneven_s = max(0.0, view.recent_s - even_s) if view.waiting_s > 0 else 0.0
    return view.waiting_s + prefill_weight * prefill_s + evening_weight * uneven_s


def _by_name(views: Sequence[View]) -> list[View]:
    return sorted(views, key=lambda view: view.replica)


def _hash(seed: int, what: str, replica: str) -> int:
    content = f"{seed}\0{what}\0{replica}".encode()
    return int.from_bytes(blake2b(content, digest_size=8, person=b"rc route hash").digest(), "little")
