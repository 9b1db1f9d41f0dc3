"""What callers pass as tokens and keys: taken when it is integers in range, refused in one clear line otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache.tokens import checked_prompt, token_ids, vocabulary_size


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint16),
        np.array([1, 2, 3], dtype=np.uint64),
        np.array([0, 1, 2, 3, 4])[1:4],
        mx.array([1, 2, 3]),
        mx.array([1, 2, 3], mx.uint32),
        mx.array([1, 2, 3], mx.int64),
        [np.int64(1), 2, np.uint8(3)],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_any_sequence_of_integers_becomes_int32(tokens: Any) -> None:
    ids = token_ids(tokens, 10)
    assert ids.tolist() == [1, 2, 3]
    assert ids.dtype == np.int32


def test_the_result_is_the_callers_to_keep() -> None:
    tokens = np.array([1, 2, 3], dtype=np.int32)
    ids = token_ids(tokens)
    tokens[0] = 9
    assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"tokens is empty; wanted at least 1\."),
        (np.array([], dtype=np.int64), r"tokens is empty; wanted at least 1\."),
        ("hello", r"tokens is a str; wanted token ids: encode the text first\."),
        ([[1, 2], [3, 4]], r"tokens has 2 dimensions; wanted 1: a list or an array of integers\."),
        (mx.array([[1, 2]]), r"tokens has 2 dimensions; wanted 1: a list or an array of integers\."),
        (7, r"tokens has 0 dimensions; wanted 1: a list or an array of integers\."),
        ([[1], [2, 3]], r"tokens is not a sequence of integers: .*"),
        ([1.0, 2.0], r"tokens\[0\] is 1\.0; wanted an integer of at most 64 bits\."),
        ([True, False], r"tokens\[0\] is True; wanted an integer of at most 64 bits\."),
        (mx.array([1.0, 2.0]), r"tokens\[0\] is 1\.0; wanted an integer of at most 64 bits\."),
        ([1, None], r"tokens\[1\] is None; wanted an integer of at most 64 bits\."),
        ([1, 1 << 70], rf"tokens\[1\] is {1 << 70}; wanted an integer of at most 64 bits\."),
        ([3, -1, 5], r"tokens\[1\] is -1; wanted a token id in \[0, 10\)\."),
        ([3, 4, 10, 11], r"tokens\[2\] is 10; wanted a token id in \[0, 10\)\."),
        (np.array([1, 1 << 63], dtype=np.uint64), rf"tokens\[1\] is {1 << 63}; wanted .*"),
    ],
    ids=str,
)
def test_anything_else_is_refused_in_one_line_that_says_what_was_found(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$") as caught:
        token_ids(tokens, 10)
    assert "\n" not in str(caught.value)


def test_without_a_vocabulary_ids_fill_31_bits() -> None:
    largest = (1 << 31) - 1
    assert token_ids([0, largest]).tolist() == [0, largest]
    for size in (None, 1 << 40):
        with pytest.raises(ValueError, match=rf"tokens\[0\] is {1 << 31}; wanted a token id in \[0, {1 << 31}\)"):
            token_ids([1 << 31], size)


# Keys


def test_keys_are_64_bits_wide_and_signed() -> None:
    extremes = [-(1 << 63), -1, 0, 1 << 62, (1 << 63) - 1]
    found = checked_prompt(range(5), extremes)[1]
    assert found.tolist() == extremes
    assert found.dtype == np.int64
    assert checked_prompt([0], np.array([(1 << 63) - 1], dtype=np.uint64))[1].tolist() == [(1 << 63) - 1]


@pytest.mark.parametrize(
    ("keys", "length", "message"),
    [
        ([1, 2, 3], 2, r"keys has 3 entries; wanted 2, one for each token\."),
        ([1], 2, r"keys has 1 entries; wanted 2, one for each token\."),
        ([], 2, r"keys is empty; wanted at least 1\."),
        ([0, 1 << 63], 2, rf"keys\[1\] is {1 << 63}; wanted an integer of at most 64 bits\."),
        ([0, -(1 << 63) - 1], 2, rf"keys\[1\] is {-(1 << 63) - 1}; wanted an integer of at most 64 bits\."),
        ([0.5, 1.0], 2, r"keys\[0\] is 0\.5; wanted an integer of at most 64 bits\."),
        ("ab", 2, r"keys is a str; wanted .*"),
        (np.array([5, (1 << 63) + 1], dtype=np.uint64), 2, rf"keys\[1\] is {(1 << 63) + 1}; wanted .*"),
    ],
    ids=str,
)
def test_keys_that_are_not_one_integer_a_token_are_refused(keys: Any, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        checked_prompt(range(length), keys)


# Vocabulary


@pytest.mark.parametrize(
    ("args", "size"),
    [
        (SimpleNamespace(vocab_size=100), 100),
        (SimpleNamespace(text_config={"vocab_size": 200}), 200),
        (SimpleNamespace(text_config=SimpleNamespace(vocab_size=300)), 300),
        (SimpleNamespace(vocab_size=None, text_config={"vocab_size": 400}), 400),
        (SimpleNamespace(text_config={}), None),
        (SimpleNamespace(), None),
        (SimpleNamespace(vocab_size="many"), None),
        (SimpleNamespace(vocab_size=0), None),
    ],
    ids=str,
)
def test_the_vocabulary_is_what_the_models_arguments_state(args: Any, size: int | None) -> None:
    assert vocabulary_size(SimpleNamespace(args=args)) == size
