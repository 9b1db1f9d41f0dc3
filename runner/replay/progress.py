"""Progress of a replay: a bar per cache with its requests and prompt tokens, and an estimate of the time.

Without a terminal, a line is written now and then, and each bar as it stands at the end. Also a replay as a picture:
TTFT per request, and the bytes that each cache held. Never imports MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from radixcache.tokens import common_length
from runner.text import MIB, ProgressLines, new_figure, picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from runner.replay.replayer import CacheRun
    from runner.replay.servers import RequestRow

# Estimates below NOTED_S are not shown. Above LONG_S the note says what to pass for about MINUTE_S.
NOTED_S, LONG_S, MINUTE_S = 20, 90, 60
COMPARED_PROMPTS = 64  # an estimate looks for a prompt's prefix in so many earlier prompts
# Distinct in colour, in grey and for colour-blind readers: Okabe and Ito's palette, and a marker each.
STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": "#999999", "marker": "o"},
    "single": {"color": "#E69F00", "marker": "s"},
    "mlx-lm": {"color": "#0072B2", "marker": "^"},
    "radix": {"color": "#D55E00", "marker": "D"},
}


class ReplayProgress(Progress):
    """An `Observer` that draws. A bar counts requests; the running one counts by the share of its prompt that is done.

    `note_of_first` makes a note of the first finished request, or None.
    """

    def __init__(self, console: Console, note_of_first: Callable[[RequestRow], str | None] | None = None) -> None:
        super().__init__(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TextColumn("{task.fields[requests_done]}/{task.total} requests"),
            TextColumn("{task.fields[prompt_tokens]:,} prompt tokens"),
            TextColumn("{task.fields[cached]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._lines = ProgressLines()
        self._bars: dict[str, TaskID] = {}
        # Of each cache: requests that are done, their prompt tokens, and how many of those were cached.
        self._done: dict[str, tuple[int, int, int]] = {}
        self._note_of_first = note_of_first

    def run_started(self, cache: str, requests: int) -> None:
        self._done[cache] = 0, 0, 0
        self._bars[cache] = self.add_task(cache, total=requests, requests_done=0, prompt_tokens=0, cached="")

    def request_advanced(self, cache: str, done_tokens: int, prompt_tokens: int) -> None:
        requests, tokens, _ = self._done[cache]
        self._draw(cache, requests + done_tokens / prompt_tokens, tokens + done_tokens)

    def request_done(self, cache: str, row: RequestRow) -> None:
        requests, tokens, cached_tokens = self._done[cache]
        self._done[cache] = requests + 1, tokens + row.prompt_tokens, cached_tokens + row.cached_tokens
        self._draw(cache, requests + 1, tokens + row.prompt_tokens)
        if self._note_of_first is not None:
            note, self._note_of_first = self._note_of_first(row), None
            if note:
                self.console.print(note, markup=False, soft_wrap=True)

    def _draw(self, cache: str, completed: float, prompt_tokens: int) -> None:
        requests, done_tokens, cached_tokens = self._done[cache]
        cached = f"{cached_tokens / done_tokens:.0%} cached" if done_tokens else ""
        self.update(
            self._bars[cache], completed=completed, requests_done=requests, prompt_tokens=prompt_tokens, cached=cached
        )
        self._lines.tell(lambda: f"{cache}: {requests} requests, {prompt_tokens:,} prompt tokens {cached}")


def expected_time(
    row: RequestRow, prompts: Sequence[NDArray[np.int32]], caches: Sequence[str], reply_tokens: int
) -> str | None:
    """A note of how long a replay of one request at a time takes, and what to pass for less; None if it is short.

    All requests are taken to be as fast as the one of `row`. Replies have `reply_tokens` at most.
    """
    evaluated_tokens = row.prompt_tokens - row.cached_tokens
    prefill_ms, decode_ms = row.ttft_ms / evaluated_tokens, row.decode_ms / max(1, row.output_tokens - 1)
    decoded_tokens = (reply_tokens - 1) * len(prompts) * len(caches)
    total_s = (_tokens_to_prefill(prompts, caches) * prefill_ms + decoded_tokens * decode_ms) / 1e3
    if total_s < NOTED_S:
        return None
    rates = f"{1e3 / prefill_ms:,.0f} prompt tokens/s"
    if decoded_tokens and decode_ms:
        rates += f", {1e3 / decode_ms:.1f} tokens/s of replies"
    took = f"{total_s:.0f} s" if total_s < 2 * LONG_S else f"{total_s / 60:.0f} min"
    fewer = max(1, int(len(prompts) * MINUTE_S / total_s))
    less = f" For about a minute, pass --requests {fewer}." if total_s > LONG_S and fewer < len(prompts) else ""
    return f"note: the whole replay takes about {took} on this machine ({rates}).{less}"


def _tokens_to_prefill(prompts: Sequence[NDArray[np.int32]], caches: Sequence[str]) -> int:
    """How many prompt tokens all caches prefill if none evicts anything."""
    total = 0
    for index, prompt in enumerate(prompts):
        shared = [common_length(earlier, prompt) for earlier in prompts[max(0, index - COMPARED_PROMPTS) : index]]
        cached = {"none": 0, "single": shared[-1] if shared else 0}
        total += sum(len(prompt) - cached.get(cache, max(shared, default=0)) for cache in caches)
    return total


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
    # A budget far above what was held would flatten everything else.
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
