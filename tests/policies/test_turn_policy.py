"""Turn and its model of reuse: classes, what is spent, what is learnt, and that no scale is built in."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from policies import CostModel
from policies.conversations import Ends, Request, Sizes
from policies.entry import Entry
from policies.lru import LRU
from policies.protocol import EvictionPolicy
from policies.reuse import BIN_COUNT, WARM_UP_INTERVALS, ReuseModel
from policies.turn import MAX_BRANCHING, MAX_KINDS, OTHER_KINDS, PRIOR, REBUILD_USES, Turn
from radixcache.layers.layout import Layout
from radixcache.ledger import Ledger
from radixcache.tree.entries import Use
from radixcache.tree.state_tree import StateTree


class Server:
    """Serves prompts of blocks from a real tree without arrays, under a capacity in blocks."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int = 10**9, cost: CostModel | None = None) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        account = Ledger(1 << 40).open_account(lambda amount_bytes: 0)
        self.states = StateTree(Layout(list, None, 64), policy, account, cost or CostModel())
        self.hits = 0

    def serve(self, keys: Sequence[int], tick: int, turn: int | None = None, kind: str = "") -> int:
        """Serve one prompt; returns how many of its blocks were there."""
        use = Use(tick, 0, turn, kind)
        match = self.states.match(np.array(keys, dtype=np.int64), "")
        node = match.node
        if match.offset:
            if match.offset < node.end:
                node = self.states.split(node, match.offset)
            self.states.touch(node.path(), None, use)
        self.states.guard(node, 1)
        self.evict(self.states.tree.key_count + len(keys) - match.offset - self.capacity_blocks)
        if match.offset < len(keys):
            leaf = self.states.add_leaf(node, np.array(keys[match.offset :], dtype=np.int64), use)
            self.states.set_leaving(leaf, 100 * (len(keys) - match.offset))
        self.states.guard(node, -1)
        self.hits += match.offset
        return match.offset

    def evict(self, blocks: int) -> list[int]:
        """Let that many blocks go; returns their keys."""
        gone = []
        while len(gone) < blocks and (victim := self.states.victim()) is not None:
            leaf = victim[0]
            gone.append(int(leaf.edge[-1]))
            if leaf.end - leaf.start > 1:
                self.states.truncate(leaf, leaf.end - 1)
            else:
                self.states.remove(leaf)
        return gone


def prompt(conversation: int, length: int) -> list[int]:
    return [0, *(1000 * conversation + index for index in range(1, length))]


def warm(server: Server, turns: int = 4, conversations: int = 10) -> int:
    """Conversations that all go on, 50 ticks from turn to turn, 100 blocks each turn; returns the tick after them."""
    tick = 0
    for turn in range(1, turns + 1):
        for conversation in range(1, conversations + 1):
            tick += 5
            server.serve(prompt(conversation, 10 + 2 * turn), tick, turn)
    for number in range(200):
        tick += 5
        server.serve(prompt(500 + number, 12), tick, 1)
    assert isinstance(server.policy, Turn)
    assert server.policy.model.is_warm
    return tick


def random_traffic(seed: int, requests: int = 500) -> list[tuple[list[int], int, int]]:
    """(prompt, tick, turn): conversations that go on the likelier the longer they did, most with a cut-off end."""
    draw = random.Random(seed)
    planned = [(draw.randrange(20 * requests), number, 1, draw.randrange(4, 20)) for number in range(1, requests)]
    traffic: list[tuple[int, list[int], int]] = []
    while planned:
        tick, number, turn, length = planned.pop()
        traffic.append((tick, [*prompt(number, length - 1), -1000 * number - turn], turn))
        if draw.random() < min(0.9, 0.2 + 0.2 * turn):
            planned.append((tick + int(200 * draw.lognormvariate(0, 0.8)), number, turn + 1, length + 2))
    traffic.sort(key=lambda each: each[0])
    return [(keys, index + tick, turn) for index, (tick, keys, turn) in enumerate(traffic)]


def test_until_intervals_are_known_the_least_recently_used_goes_first() -> None:
    turn, lru = Server(Turn()), Server(LRU())
    for server in (turn, lru):
        for number in range(1, 30):
            server.serve(prompt(number, 5), 10 * number, 1)
    assert turn.evict(60) == lru.evict(60)


def test_a_conversation_of_many_turns_outlasts_a_newer_first_turn() -> None:
    server = Server(Turn())
    tick = warm(server)
    for turn in range(1, 7):
        server.serve(prompt(901, 10 + 2 * turn), tick := tick + 50, turn)
    server.serve(prompt(902, 12), tick := tick + 20, 1)
    server.serve(prompt(903, 12), tick := tick + 20, 1)
    gone = server.evict(10**6)
    assert gone.index(902_001) < gone.index(901_001)


def test_a_later_turn_that_grew_much_goes_before_one_that_grew_little() -> None:
    server = Server(Turn())
    tick = warm(server)
    for conversation, second in ((901, 14), (902, 40)):
        server.serve(prompt(conversation, 12), tick := tick + 10, 1)
        server.serve(prompt(conversation, second), tick := tick + 10, 2)
    server.serve(prompt(903, 12), tick + 1, 1)
    gone = server.evict(10**6)
    assert gone.index(902_011) < gone.index(901_011)


def test_what_a_continuation_leaves_behind_goes_first() -> None:
    server = Server(Turn())
    tick = warm(server)
    server.serve([*prompt(901, 12), -7], tick := tick + 10, 1)
    server.serve(prompt(901, 14), tick := tick + 10, 2)
    server.serve(prompt(902, 12), tick + 1, 1)
    assert -7 in server.evict(1)


def test_a_prompt_that_passes_through_makes_a_shared_part_worth_more() -> None:
    server = Server(Turn())
    tick = warm(server)
    for conversation in (902, 901):
        server.serve(prompt(conversation, 20), tick := tick + 1, 1)
    for number, conversation in enumerate((902, 902, 902, 901)):
        server.serve([*prompt(conversation, 6), 10**6 + number, 10**7 + number], tick := tick + 1, 1)
    server.serve(prompt(903, 12), tick + 1, 1)
    gone = server.evict(10**6)
    assert gone.index(901_005) < gone.index(902_005)


def test_the_turn_is_inferred_where_it_is_not_given() -> None:
    server = Server(Turn())
    for turn in range(1, 5):
        server.serve([*prompt(1, 10 + 3 * turn), -turn], 10 * turn)
        server.serve(prompt(50 + turn, 12), 10 * turn + 1)
    server.serve(prompt(99, 12), 100)
    policy = server.policy
    assert isinstance(policy, Turn)
    assert [policy._requests[tick].turn for tick in (40, 11, 21, 31, 41)] == [4, 1, 1, 1, 1]


def test_a_prompt_that_is_repeated_is_no_next_turn() -> None:
    server = Server(Turn())
    for tick in (1, 2):
        server.serve(prompt(1, 10), tick)
    server.serve([9999], 10)
    policy = server.policy
    assert isinstance(policy, Turn)
    assert policy._requests[2].turn == 1


def test_one_block_beside_others_is_no_next_turn() -> None:
    server = Server(Turn())
    for tick in range(1, 6):
        server.serve([0, tick], tick)
    server.serve([9999], 10)
    policy = server.policy
    assert isinstance(policy, Turn)
    assert [policy._requests[tick].turn for tick in (3, 4, 5)] == [1, 1, 1]


def test_who_passes_through_counts_where_it_passed_and_only_there() -> None:
    server = Server(Turn())
    for number in range(1, 8):
        server.serve([1, 2, 3, 10 + number], number, 1)
    server.serve([9999], 20)
    policy = server.policy
    assert isinstance(policy, Turn)
    shared = server.states.match(np.array([1, 2, 3]), "").node.payload
    assert shared is not None
    assert policy._branching == {shared.entry.entry_id: MAX_BRANCHING}


def test_an_inferred_turn_is_a_class_of_its_own_with_half_the_prior() -> None:
    server = Server(Turn())
    tick = warm(server)
    for given in (6, None):
        server.serve(prompt(900 + (given or 0), 12), tick := tick + 1, given)
    server.serve([9999], tick + 1)
    policy = server.policy
    assert isinstance(policy, Turn)
    assert [policy._requests[each].class_key[1] for each in (tick - 1, tick)] == ["6+", "1?"]


def test_where_others_have_branched_off_a_shared_beginning_is_no_next_turn() -> None:
    server = Server(Turn())
    shared = list(range(40))
    for number in range(1, 6):
        server.serve([*shared, *range(100 * number, 100 * number + 20)], number)
    server.serve([9999], 10)
    policy = server.policy
    assert isinstance(policy, Turn)
    assert [policy._requests[tick].turn for tick in (3, 4, 5)] == [1, 1, 1]


def test_more_is_found_than_with_lru_where_turns_tell_who_goes_on() -> None:
    hits = []
    for policy in (Turn(), LRU()):
        server = Server(policy, capacity_blocks=400)
        for keys, tick, turn in random_traffic(0):
            server.serve(keys, tick, turn)
        server.states.check()
        hits.append(server.hits)
    assert hits[0] > 1.1 * hits[1]


def test_ticks_of_another_length_change_next_to_nothing() -> None:
    found = []
    for scale in (64, 64 * 1024):
        server = Server(Turn(), capacity_blocks=400)
        found.append(sum(server.serve(keys, scale * tick, turn) for keys, tick, turn in random_traffic(5, 300)))
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_ends_are_spent_only_when_they_are_cut_off_and_trimming_takes_no_more() -> None:
    ends = Ends()
    assert not ends.are_spent
    ends.cut(1)
    assert not ends.are_spent
    ends.cut_off(1)
    assert ends.are_spent
    for _ in range(100):
        ends.cut(256)
    assert not ends.are_spent
    for _ in range(200):
        ends.cut_off(400)
    assert ends.are_spent
    for _ in range(400):
        ends.cut_off(0)
    assert not ends.are_spent


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


def test_each_class_that_a_size_names_has_a_prior() -> None:
    sizes = Sizes()
    named = {
        sizes.classify(turn, start, end, continues)
        for turn in range(1, 9)
        for start in (1, 5)
        for end in (2, 10, 50, 500)
        for continues in (False, True)
    }
    assert named <= set(PRIOR)


def learnt(intervals: Sequence[int], lost: int = 0) -> ReuseModel:
    """A model of class "a" that saw these intervals, and after each a loss at age `lost`; class "b" saw none."""
    model = ReuseModel()
    model.declare("a", 0.5, 1.0)
    model.declare("b", 0.5, 1.0)
    for interval in intervals:
        model.used_again("a", interval)
        if lost:
            model.lost_sight("a", lost)
    for _ in range(12):
        model.rebuild([], 0)
    return model


def test_worth_never_grows_with_age() -> None:
    model = learnt([100] * 40)
    worths = [model.value("a", 2**exponent) for exponent in range(BIN_COUNT // 2)]
    assert worths == sorted(worths, reverse=True)
    assert worths[0] > worths[-1] > 0


def test_the_median_settles_near_what_was_seen() -> None:
    draw = random.Random(1)
    model = learnt([int(5000 * 2 ** draw.gauss(0, 1.7)) for _ in range(400)])
    assert 5000 / 4 < model.median_ticks < 5000 * 4


def test_nothing_is_guessed_before_enough_intervals_were_seen() -> None:
    assert not learnt([100] * (WARM_UP_INTERVALS - 1)).is_warm
    assert learnt([100] * WARM_UP_INTERVALS).is_warm


def test_a_class_that_is_used_more_than_its_prior_says_is_worth_more() -> None:
    model = learnt([100] * 200)
    assert model.value("a", 100) > 1.2 * model.value("b", 100)


def test_what_is_lost_before_its_time_says_little_and_what_is_lost_after_it_much() -> None:
    early, late, never = (learnt([100] * 200, lost).value("a", 50) for lost in (2, 5000, 0))
    assert early == pytest.approx(never, rel=0.1)
    assert late < 0.9 * never


def test_what_still_waits_counts_against_its_class() -> None:
    model = learnt([100] * 200)
    before = model.value("a", 100)
    model.rebuild([("a", 5000)] * 400, 0)
    assert model.value("a", 100) < 0.8 * before


def test_a_request_that_adds_nothing_keeps_its_place_until_the_next() -> None:
    server = Server(Turn())
    tick = warm(server)
    server.serve(prompt(901, 12), tick + 1, 1)
    server.serve(prompt(901, 12), tick + 2, 2)
    assert 901_011 not in server.evict(20)


def test_prompts_that_are_stored_already_are_settled_like_others_and_forgotten() -> None:
    server = Server(Turn())
    policy = server.policy
    assert isinstance(policy, Turn)
    for tick, last in enumerate((8, 9), 1):
        server.serve([1, 2, 3, last], tick)
    for tick in range(3, 3000):
        server.serve([1, 2, 3], tick)
    assert len(policy._requests) <= 2 * len(policy._user) == 6
    assert policy._requests[2998].class_key[1] == "1?"
    assert len(server.evict(100)) == 5
    assert policy._requests == policy._user == {}


def test_what_a_request_passed_is_forgotten_when_it_is_settled() -> None:
    server = Server(Turn())
    policy = server.policy
    assert isinstance(policy, Turn)
    for tick, keys in enumerate(([1, 2], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [9]), 1):
        server.serve(keys, tick)
    assert [request.passed for request in policy._requests.values()] == [[]] * len(policy._requests)


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
    for point in points:
        policy.inserted(point)
        policy.evictable_changed(point, True)
    assert policy.victim() is points[0], "the least recently used"
    for number in range(3, REBUILD_USES + 3):
        other = Entry(number, "checkpoint", 0, 5, 1, 1.0, created=2, last_used=2, kind="often")
        policy.inserted(other)
        policy.touched(other)
        policy.evicted(other)
    assert policy.model.is_warm
    assert policy.victim() is points[1]


def test_as_many_kinds_as_there_are_users_share_their_classes_but_for_the_first() -> None:
    server = Server(Turn(), capacity_blocks=50)
    policy = server.policy
    assert isinstance(policy, Turn)
    for number in range(1, 200):
        server.serve(prompt(number, 8), number, 1, f"user {number}")
        assert policy.victim() is not None
    kinds = {key[0] for key in policy.model._classes}  # type: ignore[index]
    assert kinds == {OTHER_KINDS, *(f"user {number}" for number in range(1, MAX_KINDS + 1))}
    assert len(policy._queues) <= 2


@pytest.mark.parametrize("first", [-2, 0])
def test_turns_may_be_counted_from_anywhere(first: int) -> None:
    server = Server(Turn())
    for turn in range(5):
        server.serve(prompt(1, 10 + 2 * turn), 10 * turn + 1, first + turn)
    server.serve([9999], 100)
    policy = server.policy
    assert isinstance(policy, Turn)
    assert policy._requests[41].turn == max(1, first + 4)


def test_checkpoints_are_classes_of_their_own() -> None:
    policy = Turn()
    span = Entry(1, "span", 0, 10, 1, 1.0, created=1, last_used=1)
    point = Entry(2, "checkpoint", 0, 10, 1, 1.0, created=1, last_used=1, has_checkpoint=True)
    policy.inserted(span)
    policy.inserted(point)
    assert policy._user[2].class_key == ("", "checkpoint", "fresh")
    point.last_used = 4
    policy.touched(point)
    assert policy._user[2].class_key == ("", "checkpoint", "used")
    policy.evictable_changed(point, True)
    assert policy.victim() is point
    policy.evicted(point)
    policy.evicted(span)
    assert policy.victim() is None


def test_a_new_request_holds_nothing() -> None:
    assert Request(3).holds == {}
    assert math.isinf(Turn()._rank((("", "", ""), 0, False, 0), (3, -1, 1))[0])
