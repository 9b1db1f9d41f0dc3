"""Progress of a replay: one bar per cache, with its requests and prompt tokens.

On a terminal the bars move; into a file or a pipe each is written once, as it stands at the end.
"""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


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
        self._task: TaskID | None = None
        self._requests_done = 0
        self._tokens_done = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def run_started(self, cache: str, requests: int) -> None:
        """Open the next bar."""
        self._requests_done = 0
        self._tokens_done = 0
        self._task = self._progress.add_task(cache, total=requests, requests_done=0, prompt_tokens=0)

    def request_advanced(self, done_tokens: int, prompt_tokens: int) -> None:
        """Move the bar on within a request."""
        self._draw(self._requests_done + done_tokens / prompt_tokens, self._tokens_done + done_tokens)

    def request_done(self, prompt_tokens: int) -> None:
        """Count a request."""
        self._requests_done += 1
        self._tokens_done += prompt_tokens
        self._draw(self._requests_done, self._tokens_done)

    def _draw(self, completed: float, prompt_tokens: int) -> None:
        assert self._task is not None, "a run has started"
        self._progress.update(
            self._task, completed=completed, requests_done=self._requests_done, prompt_tokens=prompt_tokens
        )
