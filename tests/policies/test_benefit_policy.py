"""Benefit: prefill saved per byte and tick, of spans and checkpoints alike."""

from __future__ import annotations

import pytest

from policies import CostModel, Entry
from policies.benefit import Benefit
from policies.turn import Turn
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from tests.policies.turns import prompt, random_traffic, served_by, warm


def entry(
    number: int, cost: float, weight_bytes: int, parent: Entry | None = None, has_checkpoint: bool = False
) -> Entry:
    start = 0 if parent is None else parent.end
    each = Entry(number, "span", start, start + 10, weight_bytes, cost, created=number, last_used=number, parent=parent)
    each.has_checkpoint = has_checkpoint
    return each


def test_where_all_bytes_cost_the_same_the_order_is_that_of_turn() -> None:
    found = []
    for policy in (Turn(), Benefit()):
        server = served_by(policy, capacity_blocks=150)
        found.append([server.request(keys, tick, turn) for keys, tick, turn in random_traffic(3, 100)])
    assert found[0] == found[1]


def test_of_two_alike_the_one_whose_bytes_cost_more_to_compute_stays() -> None:
    for dear, cheap in ((901, 902), (902, 901)):
        server = served_by(Benefit())
        tick = warm(server)
        for number in (901, 902):
            server.request(prompt(number, 12), tick := tick + 1, 1)
        server.request(prompt(903, 12), tick := tick + 1, 1)
        for node in server.states.tree.nodes():
            state = node.payload
            assert state is not None
            if int(node.edge[-1]) // 1000 == dear:
                state.entry.cost *= 4
                server.states.guard(node, 1)
                server.states.guard(node, -1)
        gone = server.evict(10**6)
        assert gone.index(1000 * cheap + 1) < gone.index(1000 * dear + 11)


@pytest.mark.parametrize("live_slots", [1, 3])
def test_all_that_may_go_from_a_cache_is_weighed_with_the_bytes_that_it_has(live_slots: int) -> None:
    policy = Benefit()
    layout = SizedLayout(1000, 5000)
    cache = sized_cache(layout, budget_bytes=1 << 40, policy=policy, cost=CostModel(), live_slots=live_slots)
    for number in range(8):
        tokens = [0, 1, 2, *range(100 * number, 100 * number + 20)]
        with cache.begin(tokens) as session:
            session.prefill(SizedModel())
            session.step(SizedModel(), tokens[-1:])
    assert policy.victim() is not None
    filed = {number: queue[-1] for number, (queue, _) in policy._filed.items()}
    assert filed == {number: policy.weight_of(each) for number, each in policy._entries.items()}
    assert len(filed) > 4


def test_what_would_go_is_weighed_again_when_the_checkpoint_before_it_has_gone() -> None:
    benefit = Benefit()
    above = entry(1, 1000.0, 50, has_checkpoint=True)
    leaf = entry(2, 10.0, 10, above, has_checkpoint=True)
    for each in (above, leaf):
        benefit.inserted(each)
    benefit.evictable_changed(leaf, True)
    assert benefit.victim() is leaf
    assert benefit.weight_of(leaf) == 0
    above.has_checkpoint = False
    assert benefit.victim() is leaf
    assert benefit._filed[2][0][-1] == benefit.weight_of(leaf) == 13, "1010 / 10 bytes"
