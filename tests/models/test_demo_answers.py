"""The real demo model: its answers, and a conversation past its context that still knows its system prompt.

Skipped only where it cannot be fetched.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache, render_chat
from runner.engine.generation import Generation
from runner.engine.generator import ParallelGenerator
from runner.engine.token import Completion
from runner.models.load import FetchError, LoadedModel, load_model

pytestmark = pytest.mark.slow

REPLY_TOKENS = 12
CONTEXT = 96
SYSTEM = (
    "You are the guide of the lighthouse museum. The lighthouse keeper's name is Oskar. The museum opens at nine. "
    "Answer in one short sentence."
)
QUESTION = "We came by boat this morning with the children. Why do ships need a light at night?"
SAID = (
    "Gladly. The museum stands on the cliff above the town. Visitors climb the stairs and look at the old lamp. "
    "The lighthouse keeper's name is"
)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    try:
        return load_model("demo")
    except FetchError as error:
        pytest.skip(str(error))


def done(ticket: Generation) -> Completion:
    assert ticket.completion is not None
    return ticket.completion


def test_the_demo_model_knows_the_capital_of_france(demo: LoadedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = demo.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    caches = make_prompt_cache(demo.model)
    reply: list[int] = []
    while len(reply) < REPLY_TOKENS and not demo.tokenizer.eos_token_ids & set(reply):
        logits = demo.model(mx.array([reply[-1:] or tokens]), cache=caches)
        reply.append(int(np.argmax(np.array(logits[0, -1]))))
    assert "Paris" in demo.tokenizer.decode(reply)
    assert demo.tokenizer.eos_token_ids & set(reply)


def test_the_demo_model_says_its_context_vocabulary_and_weights_and_splits_digits(demo: LoadedModel) -> None:
    assert (demo.context_length, demo.vocabulary_length) == (8192, 49152)
    parameters: dict[str, mx.array] = dict(tree_flatten(demo.model.parameters()))
    assert {value.dtype for value in parameters.values()} == {mx.float32}
    assert sum(value.size for value in parameters.values()) == 134_515_008
    ids = demo.tokenizer.encode("In 2024<|im_end|> naïve")
    assert demo.tokenizer.decode(ids) == "In 2024<|im_end|> naïve"
    spelled = [demo.tokenizer.decode([index]) for index in ids]
    assert spelled[:7] == ["In", " ", "2", "0", "2", "4", "<|im_end|>"]


def then_greedy(tokens: list[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that says what it is told to, and then what the model thinks."""
    script = iter(tokens)

    def sampler(logprobs: mx.array) -> mx.array:
        told = next(script, None)
        return mx.argmax(logprobs, axis=-1) if told is None else mx.array([told])

    return sampler


def test_a_reply_during_which_the_context_was_shifted_still_knows_the_system_prompt(demo: LoadedModel) -> None:
    cache = PrefixCache(demo.model, budget_bytes=1 << 30, verify=1.0)
    messages = [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": QUESTION})
    messages.append({"role": "assistant", "content": "That is a good question."})
    messages.append({"role": "user", "content": "Tell me about the museum."})
    tokens, marks = render_chat(demo.tokenizer, messages)
    said = demo.tokenizer.encode(SAID, add_special_tokens=False)
    with ParallelGenerator(cache, demo.model, demo.tokenizer, capacity=CONTEXT, context=CONTEXT) as generator:
        ticket = generator.submit(tokens, marks=marks, max_tokens=len(said) + 4, sampler=then_greedy(said))
        text = "".join(piece.text for _, piece in generator)
    completion = done(ticket)
    assert completion.omitted_tokens > 0
    assert completion.shifted_tokens > 0
    assert completion.note is None
    assert len(tokens) - completion.omitted_tokens + len(completion.tokens) > CONTEXT
    assert text.startswith(SAID)
    assert text.removeprefix(SAID).startswith(" Oskar")
    gone = completion.omitted_tokens + completion.shifted_tokens
    left = [*tokens[: marks[0]], *tokens[marks[0] + gone :], *completion.tokens]
    with cache.begin(left) as session:
        session.prefill(demo.model)
        assert marks[0] <= session.cached_tokens < marks[0] + 8
        assert session.mismatch is None
