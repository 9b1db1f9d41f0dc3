"""Queue policies: hits on star-shaped trees, as in the textbooks; ghosts of evicted keys; the learnt capacity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from policies import ARC, S3FIFO, SIEVE, Entry
from policies.ghosts import Ghosts
from policies.runs import RunPolicy
from tests.policies.blocks import BlockCache, prefix_digests, served


def _entry(number: int, keys: list[int], start: int = 0) -> Entry:
    digests = prefix_digests(keys)
    entry = Entry(number, "span", start, len(keys), 1, 1.0, created=1, last_used=1)
    entry.digests_of = lambda _, offsets: [digests[offset - 1] for offset in offsets]
    return entry


def test_a_ghost_is_met_by_what_spells_all_of_it_and_by_nothing_else() -> None:
    ghosts = Ghosts()
    ghosts.add(_entry(1, [1, 2, 3, 4], start=2), 2)
    assert ghosts.tokens == 2
    assert [end for end, _ in ghosts.meet(_entry(2, [1, 2, 3, 4, 5, 6]))] == [4]
    assert ghosts.meet(_entry(3, [1, 2, 3])) == []
    assert ghosts.meet(_entry(4, [1, 2, 3, 5, 4])) == []
    assert ghosts.meet(_entry(5, [1, 2, 3, 4, 9], start=4)) == [], "it does not reach back over its start"


def test_a_taken_ghost_is_gone_and_the_oldest_go_first() -> None:
    ghosts = Ghosts()
    for key in (1, 2, 3):
        ghosts.add(_entry(key, [key]), 1)
    assert ghosts.take("span", 1, prefix_digests([2])[0]) == 1
    assert ghosts.take("span", 1, prefix_digests([2])[0]) == 0
    ghosts.trim(1)
    assert (len(ghosts), ghosts.tokens) == (1, 1)
    assert ghosts.meet(_entry(9, [1])) == []
    assert len(ghosts.meet(_entry(9, [3]))) == 1
    ghosts.trim(0)
    assert ghosts._ends == {}


def test_s3fifo_lets_a_key_go_round_the_main_queue_once_for_each_use() -> None:
    cache = BlockCache(S3FIFO(), 10)
    for key in [*range(10), 5, 5]:
        cache.request([key])
    rounds = 0
    while cache.states.match(np.array([5]), "").offset:
        rounds += 1
        for _ in range(3):
            cache.request([9 + rounds])  # joins the main queue, and has its oldest go
    assert rounds == 6 + 9 + 9, "behind the six before it, then twice behind all nine others"


@pytest.mark.parametrize("kind", [ARC, S3FIFO, SIEVE])
def test_the_request_that_made_a_key_does_not_count_as_a_use_of_it(kind: type[RunPolicy]) -> None:
    policy = kind()
    entry = _entry(1, [1, 2, 3])
    policy.inserted(entry)
    policy.touched(entry)
    assert [(run.queue, run.marks) for run in policy._runs[1]] == [(0, 0)]
    entry.last_used = 2
    policy.touched(entry)
    assert [(run.queue, run.marks) for run in policy._runs[1]] == [(1, 0) if kind is ARC else (0, 1)]


def test_arc_moves_its_target_towards_the_list_whose_ghost_it_met() -> None:
    policy = ARC()
    cache = BlockCache(policy, 4, adds_first=True)
    for key in (1, 2, 1, 2, 3, 4, 5):
        cache.request([key])
    assert policy.target == 0
    assert (policy.ghosts[0].tokens, policy.ghosts[1].tokens) == (1, 0)
    cache.request([3])
    assert policy.target == 1
    assert policy.ghosts[0].tokens + policy.ghosts[1].tokens == 1


@pytest.mark.parametrize("kind", [S3FIFO, ARC])
@pytest.mark.parametrize("adds_first", [False, True])
def test_the_capacity_is_learnt_from_what_is_held_and_follows_it(kind: type[RunPolicy], adds_first: bool) -> None:
    policy = kind()
    cache = BlockCache(policy, 30, adds_first=adds_first)
    for key in range(0, 400, 4):
        cache.request([key, key + 1, key + 2])
    assert policy.capacity == 30
    cache.capacity_blocks = 12
    for key in range(1000, 1040, 4):
        cache.request([key, key + 1, key + 2])
    assert policy.capacity == 12
    policy.check()


def test_what_was_removed_and_not_chosen_leaves_no_ghost() -> None:
    policy = S3FIFO()
    cache = BlockCache(policy, 100)
    cache.request([1, 2, 3])
    cache.states.remove(cache.states.match(np.array([1, 2, 3]), "").node)
    assert len(policy.ghosts) == 0


# Star-shaped trees: every key is a child of the root

STAR = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5, 1, 1, 6, 7, 2, 3, 1, 8, 9, 1, 2]
HITS = {
    "fifo": "00001100000001000000010",
    "lru": "00001101100001000000010",
    "lfu": "00001101100011001010011",
    "sieve": "00001101100011001010011",
    "gdsf": "00001101100011001010011",
    "arc": "00001101100101000010011",
    "belady": "00001101110111001010011",
}


def _hits(name: str, keys: Sequence[int], capacity: int, adds_first: bool) -> str:
    """Which requests hit, as 0 and 1."""
    found, _ = served(name, [[key] for key in keys], capacity, adds_first=adds_first)
    return "".join(map(str, found))


@pytest.mark.parametrize(("name", "count"), [*zip(HITS, (4, 6, 10, 10, 10, 9, 12), strict=True)])
def test_a_short_sequence_hits_where_it_always_did(name: str, count: int) -> None:
    assert HITS[name].count("1") == count
    for adds_first in (False, True):
        assert _hits(name, STAR, 4, adds_first).count("1") == count
    assert _hits(name, STAR, 4, adds_first=True) == HITS[name]


def test_what_fits_is_missed_once_each_and_never_again() -> None:
    for name in [*HITS, "s3fifo"]:
        assert _hits(name, STAR * 20, 20, adds_first=True).count("1") == 20 * len(STAR) - len(set(STAR)) == 451
