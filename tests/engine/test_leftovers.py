"""What requests leave in memory is on the books, however they end and whoever keeps their tickets.

Python's collector is off: what only it would free counts as held.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import pytest

from policies import LRU
from radixcache import PolicyError, PrefixCache
from runner.engine.generation import Generation
from runner.models.load import LoadedModel
from tests import inside
from tests.engine.generators import BAD_TOKEN, PROMPTS, drain, embedding, load, new_cache, new_generator, spoilt, submit
from tests.memory import active_bytes, held_bytes
from tests.sessions.faults import Fuse, fused, raising, refused_product, spoiling

pytestmark = pytest.mark.usefixtures("exact_allocations", "no_collector")

KINDS = ("llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama_sliding", "jamba")))
BUDGET_BYTES = 2 << 20


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def refuse(*_: Any) -> Any:
    raise ValueError("refused")


def cancelling(generator: Any, tickets: list[Generation]) -> Callable[[int], None]:
    def at(count: int) -> None:
        if count in (0, 4):
            tickets[count // 4].cancel()

    return at


def failing(model: Any, at: int, blow: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: fused(model, Fuse(at, blow))


def ways(model: Any) -> dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]]]]:
    """How requests may end: what two of them are submitted with, and in what they run."""
    return {
        "length": ({}, nullcontext),
        "sampler": ({"sampler": refuse}, nullcontext),
        "processor": ({"logits_processors": [refuse]}, nullcontext),
        "progress": ({"on_progress": refuse}, nullcontext),
        "guidance": ({"guidance": refuse}, nullcontext),
        "prefill": ({}, failing(model, 2, raising(ValueError, True))),
        "step": ({}, failing(model, 12, raising(ValueError, True))),
        "evaluation": ({}, failing(model, 9, spoiling(refused_product))),
        "not a number": ({"sampler": lambda _: mx.array([BAD_TOKEN])}, lambda: embedding(model, spoilt)),
    }


def served(loaded: LoadedModel, cache: PrefixCache, way: str) -> list[Generation]:
    """Requests of which two end in this way, some are cancelled, and some need the room of others."""
    options, surroundings = ways(loaded.model)[way]
    with new_generator(loaded, cache, max_rows=3) as generator, surroundings():
        tickets = [submit(generator, PROMPTS[0], **options), submit(generator, PROMPTS[2], **options)]
        tickets += [submit(generator, prompt) for prompt in (*PROMPTS, *PROMPTS)]
        drain(generator, cancelling(generator, tickets[2:]))
    return tickets


@pytest.mark.parametrize("kind", KINDS)
def test_no_end_of_a_request_leaves_bytes_that_nobody_counts(kind: str) -> None:
    loaded = load(kind)
    inside.try_ways(loaded.model)
    before: int | None = None
    kept: list[Generation] = []
    with new_cache(loaded, budget_bytes=BUDGET_BYTES) as cache:
        for way in ways(loaded.model):
            tickets = served(loaded, cache, way)
            kept += tickets
            found = active_bytes(collects=False) - held_bytes(cache.stats)
            before = found if before is None else before
            assert abs(found - before) <= 0.01 * BUDGET_BYTES, way
            errors = [ticket.completion.error for ticket in tickets if ticket.completion and ticket.completion.error]
            assert bool(errors) == (way != "length"), way
            for error in errors:
                assert error.__traceback__ is None
            if way in ("sampler", "prefill", "step"):
                assert "raised at\n" in errors[0].__notes__[0]
            cache.check()


@pytest.mark.parametrize("way", ["length", "sampler"])
def test_a_generation_that_is_kept_holds_neither_its_row_nor_what_was_predicted(way: str) -> None:
    loaded = load("llama")
    with new_cache(loaded, budget_bytes=BUDGET_BYTES) as cache:
        for ticket in served(loaded, cache, way):
            assert (ticket.completion, ticket.held_row, ticket.last) == (ticket.facts, None, None)


def test_an_error_of_a_policy_does_not_hold_what_was_open_when_it_was_raised() -> None:
    class Failing(LRU):
        def victim(self) -> Any:
            raise ValueError("no victim")

    loaded = load("llama")

    def serve(cache: PrefixCache) -> None:
        for prompt in PROMPTS:
            with cache.begin(prompt) as session:
                session.prefill(loaded.model)

    held = []
    for _ in range(3):
        cache = PrefixCache(loaded.model, policy=Failing(), budget_bytes=100_000)
        with pytest.raises(PolicyError, match="no victim"):
            serve(cache)
        cache.close()
        held.append(mx.get_active_memory())
    assert held[2] <= held[1]
