"""What is known of a request's tokens is read when it is asked for, in order, and no further than it is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from radixcache.tokens import KnownTokens


class Pending:
    """Tokens that are evaluated when somebody reads them; `error`: that fails."""

    def __init__(self, tokens: list[int], error: Exception | None = None) -> None:
        self.tokens, self.error = tokens, error
        self.reads = 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return np.array([self.tokens], dtype=dtype)


def known(vocab_size: int | None = 100) -> KnownTokens:
    return KnownTokens(np.array([1, 2, 3], np.int32), np.array([-1, -2, -3]), vocab_size)


def test_reported_tokens_are_read_once_and_only_when_asked_for() -> None:
    tokens, pending = known(), Pending([7, 8, 9])
    tokens.report(pending, 1, 3)
    assert (tokens.count, pending.reads) == (5, 0)
    assert tokens.read_ids.tolist() == [1, 2, 3]
    assert tokens.ids().tolist() == [1, 2, 3, 8, 9]
    assert tokens.keys().tolist() == [-1, -2, -3, 8, 9]
    assert (tokens.ids().dtype, tokens.keys().dtype) == (np.int32, np.int64)
    assert (tokens.count, pending.reads) == (5, 1)


@pytest.mark.parametrize(("vocab_size", "wrong"), [(100, 100), (100, -1), (None, 1 << 31)])
def test_nothing_is_known_from_the_first_on_that_is_no_token_id(vocab_size: int | None, wrong: int) -> None:
    tokens = known(vocab_size)
    tokens.report(np.array([5, wrong, 6]), 0, 3)
    tokens.report(np.array([7]), 0, 1)
    assert tokens.ids().tolist() == [1, 2, 3, 5]
    tokens.report(np.array([8]), 0, 1)
    assert tokens.keys().tolist() == [-1, -2, -3, 5]
    assert tokens.count == 8


def test_tokens_that_are_cut_off_are_neither_counted_nor_read() -> None:
    tokens, first, second = known(), Pending([5, 6, 7]), Pending([8])
    tokens.report(first, 0, 3)
    tokens.report(second, 0, 1)
    tokens.cut(9)
    assert tokens.count == 7
    tokens.cut(5)
    assert (tokens.count, first.reads) == (5, 0)
    assert tokens.ids().tolist() == [1, 2, 3, 5, 6]
    assert second.reads == 0
    tokens.report(np.array([100, 9]), 0, 2)
    assert tokens.ids().tolist() == [1, 2, 3, 5, 6]
    tokens.cut(4)
    tokens.report(np.array([9]), 0, 1)
    assert tokens.keys().tolist() == [-1, -2, -3, 5, 9]


def test_nothing_is_known_from_the_first_on_that_cannot_be_evaluated() -> None:
    tokens = known()
    for reported in (np.array([5]), Pending([6], RuntimeError("failed")), np.array([7])):
        tokens.report(reported, 0, 1)
    assert (tokens.ids().tolist(), tokens.count) == ([1, 2, 3, 5], 6)


def test_keys_are_compared_without_waiting_unless_they_go_along_with_all_that_was_read() -> None:
    tokens, pending = known(), Pending([7, 8])
    tokens.report(pending, 0, 2)
    assert tokens.common(np.array([-1, -2, -4, 7]), 5) == 2
    assert tokens.common(np.array([-1, -2, -3]), 5) == 3
    assert tokens.common(np.array([-1, -2, -3, 7]), 3) == 3
    assert pending.reads == 0
    assert tokens.common(np.array([-1, -2, -3, 7, 9]), 5) == 4
    assert tokens.common(np.array([-1, -2, -3, 7, 8]), 4) == 4
    assert pending.reads == 1


def test_what_is_removed_is_neither_known_nor_counted() -> None:
    tokens = known()
    tokens.report(np.array([7, 8]), 0, 2)
    tokens.remove(1, 4)
    assert tokens.ids().tolist() == [1, 8]
    assert tokens.keys().tolist() == [-1, 8]
    assert tokens.count == 2


def test_what_is_forgotten_counts_and_is_not_held() -> None:
    tokens, pending = known(), Pending([7])
    tokens.report(pending, 0, 1)
    tokens.forget_pending()
    assert (tokens.ids().tolist(), tokens.count, pending.reads) == ([1, 2, 3], 4, 0)
