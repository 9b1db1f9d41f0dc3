"""Turn and its model of reuse: classes, what is spent, what is learnt, and that no scale is built in."""

from __future__ import annotations

from typing import Any

import pytest

from policies import LRU
from policies.conversations import Sizes
from policies.entry import Entry
from policies.turn import MAX_KINDS, OTHER_KINDS, REBUILD_USES, Turn
from tests.policies.blocks import admit
from tests.policies.turns import prompt, random_traffic, served_by, warm


def test_until_intervals_are_known_the_least_recently_used_goes_first() -> None:
    turn, lru = served_by(Turn()), served_by(LRU())
    for server in (turn, lru):
        for number in range(1, 30):
            server.request(prompt(number, 5), 10 * number, 1)
    assert turn.evict(60) == lru.evict(60)


def test_a_conversation_of_many_turns_outlasts_a_newer_first_turn() -> None:
    server = served_by(Turn())
    tick = warm(server)
    for turn in range(1, 7):
        server.request(prompt(901, 10 + 2 * turn), tick := tick + 50, turn)
    server.request(prompt(902, 12), tick := tick + 20, 1)
    server.request(prompt(903, 12), tick := tick + 20, 1)
    gone = server.evict(10**6)
    assert gone.index(902_001) < gone.index(901_001)


def test_a_later_turn_that_grew_much_goes_before_one_that_grew_little() -> None:
    server = served_by(Turn())
    tick = warm(server)
    for conversation, second in ((901, 14), (902, 40)):
        server.request(prompt(conversation, 12), tick := tick + 10, 1)
        server.request(prompt(conversation, second), tick := tick + 10, 2)
    server.request(prompt(903, 12), tick + 1, 1)
    gone = server.evict(10**6)
    assert gone.index(902_011) < gone.index(901_011)


def test_what_a_continuation_leaves_behind_goes_first() -> None:
    server = served_by(Turn())
    tick = warm(server)
    server.request([*prompt(901, 12), -7], tick := tick + 10, 1)
    server.request(prompt(901, 14), tick := tick + 10, 2)
    server.request(prompt(902, 12), tick + 1, 1)
    assert -7 in server.evict(1)


def test_a_prompt_that_passes_through_makes_a_shared_part_worth_more() -> None:
    server = served_by(Turn())
    tick = warm(server)
    for conversation in (902, 901):
        server.request(prompt(conversation, 20), tick := tick + 1, 1)
    for number, conversation in enumerate((902, 902, 902, 901)):
        server.request([*prompt(conversation, 6), 10**6 + number, 10**7 + number], tick := tick + 1, 1)
    server.request(prompt(903, 12), tick + 1, 1)
    gone = server.evict(10**6)
    assert gone.index(901_005) < gone.index(902_005)


GROWING = [[*prompt(1, 10 + 3 * turn), -turn] for turn in range(1, 5)]
BESIDE = [prompt(50 + turn, 12) for turn in range(1, 5)]


@pytest.mark.parametrize(
    ("prompts", "turns"),
    [
        ([each for pair in zip(GROWING, BESIDE, strict=True) for each in pair], [1, 1, 2, 1, 3, 1, 4, 1]),
        # A repeated prompt is no next turn; nor is a branch where others have branched off.
        ([prompt(1, 10)] * 2, [1, 1]),
        ([[0, number] for number in range(1, 6)], [1, 2, 1, 1, 1]),
        ([[*range(40), *range(100 * number, 100 * number + 20)] for number in range(1, 6)], [1, 2, 1, 1, 1]),
    ],
)
def test_the_turn_is_inferred_where_it_is_not_given(prompts: list[list[int]], turns: list[int]) -> None:
    policy = Turn()
    server = served_by(policy)
    inferred = []
    for number, keys in enumerate(prompts, 1):
        server.request(keys, 10 * number)
        server.request([9999 + number], 10 * number + 1)  # The next request settles the one before.
        settled = policy._requests.get(10 * number)
        inferred.append(settled.turn if settled else None)
    assert inferred == turns


def test_more_is_found_than_with_lru_where_turns_tell_who_goes_on() -> None:
    hits = []
    for policy in (Turn(), LRU()):
        server = served_by(policy, capacity_blocks=400)
        hits.append(sum(server.request(*each) for each in random_traffic(0)))
        server.states.check()
    assert hits[0] > 1.1 * hits[1]


def test_ticks_of_another_length_change_next_to_nothing() -> None:
    found = []
    for scale in (64, 64 * 1024):
        server = served_by(Turn(), capacity_blocks=400)
        found.append(sum(server.request(keys, scale * tick, turn) for keys, tick, turn in random_traffic(5, 200)))
    assert found[0] == pytest.approx(found[1], rel=0.01)


@pytest.mark.parametrize("key_tokens", [1, 512])
def test_sizes_are_named_in_units_of_the_typical_first_turn(key_tokens: int) -> None:
    sizes = Sizes()
    for _ in range(50):
        assert sizes.classify(1, key_tokens, 10 * key_tokens, False)[1] == "short"
    lengths = {2: "tiny", 8: "short", 30: "long", 100: "huge"}
    assert {n: sizes.classify(1, key_tokens, n * key_tokens, False)[1] for n in lengths} == lengths
    assert sizes.classify(1, 5 * key_tokens, 20 * key_tokens, False) == ("1", "branch")
    assert sizes.classify(2, 10 * key_tokens, 12 * key_tokens, True) == ("2", "small")
    assert sizes.classify(5, 10 * key_tokens, 30 * key_tokens, True) == ("4-5", "large")
    assert sizes.classify(9, 1 * key_tokens, 30 * key_tokens, False) == ("6+", "unknown")


def test_a_request_that_adds_nothing_keeps_its_place_until_the_next() -> None:
    server = served_by(Turn())
    tick = warm(server)
    server.request(prompt(901, 12), tick + 1, 1)
    server.request(prompt(901, 12), tick + 2, 2)
    assert 901_011 not in server.evict(20)


def test_many_checkpoints_for_each_request_do_not_keep_the_model_from_learning() -> None:
    policy = Turn()
    for tick in range(1, 200):
        points = [Entry(100 * tick + n, "checkpoint", 0, n, 1, 1.0, created=tick, last_used=tick) for n in range(1, 21)]
        span = Entry(100 * tick, "span", 0, 20, 1, 1.0, created=tick, last_used=tick)
        for entry in (span, *points):
            policy.inserted(entry)
        for point in points:
            point.last_used += 1
            policy.touched(point)
        for entry in (span, *points):
            policy.evicted(entry)
        assert len(policy._watched) <= REBUILD_USES
    assert policy.model.is_warm


def test_what_the_model_has_learnt_since_counts_for_the_next_victim() -> None:
    policy = Turn()
    points = [
        Entry(number, "checkpoint", 0, 5, 1, 1.0, created=0, last_used=1, kind=kind)
        for number, kind in ((1, "often"), (2, "rarely"))
    ]
    points[1].last_used = 2
    admit(policy, *points)
    assert policy.victim() is points[0], "the least recently used"
    for number in range(3, REBUILD_USES + 3):
        other = Entry(number, "checkpoint", 0, 5, 1, 1.0, created=2, last_used=2, kind="often")
        policy.inserted(other)
        policy.touched(other)
        policy.evicted(other)
    assert policy.model.is_warm
    assert policy.victim() is points[1]


def test_as_many_kinds_as_there_are_users_share_their_classes_but_for_the_first() -> None:
    server = served_by(Turn(), capacity_blocks=50)
    policy: Any = server.policy
    for number in range(1, 200):
        server.request(prompt(number, 8), number, 1, f"user {number}")
        assert policy.victim() is not None
    kinds = {key[0] for key in policy.model._classes}  # type: ignore[index]
    assert kinds == {OTHER_KINDS, *(f"user {number}" for number in range(1, MAX_KINDS + 1))}
    assert len(policy._queues) <= 2
