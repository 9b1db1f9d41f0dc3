"""Generation threads that many tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runner.models.load import LoadedModel, load_model
from runner.serve.scheduler import Scheduler
from tests.serve.jobs import running


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
