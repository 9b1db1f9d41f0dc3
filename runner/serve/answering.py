"""Answering: one job on the generation thread: what is answered, and the record of it. Never imports MLX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from runner.serve.asked import Ended, Failed, FinishReason, Job, Progress, Record, Started, Step, TopToken

if TYPE_CHECKING:
    from radixcache import Explanation


class Answering:
    """Answers one job; exactly one Ended or Failed is the last of it.

    Args:
        on_record: told how it ended.

    Attributes:
        prompt_tokens, cached_tokens, matched_tokens, reason, shortfalls: as in Record.
        is_running: whether it was admitted. `is_over`: whether the last answer was given.
    """

    def __init__(self, job: Job, on_record: Callable[[Record], None]) -> None:
        self.job = job
        self.prompt_tokens = self.cached_tokens = self.matched_tokens = 0
        self.reason: str | None = None
        self.shortfalls: tuple[tuple[int, int, str], ...] = ()
        self.is_over = False
        self._on_record = on_record
        self._admitted_s: float | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        self._gaps_ms: list[float] = []
        self._tokens: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether it was admitted and is not over."""
        return self._admitted_s is not None and not self.is_over

    @property
    def tokens(self) -> Sequence[int]:
        """The reply's, so far."""
        return self._tokens

    def foresee(self, found: Explanation) -> None:
        """This is what the cache has of the prompt, and why not more."""
        self.cached_tokens, self.matched_tokens = found.resumable_tokens, found.matched_tokens
        self.shortfalls = tuple((gap.start, gap.end, str(gap.reason)) for gap in found.gaps)
        self.reason = str(found.gaps[0].reason) if found.resumable_tokens < found.matched_tokens else None

    def start(self, prompt_tokens: int, reading: Any) -> None:
        """The prompt is in tokens."""
        self.prompt_tokens = prompt_tokens
        self.job.put(Started(prompt_tokens, reading))

    def progress(self, done_tokens: int, prompt_tokens: int) -> None:
        """It was admitted, or a chunk of its prompt was evaluated."""
        if self._admitted_s is None:
            self._admitted_s = time.perf_counter()
        self.job.put(Progress(done_tokens, prompt_tokens))

    def step(
        self,
        text: str,
        token: int,
        logprob: float,
        top_tokens: tuple[TopToken, ...],
        finish_reason: FinishReason | None,
        stop_word: str | None,
    ) -> None:
        """A token was sampled."""
        now_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_ms.append((now_s - self._last_s) * 1e3)
        self._last_s = now_s
        self._tokens.append(token)
        self.job.put(Step(text, token, logprob, top_tokens, finish_reason, stop_word))

    def end(self, outcome: Literal["stop", "length", "cancelled"], note: str | None = None) -> None:
        """The reply is over."""
        if not self.is_over:
            self.is_over = True
            record = self._record(outcome, note)
            self._on_record(record)
            self.job.put(Ended(record))

    def fail(self, status: int, message: str) -> None:
        """There will be no reply, or no more of it."""
        if not self.is_over:
            self.is_over = True
            message = " ".join(message.split())
            record = self._record("error", message)
            self._on_record(record)
            self.job.put(Failed(status, message, record))

    def _record(self, outcome: Literal["stop", "length", "cancelled", "error"], note: str | None) -> Record:
        job = self.job
        return Record(
            id=job.id,
            names=job.asked.names,
            namespace=job.asked.namespace,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            matched_tokens=self.matched_tokens,
            reason=self.reason,
            completion_tokens=len(self._tokens),
            queue_ms=self._since_arrival_ms(self._admitted_s),
            ttft_ms=self._since_arrival_ms(self._first_s),
            gaps_ms=tuple(self._gaps_ms),
            outcome=outcome,
            note=note,
            shortfalls=self.shortfalls,
        )

    def _since_arrival_ms(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else (moment_s - self.job.arrived_s) * 1e3
