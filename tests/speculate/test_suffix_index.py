"""SuffixIndex against a plain list of runs: what followed a suffix, by namespace, up to its bound in bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixcache.speculate.suffix_index import LENGTHS, MOST_TOKEN_BYTES, TAIL_TOKENS, SuffixIndex

NAMESPACES = ("", "tenant", "adapter")
SPACES = st.sampled_from(NAMESPACES)
# Few different tokens, so that suffixes recur; of each namespace its own, so that a leak shows.
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
CAPACITY = 128


def of_namespace(tokens: list[int], namespace: str) -> list[int]:
    return [each + 10 * NAMESPACES.index(namespace) for each in tokens]


class IndexMachine(RuleBasedStateMachine):
    """`said` is all that was added, the oldest first: namespace, token, and whether it is indexed (no context)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SuffixIndex(CAPACITY * MOST_TOKEN_BYTES)
        self.runs: list[tuple[str, list[int]]] = []

    @rule(tokens=TOKENS, namespace=SPACES, data=st.data())
    def add(self, tokens: list[int], namespace: str, data: st.DataObject) -> None:
        context = data.draw(st.integers(0, len(tokens)))
        own = of_namespace(tokens, namespace)
        self.index.add(np.array(own, np.int64), namespace, context=context)
        self.runs.append((namespace, own))

    @rule(tokens=TOKENS, namespace=SPACES)
    def extend(self, tokens: list[int], namespace: str) -> None:
        own = of_namespace(tokens, namespace)
        goes_on = self.runs and self.runs[-1][0] == namespace
        self.index.extend(own, namespace)
        self.runs.append((namespace, self.runs.pop()[1] + own if goes_on else own))

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def clear(self, namespace: str | None) -> None:
        self.index.clear(namespace)
        self.runs = [each for each in self.runs if namespace not in (None, each[0])]

    @rule(tail=TOKENS, namespace=SPACES, limit=st.integers(1, 8))
    def propose(self, tail: list[int], namespace: str, limit: int) -> None:
        own = of_namespace(tail, namespace)
        found = self.index.propose(own, limit, namespace)
        assert len(found.tokens) == len(found.chances) <= limit
        assert all(0 < chance < 1 for chance in found.chances)
        if found.tokens:
            assert found.suffix in LENGTHS
            wanted = [*own[-found.suffix :], found.tokens[0]]
            assert any(space == namespace and follows(run, wanted) for space, run in self.runs), wanted
        # Of each namespace nothing but its own tokens is ever proposed.
        assert all(token // 10 == NAMESPACES.index(namespace) for token in found.tokens)

    @invariant()
    def holds(self) -> None:
        self.index.check()


def follows(run: list[int], wanted: list[int]) -> bool:
    return any(run[at : at + len(wanted)] == wanted for at in range(len(run) - len(wanted) + 1))


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_what_followed_a_suffix_is_proposed_from_its_longest_match() -> None:
    index = SuffixIndex(1 << 16)
    index.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    index.add([0, 6, 7, 8, 50, 51])
    found = index.propose([4, 5, 6, 7, 8], 3)
    assert (found.tokens, found.suffix, found.source) == ((9,), 5, "tree")
    assert index.propose([99, 6, 7, 8], 2).tokens == (50, 51)  # of three tokens both match: the latest wins
    assert index.propose([99, 5, 6], 1).tokens == (7,)
    assert index.propose([99, 6], 1).tokens == ()


def test_most_votes_win_and_give_the_larger_chance() -> None:
    index = SuffixIndex(1 << 16)
    for following in (20, 20, 20, 21):
        index.add([1, 2, 3, following])
    found = index.propose([1, 2, 3], 4)
    assert found.tokens == (20,)
    alone = SuffixIndex(1 << 16)
    alone.add([1, 2, 3, 20])
    divided = SuffixIndex(1 << 16)
    for following in (20, 21, 22, 23):
        divided.add([1, 2, 3, following])
    assert divided.propose([1, 2, 3], 1).chances < found.chances


def test_the_context_of_a_run_only_leads_to_what_follows_it() -> None:
    index = SuffixIndex(1 << 16)
    index.add([1, 2, 3, 4, 5, 6], context=4)
    assert index.propose([1, 2, 3], 2).tokens == ()
    assert index.propose([2, 3, 4], 2).tokens == (5, 6)


def test_a_key_that_is_no_token_id_ends_a_run() -> None:
    index = SuffixIndex(1 << 16, vocab_size=100)
    for other in (-5, 100, 1 << 40):
        index.clear()
        index.add(np.array([1, 2, 3, other, 4, 5, 6, 7]))
        assert index.propose([1, 2, 3], 4).tokens == ()
        assert index.propose([4, 5, 6], 4).tokens == (7,)


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_added_at_once_and_token_by_token_are_found_alike(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(3) for _ in range(300)]
    whole, single = SuffixIndex(1 << 20), SuffixIndex(1 << 20)
    whole.add(tokens)
    single.extend(tokens)
    for _ in range(100):
        tail = [draw.randrange(3) for _ in range(draw.randrange(3, 24))]
        assert whole.propose(tail, 8) == single.propose(tail, 8)


def test_every_suffix_of_the_last_tokens_is_found_until_it_is_overwritten() -> None:
    index = SuffixIndex(1000 * MOST_TOKEN_BYTES)
    tokens = np.random.default_rng(0).integers(0, 1 << 30, 5000).tolist()
    index.add(tokens)
    assert index.tokens == index.capacity == 1000
    for at in range(len(tokens) - 800, len(tokens)):
        found = index.propose(tokens[at - TAIL_TOKENS : at], 1)
        assert found.tokens == (tokens[at],), at
    assert index.propose(tokens[1000 - TAIL_TOKENS : 1000], 1).tokens == ()
    index.check()
