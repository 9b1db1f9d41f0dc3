"""What the tests of generators share: tiny models and prompts, requests, and replies by one request at a time.

Also drafts: predictions of which some are wrong, and draft models that are wrong at times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from radixcache import Group, PrefixCache
from radixcache.speculate.pace import DraftPace
from runner.engine.generation import Generation, generate
from runner.engine.generator import ParallelGenerator
from runner.engine.token import Completion, Token
from runner.models.load import LoadedModel, load_model
from runner.models.tiny import tiny_model
from tests import inside

BUDGET_BYTES = 64 << 20
CAPACITY = 1024
STEP_SIZE = 32
MAX_TOKENS = 8

_random = np.random.default_rng(5)
SYSTEM = _random.integers(20, 200, 40)
MARKS = (len(SYSTEM),)
PROMPTS = [np.concatenate([SYSTEM, _random.integers(20, 200, length)]) for length in (5, 40, 90, 7, 33)]
MORE_PROMPTS = [np.append(prompt, [30 + index]) for index, prompt in enumerate(PROMPTS[:3])]
#: Neither in a prompt nor among the tokens that a model is tried with.
BAD_TOKEN = 210

_alone: dict[tuple[str, bytes], tuple[int, ...]] = {}


@cache
def load(kind: str) -> LoadedModel:
    return load_model(f"tiny:{kind}")


def new_cache(loaded: LoadedModel, **more: Any) -> PrefixCache:
    return PrefixCache(loaded.model, **{"budget_bytes": BUDGET_BYTES, **more})


def new_generator(loaded: LoadedModel, cache: PrefixCache, **more: Any) -> ParallelGenerator:
    options = {"capacity": CAPACITY, "step_size": STEP_SIZE, **more}
    return ParallelGenerator(cache, loaded.model, loaded.tokenizer, **options)


def alone(loaded: LoadedModel, prompt: Any, max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
    """The greedy reply to a prompt, by the pipeline of one request at a time on an empty cache."""
    key = loaded.name, np.asarray(prompt, np.int64).tobytes()
    if len(_alone.get(key, ())) < max_tokens:
        with new_cache(loaded).begin(prompt) as session:
            length = max(max_tokens, MAX_TOKENS)
            *_, last = generate(session, loaded.model, loaded.tokenizer, max_tokens=length, stop_tokens=())
        _alone[key] = done(last).tokens
    return _alone[key][:max_tokens]


def submit(generator: ParallelGenerator, prompt: Any, max_tokens: int = MAX_TOKENS, **more: Any) -> Generation:
    return generator.submit(prompt, max_tokens=max_tokens, **{"marks": MARKS, "stop_tokens": (), **more})


def drain(
    generator: ParallelGenerator, at: Callable[[int], None] = lambda count: None
) -> dict[Generation, list[Token]]:
    """Serve until all is done, with a check of the group after each piece; `at` is told the number of pieces."""
    pieces: dict[Generation, list[Token]] = {}
    at(0)
    for count, (ticket, piece) in enumerate(generator, start=1):
        pieces.setdefault(ticket, []).append(piece)
        if isinstance(generator.group, Group):
            generator.group.check()
        at(count)
    return pieces


def serve(
    generator: ParallelGenerator, prompts: Iterable[Any], max_tokens: int = MAX_TOKENS, **more: Any
) -> list[Generation]:
    """Serve these prompts at once until all are done."""
    tickets = [submit(generator, prompt, max_tokens, **more) for prompt in prompts]
    drain(generator)
    return tickets


def done(ticket: Generation) -> Completion:
    assert ticket.completion is not None
    return ticket.completion


def tokens_of(ticket: Generation) -> tuple[int, ...]:
    return done(ticket).tokens


def require_alone(loaded: LoadedModel, tickets: Iterable[Generation], prompts: Iterable[Any]) -> None:
    for ticket, prompt in zip(tickets, prompts, strict=True):
        assert done(ticket).done_reason == "length", done(ticket)
        assert done(ticket).tokens == alone(loaded, prompt, len(done(ticket).tokens))


def require_right_tree(loaded: LoadedModel, cache: PrefixCache, prompts: Iterable[Any]) -> None:
    """What the cache restores of these prompts gives the tokens that an empty one gives."""
    cache.check()
    for prompt in prompts:
        with cache.begin(prompt) as session:
            *_, last = generate(session, loaded.model, loaded.tokenizer, max_tokens=2, stop_tokens=())
        assert done(last).tokens == alone(loaded, prompt, 2)


def scripted(tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
    script = iter(tokens)
    return lambda logprobs: mx.array([next(script)])


def spoilt(ids: mx.array, found: mx.array) -> mx.array:
    """For `embedding`: the bad token becomes no number."""
    return mx.where((ids == BAD_TOKEN)[..., None], float("nan"), found)


@contextmanager
def embedding(model: Any, of: Callable[[mx.array, mx.array], mx.array]) -> Iterator[None]:
    """A model in which tokens are embedded as this says, from their ids and from what they are embedded as."""
    layer = model.model.embed_tokens
    plain = type(layer)
    call = {"__call__": lambda self, ids: of(ids, plain.__call__(self, ids))}
    layer.__class__ = type(plain.__name__, (plain,), call)
    try:
        yield
    finally:
        layer.__class__ = plain


def free_cache(loaded: LoadedModel, pace: DraftPace | None = None, **more: Any) -> PrefixCache:
    """A cache with a pace; without one, passes are taken to last equally long, so all that may be right is checked."""
    drafting_cache = new_cache(loaded, **more)
    inside.assume_pace(drafting_cache, DraftPace(lambda rows, tokens: 1.0) if pace is None else pace)
    return drafting_cache


def misled(tokens: Sequence[int], seed: int, share: float = 0.2) -> list[int]:
    """These tokens, some of them wrong."""
    draw = random.Random(seed)
    return [(token + 1) % 200 if draw.random() < share else token for token in tokens]


class Alternating:
    """Guidance: even and odd tokens in turn. It must be told each token once, in order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, before: int | None) -> Any:
        assert before is None or before % 2 == (self.calls - 1) % 2, (before, self.calls)
        self.calls += 1
        return np.arange(1 << 18) % 2 == (self.calls - 1) % 2


class Doubtful(nn.Module):  # type: ignore[misc]
    """A twin of a tiny model, which says something else behind every token that `is_wrong`."""

    def __init__(self, kind: str, is_wrong: Any = lambda tokens: tokens * 7919 % 11 < 5) -> None:
        super().__init__()
        self.twin, self.is_wrong = tiny_model(kind), is_wrong

    @property
    def layers(self) -> Any:
        return self.twin.layers

    def make_cache(self) -> Any:
        return make_prompt_cache(self.twin)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = self.twin(tokens, cache=cache)
        return mx.where(self.is_wrong(tokens)[..., None], mx.roll(logits, 1, axis=-1), logits)


def cache_of_both(loaded: LoadedModel, draft: Any, pace: DraftPace | None = None) -> PrefixCache:
    """The same for a model and its draft model."""
    caches = lambda: [*make_prompt_cache(loaded.model), *make_prompt_cache(draft)]  # noqa: E731
    return free_cache(loaded, pace, caches=caches)
