"""StoreRates: measured speeds of prefill and of reading from stores, to decide which of the two is faster.

    prefill    seconds per unit of the cost model, at each depth: [0, 512), [512, 1024), [1024, 2048), ...
    reading    seconds per byte, from a store into the tree and on into live caches; for each store by itself

Both are exponential moving averages. A prefill pass over few tokens is slower by the token, so it counts only if no
pass of twice its length was measured for long. A store that is slower than prefill is read now and then, to see whether
it still is: such trials take at most `TRIAL` of the time that prefill took meanwhile. If all prompts can be read, only
`PrefixCache.learn` measures prefill.

The clock is read only if a store is set. Not thread-safe: a lost measurement costs nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from policies import CostModel

#: Decay of the moving averages at each measurement.
DECAY = 0.9
#: Decay of the longest pass at each pass that was too short beside it.
LONGEST_DECAY = 0.99
#: The cost of trial reads as a share of the prefill chosen instead since the last read.
TRIAL = 0.01
#: Reading must take at most this share of the expected prefill: both are estimates.
SURE = 0.8
#: Tokens of the first depth; each further depth ends at twice the offset.
DEPTH_TOKENS = 512


class Rate:
    """Seconds per unit of work; 0 before the first measurement, so that there will be one."""

    def __init__(self) -> None:
        self.amount = self.seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = self.amount * DECAY + amount
        self.seconds = self.seconds * DECAY + seconds

    def seconds_for(self, amount: float) -> float:
        return self.seconds / self.amount * amount if self.amount else 0.0


class ReadRate(Rate):
    """The speed of one store. `refused_seconds`: expected time of the prefills chosen instead since its last read."""

    refused_seconds = 0.0


class StoreRates:
    """The speeds of one cache and its stores. Stores are numbered by `Link.tier`; bytes are given by that number."""

    def __init__(self, cost: CostModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cost = cost
        self.clock = clock
        self._reading: defaultdict[int, ReadRate] = defaultdict(ReadRate)
        self._last_bytes: dict[int, int] = {}
        self._prefill: dict[int, Rate] = {}
        self._longest = 0.0

    @contextmanager
    def timing_prefill(self, start: int, end: int) -> Iterator[None]:
        """Measure a block that evaluates the tokens [start, end) and waits for them."""
        began = self.clock()
        yield
        seconds = self.clock() - began
        if end - start < self._longest / 2:
            self._longest *= LONGEST_DECAY
            return
        if end - start > self._longest * 2:
            self._prefill.clear()
        self._longest = max(self._longest, end - start)
        self._prefill.setdefault(_depth((start + end) // 2), Rate()).add(self._cost.cost(start, end), seconds)

    @contextmanager
    def timing_move(self) -> Iterator[None]:
        """Measure a block that copies what was read last into live caches: a part of reading, not of prefill."""
        began = self.clock()
        yield
        per_byte = (self.clock() - began) / max(1, sum(self._last_bytes.values()))
        for tier, nbytes in self._last_bytes.items():
            self._reading[tier].seconds += nbytes * per_byte

    def count_read(self, nbytes: Mapping[int, int], seconds: Mapping[int, float]) -> None:
        """Count a read of so many bytes of each store; a trial replaces what was measured of a store before."""
        self._last_bytes = dict(nbytes)
        for tier in nbytes:
            if self._reading[tier].refused_seconds:
                self._reading[tier] = ReadRate()
            self._reading[tier].add(nbytes[tier], seconds.get(tier, 0.0))

    def count_refused(self, tiers: Iterable[int], start: int, end: int) -> None:
        """Note that reading [start, end) from these stores was found too slow."""
        for tier in tiers:
            self._reading[tier].refused_seconds += self.prefill_seconds(start, end)

    def is_worth_reading(self, nbytes: Mapping[int, int], start: int, end: int) -> bool:
        """Whether to read so many bytes of each store: faster than the prefill of [start, end), or not measured yet.

        Also True for a slow store whose next trial is due.
        """
        if not self._prefill:
            return True
        refused_seconds = sum(self._reading[tier].refused_seconds for tier in nbytes)
        read_seconds = sum(self._reading[tier].seconds_for(its) for tier, its in nbytes.items())
        return read_seconds <= SURE * self.prefill_seconds(start, end) + TRIAL * refused_seconds

    def prefill_seconds(self, start: int, end: int) -> float:
        """Expected seconds to prefill [start, end), from the measured depth nearest to each part."""
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
