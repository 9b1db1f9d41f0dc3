"""Rates: how fast prefill and reading from disk are, as measured, and which of the two is expected to be faster.

    prefill    seconds per unit of the cost model, at each depth by itself: [0, 512), [512, 1024), [1024, 2048), ...
    reading    seconds per byte, from the disk into the tree, and on into live caches

Recent measurements count for more: each takes a tenth off the weight of those before it. A pass over few tokens takes
longer by the token, and says nothing about many: it counts where no longer one was measured for long. What is slower
is not read; now and then some of it is, to see whether it still is, for at most `TRIAL` of what prefill took meanwhile.

The only file of the cache that reads a clock, and only where there is a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from policies import CostModel

#: What is left of the weight of a measurement when another one comes.
KEPT = 0.9
#: What is left of the longest pass each time that one came which was too short beside it.
SHORTENED = 0.99
#: What reading that is expected to be slower may cost, of the prefill that was chosen instead since the last reading.
TRIAL = 0.01
#: Of what prefill is expected to take reading may take so much: both are estimates, and hold for none to the last bit.
SURE = 0.8
#: Tokens of the first depth, and of each one the double of those before it.
DEPTH_TOKENS = 512


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
        self.read = Rate()
        self._prefill: dict[int, Rate] = {}
        self._longest = 0.0
        self._refused_seconds = 0.0

    @contextmanager
    def timing_prefill(self, start: int, end: int) -> Iterator[None]:
        """The block evaluates the tokens [start, end), and waits for them."""
        began = self.clock()
        yield
        seconds = self.clock() - began
        if end - start < self._longest / 2:
            self._longest *= SHORTENED
            return
        if end - start > self._longest * 2:
            self._prefill.clear()
        self._longest = max(self._longest, end - start)
        self._prefill.setdefault(_depth((start + end) // 2), Rate()).add(self._cost.cost(start, end), seconds)

    @contextmanager
    def timing_move(self) -> Iterator[None]:
        """The block copies what was read last into live caches, which prefill would have written to."""
        began = self.clock()
        yield
        self.read.seconds += self.clock() - began

    def was_read(self, nbytes: int, seconds: float) -> None:
        """So many bytes took so long; in a trial that is all that is known from now on."""
        if self._refused_seconds:
            self.read, self._refused_seconds = Rate(), 0.0
        self.read.add(nbytes, seconds)

    def was_refused(self, start: int, end: int) -> None:
        """Reading [start, end) was found too slow."""
        self._refused_seconds += self.prefill_seconds(start, end)

    def is_worth_reading(self, nbytes: int, start: int, end: int) -> bool:
        """Whether reading so many bytes is surely faster than the prefill of [start, end), unknown, or due."""
        if not self._prefill:
            return True
        allowed = SURE * self.prefill_seconds(start, end) + TRIAL * self._refused_seconds
        return self.read.seconds_for(nbytes) <= allowed

    def prefill_seconds(self, start: int, end: int) -> float:
        """What the prefill of [start, end) is expected to take, by what was measured nearest to each depth."""
        seconds = 0.0
        while start < end and self._prefill:
            depth = _depth(start)
            stop = min(end, DEPTH_TOKENS << depth)
            nearest = min(self._prefill, key=lambda each: abs(each - depth))
            seconds += self._prefill[nearest].seconds_for(self._cost.cost(start, stop))
            start = stop
        return seconds


def _depth(offset: int) -> int:
    return (offset // DEPTH_TOKENS).bit_length()
