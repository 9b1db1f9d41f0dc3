"""Star-shaped trees, where every key is a child of the root: the caches of the textbooks, hit by hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from policies import Belady, EvictionPolicy, make_policy
from tests.policies.blocks import BlockCache, Future, conversations, replay, star_hits
from tests.policies.blocktree import ARCWorld, BlockWorld, S3FIFOWorld, SieveWorld
from tests.policies.test_policies import STAR

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
    if name != "belady":
        return star_hits(make_policy(name), keys, capacity, adds_first=adds_first)
    requests = [[key] for key in keys]
    future = Future(requests)
    cache = BlockCache(Belady(future), capacity, adds_first=adds_first)
    return "".join(map(str, replay(cache, requests, future)))


@pytest.mark.parametrize(("name", "count"), [*zip(HITS, (4, 6, 10, 10, 10, 9, 12), strict=True)])
def test_a_short_sequence_hits_where_it_always_did(name: str, count: int) -> None:
    assert HITS[name].count("1") == count
    for adds_first in (False, True):
        assert _hits(name, STAR, 4, adds_first).count("1") == count
    assert _hits(name, STAR, 4, adds_first=True) == HITS[name]


def test_what_fits_is_missed_once_each_and_never_again() -> None:
    for name in [*HITS, "s3fifo"]:
        assert _hits(name, STAR * 20, 20, adds_first=True).count("1") == 20 * len(STAR) - len(set(STAR)) == 451


@pytest.mark.parametrize("name", ["sieve", "s3fifo", "arc"])
def test_a_queue_policy_passes_over_what_is_held_as_lists_of_blocks_do(name: str) -> None:
    worlds: dict[str, Callable[[int], BlockWorld]] = {"sieve": SieveWorld, "s3fifo": S3FIFOWorld, "arc": ARCWorld}
    for seed in (0, 3):
        capacity = 25 + 20 * seed
        requests = conversations(seed, 120)
        world, cache = worlds[name](capacity), BlockCache(make_policy(name), capacity)
        assert replay(cache, requests) == [world.request(keys) for keys in requests]
        assert cache.gone == world.gone


def test_the_order_of_adding_and_making_room_changes_what_a_policy_knows_and_nothing_else() -> None:
    def differs(policy: str) -> bool:
        keys = [(7 * number * number + number // 3) % 31 for number in range(400)]
        hits = [star_hits(make_policy(policy), keys, 20, adds_first=first) for first in (False, True)]
        return hits[0] != hits[1]

    assert not any(differs(name) for name in ("fifo", "lru", "lfu", "sieve"))


def test_a_policy_is_asked_for_nothing_while_everything_fits() -> None:
    class Refusing:
        """Has no victim to give."""

        def inserted(self, entry: object) -> None: ...
        def touched(self, entry: object) -> None: ...
        def split(self, upper: object, lower: object) -> None: ...
        def merged(self, gone: object, into: object) -> None: ...
        def evicted(self, entry: object) -> None: ...
        def evictable_changed(self, entry: object, evictable: bool) -> None: ...
        def victim(self) -> None:
            raise AssertionError("asked")

    policy: EvictionPolicy = Refusing()  # type: ignore[assignment]
    assert star_hits(policy, [1, 2, 3, 1, 2, 3], 3) == "000111"
    with pytest.raises(AssertionError, match="asked"):
        star_hits(policy, [1, 2, 3, 4], 3)
