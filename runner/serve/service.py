"""Service: how the routes of every API get replies. Runs on the event loop; never imports MLX.

reply = await service.ask(asked)          ApiError before anything was sent: full, stopping, bad request
async for part in reply: ...              Progress and Delta
reply.ending                              how it ended, once it is through
reply.cancel()                            also when the iteration is left early
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from runner.serve.asked import Answer, Asked, Ended, Failed, FinishReason, Job, Progress, Record, Started, Step
from runner.serve.errors import ApiError


class Runs(Protocol):
    """What the service needs of the generation thread; `runner.serve.running.Running` is it."""

    @property
    def is_healthy(self) -> bool:
        """Whether it can serve requests."""

    def ask(self, job: Job) -> None:
        """Take a request in; any thread. ApiError: it is full (429) or stopping (503)."""


@dataclass(frozen=True)
class Delta:
    """What one or several tokens added to a reply.

    Attributes:
        text, reasoning: less control sequences and stop words.
        tool_calls: whole ones, each {"id", "name", "arguments"}, with arguments as JSON text.
        steps: the tokens, for logprobs and counts.
    """

    text: str
    reasoning: str
    tool_calls: tuple[dict[str, str], ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Ending:
    """How a reply ended. `finish_reason` is OpenAI's."""

    finish_reason: FinishReason
    has_tool_calls: bool
    record: Record


class Reader(Protocol):
    """Turns steps into deltas; `runner.serve.reading.Reading` is it."""

    def add(self, step: Step) -> Delta: ...

    def finish(self) -> Delta: ...


class Reply:
    """One reply as it comes in. Made by Service.ask."""

    def __init__(self, job: Job, answers: asyncio.Queue[Answer], started: Started, timer: asyncio.TimerHandle) -> None:
        self.prompt_tokens = started.prompt_tokens
        self.ending: Ending | None = None
        self.id = job.id
        self._job, self._answers, self._reading, self._timer = job, answers, started.reading, timer

    def cancel(self) -> None:
        """End it soon."""
        self._timer.cancel()
        self._job.cancel()

    async def __aiter__(self) -> AsyncIterator[Progress | Delta]:
        """ApiError: it failed on the way."""
        reason: FinishReason = "stop"
        has_tool_calls = False
        try:
            while True:
                answer = await self._answers.get()
                if isinstance(answer, Progress):
                    yield answer
                elif isinstance(answer, Step):
                    reason = answer.finish_reason or reason
                    delta = self._reading.add(answer)
                    has_tool_calls |= bool(delta.tool_calls)
                    yield delta
                elif isinstance(answer, Failed):
                    raise ApiError(answer.status, answer.message)
                elif isinstance(answer, Ended):
                    delta = self._reading.finish()
                    has_tool_calls |= bool(delta.tool_calls)
                    if answer.record.outcome != "stop":
                        reason = "length"
                    self.ending = Ending(reason, has_tool_calls, answer.record)
                    yield delta
                    return
        finally:
            self.cancel()


class _Mailbox:
    """Answers on their way to an event loop, which is woken once for all that come at a time: a round's tokens."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answers: deque[tuple[asyncio.Queue[Answer], Answer]] = deque()
        self._is_woken = False

    def put(self, queue: asyncio.Queue[Answer], answer: Answer) -> None:
        """Have an answer put into its queue; any thread. RuntimeError: the loop is closed."""
        self._answers.append((queue, answer))
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: what comes from now on may be too late for this time
        while self._answers:
            queue, answer = self._answers.popleft()
            queue.put_nowait(answer)


class Service:
    """Asks the generation thread on behalf of the routes.

    Args:
        runs: the generation thread.
        timeout_s: from asking to the reply's end, beyond which it is ended with what it has.
    """

    def __init__(self, runs: Runs, *, timeout_s: float) -> None:
        self._runs, self._timeout_s = runs, timeout_s
        self._mailbox: _Mailbox | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return self._runs.is_healthy

    async def ask(self, asked: Asked) -> Reply:
        """Hand a request in, and wait until its prompt is in tokens.

        Raises:
            ApiError: it cannot be served, and why.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        mailbox, answers = self._mailbox, asyncio.Queue[Answer]()

        def put(answer: Answer) -> None:
            try:
                mailbox.put(answers, answer)
            except RuntimeError:  # the loop is closed: nobody listens any more
                job.cancel()

        job = Job(asked, put)
        self._runs.ask(job)
        timer = loop.call_later(self._timeout_s, job.cancel)
        try:
            first: Any = await answers.get()
        except BaseException:
            job.cancel()
            timer.cancel()
            raise
        if isinstance(first, Failed):
            timer.cancel()
            raise ApiError(first.status, first.message, retry_after_s=first.retry_after_s)
        if isinstance(first, Ended):
            timer.cancel()
            raise ApiError(503, "the request was ended before it was served: it took too long, or the server stops.")
        assert isinstance(first, Started), first
        return Reply(job, answers, first, timer)
