"""The real demo model: its answers, and a conversation past its context that still knows its system prompt.

Skipped only where it cannot be fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache, render_chat
from runner.engine.generator import ParallelGenerator
from runner.engine.replies import Completion
from runner.engine.sequence import Ticket
from runner.models.load import FetchError, LoadedModel, load_model

pytestmark = pytest.mark.slow

REPLY_TOKENS = 12
CONTEXT = 128
SHORT_CONTEXT = 96
SYSTEM = (
    "You are the guide of the lighthouse museum. The lighthouse keeper's name is Oskar. The museum opens at nine. "
    "Answer in one short sentence."
)
QUESTIONS = (
    "We came by boat this morning with the children, and they would like to know why ships need a light at night.",
    "On the way we saw many gulls on the rocks below the cliff. What do gulls eat, and where do they sleep?",
    "The harbour was full of nets and ropes. What is a rope made of, and who makes the long ones for the boats?",
    "In the afternoon it may rain, they said on the radio. Where do the high waves come from, and what is fog?",
)
LAST_QUESTION = "What is the name of the lighthouse keeper?"
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


def done(ticket: Ticket) -> Completion:
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


def test_the_demo_model_says_its_context_vocabulary_and_weights(demo: LoadedModel) -> None:
    assert (demo.context_length, demo.vocabulary_length) == (8192, 49152)
    parameters: dict[str, mx.array] = dict(tree_flatten(demo.model.parameters()))
    assert {value.dtype for value in parameters.values()} == {mx.float32}
    assert demo.weight_bytes == 4 * sum(value.size for value in parameters.values()) == 4 * 134_515_008


def test_the_demo_tokenizer_splits_digits_and_keeps_control_tokens_whole(demo: LoadedModel) -> None:
    ids = demo.tokenizer.encode("In 2024<|im_end|> naïve")
    assert demo.tokenizer.decode(ids) == "In 2024<|im_end|> naïve"
    spelled = [demo.tokenizer.decode([index]) for index in ids]
    assert spelled[:7] == ["In", " ", "2", "0", "2", "4", "<|im_end|>"]


def test_a_conversation_of_two_contexts_still_knows_its_system_prompt(demo: LoadedModel) -> None:
    cache = PrefixCache(demo.model, budget_bytes=1 << 30, verify=1.0)
    messages = [{"role": "system", "content": SYSTEM}]
    completions: list[Completion] = []
    with ParallelGenerator(cache, demo.model, demo.tokenizer, capacity=CONTEXT, context=CONTEXT) as generator:
        for turn in count():
            is_long = bool(completions) and completions[-1].prompt_tokens > 2 * CONTEXT
            messages.append({"role": "user", "content": LAST_QUESTION if is_long else QUESTIONS[turn % len(QUESTIONS)]})
            tokens, marks = render_chat(demo.tokenizer, messages)
            ticket = generator.submit(tokens, marks=marks, max_tokens=12 if is_long else 4)
            text = "".join(piece.text for _, piece in generator)
            completions.append(done(ticket))
            messages.append({"role": "assistant", "content": text})
            if is_long:
                break
    assert "Oskar" in text
    assert completions[-1].prompt_tokens > 2 * CONTEXT
    assert completions[-1].omitted_tokens >= CONTEXT
    assert all(completion.error is None and completion.note is None for completion in completions)
    # The system prompt at least was there for every turn but the first.
    _, (system_end, *_) = render_chat(demo.tokenizer, messages)
    assert all(completion.cached_tokens >= system_end - 1 for completion in completions[1:])
    tokens, marks = render_chat(demo.tokenizer, messages)
    with cache.begin(tokens, marks=marks) as session:
        session.prefill(demo.model)
        assert session.cached_tokens >= system_end
        assert session.mismatch is None


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
    messages.append({"role": "user", "content": QUESTIONS[0]})
    messages.append({"role": "assistant", "content": "That is a good question."})
    messages.append({"role": "user", "content": "Tell me about the museum."})
    tokens, marks = render_chat(demo.tokenizer, messages)
    said = demo.tokenizer.encode(SAID, add_special_tokens=False)
    with ParallelGenerator(
        cache, demo.model, demo.tokenizer, capacity=SHORT_CONTEXT, context=SHORT_CONTEXT
    ) as generator:
        ticket = generator.submit(tokens, marks=marks, max_tokens=len(said) + 4, sampler=then_greedy(said))
        text = "".join(piece.text for _, piece in generator)
    completion = done(ticket)
    assert completion.omitted_tokens > 0
    assert completion.shifted_tokens > 0
    assert completion.note is None
    assert len(tokens) - completion.omitted_tokens + len(completion.tokens) > SHORT_CONTEXT
    assert text.startswith(SAID)
    assert text.removeprefix(SAID).startswith(" Oskar")
    gone = completion.omitted_tokens + completion.shifted_tokens
    left = [*tokens[: marks[0]], *tokens[marks[0] + gone :], *completion.tokens]
    with cache.begin(left) as session:
        session.prefill(demo.model)
        assert marks[0] <= session.cached_tokens < marks[0] + 8
        assert session.mismatch is None
