"""With `min_tokens` no reply ends before so many tokens: alone, together, with drafts, and on each route."""

from __future__ import annotations

from typing import Any

import pytest

from radixcache import PrefixCache, stream_generate
from runner.models.tiny import tiny_model, tiny_tokenizer
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
from tests.serve.jobs import MESSAGES, application, local_client

LENGTH = 12


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 4, LENGTH])
def test_no_stop_token_ends_a_reply_before(is_alone: bool, min_tokens: int) -> None:
    """All tokens that the reply would have are stop tokens."""
    loaded, stops = load("llama"), set(alone(load("llama"), PROMPTS[0], LENGTH))
    others = set(range(256)) - stops
    with new_cache(loaded) as cache, new_generator(loaded, cache, is_alone=is_alone) as generator:
        (ticket,) = serve(generator, [PROMPTS[0]], LENGTH, stop_tokens=stops, min_tokens=min_tokens)
        said = tokens_of(ticket)
        assert set(said[:min_tokens]) <= others
        assert len(said) > min_tokens or min_tokens == LENGTH
        assert done(ticket).done_reason == ("length" if len(said) == LENGTH else "stop")
        cache.check()


def test_a_stop_word_before_is_text_and_ends_the_reply_behind() -> None:
    loaded = load("llama")
    with new_cache(loaded) as cache, new_generator(loaded, cache) as generator:
        whole = submit(generator, PROMPTS[0], LENGTH)
        texts = [token.text for _, token in generator]
        word = next(text for text in texts if text)
        for min_tokens in (0, 3, LENGTH):
            ticket = submit(generator, PROMPTS[0], LENGTH, stop_words=[word], min_tokens=min_tokens)
            found = "".join(token.text for _, token in generator)
            assert len(tokens_of(ticket)) >= min_tokens
            assert found == "".join(texts)[: len(found)]
        assert found == "".join(texts)
        assert tokens_of(ticket) == tokens_of(whole)


def test_drafts_that_would_end_it_are_not_accepted() -> None:
    loaded = load("llama")
    wanted = alone(loaded, PROMPTS[1], LENGTH)
    stop = wanted[3]
    with free_cache(loaded) as cache, new_generator(loaded, cache) as generator:
        (plain,) = serve(generator, [PROMPTS[1]], LENGTH, stop_tokens=[stop], min_tokens=8)
        (drafted,) = serve(generator, [PROMPTS[1]], LENGTH, stop_tokens=[stop], min_tokens=8, prediction=wanted)
        assert tokens_of(drafted) == tokens_of(plain)
        assert stop not in tokens_of(plain)[:8]
        assert drafted.facts.drafted["prediction"].proposed > 0


def test_stream_generate_goes_on_until_then() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokenizer.eos_token_ids = set()
    with PrefixCache(model) as cache:
        said = [each.token for each in stream_generate(model, tokenizer, PROMPTS[0], LENGTH, cache=cache)]
        tokenizer.eos_token_ids = {said[0], said[1]}
        for min_tokens in (0, 5):
            found = list(stream_generate(model, tokenizer, PROMPTS[0], LENGTH, cache=cache, min_tokens=min_tokens))
            assert len(found) > min_tokens
            assert not tokenizer.eos_token_ids & {each.token for each in found[:min_tokens]}
        with pytest.raises(ValueError, match="min_tokens is 13; wanted at most max_tokens, 12"):
            stream_generate(model, tokenizer, PROMPTS[0], LENGTH, cache=cache, min_tokens=13)
        with pytest.raises(ValueError, match="min_tokens is -1; wanted a whole number of tokens, 0 or more"):
            stream_generate(model, tokenizer, PROMPTS[0], LENGTH, cache=cache, min_tokens=-1)


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": LENGTH},
    "/v1/completions": {"prompt": "Hello", "max_tokens": LENGTH},
    "/v1/responses": {"input": "Hello", "max_output_tokens": LENGTH},
}


def test_clients_ask_for_it_on_each_route_and_a_wrong_one_is_refused_by_name() -> None:
    with application() as (app, _):
        client = local_client(app)
        for route, body in ROUTES.items():
            usage = client.post(route, json={**body, "min_tokens": LENGTH}).json()["usage"]
            assert LENGTH in (usage.get("completion_tokens"), usage.get("output_tokens"))
            for wrong, why in ((LENGTH + 1, f"at most max_tokens, {LENGTH}"), (-1, "greater than or equal to 0")):
                refused = client.post(route, json={**body, "min_tokens": wrong})
                assert refused.status_code == 400
                assert "min_tokens" in refused.text
                assert why in refused.text
        enforced = {**ROUTES["/v1/chat/completions"], "response_format": {"type": "json_object"}, "min_tokens": 3}
        assert "0 where a format or a call is enforced" in client.post("/v1/chat/completions", json=enforced).text
