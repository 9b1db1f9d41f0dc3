"""Digests of a prompt at its block borders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.routing.dispatcher import chain_digests, root_digest

ROOT = root_digest("model")
TOKENS = st.lists(st.integers(0, 3), max_size=24)


@given(TOKENS, TOKENS)
def test_digests_are_equal_exactly_as_far_as_whole_blocks_are(left: list[int], right: list[int]) -> None:
    ours, theirs = (chain_digests(np.array(tokens, np.int64), ROOT, 4) for tokens in (left, right))
    assert [len(ours), len(theirs)] == [len(left) // 4, len(right) // 4]
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = 4 * (index + 1)
        assert (one == other) == (left[:end] == right[:end])


@given(TOKENS, st.integers(0, 6))
def test_a_chain_goes_on_from_any_border(tokens: list[int], border: int) -> None:
    whole = np.array(tokens, np.int64)
    first = chain_digests(whole[: 4 * border], ROOT, 4)
    rest = chain_digests(whole[4 * border :], first[-1] if first else ROOT, 4)
    assert first + rest == chain_digests(whole, ROOT, 4)


def test_ids_of_32_and_of_64_bits_have_the_same_digests() -> None:
    tokens = np.arange(512)
    assert chain_digests(tokens.astype(np.int32), ROOT) == chain_digests(tokens.astype(np.int64), ROOT)


@pytest.mark.parametrize(
    "other", [root_digest("another"), root_digest("model", "ann"), root_digest("model", "", b"secret")]
)
def test_models_namespaces_and_secrets_share_no_digest(other: int) -> None:
    tokens = np.zeros(2_560, np.int64)
    assert not set(chain_digests(tokens, ROOT)) & set(chain_digests(tokens, other))


def test_a_digest_has_64_bits_and_stays_what_it_is() -> None:
    assert all(0 <= digest < 1 << 64 for digest in chain_digests(np.arange(10_000), ROOT))
    assert chain_digests(np.arange(512), ROOT) == [107264700168270322, 12236871523018486876]


def test_a_block_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0; wanted at least 1"):
        chain_digests(np.arange(4), ROOT, 0)
