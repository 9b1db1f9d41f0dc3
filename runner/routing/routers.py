"""Routers: which replica a request goes to. Each decides by plain data alone, in a server as in a simulation.

    random        any one, by a seed
    round-robin   one after the other
    hash          by the session, or where there is none by how the prompt begins, always the same one (rendezvous
                  hashing: where a replica comes or goes, only what was its own moves)
    prefix        where it takes the least time, its own and that of others, in seconds:

                      work that waits there
                    + what prefilling the rest of the prompt takes there, PREFILL_WEIGHT times
                    + where work waits: work of late there beyond UNEVEN times the mean, EVENING_WEIGHT times

Each by itself the first two are the time to the first token. But a token that is prefilled again is work for those that
come behind too, and takes the room of another prefix: weighed once, an hour of a chat service finds 0.81 to 0.87 of
what can be found at 8 replicas, weighed three times 0.92 to 0.94, and nobody waits longer for it
(benchmarks/results/routing-parts.json). The last one moves long conversations off a replica that has had more of
them than others, once somebody has to wait for it; idle replicas are left uneven.

Ties of `prefix` go to the replica that had the least work of late, then by a hash of prompt and replica. A router sees
only what it is given, no clock and no other chance than its seed. Never imports MLX.

Rates: what a token costs, as measured, recent measurements counting for more. Never imports MLX.

A rate is seconds over tokens, both sums; what is new adds to them once what was there is halved every `HALF_LIFE`
measurements. So many small measurements and one large one weigh what they took, and one odd request moves little.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

#: Measurements after which an old one counts for half.
HALF_LIFE = 32
_KEPT = 0.5 ** (1 / HALF_LIFE)


class Coefficients(NamedTuple):
    """What a replica takes.

    Attributes:
        prefill_s: seconds to prefill a token.
        decode_s: seconds of a replica for a generated token; where several are decoded together, their share of the
            step.
        output_tokens: tokens of a reply, on average.
    """

    prefill_s: float
    decode_s: float
    output_tokens: float

    def work_s(self, prefill_tokens: float, output_tokens: float | None = None) -> float:
        """Seconds of a replica for a request; its reply is taken to be an average one where it is not known."""
        return prefill_tokens * self.prefill_s + self.decode_s * (
            self.output_tokens if output_tokens is None else output_tokens
        )


#: Before anything was measured: a model of 8 billion parameters on a laptop, about.
FIRST = Coefficients(prefill_s=1e-3, decode_s=2.5e-2, output_tokens=256.0)


class RoutingRates:
    """Coefficients that learn. Until something was measured they are the first ones.

    Raises:
        ValueError: one of the first ones is negative or not a number.
    """

    def __init__(self, first: Coefficients = FIRST) -> None:
        if not all(0 <= each < float("inf") for each in first):
            raise ValueError(f"{first}; wanted numbers of 0 or more.")
        self._prefill, self._decode, self._replies = (_Ratio(each) for each in first)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Learn that so many tokens took so long to prefill, without any waiting."""
        self._prefill.add(seconds, tokens)

    def decoded(self, tokens: int, seconds: float) -> None:
        """Learn that a reply of so many tokens took a replica so long, apart from prefill; a reply's length as well."""
        self._decode.add(seconds, tokens)
        self._replies.add(tokens, 1)

    @property
    def now(self) -> Coefficients:
        return Coefficients(self._prefill.value, self._decode.value, self._replies.value)


class _Ratio:
    """A sum over another one, old summands fading."""

    def __init__(self, first: float) -> None:
        self.value = first
        self._upper = self._lower = 0.0

    def add(self, upper: float, lower: float) -> None:
        self._upper = self._upper * _KEPT + upper
        self._lower = self._lower * _KEPT + lower
        if self._lower > 0:
            self.value = self._upper / self._lower


#: How many blocks say how a prompt begins, for `hash`: beyond a system prompt that many share.
HASH_BLOCKS = 4
PREFILL_WEIGHT = 3.0
UNEVEN, EVENING_WEIGHT = 1.1, 2.0


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
    """

    replica: str
    waiting_s: float
    matched_tokens: int
    recent_s: float


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
    """Weights other than the deployed ones are for finding out what they do."""

    def __init__(
        self, seed: int = 0, prefill_weight: float = PREFILL_WEIGHT, evening_weight: float = EVENING_WEIGHT
    ) -> None:
        self._seed = seed
        self._weights = prefill_weight, evening_weight

    def choose(self, ask: Ask, views: Sequence[View], coefficients: Coefficients) -> View:
        what = f"{list(ask.digests[:HASH_BLOCKS])}"
        even_s = UNEVEN * sum(view.recent_s for view in views) / len(views)

        def order(view: View) -> tuple[float, float, int, str]:
            spread = _hash(self._seed, what, view.replica)
            return (weighed_s(ask, view, coefficients, even_s, *self._weights), view.recent_s, spread, view.replica)

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


def weighed_s(
    ask: Ask,
    view: View,
    coefficients: Coefficients,
    even_s: float,
    prefill_weight: float = PREFILL_WEIGHT,
    evening_weight: float = EVENING_WEIGHT,
) -> float:
    """What `prefix` compares: seconds that a request takes of itself and of others, at one replica.

    Args:
        even_s: work of late up to which a replica has no more than others.
    """
    prefill_s = coefficients.prefill_s * max(0, ask.tokens - view.matched_tokens)
    uneven_s = max(0.0, view.recent_s - even_s) if view.waiting_s > 0 else 0.0
    return view.waiting_s + prefill_weight * prefill_s + evening_weight * uneven_s


def _by_name(views: Sequence[View]) -> list[View]:
    return sorted(views, key=lambda view: view.replica)


def _hash(seed: int, what: str, replica: str) -> int:
    content = f"{seed}\0{what}\0{replica}".encode()
    return int.from_bytes(blake2b(content, digest_size=8, person=b"rc route hash").digest(), "little")
