"""What a replay found, as a table and a sentence for people and as JSON for programs. This file never imports MLX.

The run of `none` is the reference: an answer of another cache counts as equal
when its output tokens are the same. Without it nothing is compared, and that is said, not left out.

Every figure of the sentence is computed from the runs, so it also says when the radix cache is not ahead.

What a replay of several users at a time found, as a table, a sentence and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table

from runner.origin import machine, versions
from runner.text import MIB, plural, table_of_figures

if TYPE_CHECKING:
    from runner.replay.replayer import CacheRun, RequestRow

REFERENCE = "none"
OURS = "radix"
#: What the byte budget is for.
WITH_A_BUDGET = ("mlx-lm", "radix")
# Ratios closer to 1 than this are called level: two runs of one cache differ by about as much.
LEVEL_RATIO = 1.02


@dataclass(frozen=True)
class Summary:
    """One cache's row of the table. `answers_equal` is None when there was no reference to compare with."""

    cache: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms_p50: float
    ttft_ms_p95: float
    # Totals over all requests: to the first token, and from there to the last.
    prefill_s: float
    decode_s: float
    # What the cache itself took before prefill (part of prefill_s) and after the reply (part of neither).
    begin_s: float
    close_s: float
    wall_s: float
    peak_cache_bytes: int
    peak_allocated_bytes: int
    evictions: int
    answers_equal: int | None

    @property
    def cached_share(self) -> float:
        """Cached tokens over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens


#: Of fewer pairs even all together say nothing with 95 %: 2 * 0.5**5 is more than 5 %.
LEAST_PAIRS = 6


class PairedRatio(NamedTuple):
    """The median of one figure over another, request by request, and its 95 % interval: all there is for few pairs."""

    median: float
    low: float
    high: float
    pairs: int


def paired_ratio(theirs: Sequence[float], ours: Sequence[float]) -> PairedRatio:
    """How many times as much `theirs` is. The interval is that of the sign test: it asks nothing of how values spread.

    Of fewer than LEAST_PAIRS no interval of 95 % is known; then it is from the least ratio to the most.
    """
    ratios = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    count = len(ratios)
    # The most values that can be left out at each end with at most 2.5 % that the median is one of them.
    left_out, tail = 0, 0.5**count
    while tail <= 0.025:
        left_out += 1
        tail += math.comb(count, left_out) * 0.5**count
    left_out = max(0, left_out - 1)
    return PairedRatio(float(np.median(ratios)), ratios[left_out], ratios[count - 1 - left_out], count)


class Report:
    """The runs of one replay, a row for each request that every cache has answered."""

    def __init__(self, runs: Sequence[CacheRun]) -> None:
        self.runs = tuple(runs)
        self._reference = next((run for run in runs if run.cache == REFERENCE), None)
        self.summaries = tuple(self._summarize(run) for run in runs)

    def differences(self) -> list[tuple[str, int, RequestRow]]:
        """Every answer that is not the reference's, as (cache, request index, row)."""
        if self._reference is None:
            return []
        expected = [row.output_hash for row in self._reference.rows]
        return [
            (run.cache, index, row)
            for run in self.runs
            for index, row in enumerate(run.rows)
            if row.output_hash != expected[index]
        ]

    def table(self) -> Table:
        """One row per cache, units in the header."""
        table = table_of_figures(
            "cache",
            "requests",
            "prompt\ntokens",
            "cached\ntokens %",
            "TTFT\np50 ms",
            "TTFT\np95 ms",
            "prefill\ns",
            "decode\ns",
            "peak cache\nMiB",
            "evictions",
            f"answers equal\nto {REFERENCE}",
        )
        for summary in self.summaries:
            table.add_row(*_cells(summary))
        return table

    def sentence(self) -> str:
        """Say what the figures mean."""
        if not self.summaries:
            return "No request was answered by every cache."
        return f"{self._comparison()} {self._answers()}"

    def progress(self, requests: int) -> str:
        """How far the replay had come."""
        return f"{len(self.runs[0].rows) if self.runs else 0} of {requests} requests"

    def document(self, **about: Any) -> dict[str, Any]:
        """Everything, for JSON: `about`, and per cache its summary and a row per request."""
        runs = [
            {**asdict(summary), "rows": [asdict(row) for row in run.rows]}
            for summary, run in zip(self.summaries, self.runs, strict=True)
        ]
        return {"runs": runs, **about, "machine": machine(), "versions": versions()}

    def _summarize(self, run: CacheRun) -> Summary:
        ttft_ms = [row.ttft_ms for row in run.rows]
        p50, p95 = (float(value) for value in np.percentile(ttft_ms, (50, 95)))
        equal = None
        if self._reference is not None:
            pairs = zip(run.rows, self._reference.rows, strict=True)
            equal = sum(row.output_hash == expected.output_hash for row, expected in pairs)
        return Summary(
            cache=run.cache,
            requests=len(run.rows),
            prompt_tokens=sum(row.prompt_tokens for row in run.rows),
            cached_tokens=sum(row.cached_tokens for row in run.rows),
            ttft_ms_p50=p50,
            ttft_ms_p95=p95,
            prefill_s=sum(ttft_ms) / 1e3,
            decode_s=sum(row.decode_ms for row in run.rows) / 1e3,
            begin_s=sum(row.begin_ms for row in run.rows) / 1e3,
            close_s=sum(row.close_ms for row in run.rows) / 1e3,
            wall_s=run.wall_s,
            peak_cache_bytes=max(row.peak_bytes for row in run.rows),
            peak_allocated_bytes=max(row.allocated_bytes for row in run.rows),
            evictions=run.evictions,
            answers_equal=equal,
        )

    def _comparison(self) -> str:
        ours = next((summary for summary in self.summaries if summary.cache == OURS), None)
        others = sorted((s for s in self.summaries if s.cache != OURS), key=lambda summary: summary.prefill_s)
        if ours is None or not others:
            quickest, *slower = others or self.summaries
            return (
                f"{quickest.cache} reached its first tokens in {quickest.prefill_s:.1f} s, with "
                f"{quickest.cached_share:.0%} of the prompt tokens cached{_against(slower)}."
            )
        pairs = {other.cache: paired_ratio(self._ttft_ms(other.cache), self._ttft_ms(OURS)) for other in others}
        best = min(others, key=lambda other: pairs[other.cache].median)
        rest = [other for other in others if other is not best]
        return (
            f"{_verdict(best.cache, pairs[best.cache])} {OURS} took {ours.cached_share:.0%} of the prompt tokens from "
            f"its cache, {best.cache} {best.cached_share:.0%}; the first tokens of all took {ours.prefill_s:.1f} s, "
            f"with {best.cache} {best.prefill_s:.1f} s{_against(rest)}. {self._budget(ours)}"
        )

    def _ttft_ms(self, cache: str) -> list[float]:
        return next([row.ttft_ms for row in run.rows] for run in self.runs if run.cache == cache)

    def _budget(self, ours: Summary) -> str:
        """What was held, and whom the budget cost anything."""
        held = [f"{OURS} held {ours.peak_cache_bytes / MIB:.0f} MiB at most"]
        evicted = {summary.cache: summary.evictions for summary in self.summaries if summary.cache in WITH_A_BUDGET}
        held += [
            f"{s.cache} {s.peak_cache_bytes / MIB:.0f}" for s in self.summaries if s.cache in evicted and s != ours
        ]
        squeezed = [cache for cache, count in evicted.items() if count]
        if len(squeezed) == len(evicted):
            said = "the budget was too small for all of it" + (" in both" if len(evicted) > 1 else "")
        elif squeezed:
            said = f"the budget was too small for all of it in {squeezed[0]} alone"
        else:
            said = "the budget had room for everything"
        return f"{', '.join(held)}: {said}."

    def _answers(self) -> str:
        if self._reference is None:
            return f"Answers were not compared: {REFERENCE} was not among the caches."
        compared = [summary for summary in self.summaries if summary.cache != REFERENCE]
        wrong = [
            f"{summary.requests - (summary.answers_equal or 0)} of {summary.requests} with {summary.cache}"
            for summary in compared
            if summary.answers_equal != summary.requests
        ]
        if not compared:
            return "There was no other cache to compare answers with."
        if wrong:
            return f"Answers DIFFER from those without a cache: {', '.join(wrong)}."
        return "Every answer is the same as without a cache."


def _cells(summary: Summary) -> tuple[str, ...]:
    equal = "-" if summary.answers_equal is None else f"{summary.answers_equal}/{summary.requests}"
    return (
        summary.cache,
        str(summary.requests),
        f"{summary.prompt_tokens:,}",
        f"{summary.cached_share:.1%}".removesuffix("%"),
        f"{summary.ttft_ms_p50:,.0f}",
        f"{summary.ttft_ms_p95:,.0f}",
        f"{summary.prefill_s:.1f}",
        f"{summary.decode_s:.1f}",
        f"{summary.peak_cache_bytes / MIB:,.1f}",
        str(summary.evictions),
        equal,
    )


def _verdict(other: str, ratio: PairedRatio) -> str:
    """Who is ahead, as far as these requests can tell."""
    if ratio.pairs < LEAST_PAIRS:
        return (
            f"{plural(ratio.pairs, 'request')} cannot tell {OURS} and {other} apart, it takes {LEAST_PAIRS}: the "
            f"median of their ratios is {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})."
        )
    interval = f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    half = "half of the requests reached their first token"
    if ratio.low > 1 and ratio.median >= LEVEL_RATIO:
        return (
            f"With {OURS} {half} {ratio.median:.1f} times as fast as with {other}, the next best, or more {interval}."
        )
    if ratio.high < 1 and ratio.median <= 1 / LEVEL_RATIO:
        slower = 1 / ratio.median
        return f"{OURS} is not ahead here: with {other} {half} {slower:.1f} times as fast or more {interval}."
    return (
        f"{OURS} and {other} are level here, as far as these requests tell: the median of their ratios is "
        f"{ratio.median:.2f} {interval}."
    )


def _against(others: Sequence[Summary]) -> str:
    """The remaining totals as a clause, or nothing."""
    if not others:
        return ""
    return "; " + ", ".join(f"{summary.cache} took {summary.prefill_s:.1f} s" for summary in others)


if TYPE_CHECKING:
    from runner.replay.replayer import CacheRun, RequestRow
    from runner.replay.together import AnswerDifference, ParallelRow, ParallelRun

#: Two logits nearer than this are as good as one another.
TIE = 1e-3


@dataclass(frozen=True)
class ParallelSummary:
    """A run's row of the table. Tokens per second are those of all users together, over the whole run."""

    cache: str
    users_at_a_time: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    # From a token of a reply to its next, the median over the replies of more than one token; None: there are none.
    token_ms_p50: float | None
    wall_s: float
    peak_cache_bytes: int
    evictions: int

    @property
    def cached_share(self) -> float:
        """Cached tokens over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens


class ParallelReport:
    """The requests that had their reply, each way together, and the same ones one after the other.

    `alone` is empty, or short of requests, where that was broken off.
    """

    def __init__(
        self, runs: Sequence[ParallelRun], alone: Sequence[CacheRun] = (), partings: Sequence[AnswerDifference] = ()
    ) -> None:
        self.runs = tuple(run for run in runs if run.rows)
        most = max((len(run.rows) for run in runs), default=0)
        self.alone = tuple(run for run in alone if len(run.rows) == most)
        self.partings = tuple(partings)
        self.summaries = [_together(run) for run in self.runs]
        self._alone = [_one_at_a_time(run) for run in self.alone]

    def table(self) -> Table:
        """A row for each way together and one after the other, units in the header."""
        table = table_of_figures(
            "cache",
            "users at\na time",
            "requests",
            "prompt\ntokens",
            "cached\ntokens %",
            "tokens\nper s",
            "TTFT\np50 ms",
            "TTFT\np95 ms",
            "token\np50 ms",
            "wall\ns",
            "peak cache\nMiB",
            "evicted",
        )
        for summary in (*self.summaries, *self._alone):
            table.add_row(*_parallel_cells(summary))
        return table

    def sentence(self) -> str:
        """Say what the figures mean."""
        if not self.summaries:
            return "No request had its reply."
        first = self.summaries[0]
        users = first.users_at_a_time
        who = "1 user at a time was" if users == 1 else f"{users} users at a time were"
        return (
            f"{who} given {first.output_tokens:,} tokens in {first.wall_s:.1f} s, {first.output_tokens_per_s:.1f} per "
            f"second in all, with {first.cached_share:.0%} of the prompt tokens from the cache.{self._beside()}"
            f"{self._answers()}"
        )

    def _beside(self) -> str:
        """What the other ways took."""
        first = self.summaries[0]
        said = [
            f" In {other.cache}'s batches they took {other.wall_s:.1f} s, {other.wall_s / first.wall_s:.2f} times as "
            f"long, with {other.cached_share:.0%} cached."
            for other in self.summaries[1:]
        ]
        for alone in self._alone:
            what = "without a cache" if alone.cache == "none" else f"with {alone.cached_share:.0%} cached"
            ratio = alone.wall_s / first.wall_s
            said.append(f" One after the other, {what}, they take {alone.wall_s:.1f} s, {ratio:.2f} times as long.")
        return "".join(said)

    def _answers(self) -> str:
        """Whether answers were those without a cache."""
        if not self._alone:
            return " Answers were not compared."
        wrong, tied = len(self._wrong()), len(self.partings) - len(self._wrong())
        if not self.partings:
            return " Every answer is the same as without a cache."
        ties = f" {plural(tied, 'answer')} parted where two tokens were as good as one another." if tied else ""
        return f"{ties} {plural(wrong, 'answer')} differ from those without a cache." if wrong else ties

    def differences(self) -> list[tuple[str, int, ParallelRow | RequestRow]]:
        """Answers that no rounding explains."""
        rows: dict[str, Sequence[ParallelRow | RequestRow]] = {run.cache: run.rows for run in self.runs}
        rows |= {f"{run.cache} alone": run.rows for run in self.alone}
        return [(each.cache, each.index, rows[each.cache][each.index]) for each in self._wrong()]

    def _wrong(self) -> list[AnswerDifference]:
        return [each for each in self.partings if each.gap >= TIE]

    def progress(self, requests: int) -> str:
        """How far the replay had come."""
        return f"{len(self.runs[0].rows) if self.runs else 0} of {requests} requests"

    def document(self, **about: Any) -> dict[str, Any]:
        """Everything, for JSON: `about`, and the summaries with a row per request."""
        of_runs = [run.rows for run in self.runs], [run.rows for run in self.alone]
        rows = [[asdict(row) for row in its] for each in of_runs for its in each]
        summaries = map(asdict, (*self.summaries, *self._alone))
        runs = [{**summary, "rows": its} for summary, its in zip(summaries, rows, strict=True)]
        peaks = {"peak_tokens": [run.peak_tokens for run in self.runs]}
        partings = [asdict(each) for each in self.partings]
        return {"runs": runs, **peaks, "partings": partings, **about, "machine": machine(), "versions": versions()}


def _together(run: ParallelRun) -> ParallelSummary:
    return _summary(run.cache, run.users_at_a_time, run.rows, run.wall_s, run.peak_bytes, run.evictions)


def _one_at_a_time(run: CacheRun) -> ParallelSummary:
    peak_bytes = max(row.peak_bytes for row in run.rows)
    return _summary(run.cache, 1, run.rows, run.wall_s, peak_bytes, run.evictions)


def _summary(
    cache: str,
    users: int,
    rows: Sequence[ParallelRow | RequestRow],
    wall_s: float,
    peak_bytes: int,
    evictions: int,
) -> ParallelSummary:
    token_ms = [row.decode_ms / (row.output_tokens - 1) for row in rows if row.output_tokens > 1]
    p50, p95 = (float(value) for value in np.percentile([row.ttft_ms for row in rows], (50, 95)))
    output_tokens = sum(row.output_tokens for row in rows)
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    return ParallelSummary(
        cache=cache,
        users_at_a_time=users,
        requests=len(rows),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(row.cached_tokens for row in rows),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        prompt_tokens_per_s=prompt_tokens / wall_s,
        ttft_ms_p50=p50,
        ttft_ms_p95=p95,
        token_ms_p50=float(np.median(token_ms)) if token_ms else None,
        wall_s=wall_s,
        peak_cache_bytes=peak_bytes,
        evictions=evictions,
    )


def _parallel_cells(summary: ParallelSummary) -> tuple[str, ...]:
    return (
        summary.cache,
        str(summary.users_at_a_time),
        str(summary.requests),
        f"{summary.prompt_tokens:,}",
        f"{summary.cached_share:.1%}".removesuffix("%"),
        f"{summary.output_tokens_per_s:.1f}",
        f"{summary.ttft_ms_p50:,.0f}",
        f"{summary.ttft_ms_p95:,.0f}",
        "-" if summary.token_ms_p50 is None else f"{summary.token_ms_p50:,.0f}",
        f"{summary.wall_s:.1f}",
        f"{summary.peak_cache_bytes / MIB:,.1f}",
        str(summary.evictions),
    )
