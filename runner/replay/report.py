"""The result of a replay: a table, a sentence and a picture for people, JSON for programs. Never imports MLX.

For one user at a time the run of `none` is the reference: an answer of another cache counts as equal if its output
tokens are the same. For several users at a time, the replay lists the answers that differ: the number of rows in a
forward pass changes the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from rich.table import Table

from runner.text import MIB, Column, cells, figures_table, new_figure, picture_bytes, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from runner.replay.replayer import AnswerDifference, CacheRun
    from runner.replay.servers import RequestRow

REFERENCE = "none"
RADIX = "radix"
WITH_A_BUDGET = ("mlx-lm", "radix")  # the caches that the byte budget limits
LEAST_PAIRS = 6  # fewer pairs give no 95 % interval, even if all of them agree: 2 * 0.5**5 is more than 5 %
RESAMPLES = 2_000  # of the requests, for an interval
TIE = 1e-3  # two logits closer than this count as equal


@dataclass(frozen=True)
class Summary:
    """One run's row of the table. `answers_equal` is None if there was no reference to compare with."""

    cache: str
    users_at_a_time: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    proposed_tokens: int  # drafted tokens that were checked
    accepted_tokens: int
    output_tokens_per_s: float  # of all users together, over the whole run, like `prompt_tokens_per_s`
    prompt_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    token_ms_p50: float | None  # from a token of a reply to the next; None: no reply has two tokens
    prefill_s: float  # until the first token, of all requests
    decode_s: float  # from the first token to the last, of all requests
    begin_s: float  # spent in the cache before prefill, a part of prefill_s
    close_s: float  # spent in the cache after the reply
    wall_s: float
    peak_cache_bytes: int
    peak_allocated_bytes: int
    evictions: int
    answers_equal: int | None

    @property
    def evaluated_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def drafted_words(self) -> str | None:
        return f"{self.accepted_tokens:,}/{self.proposed_tokens:,}" if self.proposed_tokens else None

    @property
    def equal_words(self) -> str | None:
        return None if self.answers_equal is None else f"{self.answers_equal}/{self.requests}"


#: Keys of a summary that JSON has only for one user at a time, and only for several.
ONE_USER_KEYS = {"prefill_s", "decode_s", "begin_s", "close_s", "peak_allocated_bytes", "answers_equal"}
MANY_USERS_KEYS = {
    "users_at_a_time", "output_tokens", "proposed_tokens", "accepted_tokens", "output_tokens_per_s",
    "prompt_tokens_per_s", "token_ms_p50",
}  # fmt: skip

#: The columns of the table, and for how many users at a time each is shown; None: for any number.
COLUMNS: tuple[tuple[Column, Literal["one", "many"] | None], ...] = (
    (Column("cache", "cache"), None),
    (Column("users at a time", "users_at_a_time"), "many"),
    (Column("requests", "requests"), None),
    (Column("prompt tokens", "prompt_tokens", ","), None),
    (Column("cached tokens %", lambda each: 100 * each.cached_share, ".1f"), None),
    (Column("tokens per s", "output_tokens_per_s", ".1f"), "many"),
    (Column("drafted tokens accepted", "drafted_words"), "many"),
    (Column("TTFT p50 ms", "ttft_ms_p50", ",.0f"), None),
    (Column("TTFT p95 ms", "ttft_ms_p95", ",.0f"), None),
    (Column("token p50 ms", "token_ms_p50", ",.0f"), "many"),
    (Column("prefill s", "prefill_s", ".1f"), "one"),
    (Column("decode s", "decode_s", ".1f"), "one"),
    (Column("wall s", "wall_s", ".1f"), "many"),
    (Column("peak cache MiB", "peak_cache_bytes", ",.1f", MIB), None),
    (Column("evicted", "evictions"), None),
    (Column(f"answers equal to {REFERENCE}", "equal_words"), "one"),
)
# Distinct in colour, in grey and for colour-blind readers: Okabe and Ito's palette, and a marker each.
STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": "#999999", "marker": "o"},
    "single": {"color": "#E69F00", "marker": "s"},
    "mlx-lm": {"color": "#0072B2", "marker": "^"},
    "radix": {"color": "#D55E00", "marker": "D"},
}


class TotalRatio(NamedTuple):
    """The total of one figure / the total of another, and the 95 % interval; None: there are too few pairs."""

    ratio: float
    interval: tuple[float, float] | None


def total_ratio(upper: Sequence[float], lower: Sequence[float]) -> TotalRatio:
    """The sum of `upper` / the sum of `lower`, and its interval by a paired bootstrap over the requests."""
    pairs = np.array([upper, lower], dtype=np.float64)
    count = pairs.shape[1]
    ratio = float(pairs[0].sum() / pairs[1].sum())
    if count < LEAST_PAIRS:
        return TotalRatio(ratio, None)
    random = np.random.default_rng(0)
    totals = [pairs[:, random.integers(count, size=count)].sum(axis=1) for _ in range(RESAMPLES)]
    low, high = np.percentile([above / below for above, below in totals], (2.5, 97.5)).tolist()
    return TotalRatio(ratio, (low, high))


class Report:
    """The runs of one replay, with a row for each request."""

    def __init__(
        self,
        runs: Sequence[CacheRun],
        *,
        is_parallel: bool = False,
        alone: Sequence[CacheRun] = (),
        partings: Sequence[AnswerDifference] = (),
        stored_bits: int | None = None,
    ) -> None:
        """Sum up the runs. If they served several users at a time, `alone` has the same requests one at a time.

        With `stored_bits`, answers of radix may differ.
        """
        self._stored_bits = stored_bits
        self.runs = tuple(runs)
        self.partings = tuple(partings)
        self._is_parallel = is_parallel
        most = max((len(run.rows) for run in runs), default=0)
        self.alone = tuple(run for run in alone if len(run.rows) == most)
        self._reference = next((run for run in runs if run.cache == REFERENCE), None)
        self.summaries = tuple(self._summarize(run) for run in self.runs)
        self._alone_summaries = tuple(self._summarize(run) for run in self.alone)

    def differences(self) -> list[tuple[str, int, RequestRow]]:
        """Every wrong answer: it differs from the reference, and rounding does not explain it. Cache, index, row."""
        rows = {run.cache: run.rows for run in self.runs} | {f"{run.cache} alone": run.rows for run in self.alone}
        if self._stored_bits is not None:
            rows = {cache: found for cache, found in rows.items() if not cache.startswith(RADIX)}
        if self._is_parallel:
            wrong = [each for each in self.partings if each.gap >= TIE and each.cache in rows]
            return [(each.cache, each.index, rows[each.cache][each.index]) for each in wrong]
        expected = () if self._reference is None else self._reference.rows
        return [
            (cache, index, found[index])
            for cache, found in rows.items()
            for index, row in enumerate(expected)
            if found[index].output_hash != row.output_hash
        ]

    def table(self) -> Table:
        users = "many" if self._is_parallel else "one"
        columns = [column for column, only in COLUMNS if only in (None, users)]
        return figures_table(cells(columns, [*self.summaries, *self._alone_summaries]), names=("cache",))

    def sentence(self) -> str:
        if self._is_parallel:
            return f"{self._throughput()}{self._partings()}" if self.summaries else "No request got a reply."
        if not self.summaries:
            return "No request was answered by every cache."
        return f"{self._comparison()}\n{self._answers()}"

    def document(self, **about: Any) -> dict[str, Any]:
        """Everything, for JSON: `about`, and per run its summary and a row per request."""
        left_out = ONE_USER_KEYS if self._is_parallel else MANY_USERS_KEYS
        runs = [
            {
                **{key: value for key, value in asdict(summary).items() if key not in left_out},
                "rows": [{k: v for k, v in vars(row).items() if v is not None or k == "reason"} for row in run.rows],
            }
            for summary, run in zip((*self.summaries, *self._alone_summaries), (*self.runs, *self.alone), strict=True)
        ]
        found: dict[str, Any] = {"runs": runs}
        if self._is_parallel:
            found["peak_tokens"] = [run.peak_tokens for run in self.runs]
        if self._is_parallel or self._stored_bits is not None:
            found["partings"] = [asdict(each) for each in self.partings]
        return {**found, **about}

    def _summarize(self, run: CacheRun) -> Summary:
        rows, equal = run.rows, None
        ttft_ms = [row.ttft_ms for row in rows]
        p50, p95 = np.percentile(ttft_ms, (50, 95)).tolist()
        token_ms = [row.decode_ms / (row.output_tokens - 1) for row in rows if row.output_tokens > 1]
        prompt_tokens, output_tokens = (sum(row.prompt_tokens for row in rows), sum(row.output_tokens for row in rows))
        if self._reference is not None:
            pairs = zip(rows, self._reference.rows, strict=True)
            equal = sum(row.output_hash == expected.output_hash for row, expected in pairs)
        return Summary(
            cache=run.cache,
            users_at_a_time=run.users_at_a_time,
            requests=len(rows),
            prompt_tokens=prompt_tokens,
            cached_tokens=sum(row.cached_tokens for row in rows),
            output_tokens=output_tokens,
            proposed_tokens=sum(row.proposed_tokens or 0 for row in rows),
            accepted_tokens=sum(row.accepted_tokens or 0 for row in rows),
            output_tokens_per_s=output_tokens / run.wall_s,
            prompt_tokens_per_s=prompt_tokens / run.wall_s,
            ttft_ms_p50=p50,
            ttft_ms_p95=p95,
            token_ms_p50=float(np.median(token_ms)) if token_ms else None,
            prefill_s=sum(ttft_ms) / 1e3,
            decode_s=sum(row.decode_ms for row in rows) / 1e3,
            begin_s=sum(row.begin_ms or 0.0 for row in rows) / 1e3,
            close_s=sum(row.close_ms or 0.0 for row in rows) / 1e3,
            wall_s=run.wall_s,
            peak_cache_bytes=max(row.peak_bytes for row in rows),
            peak_allocated_bytes=max(row.allocated_bytes or 0 for row in rows),
            evictions=run.evictions,
            answers_equal=equal,
        )

    def _comparison(self) -> str:
        radix = next((summary for summary in self.summaries if summary.cache == RADIX), None)
        others = sorted((s for s in self.summaries if s.cache != RADIX), key=lambda summary: summary.evaluated_tokens)
        if radix is None or not others:
            quickest, *slower = sorted(self.summaries, key=lambda summary: summary.prefill_s)
            took = ", ".join(f"{summary.cache} took {summary.prefill_s:.1f} s" for summary in slower)
            return (
                f"{quickest.cache} reached all first tokens in {quickest.prefill_s:.1f} s, with "
                f"{quickest.cached_share:.0%} of the prompt tokens cached{f'; {took}' if took else ''}."
            )
        counts = ", ".join(f"{other.cache} {other.evaluated_tokens:,}" for other in others)
        return "\n".join(
            (
                f"radix evaluated {radix.evaluated_tokens:,} of {radix.prompt_tokens:,} prompt tokens; {counts}. These "
                "counts are the same on every machine.",
                self._times(radix, others),
                self._budget(radix),
                _meaning(radix, others),
            )
        )

    def _times(self, radix: Summary, others: Sequence[Summary]) -> str:
        """The total time to all first tokens, and for which caches the requests show a difference."""
        ttft_ms = {run.cache: [row.ttft_ms for row in run.rows] for run in self.runs}
        ratios = {other.cache: total_ratio(ttft_ms[other.cache], ttft_ms[RADIX]) for other in others}
        times, level, ahead = [], [], []
        for cache, (ratio, interval) in ratios.items():
            if interval is None:
                times.append(f"{ratio:.2f} times as long with {cache}")
                continue
            low, high = interval
            times.append(f"{ratio:.2f} times as long with {cache} (95 % interval {low:.2f} to {high:.2f})")
            if high < 1:
                ahead.append(cache)
            elif low <= 1:
                level.append(cache)
        said = [f"All first tokens took {radix.prefill_s:.1f} s with radix, {', '.join(times)}."]
        if len(self.runs[0].rows) < LEAST_PAIRS:
            said.append(f"For an interval, {LEAST_PAIRS} requests are needed.")
        said += [f"radix is slower than {' and '.join(ahead)} here."] if ahead else []
        said += [f"These requests show no clear difference in time from {' and '.join(level)}."] if level else []
        return " ".join(said)

    def _budget(self, radix: Summary) -> str:
        """The bytes that were held, and in which caches the budget was too small."""
        limited = [summary for summary in self.summaries if summary.cache in WITH_A_BUDGET]
        held = [f"radix held at most {radix.peak_cache_bytes / MIB:.0f} MiB"]
        held += [f"{each.cache} {each.peak_cache_bytes / MIB:.0f} MiB" for each in limited if each != radix]
        evicted = [each.cache for each in limited if each.evictions]
        said = "the budget was too small for everything" if evicted else "the budget had room for everything"
        if evicted and len(limited) > 1:
            said += " in both caches" if len(evicted) == len(limited) else f" in {evicted[0]} only"
        return f"{', '.join(held)}; {said}."

    def _answers(self) -> str:
        if self._reference is None:
            return f"Answers were not compared: {REFERENCE} was not among the caches."
        if len(self.summaries) == 1:
            return "There was no second cache to compare answers with."
        wrong = [each for each in self.summaries if each.answers_equal != each.requests]
        gaps = sorted(each.gap for each in self.partings if each.cache == RADIX)
        if gaps and [each.cache for each in wrong] == [RADIX]:
            answers = plural(len(self.runs[0].rows), "answer")
            return (
                f"With {self._stored_bits} bits at rest, {len(gaps)} of {answers} differ from those without a cache, "
                f"at tokens whose two highest logits are {gaps[0]:.2g} to {gaps[-1]:.2g} apart."
            )
        if not wrong:
            return "Every answer is the same as without a cache."
        counts = [f"{s.requests - (s.answers_equal or 0)} of {s.requests} with {s.cache}" for s in wrong]
        return f"Answers DIFFER from those without a cache: {', '.join(counts)}."

    def _throughput(self) -> str:
        first, *others = self.summaries
        users = first.users_at_a_time
        said = [
            f"{plural(users, 'user')} at a time got {first.output_tokens:,} tokens in {first.wall_s:.1f} s, "
            f"{first.output_tokens_per_s:.1f} tokens/s in total, with {first.cached_share:.0%} of the prompt tokens "
            "from the cache."
        ]
        said += [
            f"In batches of {other.cache}, they took {other.wall_s:.1f} s, {other.wall_s / first.wall_s:.2f} times as "
            f"long, with {other.cached_share:.0%} cached."
            for other in others
        ]
        for alone in self._alone_summaries:
            how = "without a cache" if alone.cache == REFERENCE else f"with {alone.cached_share:.0%} cached"
            ratio = alone.wall_s / first.wall_s
            said.append(f"One at a time, {how}, they took {alone.wall_s:.1f} s, {ratio:.2f} times as long.")
        return " ".join(said)

    def _partings(self) -> str:
        if not self.alone:
            return " Answers were not compared."
        if not self.partings:
            return " Every answer is the same as without a cache."
        wrong = sum(each.gap >= TIE for each in self.partings)
        tied = len(self.partings) - wrong
        ties = f" Answers that differ only where two tokens had equal logits: {tied}." if tied else ""
        return f"{ties} Answers that differ from those without a cache: {wrong}." if wrong else ties


def _meaning(radix: Summary, others: Sequence[Summary]) -> str:
    """Why other caches evaluated more, for whom that matters, and what the cache does not change."""
    more = {other.cache: other for other in others if other.evaluated_tokens > radix.evaluated_tokens}
    fewer = [other.cache for other in others if other.evaluated_tokens < radix.evaluated_tokens]
    is_crowded = "mlx-lm" in more and more["mlx-lm"].evictions > 0
    reasons = ["single keeps only the latest conversation"] if "single" in more else []
    reasons += ["mlx-lm keeps a copy of each conversation, too many for the budget"] if is_crowded else []
    said = []
    if fewer:
        said = [f"radix evaluated more than {' and '.join(fewer)} here."]
    elif reasons:
        said = [f"{'; '.join(reasons)}; radix keeps a shared prefix once."]
        matters = "This matters if users or branches with a common prefix take turns"
        more_room = " and memory is scarce: mlx-lm finds more in a larger budget."
        said.append(matters + (more_room if is_crowded else "."))
    elif not more.keys() - {REFERENCE} and len(others) > 1:
        said = ["All caches find the same in these requests."]
    if not radix.proposed_tokens:
        decode = ", ".join(f"{each.cache} {each.decode_s:.1f} s" for each in others)
        said += [f"A cache does not make decode faster: radix took {radix.decode_s:.1f} s, {decode}."]
    return " ".join(said)


def replay_picture(runs: Sequence[CacheRun], *, title: str, budget_bytes: int, file_format: str = "png") -> bytes:
    """TTFT per request above and bytes held below; PNG, SVG or PDF."""
    figure = new_figure(10.0, 8.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, parse_math=False)
    _plot(upper, runs, lambda row: row.ttft_ms)
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:g}")
    upper.set_ylabel("TTFT, ms (log scale)")
    upper.grid(visible=True, which="both", alpha=0.25)
    upper.legend(title="cache", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _plot(lower, runs, lambda row: row.peak_bytes / MIB)
    held_bytes = max(row.peak_bytes for run in runs for row in run.rows)
    # The line of a budget far above the bytes held would flatten the curves.
    if budget_bytes <= 2 * held_bytes:
        lower.axhline(budget_bytes / MIB, color="black", linestyle="--", linewidth=1)
        lower.annotate("budget", (1, budget_bytes / MIB), textcoords="offset points", xytext=(0, 4))
        held_bytes = max(held_bytes, budget_bytes)
    lower.set_ylim(0, 1.12 * held_bytes / MIB)
    lower.set_ylabel("peak bytes during the request, MiB")
    lower.set_xlabel("request")
    lower.grid(visible=True, alpha=0.25)
    return picture_bytes(figure, file_format)


def _plot(axes: Axes, runs: Sequence[CacheRun], value: Callable[[RequestRow], float]) -> None:
    for run in runs:
        style = {"label": run.cache, "linewidth": 1.4, "markersize": 4.5, **STYLES.get(run.cache, {})}
        axes.plot(range(1, len(run.rows) + 1), [*map(value, run.rows)], **style)
