"""Generation threads that many tests ask, and prompts that take long to make."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from runner.models.load import LoadedModel, load_model
from runner.serve import models, served_model
from runner.serve.prompts import RenderedPrompt, prompt_of
from runner.serve.request import Request
from runner.serve.scheduler import Scheduler
from tests.serve.jobs import running

#: Against hanging alone: how long the prompt "slow" is held at most.
SLOW_S = 30


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module")
def shared() -> Iterator[Scheduler]:
    with running() as thread:
        yield thread


@pytest.fixture(scope="module", params=["together", "alone"])
def either(request: Any) -> Iterator[Scheduler]:
    """A thread that serves requests together, and one that serves one at a time."""
    with running(prefill_step_size=64, exact=request.param == "alone") as thread:
        yield thread


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Prompts that begin with "slow" are made when this event is set, and "quick" when such a one is begun."""
    held, begun, made = threading.Event(), threading.Event(), prompt_of

    def prompt_of_slow(request: Request, *arguments: Any, **more: Any) -> RenderedPrompt:
        if request.prompt == "quick":
            assert begun.wait(SLOW_S)
        elif (request.prompt or "").startswith("slow"):
            begun.set()
            assert threading.current_thread().name != "generation"
            assert held.wait(SLOW_S)
        return made(request, *arguments, **more)

    for module in (served_model, models):
        monkeypatch.setattr(module, "prompt_of", prompt_of_slow)
    yield held
    held.set()
