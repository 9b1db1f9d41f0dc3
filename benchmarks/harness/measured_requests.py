"""Measured requests: conversations that fill a cache, and the time of the cache per request and per token.

The models are hollow or called like a HollowModel. A new conversation has STORED_TOKENS tokens; all conversations share
the first SHARED.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from radixcache import PrefixCache

UNLIMITED_BYTES = 1 << 40
SHARED = 32
STORED_TOKENS = 64
BLOCK_TOKENS = 32
CHUNK_TOKENS = 16
VOCABULARY = 256


# Tokens --------------------------------------------------------------------------------------------------------------


def measure_tokens(name: str, model: Any, blocks: int) -> dict[str, Any]:
    """Return a row: the time that step() and prefill() add to the forward pass, as medians over the blocks."""
    direct_us, step_us = zip(*_step_blocks(model, blocks), strict=True)
    adds = [ours - theirs for theirs, ours in zip(direct_us, step_us, strict=True)]
    chunks = [ours - theirs for theirs, ours in _prefill_pairs(model, blocks)]
    return {
        "model": name,
        "model alone us": statistics.median(direct_us),
        "step us": statistics.median(step_us),
        "step adds us": statistics.median(adds),
        "min us": min(adds),
        "max us": max(adds),
        "prefill adds us/chunk": statistics.median(chunks),
    }


def _step_blocks(model: Any, blocks: int) -> Iterator[tuple[float, float]]:
    """Yield the us per token of each block, direct and through a session."""
    prompt = np.arange(2 * STORED_TOKENS) % VOCABULARY
    room = (blocks + 1) * BLOCK_TOKENS
    tokens = [mx.array([index % VOCABULARY]) for index in range(BLOCK_TOKENS)]
    mx.eval(tokens)
    direct = _roomy(model, len(prompt) + room)
    model(mx.array(prompt)[None], cache=direct)
    with PrefixCache(model, budget_bytes=UNLIMITED_BYTES).begin(prompt, reserve=room) as session:
        session.prefill(model)
        session.step(model, prompt[-1:])
        for index in range(blocks + 1):
            theirs = block_us(lambda token: model(token[None], cache=direct), tokens)
            _wait(direct)
            ours = block_us(lambda token: session.step(model, token), tokens)
            _wait(session.caches)
            if index:  # The first block warms up.
                yield theirs, ours


def _prefill_pairs(model: Any, repeats: int) -> Iterator[tuple[float, float]]:
    """Yield the us per chunk of a prompt of 8 chunks, direct and through a session; both evaluate each chunk."""
    cache = PrefixCache(model, budget_bytes=UNLIMITED_BYTES)
    chunks = 8
    for index in range(repeats + 1):
        prompt = np.random.default_rng(index).integers(0, VOCABULARY, chunks * CHUNK_TOKENS + 1)
        direct = _roomy(model, len(prompt) + 1)
        began = time.perf_counter()
        for start in range(0, len(prompt) - 1, CHUNK_TOKENS):
            model(mx.array(prompt[start : start + CHUNK_TOKENS])[None], cache=direct)
            _wait(direct)
            mx.clear_cache()
        theirs = time.perf_counter() - began
        with cache.begin(prompt) as session:
            began = time.perf_counter()
            session.prefill(model, step_size=CHUNK_TOKENS)
            ours = time.perf_counter() - began
        if index:
            yield theirs / chunks * 1e6, ours / chunks * 1e6


def block_us(run: Callable[[mx.array], Any], tokens: Sequence[mx.array]) -> float:
    """Call `run` for each token; return the us per token."""
    began = time.perf_counter()
    for token in tokens:
        run(token)
    return (time.perf_counter() - began) / len(tokens) * 1e6


def _roomy(model: Any, tokens: int) -> list[Any]:
    """Return caches that do not grow during the measurement, as in a session."""
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    for cache in caches:
        if type(cache) is KVCache:
            cache.step = tokens
    return caches


def _wait(caches: Sequence[Any]) -> None:
    mx.eval([cache.state for cache in caches])


# Requests ------------------------------------------------------------------------------------------------------------


def fill(cache: PrefixCache, model: Any, conversations: list[list[int]], count: int) -> None:
    """Store conversations with a common prefix until the cache has `count` nodes."""
    random = np.random.default_rng(count)
    caches = model.make_cache()
    model(mx.zeros((1, STORED_TOKENS), mx.int32), cache=caches)
    _wait(caches)
    while cache.stats.nodes < count:
        conversations.append(_new_conversation(random))
        cache.insert(conversations[-1], caches)


def _new_conversation(random: np.random.Generator) -> list[int]:
    return [*range(SHARED), *random.integers(0, VOCABULARY, STORED_TOKENS - SHARED).tolist()]


def scenarios(conversations: list[list[int]], repeats: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield name and prompts of each kind of request. Each request adds its new token to the conversation.

    Only the newest conversations are used: at full budget, older ones may have been evicted.
    """
    random = np.random.default_rng(len(conversations))

    def asked(index: int) -> list[int]:
        conversations[index].append(int(random.integers(VOCABULARY)))
        return list(conversations[index])

    yield "next turn", [asked(-1) for _ in range(repeats)]
    yield "switch", [asked(-2 - index % 7) for index in range(repeats)]
    yield "miss", [_new_conversation(random) for _ in range(repeats)]
    yield "full budget", [_new_conversation(random) for _ in range(repeats)]


def request_ms(cache: PrefixCache, model: Any, prompt: list[int]) -> tuple[float, float, float, int]:
    """Return the ms of begin, of close and of MLX copies within both, and the tokens evaluated in between."""
    with _timed_evaluations() as beginning:
        began = time.perf_counter()
        session = cache.begin(prompt, reserve=16)
        begun = time.perf_counter()
    session.prefill(model)
    session.step(model, prompt[-1:])
    _wait(session.caches)
    with _timed_evaluations() as closing:
        last = time.perf_counter()
        session.close()
        closed = time.perf_counter()
    copies = sum(beginning) + sum(closing)
    return (begun - began) * 1e3, (closed - last) * 1e3, copies * 1e3, len(session.remaining)


@contextmanager
def _timed_evaluations() -> Iterator[list[float]]:
    """Collect the seconds of every `mx.eval` in the block, where MLX copies state and Python waits."""
    seconds: list[float] = []
    evaluate = mx.eval

    def timed(*arrays: Any) -> None:
        began = time.perf_counter()
        evaluate(*arrays)
        seconds.append(time.perf_counter() - began)

    mx.eval = timed
    try:
        yield seconds
    finally:
        mx.eval = evaluate
