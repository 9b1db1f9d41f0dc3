"""Replies whose tokens are drafted and checked several in a pass are those that are decoded one by one.

The random walk in tests/walks/test_drafted_machine.py looks at what is stored, with caches that spell what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from radixcache import PrefixCache, Session, stream_generate
from radixcache.generate import decode
from radixcache.speculate.drafting import Drafting
from radixcache.speculate.pace import DraftPace
from runner.models.tiny import TINY_KINDS, tiny_model, tiny_tokenizer
from tests import inside
from tests.prompts import tokens
from tests.walks.drafts import Guess

PROMPT = tokens(1, 50)
SOME_KINDS = ["llama", "llama_sliding", "nemotron_h", "mamba2"]


def guess(reply: Sequence[int], wrong: int = 3) -> Guess:
    """A source that knows the reply, and is wrong at every `wrong`-th place; it proposes up to 4 tokens."""
    return Guess(reply, range(wrong - 1, len(reply), wrong), 4)


def drafting(*sources: Any) -> Drafting:
    """From these sources, where each further token of a pass costs next to nothing."""
    return Drafting(sources, DraftPace(seconds=lambda rows, width: 1 + width / 100), PROMPT)


def decoded(session: Session, model: Any, count: int, drafts: Drafting | None = None) -> tuple[list[int], int]:
    """Tokens of a reply, and how many of them were drafted."""
    session.prefill(model)
    found = list(decode(session, model, session.prompt, count, drafting=drafts))
    return [token for token, _, _ in found], sum(is_drafted for _, _, is_drafted in found)


@pytest.mark.parametrize("kind", sorted(TINY_KINDS))
def test_with_layers_of_every_kind_a_drafted_reply_is_the_reply_and_is_stored_as_far_as_it_was_said(kind: str) -> None:
    model = tiny_model(kind)
    with PrefixCache(model).begin(PROMPT) as session:
        reply, _ = decoded(session, model, 24)
    cache = PrefixCache(model)
    with cache.begin(PROMPT) as session:
        drafts = drafting(guess(reply))
        found, accepted = decoded(session, model, 24, drafts)
        assert session.known_tokens == len(PROMPT) + 23  # the last token was not evaluated
        assert found == reply
    cache.check()
    counts = drafts.drafted["guess"]
    assert counts.accepted == accepted > 8
    assert counts.accepted < counts.proposed
    assert inside.stored_tokens(cache, [*PROMPT, *reply]) <= len(PROMPT) + 23
    following = [*PROMPT, *reply, 3]
    with cache.begin(following) as session, PrefixCache(model).begin(following) as cold:
        assert session.cached_tokens >= len(PROMPT) + 16 or inside.layout(cache).has_states
        assert decoded(session, model, 4) == decoded(cold, model, 4)


def test_accepted_tokens_are_counted_and_not_those_behind_the_end_of_a_reply() -> None:
    model = tiny_model("llama")
    with PrefixCache(model).begin(PROMPT) as session:
        reply, _ = decoded(session, model, 24)
    for end in range(1, 24):
        with PrefixCache(model).begin(PROMPT) as session:
            session.prefill(model)
            drafts, accepted = drafting(guess(reply, wrong=7)), 0
            said: Any = decode(session, model, session.prompt, 24, drafting=drafts)
            for _, _, is_drafted in islice(said, end):
                accepted += is_drafted
            said.close()
            assert sum(each.accepted for each in drafts.drafted.values()) == accepted


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("penalty", [None, 1.3])
def test_a_seeded_sampler_says_the_same_with_drafts_and_draws_no_more_random_numbers(
    kind: str, penalty: float | None
) -> None:
    model = tiny_model(kind)

    def reply(seed: int, prediction: Sequence[int] | None = None) -> tuple[list[int], list[int], int]:
        mx.random.seed(seed)
        processors = make_logits_processors(repetition_penalty=penalty) if penalty else None
        sampling: Any = {"sampler": make_sampler(temp=0.8, top_p=0.9), "logits_processors": processors}
        said = replies(model, 16, prediction=prediction, **sampling)
        return [each.token for each in said], np.asarray(mx.random.state[0]).tolist(), sum(r.from_draft for r in said)

    for seed in range(3):
        expected, state, _ = reply(seed)
        for prediction, least in ((expected, 8), ([*expected[:5], 7, *expected[6:]], 4), ([9] * 16, 0)):
            found, its_state, drafted = reply(seed, prediction)
            assert (found, its_state) == (expected, state)
            assert drafted >= least


def test_processors_and_samplers_are_asked_once_for_each_token_in_order_whatever_is_drafted() -> None:
    model, seen = tiny_model("llama_sliding"), []

    def watch(history: mx.array, logits: mx.array) -> mx.array:
        seen.append(np.asarray(history).tolist())
        return logits

    reply = [each.token for each in replies(model, 12)]
    replies(model, 12, prediction=[*reply[:4], 7, *reply[5:]], logits_processors=[watch])
    assert seen == [[*PROMPT, *reply[:at]] for at in range(12)]


def cheap_passes(cache: PrefixCache) -> PrefixCache:
    """The cache, where each further token of a pass is taken to cost next to nothing."""
    inside.core(cache).draft_pace = DraftPace(seconds=lambda rows, width: 1 + width / 100)
    return cache


def replies(model: Any, count: int, cache: PrefixCache | None = None, prompt: Any = PROMPT, **more: Any) -> list[Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token_ids = set()  # a reply of random weights is as long as it was asked to be
    cache = cheap_passes(PrefixCache(model) if cache is None else cache)
    return list(stream_generate(model, tokenizer, prompt, count, cache=cache, **more))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_reply_that_stops_inside_a_draft_is_stored_as_far_as_it_was_said_or_where_the_pass_began(kind: str) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    reply = [each.token for each in replies(model, 12)]
    with cache.begin(PROMPT) as session:
        session.prefill(model)
        drafts = drafting(guess(reply, wrong=100))
        stream: Any = decode(session, model, session.prompt, 12, drafting=drafts)
        said = [is_drafted for _, _, is_drafted in (next(stream) for _ in range(7))]
        if inside.layout(cache).has_points:
            assert said == [False] + [True] * 4 + [False, True]  # of 1, 4 and 1 tokens, and the first of the next pass
        else:
            assert said == [True] * 4 + [False] + [True] * 2
        stream.close()
        begun = 55 if inside.layout(cache).has_states else 57
        assert (session.known_tokens, session.position) == (begun, begun)
    cache.check()
    assert inside.stored_tokens(cache, [*PROMPT, *reply]) == begun


def test_a_reply_of_a_recurrent_model_may_stop_in_front_of_accepted_tokens_that_are_owed() -> None:
    """Two drafts are right and the third is wrong: the pass is taken back, and what is right is owed."""
    model = tiny_model("mamba2")
    cache = PrefixCache(model)
    reply = [each.token for each in replies(model, 6)]
    with cache.begin(PROMPT) as session:
        session.prefill(model)
        stream: Any = decode(session, model, session.prompt, 6, drafting=drafting(guess(reply, wrong=4)))
        assert [next(stream)[0]] == reply[:1]  # the first token has a pass of its own
        assert next(stream)[0] == reply[1]
        stream.close()
        assert session.known_tokens == session.position == len(PROMPT)
    cache.check()
    assert inside.stored_tokens(cache, [*PROMPT, *reply]) == len(PROMPT)


def test_a_step_is_refused_until_drafted_tokens_are_reported_or_taken_back() -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model)
    with cache.begin(PROMPT) as session:
        session.prefill(model)
        session.step(model, [PROMPT[-1], 1, 2, 3], drafted=3)
        assert (session.known_tokens, session.position) == (50, 53)
        session.extend([1])
        with pytest.raises(ValueError, match=r"2 drafted tokens .* call rewind\(51\) first"):
            session.step(model, [5])
        assert session.rewind(51) == 51
        session.step(model, [5, 6], drafted=1)
        with pytest.raises(ValueError, match="drafted is -1; wanted a whole number of tokens, 0 or more"):
            session.step(model, [5], drafted=-1)
    assert inside.stored_tokens(cache, [*PROMPT, 1, 5, 6]) == 52
    cache.check()


@pytest.mark.parametrize(("kind", "stored"), [("llama", 52), ("llama_sliding", 52), ("mamba2", 51)])
def test_drafts_that_nobody_reported_are_taken_back_when_the_session_closes(kind: str, stored: int) -> None:
    model = tiny_model(kind)
    cache = PrefixCache(model)
    with cache.begin(PROMPT) as session:
        session.prefill(model)
        session.step(model, [PROMPT[-1]])
        session.step(model, [1])
        session.step(model, [2, 3, 4], drafted=2)
    assert inside.stored_tokens(cache, [*PROMPT, 1, 2, 3]) == stored
    cache.check()


@pytest.mark.parametrize("kind", ["llama_sliding", "mamba2", "nemotron_h", "gemma3_text", "deepseek_v41", "rwkv7"])
@pytest.mark.parametrize("seed", [0, 1], ids=["a twin", "another"])
def test_a_draft_model_may_have_layers_of_any_kind_and_changes_no_token(kind: str, seed: int) -> None:
    model, draft = tiny_model(kind), tiny_model(kind, seed)
    cache = PrefixCache(model, caches=lambda: [*make_prompt_cache(model), *make_prompt_cache(draft)])
    prompt = PROMPT
    for turn in range(2):
        expected = [each.token for each in replies(model, 14, prompt=prompt)]
        found = replies(model, 14, cache, prompt, draft_model=draft, num_draft_tokens=3)
        cache.check()
        assert [each.token for each in found] == expected
        assert sum(each.from_draft for each in found) >= (9 if seed == 0 else 0)
        assert found[0].cached_tokens >= 40 * turn
        prompt = [*prompt, *expected, turn, 2]


@pytest.mark.parametrize("more", [{"speculate": "tree"}, {"prediction": [1, 2]}], ids=str)
def test_an_exact_cache_refuses_drafts_by_name_before_anything_runs(more: dict[str, Any]) -> None:
    model = tiny_model("llama")
    cache = PrefixCache(model, exact=True)
    with pytest.raises(ValueError, match=f"{next(iter(more))} with an exact cache: passes over several tokens round"):
        stream_generate(model, tiny_tokenizer(), PROMPT, cache=cache, **more)
    with pytest.raises(ValueError, match=r"speculate is 'trie'; wanted .tree., .prompt. or None"):
        stream_generate(model, tiny_tokenizer(), PROMPT, cache=PrefixCache(model), **{"speculate": "trie"})
    assert cache.stats.requests == 0
