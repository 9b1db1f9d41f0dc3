"""What a request is handed is the state that its own prompt would have produced, in every layer of every kind of model.

One timeline for every kind: a prompt, another that shares a prefix with it, the first grown by a turn, a branch inside
it, and back to the second. Each goes through the cache and is compared with a cold run: the state of every layer in
temporal order, the logits of the prompt's last token, the greedy continuation, and the state after it. The last test
is the control: the state of another prompt in any one place moves the same logits far beyond what the others accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache
from numpy.typing import NDArray

from radixcache import PrefixCache, Session
from runner.tiny import TINY_KINDS, VOCABULARY_LENGTH, tiny_model

Arrays = dict[str, NDArray[Any]]

ROUNDING = 1e-4
# A wrong layer must show 100 times more than rounding may.
WRONG_STATE = 100 * ROUNDING

SHARED_LENGTH = 48
PROMPT_LENGTH = 72
BRANCH_OFFSET = 30
REPLY_LENGTH = 6
NEXT_TOKEN = 77
# Off the grid of the prompts, so that prefill is cut where nothing else ends.
STEP_SIZE = 20

_random = np.random.default_rng(3)
SHARED, TAIL_A, TAIL_B, TURN, BRANCH = (
    _random.integers(0, VOCABULARY_LENGTH, length).tolist()
    for length in (SHARED_LENGTH, PROMPT_LENGTH - SHARED_LENGTH, PROMPT_LENGTH - SHARED_LENGTH, 18, 25)
)
A, B = SHARED + TAIL_A, SHARED + TAIL_B
BRANCHED = A[:BRANCH_OFFSET] + BRANCH
OTHER = _random.integers(0, VOCABULARY_LENGTH, 160).tolist()


@dataclass(frozen=True)
class Variant:
    """The tiny llama with caches of a class that no tiny kind has.

    Attributes:
        fresh: makes the cache of one layer.
        step_size: tokens per forward pass.
    """

    fresh: Callable[[], Any]
    step_size: int = STEP_SIZE


VARIANTS = {
    # Between two bit patterns lies far more than rounding: forward passes of other lengths do not give the same state.
    "llama in 8 bits": Variant(lambda: QuantizedKVCache(group_size=64, bits=8), step_size=1),
    # What a window with `keep` lets a token see depends on how mlx-lm was fed; one token at a time is the same for all.
    "llama in a window that keeps its first 4": Variant(lambda: RotatingKVCache(max_size=24, keep=4), step_size=1),
    "llama in a window too large to wrap": Variant(lambda: RotatingKVCache(max_size=512, keep=4)),
    "llama in joined arrays": Variant(ConcatenateKVCache),
}
# Kinds whose caches and layers are much like another's.
SIMILAR = {
    "deepseek_v3", "gemma3_text", "gemma4_text", "gpt_oss", "jamba", "lfm2", "mamba2", "ministral3", "plamo2", "qwen3",
    "step3p5",
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model, how its caches are made, and how many tokens a forward pass of its prompts takes."""

    model: Any
    open_cache: Callable[[], PrefixCache]
    fresh: Callable[[], list[Any]]
    step_size: int = STEP_SIZE


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(k, marks=[pytest.mark.slow] * (k in SIMILAR)) for k in sorted(TINY_KINDS)), *VARIANTS],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param not in VARIANTS:
        model: Any = tiny_model(request.param)
        return Subject(model, lambda: PrefixCache(model), lambda: list(make_prompt_cache(model)))
    llama: Any = tiny_model("llama")
    variant = VARIANTS[request.param]

    def fresh() -> list[Any]:
        return [variant.fresh() for _ in llama.layers]

    def open_cache() -> PrefixCache:
        in_bits = isinstance(variant.fresh(), QuantizedKVCache)
        return PrefixCache(llama, kv_bits=8) if in_bits else PrefixCache(llama, caches=fresh)

    return Subject(llama, open_cache, fresh, variant.step_size)


@dataclass(frozen=True)
class Answer:
    """What a request came to: the state after its prompt, the logits there, its greedy reply, the state after that."""

    state: Arrays
    logits: NDArray[Any]
    reply: list[int]
    end_state: Arrays


def test_every_request_of_a_branching_conversation_gets_the_state_of_a_cold_run(subject: Subject) -> None:
    cache = subject.open_cache()
    first = through(cache, subject, A)
    agree(first, cold(subject, A))
    grown = [*A, *first.reply, *TURN]
    resumed = {}
    for name, prompt in {"B": B, "A grown": grown, "branch": BRANCHED, "B again": [*B, 7], "A again": A}.items():
        before = cache.stats.hit_tokens
        agree(through(cache, subject, prompt), cold(subject, prompt))
        cache.check()
        resumed[name] = cache.stats.hit_tokens - before
    # Agreeing is worth something only where state was taken up.
    assert resumed["A grown"] >= PROMPT_LENGTH - 16, resumed
    assert resumed["B again"] >= PROMPT_LENGTH - 16, resumed
    assert resumed["A again"] >= PROMPT_LENGTH - 16, resumed
    if not cache.layout.has_points:
        assert resumed["B"] == SHARED_LENGTH, resumed
        assert resumed["branch"] == BRANCH_OFFSET, resumed


def test_fetched_caches_hold_the_state_of_a_cold_run(subject: Subject) -> None:
    cache = subject.open_cache()
    through(cache, subject, A)
    through(cache, subject, B)
    for prompt in ([*A, *TURN], [*B, *TURN], BRANCHED, A):
        caches, remaining = cache.fetch(prompt)
        covered = len(prompt) - len(remaining)
        if covered:
            agree_in_state(temporal_state(caches), temporal_state(cold_caches(subject, prompt[:covered])))
        logits = forward(subject, remaining.tolist(), caches)
        assert largest_difference(logits, cold(subject, prompt).logits) < ROUNDING
    cache.check()


def test_the_state_of_another_prompt_in_any_one_place_would_have_been_noticed(subject: Subject) -> None:
    cache = subject.open_cache()
    grown = [*A, *through(cache, subject, A).reply, NEXT_TOKEN]
    expected = cold(subject, grown).logits
    for place in places(subject.fresh()):
        session = cache.begin(grown)
        assert session.cached_tokens == len(grown) - 1
        right = temporal_state(session.caches)
        stand_in(session.caches, cold_caches(subject, OTHER[: session.cached_tokens]), place)
        with pytest.raises(AssertionError, match="Cache"):
            agree_in_state(temporal_state(session.caches), right)
        logits = last_logits(subject.model, grown[-1:], session.caches)
        assert largest_difference(logits, expected) > WRONG_STATE, place
        session.close()
        # Wrong state is in the cache now.
        cache.clear()
        through(cache, subject, A)


# Running requests


def through(cache: PrefixCache, subject: Subject, prompt: list[int]) -> Answer:
    """Answer a prompt through the cache."""
    with cache.begin(prompt) as session:
        session.prefill(subject.model, step_size=subject.step_size)
        logits = np.array(session.step(subject.model, prompt[-1:])[0, -1])
        state = temporal_state(session.caches)
        reply = greedy(logits, lambda token: _stepped(session, subject.model, token))
        return Answer(state, logits, reply, temporal_state(session.caches))


def cold(subject: Subject, prompt: list[int]) -> Answer:
    """Answer a prompt from nothing, in fresh caches."""
    caches = cold_caches(subject, prompt[:-1])
    logits = last_logits(subject.model, prompt[-1:], caches)
    state = temporal_state(caches)
    reply = greedy(logits, lambda token: last_logits(subject.model, [token], caches))
    return Answer(state, logits, reply, temporal_state(caches))


def greedy(logits: NDArray[Any], step: Callable[[int], NDArray[Any]]) -> list[int]:
    reply = []
    for _ in range(REPLY_LENGTH):
        reply.append(int(logits.argmax()))
        logits = step(reply[-1])
    return reply


def cold_caches(subject: Subject, tokens: list[int]) -> list[Any]:
    """Fresh caches that hold the state of `tokens`, from as few forward passes as may be."""
    caches = subject.fresh()
    forward(subject, tokens, caches)
    return caches


def forward(subject: Subject, tokens: list[int], caches: list[Any]) -> NDArray[Any]:
    step_size = len(tokens) if subject.step_size > 1 else 1
    for start in range(0, len(tokens), step_size):
        logits = last_logits(subject.model, tokens[start : start + step_size], caches)
    return logits


def last_logits(model: Any, tokens: list[int], caches: list[Any]) -> NDArray[Any]:
    return np.array(model(mx.array([tokens]), cache=caches)[0, -1])


def _stepped(session: Session, model: Any, token: int) -> NDArray[Any]:
    return np.array(session.step(model, [token])[0, -1])


# Comparing states


def agree(found: Answer, wanted: Answer) -> None:
    assert largest_difference(found.logits, wanted.logits) < ROUNDING
    assert found.reply == wanted.reply
    agree_in_state(found.state, wanted.state)
    agree_in_state(found.end_state, wanted.end_state)


def agree_in_state(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    assert found, "no layer holds any state"
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        assert largest_difference(found[name], array) < ROUNDING, name


def largest_difference(left: NDArray[Any], right: NDArray[Any]) -> float:
    return float(np.abs(left - right).max()) if left.size else 0.0


def temporal_state(caches: list[Any]) -> Arrays:
    """Every array of every cache by name, time in order, without what the class itself would drop next."""
    state: Arrays = {}
    for place in places(caches):
        leaf = leaf_at(caches, place)
        for name, array in _leaf_state(leaf).items():
            state[f"{place} {type(leaf).__name__} {name}"] = np.array(array)
    return state


def _leaf_state(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, ArraysCache):
        return {str(index): slot for index, slot in enumerate(leaf.cache) if slot is not None}
    if isinstance(leaf, LayerCache):
        names = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
        return {"offset": leaf.offset} | {name: array for name in names if (array := getattr(leaf, name)) is not None}
    if leaf.keys is None:
        return {}
    offset = {"offset": leaf.offset}
    if isinstance(leaf, RotatingKVCache):
        return offset | {"keys": _window(leaf, leaf.keys), "values": _window(leaf, leaf.values)}
    if isinstance(leaf, ChunkedKVCache):
        filled = leaf.offset - leaf.start_position
        # The class drops what is older than a chunk at the start of the next forward pass.
        first = max(0, filled - leaf.chunk_size)
        return offset | {"keys": leaf.keys[..., first:filled, :], "values": leaf.values[..., first:filled, :]}
    if isinstance(leaf, QuantizedKVCache):
        return offset | {"keys": _dequantized(leaf, leaf.keys), "values": _dequantized(leaf, leaf.values)}
    assert isinstance(leaf, (KVCache, ConcatenateKVCache)), type(leaf)
    return offset | {"keys": leaf.keys[..., : leaf.offset, :], "values": leaf.values[..., : leaf.offset, :]}


def _dequantized(cache: QuantizedKVCache, parts: tuple[mx.array, mx.array, mx.array]) -> mx.array:
    packed, scales, biases = (part[..., : cache.offset, :] for part in parts)
    return mx.dequantize(packed, scales, biases, cache.group_size, cache.bits)


def _window(cache: RotatingKVCache, buffer: mx.array) -> NDArray[Any]:
    """The first `keep` tokens and the last ones up to `max_size`, oldest first."""
    ordered = np.array(cache._temporal_order(buffer))
    length = min(cache.offset, cache.max_size)
    return np.concatenate(
        [ordered[..., : cache.keep, :], ordered[..., cache.keep :, :][..., -(length - cache.keep) :, :]], axis=2
    )


# Single caches in a list of layers


def places(caches: list[Any]) -> list[tuple[int, int | None]]:
    """Where single caches stand: the index in the list, and the index in a CacheList there."""
    return [
        (index, inner)
        for index, layer in enumerate(caches)
        for inner in (range(len(layer.caches)) if isinstance(layer, CacheList) else [None])
    ]


def leaf_at(caches: list[Any], place: tuple[int, int | None]) -> Any:
    index, inner = place
    return caches[index] if inner is None else caches[index].caches[inner]


def stand_in(caches: list[Any], others: list[Any], place: tuple[int, int | None]) -> None:
    """Give the cache at one place the state of the same place in other caches."""
    leaf, other = leaf_at(caches, place), leaf_at(others, place)
    vars(leaf).update(vars(other))
