"""DraftPace: how many proposed tokens to check in one pass, from measured times and measured acceptance. Never MLX.

A pass over 1 + n tokens of a row checks n proposed tokens, and yields one token more than are accepted. Its time is
measured as decoding goes on. `length` chooses the n with the least expected seconds per token, 0 where nothing is
gained.

    time        seconds of a pass by rows and tokens per row; all rows of a pass pay for the widest
    chance      of a proposed token, if those in front of it are accepted: what its source says, corrected by how often
                tokens of that source with about that chance were accepted

Invariants, asserted by `check`:

  P1  A measured time is above 0, and the time of a pass never falls as its tokens grow.
  P2  Of each kind of proposed token, 0 <= accepted <= checked; a draft model's average chance is from 0 to 1.

Nothing here reads a clock. Not thread-safe: one generation thread uses a DraftPace, or its callers hold a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, zip_longest
from operator import mul
from typing import NamedTuple

#: Widths of a pass, in tokens per row, whose times are measured; times of other widths are interpolated.
WIDTHS = (1, 2, 4, 8, 16, 32)
#: Most tokens that are proposed for one pass: 31 with the token that is evaluated anyway make the widest.
MOST_PROPOSED = WIDTHS[-1] - 1
#: Weight of a new measurement in the moving averages.
WEIGHT = 0.1
#: A single measurement counts at most as so many times what was expected: a page fault is no measurement. Nor is what
#: another process takes: behind a measurement that was not as slow, the least.
MOST_TIMES, LEAST_TIMES = 3.0, 1.5
#: Until two tokens are measured, each token more is expected to cost this share of a pass over one token.
HOPED_SHARE = 0.02
#: A proposal ends where the chance that all of it is accepted is below this.
LEAST_CHANCE = 0.05
#: In so many passes without a measurement, half of what a width took more than hoped is forgotten: it is tried again,
#: and the sooner, the less that costs.
STALE_PASSES = 512
#: Drafting must save at least this share of the time: it has work of its own.
LEAST_GAIN = 0.02
#: A source's own estimate counts as much as so many checked tokens.
PRIOR = 8.0
#: Checked tokens of one kind are halved at this count: what is said changes.
MOST_CHECKED = 512.0
#: Kinds of proposed tokens: the estimated chance in steps of this size.
CHANCE_STEP = 0.1
#: Looks for drafts may take this share of the time of passes while nothing is drafted, and save so many seconds up.
LOOK_SHARE, MOST_LOOK_S = 0.002, 0.02
#: Seconds of a look until some are measured: the first one of a reply also indexes the prompt.
USUAL_LOOK_S = 2e-4
#: The source of a draft model's proposals.
MODEL = "draft"
#: The chance of a draft model's tokens until it was asked, and again when it was not asked for STALE_PASSES.
HOPED_CHANCE = 0.8


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

    Attributes:
        idle_looks: how many times its requests looked for drafts since one was checked; they count it.
        look_s: seconds that looks may still take while nothing is drafted: passes add to it, and looks take from it.
        usual_look_s: the average seconds of a look while nothing is drafted.
    """

    def __init__(self, seconds: Callable[[int, int], float] | None = None) -> None:
        self.idle_looks = 0
        self.look_s, self.usual_look_s = 0.0, USUAL_LOOK_S
        self._assumed = seconds
        #: By rows, rounded up to a power of 2, and width: the average seconds, and when it was measured last.
        self._times: dict[int, dict[int, tuple[float, int]]] = {}
        self._slow: set[tuple[int, int]] = set()  # rows and widths whose last measurement was slow
        self._passes = 0
        #: By source and kind: tokens accepted, tokens checked.
        self._kinds: dict[tuple[str, int], tuple[float, float]] = {}
        #: Of a draft model by rows, rounded up: the average seconds of its pass, the average chance of its tokens, and
        #: when it was asked last.
        self._drafts: dict[int, tuple[float, float, int]] = {}

    def note(self, tokens_in_pass: int, seconds: float, rows: int = 1) -> None:
        """Count the time of a pass in which the widest of `rows` rows had `tokens_in_pass` tokens."""
        self._passes += 1
        if seconds <= 0:
            return
        self.look_s = min(self.look_s + LOOK_SHARE * seconds, MOST_LOOK_S)
        times = self._times.setdefault(_rows_class(rows), {})
        at = min(bisect_left(WIDTHS, tokens_in_pass), len(WIDTHS) - 1)
        width = WIDTHS[at]
        if tokens_in_pass < width and at and WIDTHS[at - 1] in times:
            # A width between two: the wider one is where the line through the narrower one and this leads.
            near, base = WIDTHS[at - 1], times[WIDTHS[at - 1]][0]
            seconds = max(base + (seconds - base) * (width - near) / (tokens_in_pass - near), seconds)
        if width in times:
            average, which = times[width][0], (_rows_class(rows), width)
            most = (MOST_TIMES if which in self._slow else LEAST_TIMES) * average
            (self._slow.add if seconds > LEAST_TIMES * average else self._slow.discard)(which)
            seconds = average + WEIGHT * (min(seconds, most) - average)
        elif 1 in times:
            seconds = min(seconds, MOST_TIMES * self.seconds(width, rows))
        times[width] = seconds, self._passes

    def looked(self, seconds: float) -> None:
        """Count the time of a look while nothing was drafted. Where times are assumed, looks are free."""
        if self._assumed is None:
            self.look_s -= seconds
            self.usual_look_s += WEIGHT * (seconds - self.usual_look_s)

    def note_accepted(self, proposal: Proposal, accepted: int) -> None:
        """Count a checked proposal: its first `accepted` tokens were accepted, and the next one, if any, was not."""
        for index, kind in enumerate(_kinds_of(proposal)[: accepted + 1]):
            yes, checked = self._kinds.get((proposal.source, kind), (0.0, 0.0))
            if checked >= MOST_CHECKED:
                yes, checked = yes / 2, checked / 2
            self._kinds[proposal.source, kind] = yes + (index < accepted), checked + 1

    def note_drafted(self, proposals: Sequence[Proposal], count: int, seconds: float, rows: int) -> None:
        """Count what a draft model took for `count` tokens of each row, and the corrected chances of what it said."""
        chances = [chance for proposal in proposals for chance in proposal.chances]
        pass_s = min(seconds / count, self.seconds(1, rows))  # a pass over one token runs both models
        its_s, chance, _ = self._drafts.get(_rows_class(rows), (pass_s, HOPED_CHANCE, 0))
        its_s += WEIGHT * (pass_s - its_s)
        chance += WEIGHT * (sum(chances) / len(chances) - chance)
        self._drafts[_rows_class(rows)] = its_s, chance, self._passes

    def guess(self, count: int, rows: int) -> Proposal:
        """A proposal of so many tokens as a draft model would make, without the tokens."""
        _, chance, _ = self._asked_lately(rows)
        return Proposal((-1,) * count, (chance,) * count, MODEL)

    def of_model(self, tokens: Sequence[int], probabilities: Sequence[float]) -> Proposal:
        """A draft model's proposal, with corrected chances.

        The model often says what the draft model finds only a little likely: what is not checked yet is hoped for.
        """
        known = probabilities[: len(tokens)]
        hoped, kinds = tuple((1 + each) / 2 for each in known), tuple(int(each / CHANCE_STEP) for each in known)
        return self.corrected(Proposal(tuple(tokens), hoped, MODEL, 0, kinds))

    def _asked_lately(self, rows: int) -> tuple[float, float, int]:
        """Seconds of a draft model's pass and the chance of its tokens, as measured; as hoped if that is long ago."""
        found = self._drafts.get(_rows_class(rows))
        return (0.0, HOPED_CHANCE, 0) if found is None or self._passes - found[2] > STALE_PASSES else found

    def corrected(self, proposal: Proposal) -> Proposal:
        """The proposal with the chances that its kinds of tokens have had so far, as far as it is likely at all."""
        chances: list[float] = []
        whole = 1.0
        for kind, chance in zip(_kinds_of(proposal), proposal.chances, strict=True):
            accepted, checked = self._kinds.get((proposal.source, kind), (0.0, 0.0))
            chances.append((accepted + PRIOR * chance) / (checked + PRIOR))
            whole *= chances[-1]
            if whole < LEAST_CHANCE:
                break
        return proposal.first(len(chances))._replace(chances=tuple(chances))

    def length(self, proposals: Sequence[Proposal], rows: int | None = None) -> list[int]:
        """For each row how many of its proposed tokens (with `corrected` chances) to check; 0: none.

        Args:
            proposals: one for each row that has one.
            rows: rows in the pass, with those that propose nothing. Default: one for each proposal.
        """
        rows = len(proposals) if rows is None else rows
        _, count = self.best(proposals, rows)
        return [min(count, len(proposal.tokens)) for proposal in proposals]

    def best(self, proposals: Sequence[Proposal], rows: int) -> tuple[float, int]:
        """As `length`: the least seconds per token, and with how many proposed tokens of a row. Guesses cost time."""
        least = self.seconds(1, rows) / rows * (1 - LEAST_GAIN)
        if self._assumed is None and self._is_stale(rows):
            return least, 0  # With one token it is measured at no cost.
        chances = [accumulate(proposal.chances[:MOST_PROPOSED], mul) for proposal in proposals]
        drafting_s = self._asked_lately(rows)[0] if any(_is_guess(each) for each in proposals) else 0.0
        count, tokens = 0, float(rows)
        for width, gains in enumerate(zip_longest(*chances, fillvalue=0.0), start=2):
            tokens += sum(gains)
            each = (self.seconds(width, rows) + (width - 1) * drafting_s) / tokens
            if each < least:
                least, count = each, width - 1
        return least, count

    def seconds(self, tokens_in_pass: int, rows: int = 1) -> float:
        """Expected time of a pass in which each of `rows` rows has so many tokens."""
        if self._assumed is not None:
            return self._assumed(rows, tokens_in_pass)
        times = self._times.get(_rows_class(rows), {})
        below, time = 1, times[1][0] if 1 in times else 1.0
        if tokens_in_pass == 1:
            return time
        step = time * HOPED_SHARE
        for width in WIDTHS[1:]:
            if width in times:
                measured, at = times[width]
                hoped = time + step * (width - below)
                fresh = 0.5 ** ((self._passes - at) / STALE_PASSES) if measured > hoped else 1.0
                slower = max(time, hoped + fresh * (measured - hoped))
                step = (slower - time) / (width - below)
                if width >= tokens_in_pass:
                    break
                below, time = width, slower
        return time + step * (tokens_in_pass - below)

    def check(self) -> None:
        """Assert P1 and P2."""
        for rows, times in self._times.items():
            assert all(time > 0 and width in WIDTHS for width, (time, _) in times.items()), (rows, times)
            curve = [self.seconds(width, rows) for width in range(1, WIDTHS[-1] + 1)]
            assert all(after >= before * (1 - 1e-9) for before, after in pairwise(curve)), (rows, curve)
        for seconds, chance, _ in self._drafts.values():
            assert seconds >= 0 and 0 <= chance <= 1, (seconds, chance)
        for kind, (accepted, checked) in self._kinds.items():
            assert 0 <= accepted <= checked <= MOST_CHECKED + 1, (kind, accepted, checked)

    def _is_stale(self, rows: int) -> bool:
        """Whether a pass over one token was not measured lately."""
        times = self._times.get(_rows_class(rows), {})
        return 1 not in times or self._passes - times[1][1] > STALE_PASSES


def _is_guess(proposal: Proposal) -> bool:
    return proposal.tokens[:1] == (-1,)


def _kinds_of(proposal: Proposal) -> tuple[int, ...]:
    return proposal.kinds or tuple([int(each / CHANCE_STEP) for each in proposal.chances])


def _rows_class(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
