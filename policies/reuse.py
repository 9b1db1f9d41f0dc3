"""ReuseModel: learn how soon entries of a class are used again, and from that the worth of holding one.

A class is what is known about a use when it happens ("second turn, small growth"). The prior gives each class a
probability of another use, and a lognormal interval around one common median. The model learns the common median in
ticks, and for each class the ratio of observed to expected uses. An evicted entry counts as watched until its eviction.

The worth of an age is the Gittins index: the most uses per tick of room that any plan "hold it until age s" can expect.
Source: Gittins, J. R. Stat. Soc. B 41 (1979); as hit density in a cache: Beckmann et al., LHD, NSDI 2018.

`value` is O(1). `rebuild` is O(classes * bins^2 + watched).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

BINS_PER_OCTAVE = 2
BIN_COUNT = 96
#: Standard deviation of the logarithm of an interval, in octaves.
SIGMA_OCTAVES = 1.7
#: Observed uses that weigh as much as the prior of a class.
PRIOR_USES = 30.0
#: Share of intervals that the lognormal does not explain, when the median is fitted.
STRAY_SHARE = 0.05
HALF_LIFE_USES = 2000.0
WARM_UP_INTERVALS = 16


@dataclass(slots=True)
class _Learnt:
    """Observations of one class, per bin of age."""

    probability: float
    stretch: float
    used: list[float] = field(default_factory=lambda: [0.0] * BIN_COUNT)
    watched: list[float] = field(default_factory=lambda: [0.0] * BIN_COUNT)
    worth: list[float] = field(default_factory=lambda: [0.0] * BIN_COUNT)


class ReuseModel:
    """The worth of holding an entry, by its class and the ticks since its last use."""

    def __init__(self) -> None:
        self._classes: dict[Hashable, _Learnt] = {}
        self._intervals: list[int] = []
        self.median_ticks = 0.0

    @property
    def is_warm(self) -> bool:
        return self.median_ticks > 0

    def declare(self, key: Hashable, probability: float, stretch: float) -> None:
        """Declare a class: its prior probability of another use, and its median in units of the common one."""
        if key not in self._classes:
            self._classes[key] = _Learnt(probability, stretch)
            if self.is_warm:
                self._classes[key].worth = self._worth(self._classes[key], 1.0)

    def value(self, key: Hashable, age_ticks: int) -> float:
        """Expected uses per tick, `age_ticks` after the last use; 0 before the warm-up."""
        return self._classes[key].worth[_bin(age_ticks)]

    def used_again(self, key: Hashable, age_ticks: int) -> None:
        self.lost_sight(key, age_ticks)
        self._classes[key].used[_bin(age_ticks)] += 1.0
        if not self.is_warm:
            self._intervals.append(max(1, age_ticks))

    def lost_sight(self, key: Hashable, age_ticks: int) -> None:
        """Something of this class was evicted at this age without another use."""
        last, watched = _bin(age_ticks), self._classes[key].watched
        for index in range(last):
            watched[index] += 1.0
        watched[last] += 0.5

    def rebuild(self, watching: Iterable[tuple[Hashable, int]], uses: int) -> None:
        """Compute all worths again. `watching`: class and age of all that waits. `uses`: since the last call."""
        if not self.is_warm:
            if len(self._intervals) < WARM_UP_INTERVALS:
                return
            self.median_ticks = float(sorted(self._intervals)[len(self._intervals) // 2])
            self._intervals.clear()
        factor = 0.5 ** (uses / HALF_LIFE_USES)
        for learnt in self._classes.values():
            learnt.used = [each * factor for each in learnt.used]
            learnt.watched = [each * factor for each in learnt.watched]
        seen = {key: (learnt, list(learnt.watched)) for key, learnt in self._classes.items()}
        waiting: dict[Hashable, list[float]] = {}
        for key, age in watching:
            waiting.setdefault(key, [0.0] * BIN_COUNT)[_bin(age)] += 1.0
        for key, counts in waiting.items():
            _add_watched(seen[key][1], counts)
        self._move_median(list(seen.values()))
        for learnt, watched in seen.values():
            hazards = _hazards(learnt.probability, learnt.stretch * self.median_ticks, 0.0)
            learnt.worth = self._worth(learnt, _ratio(learnt.used, watched, hazards))

    def _move_median(self, seen: list[tuple[_Learnt, list[float]]]) -> None:
        """Move the median by half an octave if that makes the observations likelier."""
        steps = (0.0, -0.5, 0.5)
        fits = [sum(_fit(*each, self.median_ticks * 2.0**step) for each in seen) for step in steps]
        self.median_ticks *= 2.0 ** steps[fits.index(max(fits))]

    def _worth(self, learnt: _Learnt, ratio: float) -> list[float]:
        hazards = _hazards(learnt.probability, learnt.stretch * self.median_ticks, 0.0)
        hazards = [min(0.95, ratio * hazard) for hazard in hazards]
        last = min(BIN_COUNT - 1, _bin(int(64 * self.median_ticks)) + 1)
        worth = [_gittins(hazards, first, last) for first in range(last + 1)]
        worth += [worth[-1]] * (BIN_COUNT - len(worth))
        for index in reversed(range(last)):  # Worth never grows with age, so the heads of queues are enough.
            worth[index] = max(worth[index], worth[index + 1])
        return worth


def _bin(age_ticks: int) -> int:
    return 0 if age_ticks < 1 else min(BIN_COUNT - 1, int(math.log2(age_ticks) * BINS_PER_OCTAVE) + 1)


#: Lower edges of the bins, in ticks.
_EDGES = [0.0, *(2.0 ** (index / BINS_PER_OCTAVE) for index in range(BIN_COUNT))]


@lru_cache(maxsize=512)
def _hazards(probability: float, median_ticks: float, stray_share: float) -> Sequence[float]:
    """Probability of a use within each bin, given none before it."""
    hazards: list[float] = []
    below = 0.0
    for edge in _EDGES[1:]:
        up_to = 0.5 * math.erfc(-math.log2(edge / median_ticks) / (SIGMA_OCTAVES * math.sqrt(2.0)))
        hazard = probability * ((up_to - below) / (1.0 - probability * below) + stray_share / BIN_COUNT)
        hazards.append(min(0.95, max(1e-12, hazard)))
        below = up_to
    return tuple(hazards)


def _add_watched(watched: list[float], counts: list[float]) -> None:
    """Add the entries that wait: half a watch in an entry's bin, a whole one in each bin before."""
    older = 0.0
    for index in reversed(range(BIN_COUNT)):
        watched[index] += older + 0.5 * counts[index]
        older += counts[index]


def _ratio(used: list[float], watched: list[float], hazards: Sequence[float]) -> float:
    """Observed uses of a class over the uses that its prior expects, drawn towards 1."""
    expected = sum(each * hazard for each, hazard in zip(watched, hazards, strict=True) if each)
    return (sum(used) + PRIOR_USES) / (expected + PRIOR_USES)


def _fit(learnt: _Learnt, watched: list[float], median_ticks: float) -> float:
    """Log likelihood of a class's observations (a Poisson count in each bin) under a common median."""
    hazards = _hazards(learnt.probability, learnt.stretch * median_ticks, STRAY_SHARE)
    ratio = _ratio(learnt.used, watched, hazards)
    total = 0.0
    for used, exposed, hazard in zip(learnt.used, watched, hazards, strict=True):
        if exposed:
            total += used * math.log(hazard * ratio) - exposed * hazard * ratio
    return total


def _gittins(hazards: list[float], first: int, last: int) -> float:
    """Most expected uses per tick of room, held from the middle of bin `first` to the end of any later bin."""
    alive, uses, room, best = 1.0, 0.0, 0.0, 0.0
    for index in range(first, last + 1):
        width, hazard = _EDGES[index + 1] - _EDGES[index], hazards[index]
        if index == first:
            width, hazard = width / 2.0, hazard / 2.0
        uses += alive * hazard
        room += alive * width * (1.0 - hazard / 2.0)
        alive *= 1.0 - hazard
        best = max(best, uses / room)
    return best
