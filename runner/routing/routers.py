"""Routers: which replica a request goes to. Each decides by plain data alone, in a server as in a simulation.

    random        any one, by a seed
    round-robin   one after the other
    hash          by the session, or where there is none by how the prompt begins, always the same one (rendezvous
                  hashing: where a replica comes or goes, only what was its own moves)
    prefix        where it takes the least time, its own and that of others, in seconds:

                      work that waits there
                    + what prefilling the rest of the prompt takes there, PREFILL times, and ROOM times more the fuller
                      it is beside the fullest
                    + where work waits: work of late there beyond UNEVEN times the mean, EVENING times

Each by itself the first two are the time to the first token. But a token that is prefilled again is work for those that
come behind too, and takes the room of another prefix where there is no other: weighed once, less is found, and those
who wait wait longer (benchmarks/results/routing-parts.json). By room new conversations go to replicas that are empty
yet, though others have the system prompt. The last one moves long conversations off a
replica that has had more of them than others, once somebody has to wait for it; idle replicas are left uneven.

Ties of `prefix` go to the replica that had the least work of late, then by a hash of prompt and replica. A router sees
only what it is given, no clock and no other chance than its seed. Never imports MLX.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from runner.routing.rates import Coefficients

#: How many blocks say how a prompt begins, for `hash`: beyond a system prompt that many share.
HASH_BLOCKS = 4
#: How much more of late than the mean is uneven.
UNEVEN = 1.1


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
        recent_s: seconds of work that it had of late.
        stored_blocks: how much it is thought to store.
    """

    replica: str
    waiting_s: float
    matched_tokens: int
    recent_s: float
    stored_blocks: int


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


class Weights(NamedTuple):
    """What `prefix` weighs. Others than DEPLOYED are for finding out what they do."""

    prefill: float = 3.0
    room: float = 1.0
    evening: float = 2.0


DEPLOYED = Weights()


class PrefixRouter:
    def __init__(self, seed: int = 0, weights: Weights = DEPLOYED) -> None:
        self._seed, self._weights = seed, weights

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        what = f"{list(ask.digests[:HASH_BLOCKS])}"
        others = Others.of(views)

        def order(view: View) -> tuple[float, float, int, str]:
            spread = _hash(self._seed, what, view.replica)
            return (weighed_s(ask, view, coefficients, others, self._weights), view.recent_s, spread, view.replica)

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


class Others(NamedTuple):
    """What a replica is compared with.

    Attributes:
        even_s: seconds of work of late, beyond which a replica had more than others.
        most_blocks: what the fullest one stores, at least 1.
    """

    even_s: float
    most_blocks: int

    @classmethod
    def of(cls, views: Sequence[View]) -> Others:
        recent_s = sum(view.recent_s for view in views) / len(views)
        return cls(UNEVEN * recent_s, max(1, *(view.stored_blocks for view in views)))


def weighed_s(ask: Ask, view: View, coefficients: Coefficients, others: Others, weights: Weights = DEPLOYED) -> float:
    """What `prefix` compares: seconds that a request takes of itself and of others, at one replica."""
    prefill_s = coefficients.prefill_s * max(0, ask.tokens - view.matched_tokens)
    fullness = view.stored_blocks / others.most_blocks
    uneven_s = max(0.0, view.recent_s - others.even_s) if view.waiting_s > 0 else 0.0
    return view.waiting_s + (weights.prefill + weights.room * fullness) * prefill_s + weights.evening * uneven_s


def _by_name(views: Sequence[View]) -> list[View]:
    return sorted(views, key=lambda view: view.replica)


def _hash(seed: int, what: str, replica: str) -> int:
    content = f"{seed}\0{what}\0{replica}".encode()
    return int.from_bytes(blake2b(content, digest_size=8, person=b"rc route hash").digest(), "little")
