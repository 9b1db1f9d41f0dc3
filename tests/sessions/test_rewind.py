"""A session is taken back: it is as if the tokens from there on had never been given.

The random walks in tests/walks/ take sessions back at random places, with caches that spell what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache, Session, SessionClosedError, SnapshotError
from radixcache.layers.trials import error_of
from runner.models.tiny import TINY_KINDS, tiny_model
from tests import inside
from tests.prompts import tokens
from tests.walks.spelling import SpellingModel, spells

PROMPT, DRAFT, REPLY = tokens(1, 50), tokens(2, 6), tokens(3, 4)
ROUNDING = 1e-3
SOME_KINDS = ["llama", "llama_sliding", "mamba2", "nemotron_h"]


def begun(cache: PrefixCache, model: Any, prompt: Sequence[int] = PROMPT) -> Session:
    """A session whose whole prompt is evaluated."""
    session = cache.begin(prompt)
    session.prefill(model)
    session.step(model, prompt[-1:])
    return session


def cold_logits(model: Any, prompt: Sequence[int], caches: list[Any] | None = None) -> mx.array:
    return model(mx.array([prompt]), cache=make_prompt_cache(model) if caches is None else caches)[0, -1]


@pytest.mark.parametrize("kind", sorted(TINY_KINDS))
def test_drafts_are_taken_back_with_layers_of_every_kind_and_the_answers_are_those_of_a_cold_run(kind: str) -> None:
    model = tiny_model(kind)
    cache, said = PrefixCache(model), list(PROMPT)
    with begun(cache, model) as session:
        for accepted in (1, 3):
            start = session.position
            session.step(model, DRAFT)
            reached = session.rewind(start + accepted, least=start)
            assert reached in (start, start + accepted)
            assert session.position == session.known_tokens == reached
            said += DRAFT[:accepted]
            if reached < len(said):
                session.step(model, said[reached:])
            said.append(REPLY[accepted])
            logits = session.step(model, said[-1:])[0, -1]
            assert error_of(logits, cold_logits(model, said)) < ROUNDING
        cache.check()
    caches, rest = cache.fetch([*said, 1])
    assert len(rest) == 1
    assert error_of(cold_logits(model, rest.tolist(), caches), cold_logits(model, [*said, 1])) < ROUNDING


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_what_a_pass_is_taken_back_with_is_booked_and_is_let_go_by_the_next_one(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    with begun(cache, model) as session:
        before = cache.stats.checkpoint_bytes
        session.step(model, DRAFT)
        has_states = inside.layout(cache).has_states
        assert (cache.stats.checkpoint_bytes > before) == has_states
        cache.check()
        session.step(model, REPLY[:1])
        assert cache.stats.checkpoint_bytes == before
        session.step(model, DRAFT)
        session.rewind(session.position - 2)
        assert cache.stats.checkpoint_bytes == before
        session.step(model, DRAFT)
    cache.check()


def test_recurrent_layers_without_a_kept_pass_go_back_to_the_last_checkpoint_or_say_that_it_is_too_far() -> None:
    model = SpellingModel(["kv", "arrays"])
    cache = PrefixCache(model)
    prompt, reply = tokens(1, 40), [1, 2, 3]
    with cache.begin(prompt, marks=[24]) as session:
        session.prefill(model)
        for token in (prompt[-1], *reply):
            session.step(model, [token])
        with pytest.raises(SnapshotError, match=r"only offset 24 can be reached of 42; wanted at least 30"):
            session.rewind(42, least=30)
        assert (session.position, session.known_tokens) == (43, 43)
        spells(session.caches, [*prompt, *reply], model.kinds)
        assert session.rewind(42) == 24
        assert (session.position, session.known_tokens) == (24, 40)
        spells(session.caches, prompt[:24], model.kinds)
        with pytest.raises(ValueError, match="as in the prompt"):
            session.step(model, [prompt[24] + 1])
        session.prefill(model)
        session.step(model, prompt[-1:])
        assert session.rewind(10) == 0
        spells(session.caches, [], model.kinds)
        cache.check()
        session.prefill(model)
    assert inside.stored_tokens(cache, [*prompt, *reply]) == 39
    cache.check()


@pytest.mark.parametrize("kind", ["rotating", "rotating_keep", "chunked"])
def test_windows_go_back_no_further_than_to_where_all_that_they_read_is_held(kind: str) -> None:
    model = SpellingModel(["kv", kind])
    cache, prompt, reply = PrefixCache(model), tokens(1, 30), tokens(3, 40)
    with begun(cache, model, prompt) as session:
        for token in reply:
            session.step(model, [token])
        with pytest.raises(SnapshotError, match="can be reached of 60"):
            session.rewind(60, least=55)
        spells(session.caches, prompt + reply, model.kinds)
        reached = session.rewind(60)
        assert 28 <= reached <= 30  # the prompt's end is copied out of the windows
        spells(session.caches, (prompt + reply)[:reached], model.kinds)
    cache.check()


@pytest.mark.parametrize("kinds", [["kv"], ["concatenate", "quantized"], ["kv", "rotating"], ["kv", "list"], ["echo"]])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_session_goes_back_into_the_part_that_it_found_and_nothing_of_the_tree_is_lost(
    kinds: list[str], goes_on: bool
) -> None:
    model = SpellingModel(kinds)
    cache = PrefixCache(model, live_slots=2)
    first, second = tokens(1, 40), tokens(1, 30) + tokens(2, 10)
    begun(cache, model, first).close()
    with cache.begin(second, marks=[30]) as session:
        session.prefill(model)
        reached = session.rewind(20)
        assert reached == 20 or set(kinds) & {"rotating", "list", "echo"}
        spells(session.caches, second[:reached], kinds)
        cache.check()
        if goes_on:
            session.prefill(model)
            spells(session.caches, second[:-1], kinds)
    cache.check()
    for prompt, length in ((first, 40), (second, 39 if goes_on else 30)):
        assert inside.stored_tokens(cache, prompt) == length
        caches, rest = cache.fetch([*prompt, 1])
        spells(caches, [*prompt, 1][: len(prompt) + 1 - len(rest)], kinds)
    cache.check()


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_in_exact_mode_a_draft_that_was_taken_back_changes_no_bit(kind: str) -> None:
    model, found = tiny_model(kind), []
    for has_draft in (False, True):
        cache = PrefixCache(model, exact=True, step_size=16)
        with begun(cache, model) as session:
            if has_draft:
                session.step(model, DRAFT)
                assert session.rewind(len(PROMPT)) == len(PROMPT)
            found.append([np.array(session.step(model, [token])) for token in REPLY])
            assert session.rewind(45) in (32, 0)
        cache.check()
    assert all((ours == theirs).all() for ours, theirs in zip(*found, strict=True))


def test_a_loop_of_the_callers_own_is_taken_back_to_what_is_known(llama: Any) -> None:
    cache = PrefixCache(llama)
    with begun(cache, llama) as session:
        llama(mx.array([DRAFT]), cache=session.caches)
        session.extend(DRAFT[:3])
        with pytest.raises(ValueError, match=r"offset is 54; wanted 0 to 53, as many as are evaluated and known"):
            session.rewind(54)
        assert session.rewind(52) == 52
    assert inside.stored_tokens(cache, [*PROMPT, *DRAFT]) == 52


def test_what_cannot_be_taken_back_is_refused_and_changes_nothing(llama: Any) -> None:
    cache = PrefixCache(llama)
    session = begun(cache, llama)
    for arguments in ((-1,), (True,), (1.5,), (51,)):
        with pytest.raises(ValueError, match="offset is"):
            session.rewind(*arguments)
    with pytest.raises(ValueError, match="offset is 10; wanted 20 to 50"):
        session.rewind(10, least=20)
    assert (session.rewind(50), session.known_tokens) == (50, 50)
    session.close()
    with pytest.raises(SessionClosedError):
        session.rewind(10)
    cache.check()


#: Where room is made for a rewind, and budgets around it.
BUDGETS = [500_000, *(pytest.param(each, marks=pytest.mark.slow) for each in range(300_000, 700_000, 15_000))]


@pytest.mark.parametrize("kind", ["gemma4_text", "gpt_oss"])
@pytest.mark.parametrize("budget_bytes", BUDGETS)
@pytest.mark.parametrize("offset", [3, 11, 19])
def test_rewind_near_the_budget_returns_with_whole_windows(kind: str, budget_bytes: int, offset: int) -> None:
    model, base = tiny_model(kind), tokens(1, 60)
    prompt = base[:50] + tokens(3, 3)
    with PrefixCache(model, budget_bytes=budget_bytes, step_size=16, live_slots=2) as cache:
        for each in (base[:41], base[:38] + tokens(2, 65)):
            begun(cache, model, each).close()
        with cache.begin(prompt, marks=[2]) as session:
            session.prefill(model)
            session.rewind(len(prompt) - 8)
            session.prefill(model)
            session.step(model, prompt[-1:])
            reached = session.rewind(offset)
            assert {each.offset for each in session.caches} == {reached} == {session.position}
            assert reached <= offset
            session.prefill(model)
            logits = session.step(model, prompt[-1:])[0, -1]
            assert error_of(logits, cold_logits(model, prompt)) < ROUNDING
        cache.check()
