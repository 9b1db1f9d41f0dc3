"""SuffixIndex against a plain list of runs: what followed a suffix, by namespace, up to its bound in bytes."""

from __future__ import annotations

import itertools
import random
import sys
from types import FrameType
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixcache.speculate import suffix_index
from radixcache.speculate.pace import Proposal
from radixcache.speculate.suffix_index import (
    LEAST_RUN,
    LENGTHS,
    MOST_STEPS,
    MOST_TOKEN_BYTES,
    MOST_VOTES,
    TAIL_TOKENS,
    SuffixIndex,
    _hash_of,
)

if TYPE_CHECKING:
    from _typeshed import TraceFunction

NAMESPACES = ("", "tenant", "adapter")
SPACES = st.sampled_from(NAMESPACES)
# Few different tokens, so that suffixes recur; of each namespace its own, so that a leak shows.
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def of_namespace(tokens: list[int], namespace: str) -> list[int]:
    return [each + 10 * NAMESPACES.index(namespace) for each in tokens]


class IndexMachine(RuleBasedStateMachine):
    """`runs` are those that an index without limit holds, the oldest first: namespace, tokens, what is context."""

    limit_tokens = 20_000

    def __init__(self) -> None:
        super().__init__()
        self.index = SuffixIndex(self.limit_tokens * MOST_TOKEN_BYTES)
        self.runs: list[tuple[str, list[int], int]] = []

    @rule(tokens=TOKENS, namespace=SPACES, data=st.data())
    def add(self, tokens: list[int], namespace: str, data: st.DataObject) -> None:
        context = data.draw(st.integers(0, len(tokens)))
        own = of_namespace(tokens, namespace)
        self.index.add(np.array(own, np.int64), namespace, context=context)
        first = max(0, context - TAIL_TOKENS)
        if context < len(own) and len(own) - first >= LEAST_RUN:
            self.runs.append((namespace, own[first:], context - first))

    @rule(tokens=TOKENS, namespace=SPACES)
    def extend(self, tokens: list[int], namespace: str) -> None:
        own = of_namespace(tokens, namespace)
        self.index.extend(own, namespace)
        if self.runs and self.runs[-1][0] == namespace:
            self.runs[-1][1].extend(own)
        else:
            self.runs.append((namespace, own, 0))

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def clear(self, namespace: str | None) -> None:
        self.index.clear(namespace)
        # A run that goes on is the last one: what was cleared is not gone on with.
        kept = [("", [], 0) if namespace in (None, run[0]) else run for run in self.runs]
        self.runs = kept if namespace is not None else []

    @rule(tail=TOKENS, namespace=SPACES, limit=st.integers(1, 8))
    def propose(self, tail: list[int], namespace: str, limit: int) -> None:
        own = of_namespace(tail, namespace)
        with patch.object(suffix_index, "MOST_STEPS", 1 << 20):  # however many suffixes share a bucket
            found = self.index.propose(own, limit, namespace)
        assert len(found.tokens) == len(found.chances) == len(found.kinds) <= limit
        assert all(0 < chance < 1 for chance in found.chances)
        # Of each namespace nothing but its own tokens is ever proposed.
        assert all(token // 10 == NAMESPACES.index(namespace) for token in found.tokens)
        self.compare(found, own, namespace)

    def compare(self, found: Proposal, own: list[int], namespace: str) -> None:
        """The longest suffix that is known is found, and what most of its latest positions had is proposed."""
        for length in LENGTHS:
            following = self.following(own[-length:], namespace) if length <= len(own) else []
            if following:
                assert found.suffix == length
                latest = following[-MOST_VOTES:]
                assert latest.count(found.tokens[0]) == max(map(latest.count, latest))
                return
        assert found.tokens == ()

    def following(self, wanted: list[int], namespace: str) -> list[int]:
        return [
            run[at]
            for space, run, context in self.runs
            if space == namespace
            for at in range(max(len(wanted), context), len(run))
            if run[at - len(wanted) : at] == wanted
        ]

    @invariant()
    def holds(self) -> None:
        self.index.check()


class SmallIndexMachine(IndexMachine):
    """The ring goes round: what is found was said, in its namespace."""

    limit_tokens = 128

    def compare(self, found: Proposal, own: list[int], namespace: str) -> None:
        if found.tokens:
            assert found.tokens[0] in self.following(own[-found.suffix :], namespace)


IndexMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
SmallIndexMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
TestSmallIndexMachine = SmallIndexMachine.TestCase


def test_a_key_that_is_no_token_id_ends_a_run() -> None:
    index = SuffixIndex(1 << 16, vocab_size=100)
    for other in (-5, 100, 1 << 40):
        index.clear()
        index.add(np.array([1, 2, 3, other, 4, 5, 6, 7]))
        assert index.propose([1, 2, 3], 4).tokens == ()
        assert index.propose([4, 5, 6], 4).tokens == (7,)


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_added_at_once_token_by_token_and_in_batches_is_found_alike(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(3) for _ in range(300)]
    whole, single, batched = SuffixIndex(1 << 20), SuffixIndex(1 << 20), SuffixIndex(1 << 20)
    whole.add(tokens)
    for token in tokens:
        single.extend([token])
    at = 0
    while at < len(tokens):
        count = draw.choice([1, 5, 40, 64])
        batched.extend(tokens[at : at + count])
        batched.extend([], "nobody")
        batched.check()
        at += count
    for _ in range(100):
        tail = [draw.randrange(3) for _ in range(draw.randrange(3, 24))]
        assert whole.propose(tail, 8) == single.propose(tail, 8) == batched.propose(tail, 8)


def test_namespaces_that_share_buckets_and_say_the_same_get_each_what_it_said() -> None:
    index = SuffixIndex(400 * MOST_TOKEN_BYTES)
    names = [f"tenant {number}" for number in range(60)]
    for number, name in enumerate(names):
        index.add([1, 2, 3, 4, 5, 100 + number], name)
    for number, name in enumerate(names):
        assert index.propose([1, 2, 3, 4, 5], 4, name).tokens == (100 + number,)
    index.clear(names[7])
    assert index.propose([1, 2, 3, 4, 5], 4, names[7]).tokens == ()


def test_what_is_looked_at_is_the_same_whatever_another_namespace_said() -> None:
    secret = np.random.default_rng(1).integers(0, 1000, 200)
    steps = []
    for said in (secret, secret[::-1].copy()):
        index = SuffixIndex(1 << 20)
        index.add(np.arange(50), "prober")
        index.add(said, "tenant")
        steps.append([_lines_of(index, tail) for tail in ([*secret[:16].tolist()], list(range(16)), [5, 4, 3, 2, 1])])
    assert steps[0] == steps[1]


def _lines_of(index: SuffixIndex, tail: list[int]) -> int:
    """Lines of Python that a look-up by another namespace runs."""
    lines = 0

    def trace(frame: FrameType, event: str, value: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        index.propose(tail, 8, "prober")
    finally:
        sys.settrace(before)
    return lines


def test_a_long_suffix_is_found_although_its_last_two_tokens_share_a_bucket_with_many_newer_ones() -> None:
    index, pairs = SuffixIndex(16_000), itertools.product(range(1000, 1400), repeat=2)

    def bucket_of(pair: tuple[int, ...]) -> int:
        return _hash_of(pair, 1) * (index.capacity // 2) >> 32

    index.add([5, 6, 7, 8, 9])
    crowd = [pair for pair in pairs if bucket_of(pair) == bucket_of((6, 7))][:MOST_STEPS]
    for pair in crowd:
        index.add([*pair, 1])
    assert len(crowd) == MOST_STEPS
    assert index.propose([6, 7], 2).tokens == ()
    assert index.propose([5, 6, 7], 2).tokens == (8, 9)
