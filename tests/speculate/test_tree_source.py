"""A cache's suffix index: made when it is first asked for, fed when requests close, cleared with the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixcache import PrefixCache
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens

PROMPT, REPLY, QUESTION = tokens(1, 40), tokens(2, 12), tokens(3, 20)
CAPACITY = 500


def proposed(cache: PrefixCache, known: Any, namespace: str = "") -> list[int]:
    source = inside.core(cache).tree_source(namespace)
    return list(source.propose([int(each) for each in known], 4).tokens)


def said_alone(cache: PrefixCache, model: Any, prompt: Any, reply: Any, namespace: str = "") -> None:
    with cache.begin(prompt, namespace=namespace) as session:
        session.prefill(model)
        session.step(model, np.concatenate([prompt[-1:], reply]))


def said_in_a_group(cache: PrefixCache, model: Any, prompt: Any, reply: Any, namespace: str = "") -> None:
    with cache.begin_many([prompt], capacity=CAPACITY, namespace=namespace) as group:
        (row,) = group.rows
        group.prefill(model, row)
        for token in map(int, reply):
            group.step(model, [row], [token])


SAYING = pytest.mark.parametrize("say", [said_alone, said_in_a_group])


@SAYING
def test_what_was_said_before_the_first_draft_is_found_in_the_tree(say: Any) -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    say(cache, model, PROMPT, REPLY)
    assert proposed(cache, PROMPT) == list(REPLY[:4])
    cache.check()


@SAYING
def test_replies_and_new_parts_of_prompts_are_added_once_when_their_request_closes(say: Any) -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    assert proposed(cache, PROMPT) == []
    say(cache, model, PROMPT, REPLY)
    assert proposed(cache, PROMPT) == list(REPLY[:4])
    before = inside.suffixes(cache).tokens
    longer = np.concatenate([PROMPT, REPLY, QUESTION])
    say(cache, model, longer, REPLY)
    assert proposed(cache, longer[-24:-4]) == list(QUESTION[-4:])
    assert proposed(cache, longer) == list(REPLY[:4])
    assert inside.suffixes(cache).tokens <= before + len(QUESTION) + len(REPLY) + 17  # with the context in front


def test_it_outlives_the_state_and_nothing_crosses_a_namespace_until_clear() -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    inside.core(cache).tree_source()
    for namespace in ("", "tenant"):
        said_alone(cache, model, PROMPT, REPLY if namespace else REPLY[::-1], namespace)
    cache.reclaim(0)
    assert cache.stats.tokens == 0
    assert proposed(cache, PROMPT, "tenant") == list(REPLY[:4])
    assert proposed(cache, PROMPT) == list(REPLY[::-1][:4])
    assert proposed(cache, PROMPT, "stranger") == []
    cache.clear("tenant")
    assert proposed(cache, PROMPT, "tenant") == []
    assert proposed(cache, PROMPT) == list(REPLY[::-1][:4])
    cache.clear()
    assert proposed(cache, PROMPT) == []
    cache.check()


def test_what_was_said_with_wrong_state_is_forgotten() -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    inside.core(cache).tree_source()
    said_alone(cache, model, PROMPT, REPLY)
    with cache.begin(PROMPT) as session:
        live, keys = inside.live(session), session.prompt.astype(np.int64)
        with inside.core(cache).lock:
            inside.core(cache).expel(live, keys, 10, "")
    assert proposed(cache, PROMPT) == []


def test_the_option_bounds_its_bytes() -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model, suffix_index_bytes=1 << 20)
    said_alone(cache, model, PROMPT, REPLY)
    assert (cache.stats.suffix_index_tokens, cache.stats.suffix_index_bytes) == (0, 0)
    inside.core(cache).tree_source()
    assert 0.9 * (1 << 20) * 34 / 39 < cache.stats.suffix_index_bytes <= 1 << 20
    assert cache.stats.suffix_index_tokens == len(PROMPT) + len(REPLY)
    with pytest.raises(ValueError, match="suffix_index_bytes is 0"):
        PrefixCache(tiny_model("llama"), suffix_index_bytes=0)
