"""Belady's rule where every block weighs the same: never below any policy, and as good as trying everything."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import POLICIES
from tests.policies.blocks import served

Block = tuple[int, ...]
Requests = list[list[int]]

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=25)
few_prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=9)


def _found(name: str, requests: Requests, capacity: int, **more: Any) -> int:
    return sum(served(name, requests, capacity, **more)[0])


@given(prompts, st.integers(5, 14))
@settings(max_examples=25, deadline=None)
def test_belady_finds_the_most_blocks_and_more_with_bypass(requests: Requests, capacity: int) -> None:
    best = _found("belady", requests, capacity)
    assert best <= _found("belady-bypass", requests, capacity)
    for name in POLICIES:
        for adds_first in (False, True):
            assert _found(name, requests, capacity, adds_first=adds_first) <= best, name


@given(few_prompts, st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_belady_finds_as_many_blocks_as_the_best_of_all_ways_to_evict(requests: Requests, capacity: int) -> None:
    if capacity >= 3:  # A longer request does not fit beside what is held.
        assert _found("belady", requests, capacity) == _exhaustive(requests, capacity, bypass=False)
    assert _found("belady-bypass", requests, capacity) == _exhaustive(requests, capacity, bypass=True)


def _exhaustive(requests: Requests, capacity: int, bypass: bool) -> int:
    """Most blocks found over all requests, whatever goes: every set of blocks that can be held, after each request."""
    held: dict[frozenset[Block], int] = {frozenset(): 0}
    for keys in requests:
        path = frozenset(tuple(keys[:length]) for length in range(1, len(keys) + 1))
        after: dict[frozenset[Block], int] = {}
        for blocks, found in held.items():
            hits = found + len(path & blocks)
            for stored in _choices(blocks | path, capacity, frozenset() if bypass else path):
                after[stored] = max(after.get(stored, 0), hits)
        held = after
    return max(held.values())


def _choices(blocks: frozenset[Block], capacity: int, pinned: frozenset[Block]) -> list[frozenset[Block]]:
    """The sets with all prefixes of their members that can be stored: as many blocks as fit, as more never hurts."""
    size = min(capacity, len(blocks))
    chosen = (frozenset(some) | pinned for some in combinations(blocks - pinned, size - len(pinned)))
    return [some for some in chosen if all(len(block) == 1 or block[:-1] in some for block in some)]
