"""RadixPromptCache answers as mlx-lm's LRUPromptCache does, or finds more."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    KVCache,
    LRUPromptCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from numpy.typing import NDArray

from radixcache import SnapshotError, UnsupportedCacheError
from radixcache.mlx_server import HEAD_START_CALLS, PRIORITIES, RadixPromptCache
from runner.models.tiny import tiny_model
from tests.prompts import tokens

ROUNDING = 1e-4
SPANS = ["llama"]
POINTS = ["gemma3_text", "nemotron_h"]
PROMPT = tokens(1, 60)
OTHER = tokens(2, 60, first=3 if PROMPT[0] != 3 else 4)


def filled(model: Any, prompt: Sequence[int], caches: list[Any] | None = None) -> list[Any]:
    caches = list(make_prompt_cache(model)) if caches is None else caches
    model(mx.array([prompt]), cache=caches)
    return caches


def logits(model: Any, prompt: Sequence[int], caches: list[Any] | None = None) -> NDArray[Any]:
    caches = make_prompt_cache(model) if caches is None else caches
    return np.array(model(mx.array([prompt]), cache=caches)[0, -1])


def left(cache: Any, prompt: list[int], model: Any = "a") -> int:
    """How many tokens of a prompt are left to evaluate."""
    return len(cache.fetch_nearest_cache(model, prompt)[1])


# What it answers


@pytest.mark.parametrize("kind", SPANS + POINTS)
def test_a_walk_leaves_no_more_to_evaluate_than_mlx_lms_own_and_the_answers_are_right(kind: str) -> None:
    model = tiny_model(kind)
    ours, theirs = RadixPromptCache(max_size=100), LRUPromptCache(max_size=100)
    drawn = random.Random(kind)
    sent: list[list[int]] = []
    for step in range(12):
        known = drawn.choice(sent) if sent and drawn.random() < 0.6 else PROMPT[: drawn.choice((20, 40))]
        prompt = [*known, *tokens(100 + step, drawn.randint(1, 15))]
        _, expected = theirs.fetch_nearest_cache("a", prompt)
        caches, rest = ours.fetch_nearest_cache("a", prompt)
        assert 0 < len(rest) <= len(expected)
        assert rest == prompt[len(prompt) - len(rest) :]
        caches = make_prompt_cache(model) if caches is None else caches
        assert np.abs(logits(model, rest, caches) - logits(model, prompt)).max() < ROUNDING
        ours.insert_cache("a", prompt, caches, cache_type=drawn.choice(list(PRIORITIES)))
        theirs.insert_cache("a", prompt, copy.deepcopy(caches))
        ours.check()
        sent.append(prompt)
    assert len(ours) <= len(theirs)
    assert 0 < ours.nbytes <= theirs.nbytes


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_what_is_handed_out_and_what_was_handed_in_are_the_callers_to_change(kind: str) -> None:
    model = tiny_model(kind)
    cache = RadixPromptCache()
    inserted = filled(model, PROMPT)
    cache.insert_cache("a", PROMPT, inserted)
    prompt = [*PROMPT, 1, 2]
    for caches in (inserted, cache.fetch_nearest_cache("a", prompt)[0], cache.fetch_nearest_cache("a", prompt)[0]):
        filled(model, tokens(9, 40), caches)
    caches, rest = cache.fetch_nearest_cache("a", prompt)
    assert rest == [1, 2]
    assert np.abs(logits(model, rest, caches) - logits(model, prompt)).max() < ROUNDING


def test_models_share_nothing_but_the_bytes(llama: Any) -> None:
    other = tiny_model("nemotron_h")
    cache = RadixPromptCache()
    keys = ("folder", None, None), ("folder", "adapter", None), ("other", None, None)
    for key, model in zip(keys, (llama, llama, other), strict=True):
        assert left(cache, [*PROMPT, 1], key) == 61
        before = cache.nbytes
        cache.insert_cache(key, PROMPT, filled(model, PROMPT))
        assert cache.nbytes > before
        cache.check()
    assert [left(cache, [*PROMPT, 1], key) for key in keys] == [1, 1, 1]
    assert len(cache) == 3


# Keys, kinds of caches


def test_an_image_is_found_whole_or_not_at_all(llama: Any) -> None:
    cache = RadixPromptCache()
    image = -1 - (1 << 59)
    prompt = [*PROMPT[:20], *[image] * 30, *PROMPT[20:30]]
    stored = filled(llama, [max(0, key) for key in prompt])
    cache.insert_cache("a", prompt[:40], trimmed(stored, 40))
    assert left(cache, prompt) == len(prompt) - 20
    cache.insert_cache("a", prompt, stored)
    assert left(cache, prompt) == 1
    # The same ids, and another image.
    assert left(cache, [*PROMPT[:20], *[image - 1] * 30, *PROMPT[20:30]]) == len(prompt) - 20
    assert left(cache, prompt[:50]) == 30


def trimmed(caches: list[Any], length: int) -> list[Any]:
    """Copies of caches, cut to a length."""
    caches = copy.deepcopy(caches)
    trim_prompt_cache(caches, caches[0].offset - length)
    return caches


def test_a_draft_models_caches_are_stored_beside_the_models_as_far_as_both_go(llama: Any) -> None:
    cache = RadixPromptCache()
    both = filled(llama, PROMPT) + trimmed(filled(llama, PROMPT), 57)
    cache.insert_cache("a", PROMPT, both)
    caches, rest = cache.fetch_nearest_cache("a", [*PROMPT, 1])
    assert caches is not None
    assert len(caches) == len(both)
    assert {each.offset for each in caches} == {57}
    for half in (caches[: len(caches) // 2], caches[len(caches) // 2 :]):
        assert np.abs(logits(llama, rest, half) - logits(llama, [*PROMPT, 1])).max() < ROUNDING


def test_quantized_caches_of_long_prompts_stand_beside_those_of_short_ones(llama: Any) -> None:
    cache = RadixPromptCache()
    cache.insert_cache("a", PROMPT[:20], filled(llama, PROMPT[:20]))
    quantized = [each.to_quantized(group_size=64, bits=8) for each in filled(llama, PROMPT)]
    cache.insert_cache("a", PROMPT, quantized)
    cache.check()
    caches, rest = cache.fetch_nearest_cache("a", [*PROMPT, 1])
    assert caches is not None
    assert (rest, type(caches[0]).__name__) == ([1], "QuantizedKVCache")
    assert left(cache, [*PROMPT[:20], 1]) == 1


class Unknown:
    """A class of cache that mlx-lm has not."""

    nbytes = 0


def test_what_cannot_be_stored_is_refused_with_a_reason_and_changes_nothing(llama: Any) -> None:
    cache = RadixPromptCache()
    cache.insert_cache("a", PROMPT, filled(llama, PROMPT))
    before = cache.nbytes, len(cache)
    with pytest.raises(UnsupportedCacheError, match=r"layer 1 \(Unknown\)"):
        cache.insert_cache("a", OTHER, [KVCache(), Unknown()])
    sliding = tiny_model("llama_sliding")
    with pytest.raises(SnapshotError, match="are at offset 60, after the 40 tokens"):
        cache.insert_cache("b", PROMPT[:40], filled(sliding, PROMPT))
    with pytest.raises(KeyError, match="tool"):
        cache.insert_cache("a", OTHER, filled(llama, OTHER), cache_type="tool")
    assert (cache.nbytes, len(cache)) == before
    cache.check()


# Bytes and sequences


@pytest.mark.parametrize("kind", ["gemma3_text", "nemotron_h"])
def test_bytes_and_sequences_stay_within_their_limits_whatever_comes(kind: str) -> None:
    model = tiny_model(kind)
    whole = RadixPromptCache()
    whole.insert_cache("a", PROMPT, filled(model, PROMPT))
    cache = RadixPromptCache(max_size=5, max_bytes=3 * whole.nbytes)
    for step in range(12):
        prompt = [*PROMPT[: 10 * (step % 3)], *tokens(50 + step, 20 + 5 * step)]
        cache.insert_cache(step % 2, prompt, filled(model, prompt), cache_type=list(PRIORITIES)[step % 3])
        cache.check()
    assert left(cache, [*prompt, 1], 1) == 1


def test_the_sequence_used_longest_ago_goes_first_with_all_that_no_other_begins_with(llama: Any) -> None:
    cache = RadixPromptCache(max_size=2)
    first, second, third = ([*PROMPT[:30], *tokens(seed, 20, first=seed)] for seed in (11, 12, 13))
    for prompt in (first, second):
        cache.insert_cache("a", prompt, filled(llama, prompt))
    assert left(cache, [*first, 1]) == 1
    cache.insert_cache("a", third, filled(llama, third))
    assert [left(cache, [*prompt, 1]) for prompt in (first, second, third)] == [1, 21, 1]
    cache.insert_cache("a", OTHER, filled(llama, OTHER))
    cache.insert_cache("b", OTHER, filled(llama, OTHER))
    # Of PROMPT's beginning nothing is left: its last sequence took it along.
    assert cache.fetch_nearest_cache("a", PROMPT)[0] is None
    assert len(cache) == 2


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_a_system_prompt_is_not_lost_to_replies_and_types_go_as_in_mlx_lm(kind: str) -> None:
    model = tiny_model(kind)
    ours, theirs = RadixPromptCache(max_size=3), LRUPromptCache(max_size=3)
    drawn = ["system", *["assistant"] * 4, "user", "user", "assistant", "user", "system", "assistant", "user", "user"]
    for step, cache_type in enumerate(drawn):
        prompt = tokens(300 + step, 20, first=step)
        for cache in (ours, theirs):
            cache.insert_cache("a", prompt, filled(model, prompt), cache_type=cache_type)
        counts = [{name: each["n_sequences"] for name, each in c.stats_by_type().items()} for c in (ours, theirs)]
        assert counts[0] == counts[1], step
        ours.check()
        if step == 4:
            assert left(ours, [*tokens(300, 20, first=0), 1]) == 1


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_a_reply_that_goes_takes_its_prompt_along_and_leaves_the_system_prompt(kind: str) -> None:
    model, cache = tiny_model(kind), RadixPromptCache(max_size=2)
    for cache_type, end in (("system", 20), ("user", 40), ("assistant", 60)):
        cache.insert_cache("a", PROMPT[:end], filled(model, PROMPT[:end]), cache_type=cache_type)
    stats, theirs = cache.stats_by_type(), LRUPromptCache().stats_by_type()
    assert {name: each.keys() for name, each in stats.items()} == {name: each.keys() for name, each in theirs.items()}
    assert sum(each["n_bytes"] for each in stats.values()) == cache.nbytes
    assert [each["n_sequences"] for each in stats.values()] == [1, 0, 0]
    for seed in (1, 2, 3):
        other = tokens(400 + seed, 30, first=(PROMPT[0] + seed) % 200)
        cache.insert_cache("a", other, filled(model, other))
        assert left(cache, [*PROMPT[:20], 1]) == 1
        assert left(cache, [*other, 1]) == 1
        cache.check()
    assert [each["n_sequences"] for each in cache.stats_by_type().values()] == [1, 0, 1]
    assert left(cache, [*PROMPT, 1]) == 41


def test_trim_to_takes_sequences_and_bytes_of_the_model_used_longest_ago_first(llama: Any) -> None:
    cache = RadixPromptCache()
    for model in ("a", "b"):
        for prompt in (PROMPT, OTHER):
            cache.insert_cache(model, prompt, filled(llama, prompt))
    each_bytes = cache.nbytes // 4
    cache.trim_to(n_bytes=3 * each_bytes)
    assert cache.nbytes <= 3 * each_bytes
    assert [left(cache, [*PROMPT, 1], model) for model in ("a", "b")] == [61, 1]
    cache.trim_to(n_sequences=1)
    assert (len(cache), left(cache, [*PROMPT, 1], "b")) == (1, 1)
    cache.trim_to()
    assert len(cache) == 1
    cache.trim_to(n_bytes=-5)
    assert (len(cache), cache.nbytes) == (0, 0)
    cache.insert_cache("a", PROMPT, filled(llama, PROMPT))
    cache.trim_to(n_sequences=-1)
    assert (len(cache), cache.nbytes) == (0, 0)
    cache.check()


def test_a_system_prompt_outlives_later_replies_but_not_for_good() -> None:
    model = tiny_model("mamba2")
    one = RadixPromptCache()
    one.insert_cache("a", PROMPT, filled(model, PROMPT))
    cache = RadixPromptCache(max_size=100, max_bytes=4 * one.nbytes)
    cache.insert_cache("a", PROMPT, filled(model, PROMPT), cache_type="system")
    found = []
    for call in range(3 * HEAD_START_CALLS):
        prompt = tokens(200 + call, 30, first=(PROMPT[0] + 1 + call) % 200)
        cache.insert_cache("a", prompt, filled(model, prompt))
        held = cache.stats_by_type()
        found.append(held["system"]["n_sequences"])
        assert held["assistant"]["n_sequences"] >= 1
    assert found[10] == 1
    assert found[-1] == 0
