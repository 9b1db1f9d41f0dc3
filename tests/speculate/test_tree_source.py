"""A cache's suffix index: made when it is first asked for, fed as requests go on, cleared with the cache."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache
from radixcache.speculate.drafting import FED_TOKENS, LOOK_TOKENS
from radixcache.speculate.suffix_index import SuffixIndex
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens
from tests.restarts import Open, opened, reading  # noqa: F401

PROMPT, REPLY, QUESTION = tokens(1, 40), tokens(2, 12), tokens(3, 20)
CAPACITY = 500


def proposed(cache: PrefixCache, known: Any, namespace: str = "") -> list[int]:
    source = inside.core(cache).draft_index.source(namespace)
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


@pytest.mark.parametrize("rows", [0, 2])
def test_a_long_reply_is_found_while_it_grows_and_is_added_once(rows: int) -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    reply = [int(each) for each in tokens(2, FED_TOKENS + 60)]
    assert proposed(cache, PROMPT) == []
    if rows:
        with cache.begin_many([PROMPT, QUESTION], capacity=2000) as group:
            for row in group.rows:
                group.prefill(model, row)
            for token in reply:
                group.step(model, group.rows, [token, 7])
            assert proposed(cache, reply[:20]) == reply[20:24]
            group.rows[1].close()
            before = inside.suffixes(cache).tokens
    else:
        with cache.begin(PROMPT) as session:
            session.prefill(model)
            for token in [int(PROMPT[-1]), *reply]:
                session.step(model, [token])
            assert proposed(cache, reply[:20]) == reply[20:24]
            assert proposed(cache, reply[:20], "stranger") == []
            before = inside.suffixes(cache).tokens
    assert proposed(cache, reply[-20:-4]) == reply[-4:]
    assert inside.suffixes(cache).tokens <= before + len(PROMPT) + 60 + 17  # with the context in front
    cache.check()


@pytest.mark.parametrize("rows", [0, 1])
def test_no_pass_indexes_more_than_a_part_of_a_long_prompt(rows: int) -> None:
    model, prompt = tiny_model("llama"), tokens(1, 2 * LOOK_TOKENS + 100)
    cache = PrefixCache(model)
    assert proposed(cache, PROMPT) == []
    index, ends = inside.suffixes(cache), [0]
    with ExitStack() as stack:
        if rows:
            group = stack.enter_context(cache.begin_many([prompt], capacity=2 * len(prompt)))
            group.prefill(model, group.rows[0])
        else:
            session = stack.enter_context(cache.begin(prompt))
            session.prefill(model)
        for token in [int(prompt[-1]), 7, 8, 9]:
            if rows:
                group.step(model, group.rows, [token])
            else:
                session.step(model, [token])
            ends.append(index.tokens)
    for before, after in itertools.pairwise(ends[:3]):
        assert LOOK_TOKENS <= after - before <= LOOK_TOKENS + 17  # with the context in front
    assert len(prompt) + 3 <= index.tokens <= len(prompt) + 3 + 3 * 17
    cache.check()


@pytest.mark.parametrize("cut", ["shifted", "quarantined"])
def test_a_reply_that_is_not_stored_is_not_read_at_each_token(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, added = tiny_model("llama"), []
    cache = PrefixCache(model)
    core, add = inside.core(cache), SuffixIndex.add
    assert proposed(cache, PROMPT) == []
    if cut == "quarantined":
        said_alone(cache, model, PROMPT, REPLY)
        with cache.begin(PROMPT) as session, core.lock:
            core.expel(inside.live(session), session.prompt.astype(np.int64), 10, "")

    def counted(self: SuffixIndex, *given: Any, **more: Any) -> None:
        added.append(given)
        add(self, *given, **more)

    monkeypatch.setattr(SuffixIndex, "add", counted)
    with cache.begin_many([PROMPT], capacity=CAPACITY) as group:
        (row,) = group.rows
        group.prefill(model, row)
        group.step(model, [row], [int(PROMPT[-1])])
        if cut == "shifted":
            group.remove(model, row, 5, 10)
        for token in range(FED_TOKENS + 40):
            group.step(model, [row], [token % 50])
        assert len(added) <= 1


def test_what_is_taken_back_after_it_was_indexed_is_said_anew() -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    assert proposed(cache, PROMPT) == []
    first, second = ([int(each) for each in tokens(seed, 300)] for seed in (2, 3))
    with cache.begin(PROMPT) as session:
        session.prefill(model)
        session.step(model, [int(PROMPT[-1]), *first])
        session.rewind(len(PROMPT))
        session.step(model, second)
    assert proposed(cache, [*PROMPT, *second[:4]]) == second[4:8]
    assert proposed(cache, second[:40]) == second[40:44]
    cache.check()


def test_what_is_inserted_or_read_from_a_store_is_added_once(opened: Open) -> None:  # noqa: F811
    model, prompt = tiny_model("llama"), [int(each) for each in tokens(1, 600)]
    with PrefixCache(model, store=opened()) as cache:
        said_alone(cache, model, prompt, REPLY)
        cache.flush()
    with PrefixCache(model, store=opened()) as cache:
        assert proposed(cache, prompt[:50]) == []
        for _ in range(2):
            with cache.begin([*prompt, 3]) as session:
                assert session.cached_tokens >= 512
            assert proposed(cache, prompt[:50]) == prompt[50:54]
            added = inside.suffixes(cache).tokens
            cache.reclaim(0)
        assert added <= len(prompt) + 60  # with the context in front of each part
        foreign = make_prompt_cache(model)
        other = [int(each) for each in tokens(5, 60)]
        model(mx.array([other]), cache=foreign)
        for _ in range(2):
            cache.insert(other, foreign)
            assert proposed(cache, other[:20]) == other[20:24]
            assert inside.suffixes(cache).tokens == added + len(other)


def test_text_beside_pictures_is_added_once() -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    assert proposed(cache, PROMPT) == []
    prompt = [int(each) for each in tokens(1, 60)]
    keys = [*prompt[:40], *([-(1 << 50)] * 10), *prompt[50:]]
    for more in (0, 0, 5):
        foreign = make_prompt_cache(model)
        given = prompt + prompt[:more]
        model(mx.array([given]), cache=foreign)
        assert cache.insert(given, foreign, keys=keys + prompt[:more]) == len(given)
        assert proposed(cache, prompt[:20]) == prompt[20:24]
        assert inside.suffixes(cache).tokens <= 50 + (more and more + 17)  # with the context in front
        cache.reclaim(0)
    cache.check()


def test_it_outlives_the_state_and_nothing_crosses_a_namespace_until_clear() -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    inside.core(cache).draft_index.source()
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
    inside.core(cache).draft_index.source()
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
    inside.core(cache).draft_index.source()
    assert 0.9 * (1 << 20) * 34 / 39 < cache.stats.suffix_index_bytes <= 1 << 20
    assert cache.stats.suffix_index_tokens == len(PROMPT) + len(REPLY)
    with pytest.raises(ValueError, match="suffix_index_bytes is 0"):
        PrefixCache(tiny_model("llama"), suffix_index_bytes=0)
