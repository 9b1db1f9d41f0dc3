"""Rates: what a token costs, as measured, recent measurements counting for more. Never imports MLX.

A rate is seconds over tokens, both sums; what is new adds to them once what was there is halved every `HALF_LIFE`
measurements. So many small measurements and one large one weigh what they took, and one odd request moves little.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Rates:
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
