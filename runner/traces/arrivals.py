"""Arrival times for data that has none: conversations begin as a Poisson process, people think, tools take a while.

Everything is drawn from one seeded generator; a trace with such times is labelled synthetic.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """How time passes.

    Attributes:
        sessions_per_hour: rate at which conversations begin.
        think_s: mean time that a person takes from the reply to the next message; exponential.
        tool_s: mean time that a tool takes; exponential.
        output_tokens_per_s: how fast replies are generated.
    """

    sessions_per_hour: float = 30.0
    think_s: float = 30.0
    tool_s: float = 3.0
    output_tokens_per_s: float = 40.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value:g}; wanted more than 0.")

    def session_gap_s(self, draw: random.Random) -> float:
        """Time from the beginning of one conversation to that of the next."""
        return draw.expovariate(self.sessions_per_hour / 3600.0)

    def request_gap_s(self, draw: random.Random, output_tokens: int, *, is_tool: bool) -> float:
        """Time from a request to the next one of its conversation."""
        wait_s = draw.expovariate(1.0 / (self.tool_s if is_tool else self.think_s))
        return output_tokens / self.output_tokens_per_s + wait_s
