"""Progress of a replay: one bar per cache, with its requests and prompt tokens.

On a terminal the bars move; into a file or a pipe a line is written now and then, and each bar as it stands at the end.

A replay as a picture: what each request waited for its first token, and what each cache held meanwhile.

This file never imports MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from runner.picture import new_figure, picture_bytes
from runner.text import MIB, ProgressLines


class ReplayProgress:
    """An `Observer` that draws. A bar counts requests, the running one by the share of its prompt that is done."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TextColumn("{task.fields[requests_done]}/{task.total} requests"),
            TextColumn("{task.fields[prompt_tokens]:,} prompt tokens"),
            TimeElapsedColumn(),
            console=console,
        )
        self._lines = ProgressLines()
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def run_started(self, cache: str, requests: int) -> None:
        """Open a bar."""
        self._done[cache] = 0, 0
        self._tasks[cache] = self._progress.add_task(cache, total=requests, requests_done=0, prompt_tokens=0)

    def request_advanced(self, cache: str, done_tokens: int, prompt_tokens: int) -> None:
        """Move a bar on within a request."""
        requests, tokens = self._done[cache]
        self._draw(cache, requests + done_tokens / prompt_tokens, tokens + done_tokens)

    def request_done(self, cache: str, prompt_tokens: int) -> None:
        """Count a request."""
        requests, tokens = self._done[cache]
        self._done[cache] = requests + 1, tokens + prompt_tokens
        self._draw(cache, *self._done[cache])

    def _draw(self, cache: str, completed: float, prompt_tokens: int) -> None:
        requests = self._done[cache][0]
        self._progress.update(
            self._tasks[cache], completed=completed, requests_done=requests, prompt_tokens=prompt_tokens
        )
        self._lines.tell(lambda: f"{cache}: {requests} requests, {prompt_tokens:,} prompt tokens")


if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_INCHES = (10.0, 8.0)
# Distinct in colour, in grey and for colour-blind readers: Okabe and Ito's palette, and a marker each.
STYLES = {
    "none": {"color": "#999999", "marker": "o"},
    "single": {"color": "#E69F00", "marker": "s"},
    "mlx-lm": {"color": "#0072B2", "marker": "^"},
    "radix": {"color": "#D55E00", "marker": "D"},
}


class DrawnRow(Protocol):
    """What is drawn of a request."""

    @property
    def ttft_ms(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...


class DrawnRun(Protocol):
    """What is drawn of a run, whether it was serial or parallel."""

    @property
    def cache(self) -> str: ...

    @property
    def rows(self) -> Sequence[DrawnRow]: ...


def replay_picture(runs: Sequence[DrawnRun], *, title: str, budget_bytes: int, file_format: str = "png") -> bytes:
    """TTFT per request above and bytes held below; PNG, SVG or PDF."""
    figure = new_figure(*FIGURE_INCHES)
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, parse_math=False)
    _draw_ttft(upper, runs)
    _draw_bytes(lower, runs, budget_bytes)
    return picture_bytes(figure, file_format)


def _draw_ttft(axes: Axes, runs: Sequence[DrawnRun]) -> None:
    for run in runs:
        axes.plot(_numbers(run), [row.ttft_ms for row in run.rows], label=run.cache, **_style(run))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("TTFT, ms (log scale)")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(title="cache", loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _draw_bytes(axes: Axes, runs: Sequence[DrawnRun], budget_bytes: int) -> None:
    for run in runs:
        axes.plot(_numbers(run), [row.peak_bytes / MIB for row in run.rows], label=run.cache, **_style(run))
    held_bytes = max(row.peak_bytes for run in runs for row in run.rows)
    # A budget far above what was held would flatten everything else.
    if budget_bytes <= 2 * held_bytes:
        axes.axhline(budget_bytes / MIB, color="black", linestyle="--", linewidth=1)
        axes.annotate("budget", (1, budget_bytes / MIB), textcoords="offset points", xytext=(0, 4))
        held_bytes = max(held_bytes, budget_bytes)
    axes.set_ylim(0, 1.12 * held_bytes / MIB)
    axes.set_ylabel("held at most during the request, MiB")
    axes.set_xlabel("request")
    axes.grid(visible=True, alpha=0.25)


def _numbers(run: DrawnRun) -> list[int]:
    return list(range(1, len(run.rows) + 1))


def _style(run: DrawnRun) -> dict[str, Any]:
    return {"linewidth": 1.4, "markersize": 4.5, **STYLES.get(run.cache, {})}
