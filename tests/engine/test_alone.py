"""Requests that run one at a time, each in a session: what they say, and what is stored of them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import SessionClosedError
from tests.engine.generators import (
    PROMPTS,
    alone,
    done,
    free_cache,
    load,
    new_cache,
    new_generator,
    serve,
    submit,
    tokens_of,
)

LENGTH = 12
#: Spans, windows, recurrent layers, and layers that a group refuses.
KINDS = ("llama", "llama_sliding", "mamba2", "jamba", "llama4", "deepseek_v41")


@pytest.mark.parametrize("kind", KINDS)
def test_with_layers_of_any_kind_replies_are_those_of_the_models_own_caches_and_the_next_turn_resumes(
    kind: str,
) -> None:
    loaded, prompts = load(kind), [PROMPTS[0], np.array([7])]
    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True) as generator:
        for prompt, ticket in zip(prompts, serve(generator, prompts, LENGTH, marks=()), strict=True):
            caches, tokens, said = make_prompt_cache(loaded.model), mx.array(prompt), list[int]()
            for _ in range(LENGTH):
                tokens = mx.argmax(loaded.model(tokens[None], cache=caches)[:, -1], axis=-1)
                said.append(int(tokens.item()))
            assert tokens_of(ticket) == tuple(said)
            (following,) = serve(generator, [[*prompt, *said, 5, 6]], marks=())
            assert done(following).cached_tokens >= len(prompt) - 1
        cache.check()


@pytest.mark.parametrize("more", [{"exact": True, "step_size": 32}, {"kv_bits": 8}], ids=str)
def test_what_a_group_refuses_runs_alone(more: dict[str, Any]) -> None:
    loaded = load("llama")
    with new_cache(loaded, **more) as cache:
        with pytest.raises(ValueError, match="begin_many"):
            new_generator(loaded, cache)
        with new_generator(loaded, cache, is_alone=True) as generator:
            first, again = (serve(generator, PROMPTS[:3], LENGTH) for _ in range(2))
            assert [*map(tokens_of, first)] == [*map(tokens_of, again)]
            assert done(again[0]).cached_tokens > 0
        cache.check()


@pytest.mark.parametrize("fails", ["a processor", "on_progress"])
def test_the_tokens_of_a_first_check_come_before_the_error_that_ends_the_reply(fails: str) -> None:
    """The first pass of a reply checks drafts behind the prompt."""
    loaded, calls = load("llama"), 0

    def fail_at_the_third(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("third")
        return args[-1]

    wanted = alone(loaded, PROMPTS[0], LENGTH + 4)
    more = {
        "a processor": {"logits_processors": [fail_at_the_third]},
        "on_progress": {"on_progress": fail_at_the_third},
    }
    with free_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True, step_size=64) as generator:
        ticket = submit(generator, PROMPTS[0], LENGTH + 4, prediction=wanted[:LENGTH], **more[fails])
        pieces = [piece for _, piece in generator]
        assert str(done(ticket).error) == "third"
        assert [piece.token for piece in pieces[:-1]] == [*tokens_of(ticket)] == [*wanted[: len(pieces) - 1]]
        assert len(pieces) >= 3
        assert [piece.completion for piece in pieces] == [None] * (len(pieces) - 1) + [ticket.completion]


def test_one_request_runs_at_a_time_and_each_is_cancelled_alone() -> None:
    loaded = load("llama")
    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True) as generator:
        first, second, third = (submit(generator, prompt, 50) for prompt in PROMPTS[:3])
        order: list[int] = []
        for ticket, piece in generator:
            order += [ticket.number] if piece.token is not None else []
            if ticket is first and piece.token is not None:
                first.cancel()
                second.cancel()
        assert [done(ticket).done_reason for ticket in (first, second, third)] == ["cancelled", "cancelled", "length"]
        assert order == sorted(order)
        cache.check()


@pytest.mark.parametrize("kind", ["llama", "llama_sliding", "mamba2"])
def test_a_first_token_that_is_no_number_leaves_in_the_cache_what_the_request_resumed_on(kind: str) -> None:
    loaded = load(kind)
    following = [*PROMPTS[0], 5, 6]
    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True) as generator:
        serve(generator, PROMPTS[:1])
        (failing,) = serve(generator, [following], logits_processors=[lambda _, logits: logits * mx.nan])
        assert "not numbers" in str(done(failing).error)
        cache.check()
        (fine,) = serve(generator, [following])
        assert done(fine).cached_tokens == done(failing).cached_tokens > 0
        assert tokens_of(fine) == alone(loaded, following)


def test_a_generator_does_not_hold_the_embeddings_of_a_prompt_whose_reply_is_over() -> None:
    loaded = load("gemma3_text")
    prompt, rows = np.arange(20, 60), mx.random.normal((40, 64), key=mx.random.key(1))
    embed = partial(lambda rows, offset: rows[offset:], rows)
    is_held = weakref.ref(embed)
    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True) as generator:
        ticket = submit(generator, prompt, LENGTH, keys=-1 - prompt, embed=embed)
        del embed
        list(generator)
        assert len(tokens_of(ticket)) == LENGTH
        assert is_held() is None


def test_a_full_context_ends_the_reply_and_says_why() -> None:
    loaded = load("llama")
    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True, context=64) as generator:
        (ticket,) = serve(generator, PROMPTS[:1], 60)
        completion = done(ticket)
        assert (completion.done_reason, len(completion.tokens)) == ("length", 64 - len(PROMPTS[0]) + 1)
        assert "runs alone cannot drop" in str(completion.note)


def test_a_closed_seat_takes_no_more_rows() -> None:
    with new_cache(load("llama")) as cache:
        seat = cache.alone()
        row = seat.admit(PROMPTS[0])
        assert seat.rows == [row]
        seat.close()
        assert row.is_closed
        assert seat.rows == []
        with pytest.raises(SessionClosedError, match="the seat is closed"):
            seat.admit(PROMPTS[0])
