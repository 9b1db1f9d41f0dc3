"""Requests that run one at a time, each in a session: what they say, and what is stored of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from radixcache import PrefixCache, SessionClosedError
from runner.engine.generator import ParallelGenerator
from runner.models.tiny import tiny_model
from runner.serve.served_model import SeededSampler
from tests import inside
from tests.engine.test_drafted_replies import Alternating, free_cache, misled
from tests.engine.test_parallel_generate import PROMPTS, done, load, new_cache, new_generator, submit, tokens_of

LENGTH = 12
#: Spans, windows, recurrent layers, and layers that a group refuses.
KINDS = ("llama", "llama_sliding", "mamba2", "jamba", "llama4", "deepseek_v41")


def replies(generator: ParallelGenerator, prompts: Sequence[Any], length: int = LENGTH, **more: Any) -> list[Any]:
    with generator:
        tickets = [submit(generator, prompt, length, **more) for prompt in prompts]
        list(generator)
    return [tokens_of(ticket) for ticket in tickets]


@pytest.mark.parametrize("kind", KINDS)
def test_with_layers_of_any_kind_replies_are_those_of_the_models_own_caches_and_the_next_turn_resumes(
    kind: str,
) -> None:
    loaded = load(kind)
    expected = []
    for prompt in PROMPTS[:2]:
        caches, tokens, said = make_prompt_cache(loaded.model), mx.array(prompt), list[int]()
        for _ in range(LENGTH):
            logits = loaded.model(tokens[None], cache=caches)
            tokens = mx.argmax(logits[:, -1], axis=-1)
            said.append(int(tokens.item()))
        expected.append(tuple(said))
    with new_cache(loaded) as cache:
        found = replies(new_generator(loaded, cache, is_alone=True), PROMPTS[:2])
        assert found == expected
        following = [*PROMPTS[0], *found[0], 5, 6]
        ticket = submit(generator := new_generator(loaded, cache, is_alone=True), following)
        list(generator)
        assert done(ticket).cached_tokens >= len(PROMPTS[0]) - 1
        generator.close()
        cache.check()


@pytest.mark.parametrize("more", [{"exact": True, "step_size": 32}, {"kv_bits": 8}], ids=str)
def test_what_a_group_refuses_runs_alone(more: dict[str, Any]) -> None:
    loaded = load("llama")
    with new_cache(loaded, **more) as cache:
        with pytest.raises(ValueError, match="begin_many"):
            new_generator(loaded, cache)
        first, again = (replies(new_generator(loaded, cache, is_alone=True), PROMPTS[:3]) for _ in range(2))
        assert first == again
        last = submit(generator := new_generator(loaded, cache, is_alone=True), PROMPTS[0])
        list(generator)
        assert done(last).cached_tokens > 0
        generator.close()
        cache.check()


@pytest.mark.parametrize("kind", ["llama", "llama_sliding", "mamba2"])
def test_with_drafts_masks_samplers_and_processors_a_reply_is_that_of_a_group(kind: str) -> None:
    loaded = load(kind)
    for name in ("sampler", "processors", "guidance"):

        def made(name: str = name) -> dict[str, Any]:
            sampler = SeededSampler(make_sampler(temp=1.0, top_p=0.9), 3)
            return {
                "sampler": {"sampler": sampler},
                "processors": {"logits_processors": make_logits_processors({7: 4.0}, 1.3, 20), "sampler": sampler},
                "guidance": {"guidance": Alternating()},
            }[name]

        with free_cache(loaded) as cache:
            (wanted,) = replies(new_generator(loaded, cache), PROMPTS[1:2], **made())
        for share in (0.0, 0.3):
            with free_cache(loaded) as cache:
                prediction = misled(wanted, 1, share)
                generator = new_generator(loaded, cache, is_alone=True)
                assert replies(generator, PROMPTS[1:2], prediction=prediction, **made()) == [wanted]
                assert inside.stored_tokens(cache, [*PROMPTS[1], *wanted]) <= len(PROMPTS[1]) + LENGTH - 1
                cache.check()


def test_a_draft_model_drafts_and_changes_nothing() -> None:
    loaded, draft = load("llama"), tiny_model("llama")
    wanted = replies(new_generator(loaded, new_cache(loaded), is_alone=True), PROMPTS[:2])
    caches = lambda: [*make_prompt_cache(loaded.model), *make_prompt_cache(draft)]  # noqa: E731
    with free_cache(loaded, caches=caches) as cache:
        generator = new_generator(loaded, cache, is_alone=True, draft_model=draft)
        tickets = [submit(generator, prompt, LENGTH) for prompt in PROMPTS[:2]]
        list(generator)
        assert [tokens_of(ticket) for ticket in tickets] == wanted
        assert tickets[0].facts.drafted["draft"].accepted > 0
        generator.close()


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

    (wanted,) = replies(new_generator(loaded, new_cache(loaded), is_alone=True), PROMPTS[:1], LENGTH + 4)
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
        assert done(first).done_reason == done(second).done_reason == "cancelled"
        assert done(third).done_reason == "length"
        assert order == sorted(order)
        cache.check()


def test_logits_that_are_no_numbers_end_the_request_and_are_not_stored() -> None:
    loaded = load("llama")
    calls = 0

    def spoil(_: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return logits if calls < 4 else logits * mx.nan

    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True) as generator:
        ticket = submit(generator, PROMPTS[0], logits_processors=[spoil])
        list(generator)
        assert done(ticket).done_reason == "error"
        assert "not numbers" in str(done(ticket).error)
        said = done(ticket).tokens
        assert inside.stored_tokens(cache, [*PROMPTS[0], *said, 1]) <= len(PROMPTS[0]) + len(said)
        following = submit(generator, PROMPTS[1])
        list(generator)
        assert done(following).done_reason == "length"


@pytest.mark.parametrize("kind", ["llama", "llama_sliding", "mamba2"])
def test_a_first_token_that_is_no_number_leaves_in_the_cache_what_the_request_resumed_on(kind: str) -> None:
    loaded = load(kind)
    following = [*PROMPTS[0], 5, 6]
    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True) as generator:
        submit(generator, PROMPTS[0])
        list(generator)
        failing = submit(generator, following, logits_processors=[lambda _, logits: logits * mx.nan])
        list(generator)
        assert "not numbers" in str(done(failing).error)
        cache.check()
        fine = submit(generator, following)
        list(generator)
        assert done(fine).cached_tokens == done(failing).cached_tokens > 0
        generator.close()
        assert [tokens_of(fine)] == replies(new_generator(loaded, new_cache(loaded)), [following], 8)


def test_what_a_sampler_raises_ends_its_request_alone() -> None:
    loaded = load("llama")

    def fail(_: mx.array) -> mx.array:
        raise RuntimeError("no token")

    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=True) as generator:
        failing, fine = submit(generator, PROMPTS[0], sampler=fail), submit(generator, PROMPTS[1])
        list(generator)
        assert str(done(failing).error) == "no token"
        assert done(fine).done_reason == "length"
        cache.check()


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
        ticket = submit(generator, PROMPTS[0], 60)
        list(generator)
        completion = done(ticket)
        assert (completion.done_reason, len(completion.tokens)) == ("length", 64 - len(PROMPTS[0]) + 1)
        assert "runs alone cannot drop" in str(completion.note)


def test_a_closed_seat_takes_no_more_rows() -> None:
    loaded = load("llama")
    with new_cache(loaded) as cache:
        seat = cache.alone()
        row = seat.admit(np.asarray(PROMPTS[0]))
        assert seat.rows == [row]
        seat.close()
        assert row.is_closed
        assert seat.rows == []
        with pytest.raises(SessionClosedError, match="the seat is closed"):
            seat.admit(np.asarray(PROMPTS[0]))


def test_a_one_token_prompt_has_a_reply() -> None:
    loaded = load("jamba")
    with PrefixCache(loaded.model) as cache:
        (found,) = replies(new_generator(loaded, cache, is_alone=True), [np.array([7])], marks=())
        assert len(found) == LENGTH
        cache.check()
