"""Answering: one job on the generation thread: what is answered, and the record of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from radixcache import BudgetFullError, CacheFullError, Explanation
from runner.serve import border
from runner.serve.asked import Ended, Failed, FinishReason, Job, Progress, Record, Started, Step, TopToken


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
        self, tokenizer: Any, text: str, token: int, logprob: float, logprobs: Any, finish_reason: FinishReason | None
    ) -> None:
        """A token was sampled; `logprobs` (V,) are those of all tokens, evaluated."""
        asked = self.job.asked
        top = tuple(TopToken(**each) for each in border.top_logprobs(logprobs, asked.top_logprobs, tokenizer))
        now_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_ms.append((now_s - self._last_s) * 1e3)
        self._last_s = now_s
        self._tokens.append(token)
        stop_word = self._stop_word(tokenizer) if finish_reason == "stop" else None
        self.job.put(Step(text, token, logprob, top, finish_reason, stop_word))

    def end(self, outcome: Literal["stop", "length", "cancelled"], note: str | None = None) -> None:
        """The reply is over."""
        if not self.is_over:
            self.is_over = True
            record = self._record(outcome, note)
            self._on_record(record)
            self.job.put(Ended(record))

    def fail(self, status: int, message: str, note: str | None = None) -> None:
        """There will be no reply, or no more of it. `note` is for the record alone, by default it is the message."""
        if not self.is_over:
            self.is_over = True
            message = " ".join(message.split())
            record = self._record("error", note or message)
            self._on_record(record)
            self.job.put(Failed(status, message, record))

    def raised(self, error: BaseException | None) -> None:
        """Whatever served it raised this. A reply that the budget has no room for any more ends with what it has."""
        if not isinstance(error, (BudgetFullError, CacheFullError)):
            self.fail(500, f"{type(error).__name__}: {error}")
        elif self._tokens:
            self.end("length", str(error))
        else:  # what others hold, which the error's own words count, is for the record alone
            room = f"budget of {error.budget_bytes} bytes" if isinstance(error, BudgetFullError) else "cache"
            self.fail(400, f"a prompt of {self.prompt_tokens} tokens does not fit the {room}.", str(error))

    def _stop_word(self, tokenizer: Any) -> str | None:
        """The stop word that the reply's tokens end with; the longest of several."""
        words = [(tokenizer.encode(word, add_special_tokens=False), word) for word in self.job.asked.stop_words]
        ends = [(len(ids), word) for ids, word in words if ids == self._tokens[-len(ids) :]]
        return max(ends, default=(0, None), key=lambda end: end[0])[1]

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
