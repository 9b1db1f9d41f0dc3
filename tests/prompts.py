"""Prompts of the scenarios: tokens drawn by a seed, the same every time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

import numpy as np

from runner.models.tiny import VOCABULARY_LENGTH

SYSTEM = (
    "You are a helpful assistant of the city library. Answer in one short paragraph, in the language of the question. "
    "Never guess opening hours; look them up with the tool that you were given, and say which page you found them on."
)


def tokens(seed: int, length: int, first: int | None = None) -> list[int]:
    """Random tokens of the tiny models; `first` tells sequences apart from their first token on."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY_LENGTH, length).tolist()
    return drawn if first is None else [first, *drawn[1:]]


def common(left: Iterable[int], right: Iterable[int]) -> int:
    """Length of the common prefix, one token at a time."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
