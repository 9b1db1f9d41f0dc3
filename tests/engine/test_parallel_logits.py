"""What a request asks of its logits and its end changes nothing for those beside it, and is what mlx-lm does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_logits_processors

from runner.engine.generation import Generation
from runner.models.load import LoadedModel
from tests.engine.generators import done, load, new_cache, new_generator, tokens_of
from tests.prompts import tokens

SYSTEM = tokens(1, 40)
PROMPTS = [[*SYSTEM, *tokens(seed, 5 + seed)] for seed in range(12, 15)]
PENALTIES = {"logit_bias": {7: 4.0}, "repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.5}


@pytest.fixture
def tiny() -> LoadedModel:
    return load("llama")


def alone(loaded: LoadedModel, prompt: Sequence[int], max_tokens: int = 12, **more: Any) -> list[int]:
    found = stream_generate(loaded.model, loaded.tokenizer, list(prompt), max_tokens=max_tokens, **more)
    reply = [each.token for each in found]
    assert len(reply) == max_tokens, "it ended early, and shows little"
    return reply


def said(ticket: Generation) -> list[int]:
    assert done(ticket).error is None
    return list(tokens_of(ticket))


def serve_in_short_room(tiny: LoadedModel, each: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Replies to two prompts of which one has to wait again; `each`: arguments of their requests."""
    capacity = len(SYSTEM) + sum(len(prompt) - len(SYSTEM) for prompt in PROMPTS[:2]) + 12
    rows = set[int]()
    with new_generator(tiny, new_cache(tiny), capacity=capacity) as generator:
        tickets = [
            generator.submit(prompt, max_tokens=12, stop_tokens=(), reserve=1, **more)
            for prompt, more in zip(PROMPTS, each, strict=False)
        ]
        while any(ticket.completion is None for ticket in tickets):
            generator.round()
            rows |= {row.id for row in generator.group.rows}
    assert len(rows) == 3, "one went back, and got another row"
    return [said(ticket) for ticket in tickets]


def test_penalties_go_on_where_a_request_that_went_back_to_waiting_left_off(tiny: LoadedModel) -> None:
    processors = make_logits_processors(**PENALTIES)
    wanted = [alone(tiny, prompt, logits_processors=processors) for prompt in PROMPTS[:2]]
    assert serve_in_short_room(tiny, [{"logits_processors": processors}] * 2) == wanted


def test_the_likeliest_token_is_found_without_an_exponential(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_generator(tiny, new_cache(tiny)) as generator:
        ticket = generator.submit(PROMPTS[0], max_tokens=6, stop_tokens=())
        monkeypatch.setattr(mx, "logsumexp", None)
        list(generator)
    monkeypatch.undo()
    assert said(ticket) == alone(tiny, PROMPTS[0], 6)


class Line:
    """Guidance that allows one token at a time, the line's, and notes what it is told."""

    def __init__(self, line: Sequence[int], vocabulary_length: int) -> None:
        self.line, self._vocabulary_length = line, vocabulary_length
        self.told: list[int | None] = []

    def __call__(self, token: int | None) -> np.ndarray | None:
        self.told.append(token)
        allowed = np.zeros(self._vocabulary_length + 24, np.bool_)  # as long as a tokenizer that has more tokens
        allowed[self.line[len(self.told) - 1]] = True
        return allowed


def test_guidance_is_told_each_token_once_also_where_its_request_waited_again(tiny: LoadedModel) -> None:
    lines = [Line(tokens(seed, 12), tiny.vocabulary_length) for seed in (71, 72)]
    assert serve_in_short_room(tiny, [{"guidance": line} for line in lines]) == [line.line for line in lines]
    for line in lines:
        assert line.told == [None, *line.line[:-1]]


@pytest.mark.parametrize("cuts", [True, False])
def test_a_character_cut_in_two_by_the_end_is_left_out_or_told_as_mlx_lm_does(tiny: LoadedModel, cuts: bool) -> None:
    half = tiny.tokenizer.encode("é")[0]
    more: dict[str, Any] = {"sampler": lambda _: mx.array([half]), "cuts_characters": cuts}
    with new_generator(tiny, new_cache(tiny)) as generator:
        generator.submit(PROMPTS[0], max_tokens=1, stop_tokens=(), **more)
        text = "".join(piece.text for _, piece in generator)
    assert text == ("" if cuts else "\N{REPLACEMENT CHARACTER}")


def test_a_round_evaluates_a_chunk_of_one_prompt_or_of_several(tiny: LoadedModel) -> None:
    lengths, told = [30, 30, 100, 10], dict.fromkeys(range(4), 0)
    with new_generator(tiny, new_cache(tiny), step_size=64) as generator:
        for number, length in enumerate(lengths):
            prompt = [5 + number] * length
            generator.submit(
                prompt, max_tokens=9, stop_tokens=(), on_progress=lambda done, _, at=number: told.update({at: done})
            )
        rounds = [(len(generator.round()), *told.values()) for _ in range(6)]
    assert rounds == [
        (1, 29, 24, 0, 10),  # a first token, handed out before the step
        (2, 30, 24, 0, 10),
        (1, 30, 30, 58, 10),
        (3, 30, 30, 58, 10),
        (4, 30, 30, 100, 10),  # where none comes of the chunk, both
        (0, 30, 30, 100, 10),
    ]
