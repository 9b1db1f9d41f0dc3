"""The prefill grid: where stops move to, and which dropped tails are remembered."""

from __future__ import annotations

import numpy as np
import pytest

import radixcache.grid
from radixcache.grid import TAILS_PER_NODE, Tails, floor, stops_on_grid
from radixcache.tree import Keys, Match, Node


def keys(*values: int) -> Keys:
    return np.asarray(values, dtype=np.int64)


def root(namespace: str = "") -> Node:
    return Node(keys(), 0, None, namespace)


def test_floor_is_the_multiple_at_or_below() -> None:
    assert [floor(offset, 4) for offset in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]


def test_stops_move_down_to_the_grid_and_the_most_lasting_of_several_stays() -> None:
    stops = {20: "interval", 33: "mark", 40: "branch", 47: "interval", 66: "tail", 70: "mark", 95: "interval"}
    assert stops_on_grid(stops, 16, 0, 99) == {16: "interval", 32: "branch", 64: "mark", 80: "interval", 96: "end"}


def test_a_stop_at_or_before_the_position_is_none_and_so_is_one_behind_the_last_token() -> None:
    assert stops_on_grid({20: "mark", 40: "mark", -3: "tail"}, 16, 16, 40) == {32: "mark"}
    assert stops_on_grid({20: "mark"}, 16, 32, 40) == {}


def test_a_tail_is_matched_as_far_as_it_goes_along() -> None:
    tails, node = Tails(), root()
    tails.add(node, keys(1, 2, 3))
    tails.add(node, keys(1, 9))
    found = [tails.matched(Match(node, 0), keys(*prompt)) for prompt in ((1, 2, 3, 4), (1, 2), (1, 9, 9), (5,), (1, 7))]
    assert found == [3, 2, 2, 0, 1]
    assert tails.matched(Match(root("other"), 0), keys(1, 2, 3)) == 0
    tails.clear()
    assert tails.matched(Match(node, 0), keys(1, 2, 3)) == 0


def test_a_match_that_ends_inside_an_edge_has_no_tail() -> None:
    tails = Tails()
    above = root()
    tails.add(above, keys(5, 6))
    inside = Node(keys(5, 6, 7), 0, above, "")
    assert tails.matched(Match(inside, 2), keys(5, 6, 8)) == 0


def test_a_tail_that_another_one_covers_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radixcache.grid, "MAX_TAIL_KEYS", 8)
    tails = Tails()
    for tail in (keys(1, 2), keys(1, 2, 3, 4, 5), keys(1, 2, 3)):
        tails.add(root("a"), tail)
    tails.add(root("b"), keys(1, 2, 3))
    assert tails.matched(Match(root("a"), 0), keys(1, 2, 3, 4, 5, 6)) == 5
    assert tails.matched(Match(root("b"), 0), keys(1, 2, 3, 4)) == 3


def test_the_tail_that_was_added_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radixcache.grid, "MAX_TAIL_KEYS", 8)
    tails = Tails()
    for name in ("a", "b", "c"):
        tails.add(root(name), keys(1, 2, 3))
    tails.add(root("d"), keys(*range(9)))  # more than fits at all
    assert [tails.matched(Match(root(name), 0), keys(1, 2, 3)) for name in "abcd"] == [0, 3, 3, 0]


def test_a_node_keeps_its_newest_tails() -> None:
    tails, node = Tails(), root()
    for value in range(TAILS_PER_NODE + 1):
        tails.add(node, keys(value))
    found = [tails.matched(Match(node, 0), keys(value)) for value in range(TAILS_PER_NODE + 1)]
    assert found == [0] + [1] * TAILS_PER_NODE
