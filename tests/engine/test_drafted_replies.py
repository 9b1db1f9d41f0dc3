"""Replies with drafts are those without, whatever is proposed; what is stored is what was said, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from radixcache import stream_generate
from radixcache.speculate import drafting
from radixcache.speculate.pace import DraftPace
from runner.engine.generation import Generation
from runner.models.load import LoadedModel
from runner.models.tiny import TINY_KINDS
from runner.serve.served_model import SeededSampler
from tests import inside
from tests.engine.generators import (
    MORE_PROMPTS,
    PROMPTS,
    Alternating,
    Doubtful,
    alone,
    cache_of_both,
    done,
    drain,
    free_cache,
    load,
    misled,
    new_cache,
    new_generator,
    require_right_tree,
    serve,
    submit,
    tokens_of,
)

LENGTH = 24
FAST = ("llama", "gemma3_text", "qwen3_next")
#: Full attention, windows in some layers, recurrent state beside attention.
DRAFTED_KINDS = ("llama", "llama_sliding", "qwen3_next")
KINDS = [
    kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow)
    for kind in TINY_KINDS
    if kind not in ("llama4", "deepseek_v41")
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_greedy_replies_are_the_same_and_take_fewer_passes(kind: str, rows: int) -> None:
    loaded, prompts = load(kind), [*PROMPTS, *MORE_PROMPTS][:rows]
    wanted = [alone(loaded, prompt, LENGTH) for prompt in prompts]
    cache = free_cache(loaded)
    with new_generator(loaded, cache, capacity=4096) as generator:
        together = rows == 1 or generator.group.drafts_together(loaded.model)
        tickets = [
            submit(generator, prompt, LENGTH, prediction=misled(its, seed))
            for seed, (prompt, its) in enumerate(zip(prompts, wanted, strict=True))
        ]
        drain(generator)
    assert [tokens_of(ticket) for ticket in tickets] == wanted
    accepted = sum(each.accepted for ticket in tickets for each in ticket.facts.drafted.values())
    assert accepted >= 3 * rows or not together
    require_right_tree(loaded, cache, prompts)


def test_a_round_in_which_no_reply_takes_part_is_no_measured_pass() -> None:
    loaded = load("llama")
    with new_cache(loaded) as cache, new_generator(loaded, cache) as generator:
        for _ in range(3):
            submit(generator, PROMPTS[0]).cancel()
            generator.round()
        pace = inside.core(cache).draft_pace
        assert [pace.seconds(1, rows) for rows in (1, 2)] == [1.0, 1.0]  # as long as nothing is measured


@pytest.mark.parametrize("seat", ["group", "alone", "group with a draft model", "alone with a draft model"])
@pytest.mark.parametrize("kind", DRAFTED_KINDS)
def test_with_a_seed_the_text_is_the_same_with_penalties_biases_and_masks(kind: str, seat: str) -> None:
    """Several requests, each with its own sampler, processors and guidance; alone, they say what a group says."""
    loaded = load(kind)

    def ask(predictions: Sequence[Any], seat: str) -> list[Generation]:
        draft: Any = Doubtful(kind) if "draft" in seat else None
        cache = cache_of_both(loaded, draft) if draft else free_cache(loaded)
        with new_generator(loaded, cache, is_alone="alone" in seat, draft_model=draft) as generator:
            tickets = []
            for seed, (prompt, prediction) in enumerate(zip(PROMPTS[:3], predictions, strict=True)):
                more: dict[str, Any] = {"sampler": SeededSampler(make_sampler(temp=1.0, top_p=0.9), seed)}
                if seed == 1:
                    more["logits_processors"] = make_logits_processors({7: 4.0}, 1.3, 20, frequency_penalty=0.5)
                if seed == 2:
                    more["guidance"] = Alternating()
                tickets.append(submit(generator, prompt, LENGTH, prediction=prediction, **more))
            drain(generator)
        cache.check()
        return tickets

    wanted = [tokens_of(ticket) for ticket in ask([None] * 3, "group")]
    for share in (0.0, 0.3):
        found = ask([misled(its, seed, share) for seed, its in enumerate(wanted)], seat)
        assert [tokens_of(ticket) for ticket in found] == wanted
        assert all(ticket.facts.drafted for ticket in found)
    assert any("draft" in ticket.facts.drafted for ticket in found) == ("draft" in seat)


@pytest.mark.parametrize("kind", DRAFTED_KINDS)
def test_what_ends_a_reply_inside_of_a_check_ends_it_there(kind: str) -> None:
    """A stop token, a stop word, the longest reply, and a request that is cancelled; nothing behind is stored."""
    loaded, prompt = load(kind), PROMPTS[1]
    wanted = alone(loaded, prompt, LENGTH)
    prediction = [*wanted, *range(60, 90)]
    stop = wanted[5]
    at = wanted.index(stop) + 1
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"stop_tokens": [stop]}, at, "stop"),
        ({"max_tokens": 7}, 7, "length"),
        ({"on_piece": 4}, 4, "cancelled"),
    ]
    for more, length, reason in cases:
        cache = free_cache(loaded)
        cancel_at = more.pop("on_piece", None)
        with new_generator(loaded, cache) as generator:
            ticket = submit(generator, prompt, more.pop("max_tokens", LENGTH), prediction=prediction, **more)
            count = 0
            for _ in range(200):
                count += len(generator.round())
                if cancel_at is not None and count >= 1:
                    ticket.cancel()
                if ticket.completion is not None:
                    break
        assert done(ticket).done_reason == reason
        assert done(ticket).tokens == wanted[: len(done(ticket).tokens)]
        assert cancel_at is not None or len(done(ticket).tokens) == length
        assert reason != "length" or sum(each.proposed for each in ticket.facts.drafted.values()) < length
        stored = cache.explain([*prompt, *wanted, 5]).matched_tokens
        assert stored <= len(prompt) + len(done(ticket).tokens)
        require_right_tree(loaded, cache, [prompt])


def test_of_a_long_prediction_twice_the_longest_reply_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, prompt, used = load("llama"), PROMPTS[0], list[int]()
    source = drafting.PredictionSource
    monkeypatch.setattr(drafting, "PredictionSource", lambda ids: (used.append(len(ids)), source(ids))[1])
    with free_cache(loaded) as cache, new_generator(loaded, cache) as generator:
        submit(generator, prompt, 3, prediction=[5] * 9000)
        list(generator)
        for prediction in ([5] * 9000, "a word " * 9000):
            model, tokenizer = loaded.model, loaded.tokenizer
            list(stream_generate(model, tokenizer, prompt, 3, cache=cache, prediction=prediction))
        cache.drafting(prompt, prediction=[5] * 9000)
        with pytest.raises(ValueError, match="max_tokens is 0"):
            cache.drafting(prompt, prediction=[5], max_tokens=0)
    assert used == [6, 6, 6, 9000]


def test_a_stop_word_inside_of_a_check_ends_the_text_before_it() -> None:
    loaded = load("llama")
    said = [int(token) for token in loaded.tokenizer.encode("one two three stop four five")]
    for prediction in (None, said):
        with new_generator(loaded, cache := free_cache(loaded)) as generator:
            ticket = submit(
                generator,
                PROMPTS[0],
                len(said),
                logits_processors=[forced(said)],
                stop_words=["stop"],
                prediction=prediction,
            )
            pieces = drain(generator)[ticket]
        assert "".join(piece.text for piece in pieces) == "one two three "
        assert pieces[-1].stop_word == "stop"
        assert bool(ticket.facts.drafted) == (prediction is not None)
        stored = cache.explain([*PROMPTS[0], *said]).matched_tokens
        assert stored <= len(PROMPTS[0]) + len(done(ticket).tokens)


def forced(said: Sequence[int]) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that makes the reply these tokens, whatever the model says."""
    start = len(PROMPTS[0])

    def force(tokens: mx.array, logits: mx.array) -> mx.array:
        at = len(tokens) - start
        return mx.where(mx.arange(logits.shape[-1]) == said[at], 50.0, logits) if at < len(said) else logits

    return force


def test_passes_are_measured_and_nothing_is_proposed_where_checks_cost_more_than_they_save() -> None:
    loaded = load("llama")
    wanted = alone(loaded, PROMPTS[0], LENGTH)
    cache = new_cache(loaded)
    inside.assume_pace(cache, DraftPace(lambda rows, tokens: float(tokens)))
    with new_generator(loaded, cache) as generator:
        (ticket,) = serve(generator, [PROMPTS[0]], LENGTH, prediction=wanted)
    assert (tokens_of(ticket), ticket.facts.drafted) == (wanted, {})
    measured = DraftPace()
    noted: list[tuple[int, int]] = []
    note = measured.note
    measured.note = lambda tokens, seconds, rows=1: noted.append((tokens, rows)) or note(tokens, seconds, rows)  # type: ignore[method-assign, func-returns-value]
    cache = new_cache(loaded)
    inside.assume_pace(cache, measured)
    with new_generator(loaded, cache) as generator:
        for prompt in PROMPTS[:2]:
            submit(generator, prompt, 2 * LENGTH)
        drain(generator)
        assert (1, 2) in noted
        assert all(tokens == 1 for tokens, _ in noted)
        submit(generator, PROMPTS[0], 2 * LENGTH, prediction=alone(loaded, PROMPTS[0], 2 * LENGTH))
        drain(generator)
    assert any(tokens > 1 for tokens, _ in noted), noted


def only(allowed: Sequence[int]) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that leaves these tokens, so that few draws tell distributions apart."""
    return lambda _, logits: mx.where(mx.array(np.isin(np.arange(logits.shape[-1]), [*allowed])), logits, -mx.inf)


@pytest.mark.parametrize(("is_drafted", "is_alone"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("draws", [800, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_the_first_tokens_of_many_replies_of_several_rows_have_the_distribution_of_the_model(
    draws: int, is_drafted: bool, is_alone: bool
) -> None:
    """At temperature 1: the first token, the second behind a drafted one, and the third behind two."""
    loaded, allowed, prompts = load("llama"), [3, 50, 120, 200], PROMPTS[:2]
    chances, drafts = zip(*(chances_of(loaded, prompt, allowed) for prompt in prompts), strict=True)
    found = np.zeros((2, 3, loaded.model.args.vocab_size))
    mx.random.seed(3)
    with new_generator(loaded, free_cache(loaded), capacity=1 << 16, is_alone=is_alone) as generator:
        for _ in range(draws // 80):
            tickets = [
                submit(
                    generator,
                    prompts[number % 2],
                    3,
                    sampler=mx.random.categorical,
                    logits_processors=[only(allowed)],
                    prediction=drafts[number % 2] if is_drafted else None,
                )
                for number in range(80)
            ]
            list(generator)
            for number, ticket in enumerate(tickets):
                assert done(ticket).error is None
                said = tokens_of(ticket)
                for at in range(3):
                    if said[:at] == drafts[number % 2][:at]:
                        found[number % 2, at, said[at]] += 1
    assert found[:, 2].sum(axis=1).min() > draws / 100
    for which in range(2):
        for at in range(3):
            assert chi_square_excess(found[which, at], chances[which][at]) < 4


def test_the_same_requests_with_the_same_seed_draw_the_same_replies() -> None:
    """Which row of a batch a request gets does not depend on where objects are in memory."""
    loaded, drawn = load("llama"), []
    for _ in range(3):
        mx.random.seed(3)
        with new_generator(loaded, free_cache(loaded), capacity=1 << 16) as generator:
            sampler = mx.random.categorical
            tickets = [submit(generator, PROMPTS[number % 2], 3, sampler=sampler) for number in range(40)]
            list(generator)
            drawn.append([tokens_of(ticket) for ticket in tickets])
    assert drawn[0] == drawn[1] == drawn[2]


def chi_square_excess(found: Any, chances: Any) -> float:
    """Chi-square of counts, as standard deviations above its mean; rare outcomes are taken together."""
    expected = np.asarray(chances, np.float64) / np.sum(chances) * found.sum()
    is_rare = expected < 10
    found, expected = (np.append(each[~is_rare], each[is_rare].sum()) for each in (found, expected))
    found, expected = found[expected > 0], expected[expected > 0]
    freedom = len(found) - 1
    return float((((found - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def chances_of(loaded: LoadedModel, prompt: Any, allowed: Sequence[int]) -> tuple[list[Any], tuple[int, ...]]:
    """The chances of each of three tokens behind the likeliest ones, and these."""
    found, text = [], [*map(int, prompt)]
    for _ in range(3):
        logits = np.asarray(loaded.model(mx.array([text]), cache=make_prompt_cache(loaded.model))[0, -1], np.float64)
        weights = np.where(np.isin(np.arange(len(logits)), allowed), np.exp(logits - logits.max()), 0)
        found.append(weights / weights.sum())
        text.append(int(weights.argmax()))
    return found, tuple(text[len(prompt) :])
