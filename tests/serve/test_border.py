"""Each name that the server uses of mlx-lm is there, and does what the server leans on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from runner.models.load import LoadedModel
from runner.serve import mlx_lm_border
from runner.serve.prompts import prompt_of
from runner.serve.request import ApiError, ModelNames, Request, Sampling

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "Why not?"},
]


def test_samplers_and_processors_are_made_of_a_requests_own_fields(tiny: LoadedModel) -> None:
    likeliest = mx.log(mx.array([[0.1, 0.2, 0.7]]))
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=1)):
        sampler = mlx_lm_border.make_sampler(SimpleNamespace(sampling=sampling), tiny.tokenizer)
        assert sampler(likeliest).tolist() == [2]
    penalties = Sampling(logit_bias={3: 5.0}, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    made = mlx_lm_border.make_logits_processors(SimpleNamespace(logits=penalties))
    assert len(made) == 4
    logits = mx.ones((1, 4))
    for processor in made:
        logits = processor(mx.array([1, 1, 2]), logits)
    assert logits.tolist() == [[1.0, 0.5 - 1.0 - 1.0, 0.5 - 1.0 - 0.5, 6.0]]
    assert mlx_lm_border.make_logits_processors(SimpleNamespace(logits=Sampling())) == []


def asked(**more: Any) -> Request:
    return Request(ModelNames(), 5, **more)


def test_a_chat_is_what_the_template_makes_of_it_and_stays_as_it_was(tiny: LoadedModel) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]}]
    found = prompt_of(asked(messages=messages), tiny.tokenizer, {})
    plain = [{"role": "user", "content": "Why?"}]
    assert found.tokens == tiny.tokenizer.apply_chat_template(plain, add_generation_prompt=True)
    assert found.initial_state == "normal"
    assert isinstance(messages[0]["content"], list)


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_of_tool_calls_reach_the_template_as_objects(tiny: LoadedModel, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [MESSAGES[1], {"role": "assistant", "content": None, "tool_calls": [call]}, MESSAGES[3]]
    text = tiny.tokenizer.decode(prompt_of(asked(messages=messages), tiny.tokenizer, {}).tokens)
    assert '"arguments": {"a": 1}' in text


def test_the_requests_template_arguments_go_before_the_servers(tiny: LoadedModel) -> None:
    template = "{{ who }} {{ what }}"
    found = prompt_of(
        asked(messages=MESSAGES, chat_template_kwargs={"who": "mine", "chat_template": template}),
        tiny.tokenizer,
        {"who": "server's", "what": "stays"},
    )
    assert tiny.tokenizer.decode(found.tokens) == "mine stays"


def test_the_end_of_each_message_is_marked_on_demand(tiny: LoadedModel) -> None:
    found = prompt_of(asked(messages=MESSAGES), tiny.tokenizer, {})
    assert found.marks == ()
    marked = prompt_of(asked(messages=MESSAGES), tiny.tokenizer, {}, with_marks=True)
    assert marked.tokens == found.tokens
    ends = [tiny.tokenizer.decode(marked.tokens[:mark]) for mark in marked.marks]
    for message in MESSAGES:
        assert any(end.rstrip().endswith(f"{message['content']}<|im_end|>") for end in ends), message


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "the prompt cannot be made"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_made_is_the_requests_fault(tiny: LoadedModel, more: dict[str, Any], found: str) -> None:
    with pytest.raises(ApiError, match=found) as refused:
        prompt_of(asked(**more), tiny.tokenizer, {})
    assert refused.value.status == 400
