"""DraftPace: how many proposed tokens to check in one pass, from measured times and acceptance. Never imports MLX.

A pass over 1 + n tokens of a row checks n proposed tokens, and yields one token more than it accepts. Times of passes
are measured during decoding. `length` chooses the n with the least expected seconds per token; n is 0 where drafts gain
nothing.

    time        seconds of a pass by rows and tokens per row; all rows of a pass pay for the widest row
    chance      the probability that a proposed token is accepted if all before it are: the source's estimate, corrected
                by how often tokens of that source with a similar estimate were accepted

Invariants, asserted by `check`:

  P1  A measured time is above 0, and the time of a pass never falls as it gets more tokens.
  P2  For each kind of proposed token, 0 <= accepted <= checked; a draft model's average chance is from 0 to 1.

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
#: Most tokens that are proposed for one pass. The widest pass also has the token that is evaluated anyway.
MOST_PROPOSED = WIDTHS[-1] - 1
#: Weight of a new measurement in the moving averages.
WEIGHT = 0.1
#: A measurement counts at most this many times the average, because of page faults and other processes. It is
#: MOST_TIMES if the measurement before was slow, too, else LEAST_TIMES.
MOST_TIMES, LEAST_TIMES = 3.0, 1.5
#: Until wider passes are measured, each additional token is expected to cost this share of a pass over one token.
HOPED_SHARE = 0.02
#: A proposal ends where the chance that all of it is accepted falls below this.
LEAST_CHANCE = 0.05
#: In this many passes without a measurement, the excess of a width's time over the hoped time halves. So the width is
#: tried again: sooner if the excess is small.
STALE_PASSES = 512
#: Drafting must save at least this share of the time, because drafting itself takes time.
LEAST_GAIN = 0.02
#: A source's own estimate counts as much as this many checked tokens.
PRIOR = 8.0
#: At this many checked tokens of a kind, both counts of the kind are halved: old text counts less.
MOST_CHECKED = 512.0
#: The kind of a proposed token, unless its source gives one: the estimated chance in steps of this size.
CHANCE_STEP = 0.1
#: While nothing is drafted, looks may take this share of the time of passes, and save up at most this many seconds.
LOOK_SHARE, MOST_LOOK_S = 0.002, 0.02
#: Assumed seconds of a look until looks are measured. The first look of a reply also indexes the prompt.
USUAL_LOOK_S = 2e-4
#: The source of a draft model's proposals.
MODEL = "draft"
#: The assumed chance of a draft model's tokens, if the model was not asked in the last STALE_PASSES passes.
HOPED_CHANCE = 0.8


class Proposal(NamedTuple):
    """Tokens that are expected next.

    Attributes:
        tokens: token ids, in order.
        chances: for each token, the chance that it is accepted if all tokens before it are.
        source: where the tokens come from: "tree", "prompt", "prediction" or "draft".
        suffix: how many of the reply's last tokens the source found; 0 if it does not look for them.
        kinds: a number for each token; tokens of one source and kind have about the same chance. Default: the chance,
            in steps of CHANCE_STEP.
    """

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    source: str
    suffix: int = 0
    kinds: tuple[int, ...] = ()

    def first(self, count: int) -> Proposal:
        """The first `count` tokens as a proposal."""
        return self._replace(tokens=self.tokens[:count], chances=self.chances[:count], kinds=self.kinds[:count])

    def expected(self) -> float:
        """Expected number of accepted tokens."""
        return float(sum(accumulate(self.chances, mul)))


#: The empty proposal.
NOTHING = Proposal((), (), "")


class DraftPace:
    """Decides how many tokens to check. All requests of a model on a device share one DraftPace.

    Args:
        seconds: the assumed time of a pass, from (rows, tokens per row). Default: the times that `note` measures.

    Attributes:
        idle_looks: looks for drafts since a draft was last checked; Drafting counts the looks of all requests.
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
        #: By rows, rounded up to a power of 2: the average seconds of a pass of the draft model, the average chance of
        #: its tokens, and when it was asked last.
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
            # Between two widths: add what the tokens up to the wider width are expected to take.
            near, base = WIDTHS[at - 1], times[WIDTHS[at - 1]][0]
            seconds += (width - tokens_in_pass) / (width - near) * max(0.0, self.seconds(width, rows) - base)
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
        """Count the time of a draft model for `count` tokens per row, and the corrected chances of its proposals."""
        chances = [chance for proposal in proposals for chance in proposal.chances]
        pass_s = min(seconds / count, self.seconds(1, rows))  # a pass over one token runs both models
        its_s, chance, _ = self._drafts.get(_rows_class(rows), (pass_s, HOPED_CHANCE, 0))
        its_s += WEIGHT * (pass_s - its_s)
        chance += WEIGHT * (sum(chances) / len(chances) - chance)
        self._drafts[_rows_class(rows)] = its_s, chance, self._passes

    def guess(self, count: int, rows: int) -> Proposal:
        """A stand-in for a proposal of `count` tokens by a draft model, without the tokens."""
        _, chance, _ = self._asked_lately(rows)
        return Proposal((-1,) * count, (chance,) * count, MODEL)

    def of_model(self, tokens: Sequence[int], probabilities: Sequence[float]) -> Proposal:
        """A draft model's proposal, with corrected chances.

        The model often accepts tokens that the draft model finds unlikely. So unmeasured chances start halfway to 1.
        """
        known = probabilities[: len(tokens)]
        hoped, kinds = tuple((1 + each) / 2 for each in known), tuple(int(each / CHANCE_STEP) for each in known)
        return self.corrected(Proposal(tuple(tokens), hoped, MODEL, 0, kinds))

    def _asked_lately(self, rows: int) -> tuple[float, float, int]:
        """As in `_drafts`: the measured values, or the assumed ones if the last measurement is long ago."""
        found = self._drafts.get(_rows_class(rows))
        return (0.0, HOPED_CHANCE, 0) if found is None or self._passes - found[2] > STALE_PASSES else found

    def corrected(self, proposal: Proposal) -> Proposal:
        """The proposal with chances corrected by past acceptance, cut where all of it is unlikely (LEAST_CHANCE)."""
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
        """For each row, how many of its proposed tokens (with `corrected` chances) to check; 0: none.

        Args:
            proposals: one for each row that has one.
            rows: rows in the pass, including rows without a proposal. Default: one row per proposal.
        """
        rows = len(proposals) if rows is None else rows
        _, count = self.best(proposals, rows)
        return [min(count, len(proposal.tokens)) for proposal in proposals]

    def best(self, proposals: Sequence[Proposal], rows: int) -> tuple[float, int]:
        """As `length`: the least seconds per token, and the tokens per row to check. Guesses add drafting time."""
        least = self.seconds(1, rows) / rows * (1 - LEAST_GAIN)
        if self._assumed is None and self._is_stale(rows):
            return least, 0  # Propose nothing: so a pass over one token is measured, at no cost.
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
        """Expected time of a pass in which each of `rows` rows has `tokens_in_pass` tokens."""
        if self._assumed is not None:
            return self._assumed(rows, tokens_in_pass)
        times = self._times.get(_rows_class(rows), {})
        below, time = 1, times[1][0] if 1 in times else 1.0
        if tokens_in_pass == 1:
            return time
        step = hoped_step = time * HOPED_SHARE
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
        else:  # wider than all that were measured
            step = hoped_step
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
