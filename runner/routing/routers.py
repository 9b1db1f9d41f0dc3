"""Routers: which replica a request goes to. Each decides by plain data alone, in a server as in a simulation.

    random        any one, by a seed
    round-robin   one after the other
    hash          by the session, or where there is none by how the prompt begins, always the same one (rendezvous
                  hashing: where a replica comes or goes, only what was its own moves)
    prefix        where the request is through prefill first: what waits there + what is left to prefill there

Ties of `prefix` go to the replica that was sent the least work, then by a hash of prompt and replica. A router sees
only what it is given, no clock and no other chance than its seed. Never imports MLX.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from runner.routing.rates import Coefficients

#: How many blocks say how a prompt begins, for `hash`.
HASH_BLOCKS = 1


class Ask(NamedTuple):
    """A request that comes.

    Attributes:
        digests: of its prompt, at the block borders.
        tokens: length of the prompt.
        session: what tells conversations apart, where it is known.
    """

    digests: Sequence[int]
    tokens: int
    session: str = ""


class View(NamedTuple):
    """What is known of a replica at that moment.

    Attributes:
        waiting_s: seconds of work that it has to do first.
        matched_tokens: tokens of the prompt that it is thought to have.
        sent_s: seconds of work that it was ever sent.
    """

    replica: str
    waiting_s: float
    matched_tokens: int
    sent_s: float


class Router(Protocol):
    """Chooses a replica."""

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        """The one of `views`, which are one or more and in no particular order, that the request goes to."""


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
    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        what = f"{list(ask.digests[:HASH_BLOCKS])}"

        def order(view: View) -> tuple[float, float, int, str]:
            spread = _hash(self._seed, what, view.replica)
            return (expected_s(ask, view, coefficients), view.sent_s, spread, view.replica)

        return min(views, key=order)


#: Every name works wherever a router is asked for; each is made from a seed.
ROUTERS: dict[str, Callable[[int], Router]] = {
    "random": RandomRouter,
    "round-robin": RoundRobinRouter,
    "hash": HashRouter,
    "prefix": PrefixRouter,
}


def make_router(name: str, seed: int = 0) -> Router:
    """A router by its name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in ROUTERS:
        raise ValueError(f"no router {name!r}; known: {', '.join(ROUTERS)}.")
    return ROUTERS[name](seed)


def expected_s(ask: Ask, view: View, coefficients: Coefficients) -> float:
    """Seconds until the prompt is prefilled there."""
    return view.waiting_s + coefficients.prefill_s * max(0, ask.tokens - view.matched_tokens)


def _by_name(views: Sequence[View]) -> list[View]:
    return sorted(views, key=lambda view: view.replica)


def _hash(seed: int, what: str, replica: str) -> int:
    content = f"{seed}\0{what}\0{replica}".encode()
    return int.from_bytes(blake2b(content, digest_size=8, person=b"rc route hash").digest(), "little")
