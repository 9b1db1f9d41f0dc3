"""stream_generate says what mlx_lm.stream_generate says, token by token, and leaves the conversation in the cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate as plain_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from radixcache import CacheBusyError, PrefixCache, render_chat, stream_generate
from runner.models.tiny import VOCABULARY_LENGTH, tiny_model, tiny_tokenizer
from tests import inside
from tests.groups.cold import opened, shared_model
from tests.prompts import tokens

KINDS = ["llama", "llama_sliding", "nemotron_h"]

PROMPT = np.random.default_rng(4).integers(0, VOCABULARY_LENGTH, 50).tolist()


def tokenizer_that_stops_at(*tokens: int) -> Any:
    """Without a stop token, a reply of random weights is as long as it was asked to be."""
    wrapped = tiny_tokenizer()
    wrapped.eos_token_ids = set(tokens)
    return wrapped


TOKENIZER = tokenizer_that_stops_at()


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model(request.param)


def agree(model: Any, cache: PrefixCache, prompt: Any, tokenizer: Any = TOKENIZER, **options: Any) -> list[int]:
    """Generate with and without the cache and compare every response; returns the tokens.

    An option of `made` is called for more options, once for each.
    """
    make = options.pop("made", dict)
    plain = prompt if isinstance(prompt, str) else mx.array(prompt)
    expected = list(plain_stream_generate(model, tokenizer, plain, **options, **make()))
    found = list(stream_generate(model, tokenizer, prompt, cache=cache, **options, **make()))
    cache.check()
    for name in ("token", "text", "finish_reason", "generation_tokens", "prompt_tokens"):
        assert [getattr(each, name) for each in found] == [getattr(each, name) for each in expected], name
    # Where one token is left, nothing is drafted; mlx-lm drafts it.
    assert [each.from_draft for each in found[:-1]] == [each.from_draft for each in expected[:-1]]
    for left, right in zip(found, expected, strict=True):
        assert left.logprobs.shape == right.logprobs.shape
        assert float(mx.abs(left.logprobs - right.logprobs).max()) < 1e-4
        assert min(left.prompt_tps, left.generation_tps, left.peak_memory) > 0
    return [each.token for each in found]


def test_greedy_replies_are_those_of_mlx_lm_through_a_conversation_with_a_branch(model: Any) -> None:
    cache, step_size = PrefixCache(model), 16
    prompt = PROMPT
    for turn in range(2):
        reply = agree(model, cache, prompt, max_tokens=8, prefill_step_size=step_size)
        branch = [*prompt[:-5], 1, 2, 3]
        agree(model, cache, branch, max_tokens=5, prefill_step_size=step_size)
        prompt = [*prompt, *reply, turn, 7, 8]
    assert cache.stats.hit_tokens > cache.stats.miss_tokens


@pytest.mark.parametrize("model", ["nemotron_h"], indirect=True)
def test_a_seeded_sampler_draws_what_it_draws_for_mlx_lm(model: Any) -> None:
    cache = PrefixCache(model)

    def seeded(seed: int = 7) -> dict[str, Any]:
        mx.random.seed(seed)
        return {"max_tokens": 12, "sampler": make_sampler(temp=1.5, top_p=0.95)}

    first = agree(model, cache, PROMPT, made=seeded)
    again = agree(model, cache, PROMPT, made=seeded)
    assert first == again
    assert agree(model, cache, PROMPT, made=lambda: seeded(8)) != first


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_logits_processors_see_the_whole_prompt_however_much_of_it_was_cached(model: Any) -> None:
    cache = PrefixCache(model)
    seen: list[list[list[int]]] = []

    def watching() -> dict[str, Any]:
        seen.append([])

        def watch(tokens: mx.array, logits: mx.array) -> mx.array:
            seen[-1].append(np.array(tokens).tolist())
            return logits

        penalties = make_logits_processors(repetition_penalty=1.5, repetition_context_size=30)
        return {"max_tokens": 6, "logits_processors": [*penalties, watch]}

    agree(model, cache, PROMPT, made=watching)
    reply = agree(model, cache, PROMPT, made=watching)
    for plain, cached in (seen[:2], seen[2:]):
        # mlx-lm runs ahead by one forward pass more than is yielded.
        assert plain[: len(cached)] == cached
        assert cached[0] == PROMPT
        assert cached[-1] == PROMPT + reply[:-1]


def test_text_is_encoded_as_mlx_lm_encodes_it() -> None:
    model, cache = opened("llama")
    for text in ("Grüße aus Köln, und noch mehr Text.", "Grüße aus Köln, und ganz anderer."):
        agree(model, cache, text, max_tokens=6)
    assert cache.stats.hit_tokens == len(TOKENIZER.encode("Grüße aus Köln, und "))


def test_a_stop_token_ends_the_reply(model: Any) -> None:
    cache = PrefixCache(model)
    tokens = agree(model, cache, PROMPT, max_tokens=12)
    end = tokens.index(tokens[5]) + 1
    assert agree(model, cache, PROMPT, tokenizer_that_stops_at(tokens[5]), max_tokens=12) == tokens[:end]


def test_without_a_limit_only_a_stop_token_ends_the_reply() -> None:
    model, cache = opened("llama")
    free: Any = stream_generate(model, TOKENIZER, PROMPT, max_tokens=-1, cache=cache)
    # More than the default limit of 256, and more than was reserved.
    tokens = [next(free).token for _ in range(264)]
    free.close()
    assert tokens == [each.token for each in plain_stream_generate(model, TOKENIZER, PROMPT, max_tokens=264)]
    stopping = tokenizer_that_stops_at(tokens[20])
    ended = list(stream_generate(model, stopping, PROMPT, max_tokens=-1, cache=cache))
    assert [each.token for each in ended] == tokens[: tokens.index(tokens[20]) + 1]
    assert ended[-1].finish_reason == "stop"
    cache.check()


@pytest.mark.parametrize("count", [1, 2])
def test_a_limit_ends_the_reply_and_runs_no_forward_pass_for_nothing(model: Any, count: int) -> None:
    cache = PrefixCache(model)
    agree(model, cache, PROMPT, max_tokens=count)
    # The last token was never fed to the model, so it is not stored.
    assert cache.stats.tokens == len(PROMPT) + count - 1


def test_a_stream_that_is_closed_early_frees_the_slot_and_keeps_its_tokens(model: Any) -> None:
    cache = PrefixCache(model)
    stream: Any = stream_generate(model, TOKENIZER, PROMPT, max_tokens=10, cache=cache)
    tokens = [next(stream).token for _ in range(3)]
    with pytest.raises(CacheBusyError, match=r"the live slot is taken: .* at token 3 after its 50 prompt tokens"):
        cache.begin(PROMPT)
    stream.close()
    cache.check()
    assert cache.begin([*PROMPT, *tokens, 1]).cached_tokens >= len(PROMPT) - 16


def test_marks_and_namespace_reach_the_cache() -> None:
    mamba, cache = opened("mamba2")
    system = {"role": "system", "content": "Answer in one word, and mind your manners."}
    cached = []
    for question in ("Ann asks: why?", "Bob asks: where?"):
        rendered, marks = render_chat(TOKENIZER, [system, {"role": "user", "content": question}])
        tokens = rendered.tolist()
        stream = stream_generate(mamba, TOKENIZER, tokens, max_tokens=2, cache=cache, marks=marks)
        cached.append([response.cached_tokens for response in stream])
    assert cached == [[0, 0], [marks[0], marks[0]]]
    (elsewhere,) = stream_generate(mamba, TOKENIZER, tokens, max_tokens=1, cache=cache, namespace="other")
    assert elsewhere.cached_tokens == 0


def test_progress_is_reported_up_to_the_whole_prompt() -> None:
    model, cache = opened("llama_sliding")
    found: list[list[tuple[int, int]]] = []
    for prompt in (PROMPT, [*PROMPT, *PROMPT]):
        calls: list[tuple[int, int]] = []
        tell: Any = lambda done, total, calls=calls: calls.append((done, total))  # noqa: E731
        more: dict[str, Any] = {"prefill_step_size": 16, "prompt_progress_callback": tell}
        list(stream_generate(model, TOKENIZER, prompt, max_tokens=2, cache=cache, **more))
        found.append(calls)
    first, again = found
    assert (first[0], first[-1]) == ((0, 50), (50, 50))
    assert [done for done, _ in first] == sorted({done for done, _ in first})
    # The branch's first progress says what was restored.
    assert again[0][0] > 0
    assert again[-1] == (100, 100)


@pytest.mark.filterwarnings("ignore:state up to")
def test_a_verified_prompt_of_embeddings_is_compared_with_a_cold_run_of_them() -> None:
    model = tiny_model("llama")
    rows = mx.array(np.random.default_rng(5).standard_normal((90, 64)), mx.float32)
    cache = PrefixCache(model, verify=1.0)
    prompt = tokens(8, 90)
    for length, cached_tokens in ((50, 0), (90, 50), (90, 89), (90, 0)):
        given = prompt[:length]
        if not cached_tokens and length == 90:  # wrong state: the request starts over
            inside.nodes(cache)[0].payload.spans.leaves[1].segments[0][0][..., 20:40, :] += 1.0
        expected = list(plain_stream_generate(model, TOKENIZER, mx.array(given), 8, input_embeddings=rows[:length]))
        about = {"keys": given, "embed": lambda at, end=length: rows[at:end], "prefill_step_size": 16}
        found = list(stream_generate(model, TOKENIZER, given, 8, cache=cache, **about))
        assert [each.token for each in found] == [each.token for each in expected]
        assert found[0].cached_tokens == cached_tokens
        assert len(cache.mismatches) == (length == 90 and not cached_tokens)
        list(stream_generate(model, TOKENIZER, tokens(9, 20, first=7), 1, cache=cache))  # the prompt is paged out
    assert cache.stats.verify_skipped == 0


def test_a_prompt_may_come_as_embeddings_which_are_asked_for_from_where_it_is_resumed() -> None:
    model = tiny_model("gemma3_text")
    rows = mx.array(np.random.default_rng(5).standard_normal((50, 64)), mx.float32)
    cache = PrefixCache(model)
    expected = list(plain_stream_generate(model, TOKENIZER, mx.array(PROMPT), 8, input_embeddings=rows))
    keys = [-1 - token for token in PROMPT]
    offsets: list[int] = []

    def embed(offset: int) -> mx.array:
        offsets.append(offset)
        return rows[offset:]

    for cached_tokens in (0, 49):
        found = list(
            stream_generate(model, TOKENIZER, PROMPT, 8, cache=cache, keys=keys, embed=embed, prefill_step_size=16)
        )
        cache.check()
        assert [each.token for each in found] == [each.token for each in expected]
        for left, right in zip(found, expected, strict=True):
            assert float(mx.abs(left.logprobs - right.logprobs).max()) < 1e-4
        assert found[0].cached_tokens == cached_tokens
    assert offsets == [0, 49]
    # The tokens alone are another prompt.
    assert agree(model, cache, PROMPT, max_tokens=8) != [each.token for each in expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_cache": []}, r"prompt_cache cannot be used together with cache=: \w+"),
        ({"max_kv_size": 64}, r"max_kv_size cannot be used together with cache=: \w+"),
        ({"input_embeddings": mx.zeros((4, 64))}, r"input_embeddings cannot be used together with cache=: \w+"),
        ({"kv_bits": 8}, r"kv_bits cannot be used together with cache=: \w+"),
        ({"kv_group_size": 32}, r"kv_group_size cannot be used together with cache=: \w+"),
        ({"quantized_kv_start": 100}, r"quantized_kv_start cannot be used together with cache=: \w+"),
        ({"prompt_cache": None, "temperature": 0.5}, "unexpected arguments: temperature"),
        ({"max_tokens": 0}, "max_tokens is 0; wanted 1 or more, or -1"),
        ({"max_tokens": -2}, "max_tokens is -2; wanted 1 or more, or -1"),
        ({"embed": len}, "embed= needs keys=, .* and no draft_model"),
        ({"embed": len, "keys": PROMPT, "draft_model": "draft"}, "embed= needs keys=, .* and no draft_model"),
        ({"prediction": 5}, "prediction has 0 dimensions"),
        ({"prediction": ["as", "before"]}, r"prediction\[0\] is 'as'; wanted an integer"),
        ({"prediction": {"a": 1}}, "prediction has 0 dimensions; wanted 1: a list or an array of integers"),
        ({"prediction": [[1], [2, 3]]}, "prediction is not a sequence of integers"),
        ({"draft_model": len, "num_draft_tokens": -1}, "num_draft_tokens is -1; wanted"),
        ({"embed": len, "keys": PROMPT, "speculate": "tree"}, "embed= needs keys=, .* and no draft_model, speculate="),
    ],
    ids=lambda given: next(reversed(given)) if isinstance(given, dict) else "",
)
def test_a_wrong_argument_is_refused_by_name_before_anything_runs(arguments: dict[str, Any], message: str) -> None:
    llama, cache = opened("llama")
    with pytest.raises((ValueError, TypeError), match=message):
        stream_generate(llama, TOKENIZER, PROMPT, cache=cache, **arguments)
    assert cache.stats.requests == 0


@pytest.mark.parametrize("prompt", [iter([5, 6]), [5.0, 6.0], 5, None, [[5, 6]], []])
@pytest.mark.parametrize("speculate", [None, "prompt", "tree"])
def test_a_wrong_prompt_is_refused_by_name(prompt: Any, speculate: str | None) -> None:
    llama = shared_model("llama")
    with pytest.raises(ValueError, match=r"^prompt\b"):
        stream_generate(llama, TOKENIZER, prompt, cache=PrefixCache(llama), speculate=speculate)


@pytest.mark.parametrize(("seed", "count"), [(0, 4), (1, 1)], ids=["a twin", "another"])
def test_speculative_decoding_gives_mlx_lms_tokens_and_the_next_turn_resumes(seed: int, count: int) -> None:
    model, draft = shared_model("llama"), tiny_model("llama", seed=seed)
    cache = PrefixCache(model, caches=lambda: [*make_prompt_cache(model), *make_prompt_cache(draft)])
    prompt = PROMPT
    for turn in range(2):
        reply = agree(model, cache, prompt, max_tokens=11, draft_model=draft, num_draft_tokens=count)
        longer = [*prompt, *reply, turn, 5, 6]
        with cache.begin(longer) as session:
            assert session.cached_tokens >= len(prompt) + len(reply) - 2
        prompt = longer


def test_a_draft_model_needs_a_cache_made_for_both() -> None:
    llama, cache = opened("llama")
    stream = stream_generate(llama, TOKENIZER, PROMPT, draft_model=tiny_model("llama"), cache=cache)
    with pytest.raises(ValueError, match="has 3 layer caches; draft_model needs the 6 of both models"):
        next(stream)
    cache.check()
    assert next(stream_generate(llama, TOKENIZER, PROMPT, cache=cache)).cached_tokens == 0
