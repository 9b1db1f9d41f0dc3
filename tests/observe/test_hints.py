"""Hints: spans that vary with the same text behind them are found, at any length; ordinary prompts give none."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from radixcache import render_chat
from radixcache.observe.hints import MAX_SPAN, Parting, parting, variations
from runner.models.tiny import tiny_tokenizer
from tests.prompts import SYSTEM

TOKENIZER = tiny_tokenizer()


def chat(*contents: str, system: str = SYSTEM) -> Any:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return render_chat(TOKENIZER, messages)[0].astype(np.int64)


def text(ids: Any) -> str:
    return str(TOKENIZER.decode(list(ids)))


def found(prompts: list[Any]) -> list[Any]:
    """The hints on the newest of these prompts, which came in this order."""
    return variations(prompts[-1], reversed(prompts))


def test_a_request_id_of_varying_length_at_the_very_beginning_is_found() -> None:
    ids = ["7", "1204", "98", "55555", "310"]
    prompts = [np.array([*TOKENIZER.encode(each), *chat("Is it open?")], np.int64) for each in ids]
    (hint,) = found(prompts)
    assert (hint.start, hint.end) == (0, 3)
    assert hint.values == hint.requests == 5
    assert hint.tokens == len(prompts[0]) - 1


@pytest.mark.parametrize(
    ("systems", "start", "span"),
    [
        # Digits agree by chance: one span.
        ([f"Request {each}. {SYSTEM}" for each in ("4f1a-77", "4f9b-72", "4f1c-33", "4f1a-79")], "Request 4f", "1a-79"),
        # Of two spans far apart the first.
        ([f"Id {i:03}. {SYSTEM} Id {i * 37:05}. {SYSTEM}" for i in range(4)], "Id 00", "3"),
    ],
    ids=["digits that agree", "two spans"],
)
def test_the_first_span_that_varies_is_found_whole(systems: list[str], start: str, span: str) -> None:
    prompts = [chat("Is it open?", system=each) for each in systems]
    (hint,) = found(prompts)
    assert text(prompts[-1][: hint.start]).endswith(start)
    assert text(prompts[-1][hint.start : hint.end]) == span
    assert hint.values == 4


TALK = ("Is it open?", "It is.", "Until when?", "Until eight.", "Thanks!")
LANDS, TENANTS = ("France", "Spain", "Chile", "Japan", "Peru"), ("Rome", "Oslo", "Bern")


def of_tenant(tenant: str, question: str = "Is it open?") -> Any:
    return chat(question, system=f"For {tenant}. {SYSTEM}")


ORDINARY = {
    "questions alike but for a word": [chat(f"What is the capital of {land}?") for land in LANDS],
    "numbers asked about": [chat(f"{index * 7919} and {index}?") for index in range(8)],
    "different questions": [chat(q) for q in ("Is it open?", "Where do I return books after hours?", "Why?", "Hello!")],
    "one conversation that grows": [chat(*TALK[: 2 * turn + 1]) for turn in range(3)],
    "three tenants who come back": [of_tenant(each, f"Question {i}") for i in range(3) for each in TENANTS],
    "the same prompt again and again": [chat("Is it open?")] * 6,
    "questions that differ and get the same reply": [
        chat(*[f"Are you {name}?", "No, I am an assistant of the city library, made by people.", "Oh!"][:n])
        for name in ("a robot", "GPT", "a curious cat")
        for n in (1, 3)
    ],
    "short system prompts": [chat(f"{each}?", system=f"Be {each}.") for each in ("brief", "kind", "")],
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_prompts_give_no_hint(name: str) -> None:
    prompts = ORDINARY[name]
    assert [each for prompt in prompts for each in variations(prompt, reversed(prompts))] == []


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.integers(4, 5), max_size=MAX_SPAN),
    st.lists(st.integers(6, 7), max_size=MAX_SPAN),
    st.integers(0, 1 << 30),
    st.integers(32, 90),
)
def test_a_parting_is_found_wherever_a_short_span_was_replaced(
    front: list[int], mine: list[int], other: list[int], seed: int, behind: int
) -> None:
    rest = np.random.default_rng(seed).integers(100, 1 << 40, behind).tolist()
    if not mine and not other:
        assert parting(np.array(front + rest), np.array(front + rest)) is None
        return
    found = parting(np.array(front + mine + rest + [1]), np.array(front + other + rest + [2]))
    assert found == Parting(len(front), len(front) + len(mine), len(front) + len(other), behind)
