"""What a replay of several users at a time found, as a table, a sentence and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from runner.files.origin import machine, versions
from runner.files.tables import table_of_figures
from runner.files.units import MIB, plural

if TYPE_CHECKING:
    from runner.parallel.replay import ParallelRow, ParallelRun, Parting
    from runner.replay.replay import CacheRun, RequestRow

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
        self, runs: "Sequence[ParallelRun]", alone: "Sequence[CacheRun]" = (), partings: "Sequence[Parting]" = ()
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
            table.add_row(*_cells(summary))
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

    def differences(self) -> "list[tuple[str, int, ParallelRow | RequestRow]]":
        """Answers that no rounding explains."""
        rows: dict[str, Sequence[ParallelRow | RequestRow]] = {run.cache: run.rows for run in self.runs}
        rows |= {f"{run.cache} alone": run.rows for run in self.alone}
        return [(each.cache, each.index, rows[each.cache][each.index]) for each in self._wrong()]

    def _wrong(self) -> "list[Parting]":
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


def _together(run: "ParallelRun") -> ParallelSummary:
    return _summary(run.cache, run.users_at_a_time, run.rows, run.wall_s, run.peak_bytes, run.evictions)


def _one_at_a_time(run: "CacheRun") -> ParallelSummary:
    peak_bytes = max(row.peak_bytes for row in run.rows)
    return _summary(run.cache, 1, run.rows, run.wall_s, peak_bytes, run.evictions)


def _summary(
    cache: str,
    users: int,
    rows: "Sequence[ParallelRow | RequestRow]",
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


def _cells(summary: ParallelSummary) -> tuple[str, ...]:
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
