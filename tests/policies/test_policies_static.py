"""The order that LFU, SLRU, priority, GDSF, LFUDA, TTL, T-LRU, Marconi and random document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from policies import GDSF, LFUDA, LRU, S3FIFO, SLRU, TLRU, TTL, Entry, EvictionPolicy, Marconi, Random, make_policy
from policies.ordered import SPARE_PLACES
from tests.policies.blocks import admit
from tests.policies.traffic import Traffic


def _order(policy: EvictionPolicy, entries: Sequence[Entry]) -> list[int]:
    """Ids in the order they go, of entries that may all go."""
    for entry in entries:
        if entry.entry_id not in getattr(policy, "_keys", {}):
            admit(policy, entry)
    order = []
    while (victim := policy.victim()) is not None:
        order.append(victim.entry_id)
        policy.evictable_changed(victim, False)
        policy.evicted(victim)
    return order


def _entry(
    number: int, *, last_used: int = 1, uses: int = 1, tokens: int = 10, weight: int = 1, cost: float = 1.0
) -> Entry:
    return Entry(number, "span", 0, tokens, weight, cost, created=1, last_used=last_used, uses=uses)


def _used(policy: EvictionPolicy, entry: Entry, tick: int) -> None:
    entry.last_used = tick
    entry.uses += 1
    policy.touched(entry)


@pytest.mark.parametrize(
    ("policy", "wrong", "message"),
    [
        *((SLRU, {"protected_share": share}, "wanted more than 0 and at most 1") for share in (0.0, -1.0, 1.5)),
        (TTL, {"ttl_ticks": {"chat": -1, "system": 4}}, r"ttl_ticks is \{'chat': -1\}; wanted 0 or more"),
        *((TLRU, {name: -1}, "wanted 0 or more, or None") for name in ("threshold_tokens", "next_tokens")),
        *(
            (Marconi, each, "wanted 0 or more, 1 or more, and 1 or more")
            for each in ({"alpha": -0.1}, {"candidates": 0}, {"bootstrap": 0})
        ),
        *((S3FIFO, each, "wanted") for each in ({"small_share": 0.0}, {"small_share": 1.0}, {"marks_to_promote": 0})),
    ],
)
def test_an_argument_out_of_range_is_refused(policy: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**wrong)


# Frequency


def test_lfu_gives_up_what_was_used_least_and_of_that_what_was_used_longest_ago() -> None:
    entries = [_entry(1, uses=3), _entry(2, uses=1, last_used=9), _entry(3, uses=1, last_used=2), _entry(4, uses=2)]
    assert _order(make_policy("lfu"), entries) == [3, 2, 4, 1]


def test_slru_protects_what_was_used_twice_however_long_ago() -> None:
    entries = [_entry(1, uses=2, last_used=1), _entry(2, uses=1, last_used=9), _entry(3, uses=5, last_used=3)]
    assert _order(SLRU(), entries) == [2, 1, 3]


# Priority and time to live


def test_a_higher_priority_outlives_any_lower_one_and_spreads_to_the_root() -> None:
    traffic = Traffic(make_policy("priority"))
    traffic.request([1, 2, 3], priority=5)
    traffic.request([1, 2, 4])
    traffic.request([9])
    order = []
    while (found := traffic.states.victim()) is not None:
        order.append(found[0].prefix().tolist())
        traffic.states.remove(found[0])
    assert order == [[1, 2, 4], [9], [1, 2, 3], [1, 2]]


def test_a_soft_pin_goes_last_until_it_expires_and_is_renewed_by_a_use() -> None:
    policy = TTL({"system": 10})
    pinned = Entry(1, "span", 0, 5, 1, 1.0, created=1, last_used=1, kind="system")
    other = Entry(2, "span", 0, 5, 1, 1.0, created=5, last_used=5, kind="chat")
    admit(policy, pinned, other)
    assert policy.victim() is other
    late = Entry(3, "span", 0, 5, 1, 1.0, created=11, last_used=11)
    policy.inserted(late)
    assert policy.victim() is pinned, "tick 11 is the first after its ten"
    _used(policy, pinned, 12)
    _used(policy, other, 13)
    assert policy.victim() is other
    policy.inserted(Entry(4, "span", 0, 5, 1, 1.0, created=21, last_used=21))
    assert policy.victim() is other
    policy.evicted(other)
    assert policy.victim() is pinned, "nothing else may go"


def test_a_priority_is_a_time_to_live_where_the_kind_has_none() -> None:
    policy = TTL()
    pinned = Entry(1, "span", 0, 5, 1, 1.0, created=1, last_used=1, priority=100)
    other = Entry(2, "span", 0, 5, 1, 1.0, created=50, last_used=50)
    assert _order(policy, [pinned, other]) == [2, 1]
    policy = TTL()
    late = Entry(3, "span", 0, 5, 1, 1.0, created=101, last_used=101)
    assert _order(policy, [pinned, other, late]) == [1, 2, 3]


# Greedy-dual


def test_what_is_used_again_and_again_leaves_few_old_places_behind() -> None:
    policy = LRU()
    entries = [_entry(number) for number in range(10)]
    for entry in entries:
        admit(policy, entry)
    for tick in range(2, 1000):
        _used(policy, entries[tick % 10], tick)
        assert len(policy._order) <= 2 * 10 + SPARE_PLACES
        policy.check()
    assert _order(policy, entries) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_policy_that_is_told_what_has_gone_is_told_of_each_cut() -> None:
    class Noting(LRU):
        def __init__(self) -> None:
            super().__init__()
            self.gone: list[tuple[int, int]] = []

        def evicted(self, entry: Entry) -> None:
            self.gone.append((entry.start, entry.end))
            super().evicted(entry)

    noting, lru = Noting(), LRU()
    for policy in (noting, lru):
        traffic = Traffic(policy)
        leaf = traffic.request([1, 2, 3, 4])
        traffic.states.trim(leaf, (3,))
        traffic.states.check()
        policy.check()
        assert [policy.victim(), leaf.end] == [leaf.payload.entry, 3]
    assert noting.gone == [(3, 4)]
    assert (lru.cut is None, noting.cut is None) == (False, True)


def test_gdsf_gives_up_what_is_cheap_to_compute_and_large() -> None:
    assert _order(GDSF(), [_entry(1, cost=50), _entry(2, cost=5), _entry(3, cost=20)]) == [2, 3, 1]
    assert _order(GDSF(), [_entry(1, weight=10, cost=50), _entry(2, weight=100, cost=50)]) == [2, 1]
    assert _order(GDSF(), [_entry(1, uses=2), _entry(2, uses=1)]) == [2, 1]
    # LFUDA looks at neither.
    assert _order(LFUDA(), [_entry(1, weight=1000, cost=1, uses=2), _entry(2, weight=1, cost=1000)]) == [2, 1]


@pytest.mark.parametrize("policy", [GDSF(), LFUDA()])
def test_what_goes_raises_what_comes_and_what_is_used_later(policy: GDSF) -> None:
    popular, idle, new = _entry(1, uses=5), _entry(2), _entry(3)
    admit(policy, popular, idle)
    assert policy.victim() is idle
    assert policy.inflation == 0.0
    policy.evicted(idle)
    assert policy.inflation == 1.0
    admit(policy, new)
    _used(policy, new, 2)
    _used(policy, new, 3)
    assert policy.key(new)[0] == 1 + 3
    _used(policy, new, 4)
    _used(policy, new, 5)
    assert policy.victim() is popular, "5 uses before anything went, against 5 uses and 1 of age"


# Tail latency


def test_t_lru_gives_up_what_a_conversation_can_spare_first() -> None:
    tail = Entry(3, "span", 90, 100, 1, 1.0, created=2, last_used=2)
    head = Entry(4, "span", 0, 90, 1, 1.0, created=2, last_used=2, children=1)
    idle = Entry(5, "span", 0, 60, 1, 1.0, created=1, last_used=1)
    policy = TLRU(threshold_tokens=5, next_tokens=10)
    assert _order(policy, [idle, tail]) == [5, 3], "nobody can spare anything: LRU"
    policy = TLRU(threshold_tokens=30, next_tokens=10)
    tail.parent = head
    policy.inserted(head)
    admit(policy, tail)
    assert policy.victim() is tail, "safe: 100 + 10 - 99 are left"
    policy.evicted(tail)
    policy.evictable_changed(head, True)
    admit(policy, idle)
    assert policy.victim() is idle, "head would leave 100 + 10 - 89 = 21, safe, and so is idle, older"
    head.end = 70
    policy.split(head, Entry(6, "span", 70, 90, 1, 1.0, created=2, last_used=2))
    idle.last_used = 9
    policy.touched(idle)
    assert policy.victim() is idle, "head, cut back, would leave 100 + 10 - 69 = 41: not safe any more"


# Marconi and chance


def test_marconi_goes_by_the_last_use_and_not_by_age() -> None:
    old = Entry(1, "span", 0, 10, 1, 1.0, created=1, last_used=9)
    young = Entry(2, "span", 0, 10, 1, 1.0, created=5, last_used=6)
    assert _order(Marconi(alpha=0.0), [old, young]) == [2, 1]


def test_marconi_learns_to_keep_what_saves_much_per_byte_where_that_is_what_comes_back() -> None:
    def learnt(dense_comes_back: bool) -> float:
        policy = Marconi(bootstrap=60)
        entries: dict[str, Entry] = {}
        for tick, number in enumerate(range(200), 1):
            name = f"dense {number % 6}" if number % 2 == 0 else f"thin {number}"
            if not dense_comes_back:
                name = f"dense {number}" if number % 2 == 0 else f"thin {number % 6}"
            if name in entries:
                _used(policy, entries[name], tick)
            else:
                cost = 9.0 if name.startswith("dense") else 1.0
                entry = Entry(number, "span", 0, 1, 1, cost, created=tick, last_used=tick)
                entry.digests_of = lambda _, offsets, name=name: [name.encode()] * len(offsets)
                entries[name] = entry
                admit(policy, entry)
            while len(entries) > 4:
                victim = policy.victim()
                assert victim is not None
                del entries[victim.digest.decode()]
                policy.evictable_changed(victim, False)
                policy.evicted(victim)
        assert not policy._is_learning
        return policy.alpha

    assert learnt(dense_comes_back=True) > 0
    assert learnt(dense_comes_back=False) == 0


def test_random_takes_each_with_the_same_chance_and_the_same_with_the_same_seed() -> None:
    def first(seed: int) -> int:
        policy = Random(seed)
        admit(policy, *(_entry(number, tokens=number) for number in (1, 2, 3, 4)))
        victim = policy.victim()
        assert victim is not None
        return victim.entry_id

    counts = Counter(first(seed) for seed in range(2000))
    assert all(400 < counts[number] < 600 for number in (1, 2, 3, 4)), counts
    assert first(5) == first(5)
