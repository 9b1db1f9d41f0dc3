"""What is asked of a generation thread in tests, and what it answers."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.testclient import TestClient
from mlx_lm import stream_generate

from runner.engine.token import Token
from runner.models.load import LoadedModel
from runner.serve.app import make_app
from runner.serve.metrics import Watch
from runner.serve.options import ServeOptions
from runner.serve.request import ApiError, ModelNames, OpenRequest, ReplyEvent, Request, RequestRecord, Sampling
from runner.serve.scheduler import Scheduler

T = TypeVar("T")

#: Against hanging alone.
GUARD_S = 120

SYSTEM = "You are a careful assistant, and you answer in rhyme. "
PROMPTS = [f"{SYSTEM}What about the number {number}?" for number in range(8)]
LONG = "All work and no play. " * 40
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello there."}]


@contextmanager
def running(records: list[RequestRecord] | None = None, **options: Any) -> Iterator[Scheduler]:
    """A generation thread on the tiny model, or as the options say."""
    defaults = {"model": "tiny", "budget_bytes": 64 << 20}
    thread = Scheduler(ServeOptions(**{**defaults, **options}), [].append if records is None else records.append)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop(0)


@contextmanager
def application(records: list[RequestRecord] | None = None, **options: Any) -> Iterator[tuple[FastAPI, Scheduler]]:
    """The whole application and its generation thread, on the tiny llama, or as the options say."""
    chosen, watch = ServeOptions(**{"model": "tiny:llama", "budget_bytes": 64 << 20, **options}), Watch()
    held = [] if records is None else records
    thread = Scheduler(chosen, lambda record: (held.append(record), watch.on_record(record)), watch.on_event)
    app = make_app(chosen, thread, watch)
    thread.start()
    try:
        yield app, thread
    finally:
        thread.stop(0)


def local_client(app: FastAPI) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 50000))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + GUARD_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def noting(ended: list[str], name: str) -> Callable[[OpenRequest, ReplyEvent], None]:
    """For `on_answer`: note the name of a request that ends."""
    return lambda _, answer: ended.append(name) if isinstance(answer, RequestRecord) else None


class Waiting:
    """A request that was handed in, and its answers as they come."""

    def __init__(self, thread: Scheduler, *, on_answer: Any = None, **asked: Any) -> None:
        self.answers: list[ReplyEvent] = []
        self._new: queue.Queue[ReplyEvent] = queue.Queue()
        more = {"names": ModelNames(), "max_tokens": 12, **asked}
        if "messages" not in more:
            more.setdefault("prompt", "The quick brown fox")
        sampling = Sampling(**{name: more.pop(name) for name in Sampling.model_fields if name in more})
        self.opened = OpenRequest(Request(**more, sampling=sampling), self._put)
        self._on_answer = on_answer
        thread.ask(self.opened)

    def until(self, kind: type[T]) -> T:
        while True:
            answer = self._new.get(timeout=GUARD_S)
            self.answers.append(answer)
            if isinstance(answer, kind):
                return answer
            assert not isinstance(answer, (RequestRecord, ApiError)), answer

    def _last(self, kind: type[T]) -> T:
        self.end()
        last = self.answers[-1]
        assert isinstance(last, kind), last
        return last

    @property
    def record(self) -> RequestRecord:
        return self._last(RequestRecord)

    @property
    def failure(self) -> ApiError:
        return self._last(ApiError)

    @property
    def sampled(self) -> list[Token]:
        self.end()
        return [answer for answer in self.answers if isinstance(answer, Token) and answer.id is not None]

    @property
    def tokens(self) -> list[int]:
        return [step.id for step in self.sampled]

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.sampled)

    def end(self) -> None:
        while not self.answers or not isinstance(self.answers[-1], (RequestRecord, ApiError)):
            self.answers.append(self._new.get(timeout=GUARD_S))

    def _put(self, answer: ReplyEvent) -> None:
        if self._on_answer is not None:
            self._on_answer(self.opened, answer)
        self._new.put(answer)


def alone(loaded: LoadedModel, prompt: Any, max_tokens: int = 12, **more: Any) -> tuple[list[int], str]:
    """Tokens and text of what mlx-lm says to a prompt, text or token ids."""
    found = list(stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=max_tokens, **more))
    return [each.token for each in found], "".join(each.text for each in found)
