"""A chat request is carried by few types: those that docs/architecture.md names, and no others."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import FrameType

from runner.engine import generation, generator, token
from runner.engine.generator import ParallelGenerator
from runner.serve import request, scheduler, served_model, service
from tests.architecture import PAGE
from tests.serve.jobs import MESSAGES, application, local_client

#: Whose types are counted: what runs and what watches is no carrier.
CARRYING, OTHERS = ("runner.serve.", "runner.engine.", "radixcache.groups.row"), ("runner.serve.metrics",)
#: Held by one of the carriers, which it does not leave.
HELD = {"RequestRecord", "ModelNames", "Constraint", "StopWords", "ReplyReader"}
#: What an API writes to the socket with.
WRITERS = {"ServedReply", "ReplyForm", "ReplyChoice", "OpenAIReply", "ReplyStream"}


@contextmanager
def made_types() -> Iterator[set[type]]:
    """The classes of which objects are made in the block, on any thread that starts in it."""
    made: set[type] = set()

    def hook(frame: FrameType, event: str, _: object) -> None:
        # An object is the first argument of its __init__, and the class of a named tuple that of its __new__.
        if event == "call" and frame.f_code.co_argcount and frame.f_code.co_name in ("__init__", "<lambda>"):
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            made.add(first if isinstance(first, type) else type(first))

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield made
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def carriers() -> list[str]:
    table = PAGE.read_text(encoding="utf-8").partition("Seven types carry")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.M)


def test_seven_types_carry_a_chat_request_and_its_reply() -> None:
    with made_types() as made, application() as (app, _), local_client(app) as client:
        for stream in (False, True):
            made.clear()  # what the server itself is made of
            body = {"messages": MESSAGES, "max_tokens": 3, "stream": stream}
            client.post("/v1/chat/completions", json=body).raise_for_status()
    found = {each.__name__ for each in made if each.__module__.startswith(CARRYING) and each.__module__ not in OTHERS}
    assert len(carriers()) == 7
    assert found - HELD - WRITERS == set(carriers())


def test_a_caller_of_the_engine_has_few_parameters_to_know() -> None:
    assert len(signature(ParallelGenerator.submit).parameters) <= 9  # with self


def test_the_figures_of_the_cache_are_fields_of_one_class() -> None:
    figures = {
        "prompt_tokens",
        "matched_tokens",
        "cached_tokens",
        "reason",
        "drafted",
        "queue_ms",
        "ttft_ms",
        "gaps_ms",
    }
    modules = (generation, generator, token, request, scheduler, served_model, service)
    kinds = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    own = {each for each in kinds if each.__module__.startswith("runner.") and each is not request.PrefillProgress}
    assert {each.__name__ for each in own if figures & vars(each).get("__annotations__", {}).keys()} == {"Completion"}
