"""DraftPace: how many proposed tokens to check in one pass, from measured times and measured acceptance. Never MLX.

A pass over 1 + n tokens of a row checks n proposed tokens, and yields one token more than are accepted. `best` chooses
the n with the least expected seconds per token. That is 0 where the accepted tokens do not pay for the longer pass:

    time        a plain pass is measured; for each power of two of n, also what a proposed token adds to a pass, as a
                share of a plain pass. All rows of a pass pay for the widest
    chance      of a proposed token, if those in front of it are accepted: what its source says, corrected by how often
                tokens of that source with about that chance were accepted

Shares, and the figures of a draft model, begin with what is hoped for. If passes go by without a new measurement, they
return to it, so drafting is tried again.

Invariants, asserted by `check`:

  P1  The time of a plain pass is above 0, and no pass is expected to take less.
  P2  Of each kind of proposed token, 0 <= accepted <= checked; a draft model's average chance is from 0 to 1.

Nothing here reads a clock. Not thread-safe: one generation thread uses a DraftPace, or its callers hold a lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from operator import mul
from typing import NamedTuple

#: Most tokens that are proposed for one pass.
MOST_PROPOSED = 31
#: Weight of a new measurement of a plain pass in the moving average.
WEIGHT = 0.1
#: A pass counts at most as so many times the expected seconds: a page fault is no measurement.
MOST_TIMES = 3.0
#: The share of a plain pass that a proposed token is hoped to take.
HOPED_SHARE = 0.02
#: What is hoped for counts as so many measurements. A measurement counts KEPT as much when the next one comes, and half
#: as much after so many passes. A plain pass is measured at least once in so many passes.
TRIES, KEPT, STALE_PASSES = 0.5, 0.98, 256
#: A proposal ends where the chance that all of it is accepted is below this.
LEAST_CHANCE = 0.05
#: Drafting must save at least this share of the time: it has work of its own.
LEAST_GAIN = 0.02
#: A source's own estimate counts as much as PRIOR checked tokens. The counts of a kind are halved at MOST_CHECKED.
PRIOR, MOST_CHECKED = 8.0, 512.0
#: Kinds of proposed tokens: the estimated chance in steps of this size.
CHANCE_STEP = 0.1
#: Looks for drafts may take this share of the time of passes while nothing is drafted, and save so many seconds up.
LOOK_SHARE, MOST_LOOK_S = 0.002, 0.02
#: Seconds of a look until some are measured: the first one of a reply also indexes the prompt.
USUAL_LOOK_S = 2e-4
#: The source of a draft model's proposals, and the hoped chance of its tokens.
MODEL, HOPED_CHANCE = "draft", 0.8


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
        """Return the expected number of accepted tokens."""
        return float(sum(accumulate(self.chances, mul)))


#: A proposal of nothing.
NOTHING = Proposal((), (), "")


class _Measured:
    """A mean of measurements that returns to what is hoped for as passes go by without one."""

    def __init__(self) -> None:
        self._total = self._weight = 0.0
        self._at = 0

    def add(self, value: float, passes: int) -> None:
        kept = KEPT * self._kept(passes)
        self._total, self._weight, self._at = kept * self._total + value, kept * self._weight + 1, passes

    def mean(self, hoped: float, passes: int) -> float:
        kept = self._kept(passes)
        return (TRIES * hoped + kept * self._total) / (TRIES + kept * self._weight)

    def _kept(self, passes: int) -> float:
        return float(0.5 ** ((passes - self._at) / STALE_PASSES))


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
        self._passes = 0
        # In all tables, rows are rounded up to a power of two.
        #: By rows: the average seconds of a plain pass, and when it was measured last.
        self._plain: dict[int, tuple[float, int]] = {}
        #: By rows and bits of the number of proposed tokens: the share of a plain pass that each of them adds.
        self._shares: defaultdict[tuple[int, int], _Measured] = defaultdict(_Measured)
        #: By source and kind: tokens accepted, tokens checked.
        self._kinds: dict[tuple[str, int], tuple[float, float]] = {}
        #: Of a draft model, by rows: the seconds of its pass, and the chance of its tokens.
        self._drafts: defaultdict[int, tuple[_Measured, _Measured]] = defaultdict(lambda: (_Measured(), _Measured()))

    def note(self, tokens_in_pass: int, seconds: float, rows: int = 1) -> None:
        """Count the time of a pass in which the widest of `rows` rows had `tokens_in_pass` tokens."""
        self._passes += 1
        if seconds <= 0:
            return
        self.look_s = min(self.look_s + LOOK_SHARE * seconds, MOST_LOOK_S)
        rows, proposed = _rows_class(rows), tokens_in_pass - 1
        if rows not in self._plain:
            if not proposed:
                self._plain[rows] = seconds, self._passes
            return
        plain_s, seconds = self._plain[rows][0], min(seconds, MOST_TIMES * self.seconds(tokens_in_pass, rows))
        if proposed:
            self._shares[rows, proposed.bit_length()].add((seconds / plain_s - 1) / proposed, self._passes)
        else:
            self._plain[rows] = plain_s + WEIGHT * (seconds - plain_s), self._passes

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
        """Count what a draft model took for `count` tokens of each row, and the corrected chances of its tokens."""
        chances = [chance for proposal in proposals for chance in proposal.chances]
        pass_s, chance = self._drafts[_rows_class(rows)]
        pass_s.add(min(seconds / count, self.seconds(1, rows)), self._passes)  # a pass over one token runs both models
        chance.add(sum(chances) / len(chances), self._passes)

    def guess(self, count: int, rows: int) -> Proposal:
        """Return a proposal of so many tokens as a draft model would make, without the tokens."""
        chance = self._drafts[_rows_class(rows)][1].mean(HOPED_CHANCE, self._passes)
        return Proposal((-1,) * count, (chance,) * count, MODEL)

    def of_model(self, tokens: Sequence[int], probabilities: Sequence[float]) -> Proposal:
        """Return a draft model's proposal, with corrected chances.

        The model often says what the draft model finds only a little likely: what is not checked yet is hoped for.
        """
        known = probabilities[: len(tokens)]
        hoped = tuple((1 + probability) / 2 for probability in known)
        kinds = tuple(int(probability / CHANCE_STEP) for probability in known)
        return self.corrected(Proposal(tuple(tokens), hoped, MODEL, 0, kinds))

    def corrected(self, proposal: Proposal) -> Proposal:
        """Return the proposal with the chances that its kinds of tokens have had so far, as far as it is likely."""
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
        """Return for each row how many of its proposed tokens (with `corrected` chances) to check; 0: none.

        Args:
            proposals: one for each row that has one.
            rows: rows in the pass, with those that propose nothing. Default: one for each proposal.
        """
        _, count = self.best(proposals, len(proposals) if rows is None else rows)
        return [min(count, len(proposal.tokens)) for proposal in proposals]

    def best(self, proposals: Sequence[Proposal], rows: int) -> tuple[float, int]:
        """Return the least seconds per token, and with how many proposed tokens of a row. Guesses cost time."""
        least_s = self.seconds(1, rows) / rows * (1 - LEAST_GAIN)
        if self._assumed is None:
            _, measured_at = self._plain.get(_rows_class(rows), (0.0, -STALE_PASSES - 1))
            if self._passes - measured_at > STALE_PASSES:
                return least_s, 0  # A plain pass is measured at no cost.
        chances = [accumulate(proposal.chances[:MOST_PROPOSED], mul) for proposal in proposals]
        draft_s = 0.0
        if any(proposal.tokens[:1] == (-1,) for proposal in proposals):  # a guess
            draft_s = self._drafts[_rows_class(rows)][0].mean(0.0, self._passes)
        best, tokens = 0, float(rows)
        for count, gains in enumerate(zip_longest(*chances, fillvalue=0.0), start=1):
            tokens += sum(gains)
            token_s = (self.seconds(1 + count, rows) + count * draft_s) / tokens
            if token_s < least_s:
                least_s, best = token_s, count
        return least_s, best

    def seconds(self, tokens_in_pass: int, rows: int = 1) -> float:
        """Return the expected time of a pass in which each of `rows` rows has so many tokens."""
        if self._assumed is not None:
            return self._assumed(rows, tokens_in_pass)
        rows, proposed = _rows_class(rows), tokens_in_pass - 1
        plain_s, _ = self._plain.get(rows, (1.0, 0))
        share = HOPED_SHARE
        for bits in range(1, proposed.bit_length() + 1):
            if (rows, bits) in self._shares:
                share = max(0.0, self._shares[rows, bits].mean(share, self._passes))
        return plain_s * (1 + share * proposed)

    def check(self) -> None:
        """Assert P1 and P2."""
        for rows, (plain_s, _) in self._plain.items():
            assert 0 < plain_s <= min(self.seconds(1 + count, rows) for count in range(MOST_PROPOSED + 1)), rows
        for pass_s, chance in self._drafts.values():
            assert pass_s.mean(0.0, self._passes) >= 0, pass_s
            assert 0 <= chance.mean(HOPED_CHANCE, self._passes) <= 1, chance
        for kind, (accepted, checked) in self._kinds.items():
            assert 0 <= accepted <= checked <= MOST_CHECKED + 1, (kind, accepted, checked)


def _kinds_of(proposal: Proposal) -> tuple[int, ...]:
    return proposal.kinds or tuple([int(chance / CHANCE_STEP) for chance in proposal.chances])


def _rows_class(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
