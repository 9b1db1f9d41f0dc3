"""CostModel: the cost of prefilling a span, as a pure function of its position.

A token costs a constant for the weights, plus attention, which grows with its position. The coefficients are fixed, so
two replays of a trace make the same decisions on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prefill cost of [start, end): per_token * (end - start) + per_pair * (end^2 - start^2) / 2.

    Attributes:
        per_token: cost of one token's weights, in `unit`.
        per_pair: cost of one attended (query, key) pair over all layers, in `unit`.
        unit: name of the unit, "tokens", "flops" or "seconds".
    """

    per_token: float = 1.0
    per_pair: float = 0.0
    unit: str = "tokens"

    def __post_init__(self) -> None:
        if not (0 <= self.per_token < math.inf and 0 <= self.per_pair < math.inf):
            raise ValueError(f"CostModel coefficients are {self.per_token} and {self.per_pair}; wanted 0 or more.")

    @classmethod
    def analytic(cls, *, parameters: int, layers: int, hidden_size: int) -> CostModel:
        """FLOPs of a dense forward pass: 2 per parameter and token, 4 * layers * hidden_size per attended pair.

        Source: Kaplan et al., arXiv 2001.08361, section 2.1, forward pass only.
        """
        return cls(per_token=2.0 * parameters, per_pair=4.0 * layers * hidden_size, unit="flops")

    def cost(self, start: int, end: int) -> float:
        """Cost of prefilling [start, end) when [0, start) is cached, in `unit`."""
        return self.per_token * (end - start) + self.per_pair * (end * end - start * start) / 2.0
