"""A draft model for many replies at once: they are those without it, and nothing of what it runs ahead is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from radixcache import PrefixCache
from radixcache.layers.trials import BothModels
from radixcache.speculate.pace import DraftPace
from runner.engine.generation import Generation, generate
from runner.engine.generator import ParallelGenerator
from runner.models.load import LoadedModel
from runner.models.tiny import tiny_model
from tests.engine.generators import (
    BUDGET_BYTES,
    MARKS,
    MORE_PROMPTS,
    PROMPTS,
    Doubtful,
    alone,
    cache_of_both,
    done,
    drain,
    load,
    misled,
    new_generator,
    serve,
    submit,
    tokens_of,
)

LENGTH = 24


def generator_of(loaded: LoadedModel, cache: PrefixCache, draft: Any, **more: Any) -> ParallelGenerator:
    return new_generator(loaded, cache, draft_model=draft, **{"capacity": 4096, **more})


def counts(tickets: Sequence[Generation]) -> tuple[int, int]:
    """Tokens of the draft model that were accepted, and those that were checked."""
    found = [ticket.facts.drafted["draft"] for ticket in tickets if "draft" in ticket.facts.drafted]
    return sum(each.accepted for each in found), sum(each.proposed for each in found)


def require_right_state(loaded: LoadedModel, cache: PrefixCache, draft: Any, prompts: Sequence[Any]) -> None:
    """What the cache restores of these prompts gives the tokens and the drafts that an empty one gives."""
    cache.check()
    for prompt in prompts:
        drafted = []
        for each in (cache, cache_of_both(loaded, draft)):
            with each.begin(prompt) as session:
                both = BothModels(loaded.model, draft, len(session.caches))
                *_, last = generate(session, both, loaded.tokenizer, max_tokens=2, stop_tokens=())
                assert done(last).tokens == alone(loaded, prompt, 2)
                with session.scratch(both.first) as caches:
                    drafted.append(both.drafted(mx.array([[7]]), 4, lambda ids, its=caches: draft(ids, cache=its)))
        assert drafted[0][0] == drafted[1][0]


@pytest.mark.parametrize(("kind", "drafting"), [("qwen3_next", "llama_sliding"), ("llama_sliding", "mamba2")])
def test_rows_join_where_recurrent_layers_go_back_in_front_of_a_check_beside_windows(kind: str, drafting: str) -> None:
    """A row with rejected tokens has lost none of its window when the next row makes a new batch of all."""
    loaded, draft = load(kind), tiny_model(drafting, 1)
    cache = cache_of_both(loaded, draft)
    tickets: list[Generation] = []
    with generator_of(loaded, cache, draft) as generator:
        prompts = [*PROMPTS, *MORE_PROMPTS]

        def at(count: int) -> None:
            if count % 6 == 0 and len(tickets) < len(prompts):
                prompt = prompts[len(tickets)]
                prediction = misled(alone(loaded, prompt, LENGTH), len(tickets), 0.5)
                tickets.append(submit(generator, prompt, LENGTH, prediction=prediction))

        drain(generator, at)
    for ticket, prompt in zip(tickets, prompts, strict=True):
        assert done(ticket).error is None
        assert tokens_of(ticket) == alone(loaded, prompt, LENGTH)
    require_right_state(loaded, cache, draft, prompts[:2])


def test_a_conversation_longer_than_its_context_is_shifted_in_both_models() -> None:
    loaded, draft = load("llama"), tiny_model("llama")
    replies = []
    for its in (None, draft):
        cache = cache_of_both(loaded, draft) if its else PrefixCache(loaded.model, budget_bytes=BUDGET_BYTES)
        with new_generator(loaded, cache, capacity=4096, context=150, draft_model=its) as generator:
            (ticket,) = serve(generator, [PROMPTS[2]], 60, marks=MARKS)
        assert done(ticket).shifted_tokens + done(ticket).omitted_tokens > 0
        replies.append(tokens_of(ticket))
        cache.check()
    assert replies[0] == replies[1]
    accepted, checked = counts([ticket])
    assert accepted > 0.8 * checked > 10


def test_a_draft_model_is_asked_only_where_it_is_expected_to_save_time() -> None:
    loaded = load("llama")
    passes = {}
    for name, draft, pace in (
        ("steep", Doubtful("llama"), DraftPace(lambda rows, tokens: float(tokens))),
        ("wrong", Doubtful("llama", lambda tokens: tokens >= 0), DraftPace(lambda rows, tokens: 1 + tokens / 8)),
        ("right", Doubtful("llama", lambda tokens: tokens < 0), DraftPace(lambda rows, tokens: 1 + tokens / 8)),
    ):
        cache = cache_of_both(loaded, draft, pace)
        with generator_of(loaded, cache, draft) as generator:
            tickets = serve(generator, PROMPTS[:2], 100)
            pace.check()
        accepted, checked = counts(tickets)
        passes[name] = checked
        assert accepted == (checked if name == "right" else 0)
    assert passes["steep"] == 0
    assert 0 < passes["wrong"] < 60 < passes["right"]


def test_a_draft_that_is_not_a_number_is_a_bad_guess_and_fails_nothing() -> None:
    loaded = load("llama")

    class Broken(Doubtful):
        factor = 1.0

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            logits = super().__call__(tokens, cache)
            return mx.where((tokens % 3 == 0)[..., None], logits * self.factor, logits)

    draft = Broken("llama", lambda tokens: tokens < 0)
    with generator_of(loaded, cache_of_both(loaded, draft), draft) as generator:
        submit(generator, PROMPTS[3], 2)
        drain(generator)
        draft.factor = float("nan")
        tickets = serve(generator, PROMPTS[:3], LENGTH)
    assert [tokens_of(ticket) for ticket in tickets] == [alone(loaded, prompt, LENGTH) for prompt in PROMPTS[:3]]


def test_a_draft_model_without_room_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, draft = load("llama"), Doubtful("llama", lambda tokens: tokens < 0)
    with generator_of(loaded, cache_of_both(loaded, draft), draft) as generator:
        asked: list[int] = []
        monkeypatch.setattr(generator.group, "draft", lambda *_: asked.append(1) or [])
        (ticket,) = serve(generator, [PROMPTS[0]], 100)
    assert tokens_of(ticket) == alone(loaded, PROMPTS[0], 100)
    assert len(asked) == 2


def test_a_draft_model_needs_a_cache_that_was_made_for_both() -> None:
    loaded = load("llama")
    with pytest.raises(ValueError, match="has 3 layer caches; draft_model needs the 6 of both models"):
        new_generator(loaded, PrefixCache(loaded.model), draft_model=tiny_model("llama"))
    draft = tiny_model("llama")
    cache, refusal = cache_of_both(loaded, draft), "num_draft_tokens is -1; wanted a whole number"
    for is_alone in (False, True):
        generator = new_generator(loaded, cache, draft_model=draft, is_alone=is_alone)
        with generator, pytest.raises(ValueError, match=refusal):
            submit(generator, PROMPTS[0], num_draft_tokens=-1)
