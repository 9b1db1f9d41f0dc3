"""Rates: how fast prefill and reading from disk are, as measured, and which of the two is expected to be faster.

    prefill    seconds per unit of the cost model, so that a token deep in a prompt takes longer
    reading    seconds per byte, from the disk into the tree

Recent measurements count for more: each takes a tenth off the weight of those before it. The only file of the cache
that reads a clock, and only where there is a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from policies import CostModel

#: What is left of the weight of a measurement when another one comes.
KEPT = 0.9
#: What is left of a reading's seconds each time that it was found too slow, so that it is tried again some day.
DOUBTED = 0.98


class Rate:
    """Seconds per unit of work; 0 before the first measurement, which so comes about."""

    def __init__(self) -> None:
        self.amount = self.seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = self.amount * KEPT + amount
        self.seconds = self.seconds * KEPT + seconds

    def seconds_for(self, amount: float) -> float:
        return self.seconds / self.amount * amount if self.amount else 0.0


class Rates:
    """The rates of one cache and its store. Not thread-safe: a measurement that is lost costs nothing."""

    def __init__(self, cost: CostModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cost = cost
        self.clock = clock
        self.prefill = Rate()
        self.read = Rate()

    @contextmanager
    def timing_prefill(self, start: int, end: int) -> Iterator[None]:
        """The block evaluates the tokens [start, end), and waits for them."""
        began = self.clock()
        yield
        self.prefill.add(self._cost.cost(start, end), self.clock() - began)

    def is_worth_reading(self, nbytes: int, start: int, end: int) -> bool:
        """Whether reading so many bytes is expected to be faster than the prefill of [start, end), or unknown."""
        if not self.prefill.amount:
            return True
        return self.read.seconds_for(nbytes) <= self.prefill.seconds_for(self._cost.cost(start, end))

    def doubt_reading(self) -> None:
        """Reading was found too slow once more."""
        self.read.seconds *= DOUBTED
