"""Rates: how fast prefill and reading from stores are, as measured, and which of the two is expected to be faster.

    prefill    seconds per unit of the cost model, at each depth by itself: [0, 512), [512, 1024), [1024, 2048), ...
    reading    seconds per byte, from a store into the tree, and on into live caches; of each store by itself

Recent measurements count for more: each takes a tenth off the weight of those before it. A pass over few tokens takes
longer by the token, and says nothing about many: it counts where no longer one was measured for long. What is slower
is not read; now and then some of it is, to see whether it still is, for at most `TRIAL` of what prefill took meanwhile.
Where all prompts are there to be read, nothing would ever say what prefill takes: the end of one is prefilled instead.

The only file of the cache that reads a clock, and only where there is a store.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
#: What prefill takes is not told by passes over fewer tokens alone.
TELLING_TOKENS = 256
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


class TimedRead:
    """How fast one store is, and what prefill took, or was expected to, since it was read last."""

    def __init__(self) -> None:
        self.rate = Rate()
        self.refused_seconds = 0.0


class StoreRates:
    """The rates of one cache and its stores. Not thread-safe: a measurement that is lost costs nothing.

    Stores are told apart by `Link.tier`; bytes are given for each of those that are read.
    """

    def __init__(self, cost: CostModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cost = cost
        self.clock = clock
        self._reading: defaultdict[int, TimedRead] = defaultdict(TimedRead)
        self._last_bytes: dict[int, int] = {}
        self._prefill: dict[int, Rate] = {}
        self._longest = 0.0
        self._was_told = False

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
        per_byte = (self.clock() - began) / max(1, sum(self._last_bytes.values()))
        for tier, nbytes in self._last_bytes.items():
            self._reading[tier].rate.seconds += nbytes * per_byte

    def was_read(self, nbytes: Mapping[int, int], seconds: Mapping[int, float]) -> None:
        """So many bytes of each store took so long; in a trial that is all that is known of it from now on."""
        self._last_bytes = dict(nbytes)
        for tier in nbytes:
            if self._reading[tier].refused_seconds:
                self._reading[tier] = TimedRead()
            self._reading[tier].rate.add(nbytes[tier], seconds.get(tier, 0.0))

    def tokens_to_prefill(self) -> int:
        """How many tokens had better be prefilled though they can be read, to learn what that takes; once, else 0."""
        is_due = not self._was_told and self._longest < TELLING_TOKENS and bool(self._last_bytes)
        return TELLING_TOKENS if is_due else 0

    def was_left(self) -> None:
        """So many were left to prefill."""
        self._was_told = True

    def was_refused(self, tiers: Iterable[int], start: int, end: int) -> None:
        """Reading [start, end) from these stores was found too slow."""
        for tier in tiers:
            self._reading[tier].refused_seconds += self.prefill_seconds(start, end)

    def is_worth_reading(self, nbytes: Mapping[int, int], start: int, end: int) -> bool:
        """Whether reading so many bytes is surely faster than the prefill of [start, end), unknown, or due."""
        if not self._prefill:
            return True
        refused_seconds = sum(self._reading[tier].refused_seconds for tier in nbytes)
        read_seconds = sum(self._reading[tier].rate.seconds_for(its) for tier, its in nbytes.items())
        return read_seconds <= SURE * self.prefill_seconds(start, end) + TRIAL * refused_seconds

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
