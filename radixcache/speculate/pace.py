"""DraftPace: how many proposed tokens to check in one pass, from measured times and measured acceptance. Never MLX.

A pass over 1 + n tokens of a row checks n proposed tokens, and yields one token more than are accepted. Its time is
measured as decoding goes on. `length` chooses the n with the least expected seconds per token, 0 where nothing is
gained.

    time        seconds of a pass by rows and tokens per row; all rows of a pass pay for the widest
    chance      of a proposed token, if those in front of it are accepted: what its source says, corrected by how often
                tokens of that source with about that chance were accepted

Invariants, asserted by `check`:

  P1  A measured time is above 0, and the time of a pass never falls as its tokens grow.
  P2  Of each kind of proposed token, 0 <= accepted <= checked.

Nothing here reads a clock. Not thread-safe: one generation thread uses a DraftPace, or its callers hold a lock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from operator import mul
from typing import NamedTuple

#: Widths of a pass, in tokens per row, whose times are measured; times of other widths are interpolated.
WIDTHS = (1, 2, 4, 8, 16, 32)
#: Most tokens that are proposed for one pass: 31 with the token that is evaluated anyway make the widest.
MOST_PROPOSED = WIDTHS[-1] - 1
#: Weight of a new measurement in the moving averages.
WEIGHT = 0.2
#: A single measurement counts at most as so many times the average: a page fault or another process is no measurement.
MOST_TIMES = 2.0
#: Until it is measured, each token more is expected to cost this share of a pass over one token.
HOPED_SHARE = 0.02
#: After so many passes without a measurement, a width is taken as not measured: times change with the context.
STALE_PASSES = 512
#: Drafting must save at least this share of the time: it has work of its own.
LEAST_GAIN = 0.02
#: A source's own estimate counts as much as so many checked tokens.
PRIOR = 8.0
#: Checked tokens of one kind are halved at this count: what is said changes.
MOST_CHECKED = 512.0
#: Kinds of proposed tokens: the estimated chance in steps of this size.
CHANCE_STEP = 0.1


class Proposal(NamedTuple):
    """Tokens that are expected next.

    Attributes:
        tokens: token ids, in order.
        chances: for each the chance that it is accepted, if those in front of it were.
        source: where they come from: "tree", "prompt", "prediction" or "draft".
        suffix: how many of the last tokens were found there; 0 if the source does not look for them.
        kinds: for each token a number for what is known of it; tokens of one source and kind have about one chance.
            Default: the chance, in steps of CHANCE_STEP.
    """

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    source: str
    suffix: int = 0
    kinds: tuple[int, ...] = ()

    def first(self, count: int) -> Proposal:
        """The proposal of the first `count` of its tokens."""
        return self._replace(tokens=self.tokens[:count], chances=self.chances[:count], kinds=self.kinds[:count])

    def expected(self) -> float:
        """Expected number of accepted tokens."""
        return float(sum(accumulate(self.chances, mul)))


#: A proposal of nothing.
NOTHING = Proposal((), (), "")


class DraftPace:
    """Decides how many tokens to propose; one for a model on a device, shared by its requests.

    Args:
        seconds: the time of a pass over (rows, tokens per row), where it is assumed. Default: it is measured by `note`.
    """

    def __init__(self, seconds: Callable[[int, int], float] | None = None) -> None:
        self._assumed = seconds
        #: By rows, rounded up to a power of 2, and width: the average seconds, and when it was measured last.
        self._times: dict[int, dict[int, tuple[float, int]]] = {}
        self._passes = 0
        #: By source and kind: tokens accepted, tokens checked.
        self._kinds: dict[tuple[str, int], tuple[float, float]] = {}

    def note(self, tokens_in_pass: int, seconds: float, rows: int = 1) -> None:
        """Count the time of a pass in which the widest of `rows` rows had `tokens_in_pass` tokens."""
        self._passes += 1
        if seconds <= 0:
            return
        times = self._times.setdefault(_rows_class(rows), {})
        at = min(bisect_left(WIDTHS, tokens_in_pass), len(WIDTHS) - 1)
        width = WIDTHS[at]
        if tokens_in_pass < width and at and WIDTHS[at - 1] in times:
            # A width between two: the wider one is where the line through the narrower one and this leads.
            near, base = WIDTHS[at - 1], times[WIDTHS[at - 1]][0]
            seconds = max(base + (seconds - base) * (width - near) / (tokens_in_pass - near), seconds)
        before = times.get(width)
        if before is not None:
            seconds = before[0] + WEIGHT * (min(seconds, MOST_TIMES * before[0]) - before[0])
        times[width] = seconds, self._passes

    def note_accepted(self, proposal: Proposal, accepted: int) -> None:
        """Count a checked proposal: its first `accepted` tokens were accepted, and the next one, if any, was not."""
        for index, kind in enumerate(_kinds_of(proposal)[: accepted + 1]):
            yes, checked = self._kinds.get((proposal.source, kind), (0.0, 0.0))
            if checked >= MOST_CHECKED:
                yes, checked = yes / 2, checked / 2
            self._kinds[proposal.source, kind] = yes + (index < accepted), checked + 1

    def corrected(self, proposal: Proposal) -> Proposal:
        """The proposal with the chances that its kinds of tokens have had so far."""
        chances = []
        for kind, chance in zip(_kinds_of(proposal), proposal.chances, strict=True):
            accepted, checked = self._kinds.get((proposal.source, kind), (0.0, 0.0))
            chances.append((accepted + PRIOR * chance) / (checked + PRIOR))
        return proposal._replace(chances=tuple(chances))

    def length(self, proposals: Sequence[Proposal], rows: int | None = None) -> list[int]:
        """For each row how many of its proposed tokens (with `corrected` chances) to check; 0: none.

        Args:
            proposals: one for each row that has one.
            rows: rows in the pass, with those that propose nothing. Default: one for each proposal.
        """
        rows = len(proposals) if rows is None else rows
        chances = [accumulate(proposal.chances[:MOST_PROPOSED], mul) for proposal in proposals]
        best, count, tokens = self.seconds(1, rows) / rows * (1 - LEAST_GAIN), 0, float(rows)
        for width, gains in enumerate(zip_longest(*chances, fillvalue=0.0), start=2):
            tokens += sum(gains)
            each = self.seconds(width, rows) / tokens
            if each < best:
                best, count = each, width - 1
        return [min(count, len(proposal.tokens)) for proposal in proposals]

    def seconds(self, tokens_in_pass: int, rows: int = 1) -> float:
        """Expected time of a pass in which each of `rows` rows has so many tokens."""
        if self._assumed is not None:
            return self._assumed(rows, tokens_in_pass)
        times = self._times.get(_rows_class(rows), {})
        oldest = self._passes - STALE_PASSES
        known = [width for width in WIDTHS if width in times and (width == 1 or times[width][1] >= oldest)]
        below, time = 1, times[1][0] if 1 in times else 1.0
        hoped = time * HOPED_SHARE
        for width in known:
            slower = max(time, times[width][0])
            if width >= tokens_in_pass:
                return time + (slower - time) * (tokens_in_pass - below) / max(1, width - below)
            below, time = width, slower
        return time + hoped * (tokens_in_pass - below)

    def check(self) -> None:
        """Assert P1 and P2."""
        for rows, times in self._times.items():
            assert all(time > 0 and width in WIDTHS for width, (time, _) in times.items()), (rows, times)
            curve = [self.seconds(width, rows) for width in range(1, WIDTHS[-1] + 1)]
            assert curve == sorted(curve), (rows, curve)
        for kind, (accepted, checked) in self._kinds.items():
            assert 0 <= accepted <= checked <= MOST_CHECKED + 1, (kind, accepted, checked)


def _kinds_of(proposal: Proposal) -> tuple[int, ...]:
    return proposal.kinds or tuple([int(each / CHANCE_STEP) for each in proposal.chances])


def _rows_class(rows: int) -> int:
    return 1 << max(0, math.ceil(math.log2(rows))) if rows > 1 else 1
