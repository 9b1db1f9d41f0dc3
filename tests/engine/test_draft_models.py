"""A draft model for many replies at once: they are those without it, and nothing of what it runs ahead is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler

from radixcache import PrefixCache
from radixcache.layers.trials import BothModels
from radixcache.speculate.pace import DraftPace
from runner.engine.generation import Generation, generate
from runner.engine.generator import ParallelGenerator
from runner.models.load import LoadedModel
from runner.models.tiny import tiny_model
from runner.serve.served_model import SeededSampler
from tests import inside
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
    submit,
    tokens_of,
)
from tests.engine.test_drafted_replies import LENGTH
from tests.sessions.faults import Fuse, fused, raising

KINDS = ("llama", "llama_sliding", "qwen3_next")


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_greedy_replies_are_the_same_with_a_draft_model_that_is_wrong_half_of_the_time(kind: str, rows: int) -> None:
    loaded, draft, prompts = load(kind), Doubtful(kind), [*PROMPTS, *MORE_PROMPTS][:rows]
    cache = cache_of_both(loaded, draft)
    with generator_of(loaded, cache, draft) as generator:
        for turn in range(2):
            wanted = [alone(loaded, prompt, LENGTH) for prompt in prompts]
            tickets = [submit(generator, prompt, LENGTH) for prompt in prompts]
            drain(generator)
            assert [tokens_of(ticket) for ticket in tickets] == wanted
            accepted, checked = counts(tickets)
            assert 2 * rows <= accepted < checked
            assert turn == 0 or all(done(ticket).cached_tokens >= len(PROMPTS[0]) for ticket in tickets)
            prompts = [[*prompt, *its, 9] for prompt, its in zip(prompts, wanted, strict=True)]
    require_right_state(loaded, cache, draft, prompts[:2])
    cache.clear()
    assert cache.stats.live_bytes + cache.stats.paged_bytes == 0


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_is_never_rejected_and_another_model_always(kind: str) -> None:
    loaded = load(kind)
    for draft, share in ((tiny_model(kind), 1.0), (Doubtful(kind, lambda tokens: tokens >= 0), 0.0)):
        cache = cache_of_both(loaded, draft)
        with generator_of(loaded, cache, draft) as generator:
            tickets = [submit(generator, prompt, LENGTH, num_draft_tokens=4) for prompt in PROMPTS]
            none = submit(generator, MORE_PROMPTS[0], LENGTH, num_draft_tokens=0)
            drain(generator)
        assert tokens_of(none) == alone(loaded, MORE_PROMPTS[0], LENGTH)
        assert none.facts.drafted == {}
        assert [tokens_of(ticket) for ticket in tickets] == [alone(loaded, prompt, LENGTH) for prompt in PROMPTS]
        accepted, checked = counts(tickets)
        assert checked > 10
        assert accepted == share * checked


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_seed_the_text_is_the_same_with_a_draft_model_and_with_other_sources_beside_it(kind: str) -> None:
    loaded, draft = load(kind), Doubtful(kind)

    def ask(predictions: Sequence[Any], draft: Any) -> list[Generation]:
        cache = cache_of_both(loaded, draft)
        with generator_of(loaded, cache, draft, speculate="tree") as generator:
            tickets = [
                submit(
                    generator,
                    prompt,
                    LENGTH,
                    prediction=prediction,
                    sampler=SeededSampler(make_sampler(temp=0.7), seed),
                    num_draft_tokens=0 if prediction is None else 3,
                )
                for seed, (prompt, prediction) in enumerate(zip(PROMPTS[:3], predictions, strict=True))
            ]
            drain(generator)
        return tickets

    wanted = [tokens_of(ticket) for ticket in ask([None] * 3, draft)]
    found = ask([misled(its, seed, 0.5) for seed, its in enumerate(wanted)], draft)
    assert [tokens_of(ticket) for ticket in found] == wanted
    assert {name for ticket in found for name in ticket.facts.drafted} >= {"draft", "prediction"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_a_reply_leaves_nothing_of_the_draft_models_behind(kind: str) -> None:
    """A stop token, a cancelled request, and one that joins and leaves; the others go on as they would alone."""
    loaded, draft = load(kind), Doubtful(kind)
    cache = cache_of_both(loaded, draft)
    wanted = [alone(loaded, prompt, LENGTH) for prompt in PROMPTS]
    with generator_of(loaded, cache, draft) as generator:
        stop = wanted[0][7]
        stopped = submit(generator, PROMPTS[0], LENGTH, stop_tokens=[stop])
        cancelled, whole = (submit(generator, prompt, LENGTH) for prompt in PROMPTS[1:3])
        joining: list[Generation] = []

        def at(count: int) -> None:
            if count == 9:
                joining.append(submit(generator, PROMPTS[3], 5))
            if count == 20:
                cancelled.cancel()

        drain(generator, at)
        assert tokens_of(stopped) == wanted[0][: wanted[0].index(stop) + 1]
        assert done(cancelled).done_reason == "cancelled"
        assert tokens_of(cancelled) == wanted[1][: len(tokens_of(cancelled))]
        assert tokens_of(whole) == wanted[2]
        assert tokens_of(joining[0]) == wanted[3][:5]
        assert generator.group.nbytes == 0
    for prompt, its, ticket in zip(PROMPTS, wanted, (stopped, cancelled, whole), strict=False):
        stored = cache.explain([*prompt, *its, 5]).matched_tokens
        assert stored <= len(prompt) + len(tokens_of(ticket))
    require_right_state(loaded, cache, draft, PROMPTS[:3])


@pytest.mark.parametrize(("at", "after"), [(8, True), (11, False)])
@pytest.mark.parametrize("which", ["model", "draft"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_raises_ends_the_replies_of_its_pass_and_the_next_ones_are_right(
    kind: str, which: str, at: int, after: bool
) -> None:
    """In a pass of both models, and in one that the draft model runs ahead."""
    loaded, draft = load(kind), Doubtful(kind)
    cache = cache_of_both(loaded, draft)
    with generator_of(loaded, cache, draft) as generator:
        drain(generator)
        inside.try_ways(loaded.model)
        inside.try_ways(draft)
        with fused(draft if which == "draft" else loaded.model, Fuse(at, raising(ValueError, after))):
            tickets = [submit(generator, prompt, LENGTH) for prompt in PROMPTS[:3]]
            drain(generator)
        for ticket, prompt in zip(tickets, PROMPTS, strict=False):
            assert tokens_of(ticket) == alone(loaded, prompt, LENGTH)[: len(tokens_of(ticket))]
        assert {done(ticket).done_reason for ticket in tickets} >= {"error"}
        generator.group.check()
        again = [submit(generator, prompt, LENGTH) for prompt in PROMPTS[:3]]
        drain(generator)
        assert [tokens_of(ticket) for ticket in again] == [alone(loaded, prompt, LENGTH) for prompt in PROMPTS[:3]]
        assert generator.group.nbytes == 0
    require_right_state(loaded, cache, draft, PROMPTS[:3])


def test_a_conversation_longer_than_its_context_is_shifted_in_both_models() -> None:
    loaded, draft = load("llama"), tiny_model("llama")
    replies = []
    for its in (None, draft):
        cache = cache_of_both(loaded, draft) if its else PrefixCache(loaded.model, budget_bytes=BUDGET_BYTES)
        with new_generator(loaded, cache, capacity=4096, context=150, draft_model=its) as generator:
            ticket = submit(generator, PROMPTS[2], 60, marks=MARKS)
            drain(generator)
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
            tickets = [submit(generator, prompt, 100) for prompt in PROMPTS[:2]]
            drain(generator)
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
        tickets = [submit(generator, prompt, LENGTH) for prompt in PROMPTS[:3]]
        drain(generator)
    assert [tokens_of(ticket) for ticket in tickets] == [alone(loaded, prompt, LENGTH) for prompt in PROMPTS[:3]]


def test_a_draft_model_without_room_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, draft = load("llama"), Doubtful("llama", lambda tokens: tokens < 0)
    with generator_of(loaded, cache_of_both(loaded, draft), draft) as generator:
        asked: list[int] = []
        monkeypatch.setattr(generator.group, "draft", lambda *_: asked.append(1) or [])
        ticket = submit(generator, PROMPTS[0], 100)
        drain(generator)
    assert tokens_of(ticket) == alone(loaded, PROMPTS[0], 100)
    assert len(asked) == 2


def test_a_draft_model_needs_a_cache_that_was_made_for_both() -> None:
    loaded = load("llama")
    with pytest.raises(ValueError, match="has 3 layer caches; draft_model needs the 6 of both models"):
        new_generator(loaded, PrefixCache(loaded.model), draft_model=tiny_model("llama"))
    cache, refusal = (
        cache_of_both(loaded, draft := tiny_model("llama")),
        "num_draft_tokens is -1; wanted a whole number",
    )
    with new_generator(loaded, cache, draft_model=draft) as generator, pytest.raises(ValueError, match=refusal):
        submit(generator, PROMPTS[0], num_draft_tokens=-1)
