"""The prefill grid: where stops move to, and which dropped tails are remembered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import radixcache.paging.resume
from radixcache.paging.resume import Tails, stops_on_grid
from radixcache.tokens import Keys, common_length
from radixcache.tree.radix_tree import Match, Node


def keys(*values: int) -> Keys:
    return np.asarray(values, dtype=np.int64)


def root(namespace: str = "") -> Node:
    return Node(keys(), 0, None, namespace)


def test_stops_move_down_to_the_grid_and_the_most_lasting_of_several_stays() -> None:
    stops = {20: "interval", 33: "mark", 40: "branch", 47: "interval", 66: "tail", 70: "mark", 95: "interval"}
    assert stops_on_grid(stops, 16, 0, 99) == {16: "interval", 32: "branch", 64: "mark", 80: "interval", 96: "end"}


def test_a_stop_at_or_before_the_position_is_none_and_so_is_one_behind_the_last_token() -> None:
    assert stops_on_grid({20: "mark", 40: "mark", -3: "tail"}, 16, 16, 40) == {32: "mark"}
    assert stops_on_grid({20: "mark"}, 16, 32, 40) == {}


def test_the_tails_of_one_namespace_are_forgotten() -> None:
    tails, ours, theirs = Tails(), root("ours with spaces"), root("theirs")
    for node in (ours, theirs):
        for values in ((1, 2, 3), (1, 2, 4), (5,)):
            tails.add(node, keys(*values))
    tails.clear("ours with spaces")
    tails.check()
    assert [tails.match_length(Match(node, 0, []), keys(1, 2, 3)) for node in (ours, theirs)] == [0, 3]
    tails.add(ours, keys(1, 2))
    tails.clear("nobody")
    assert tails.match_length(Match(ours, 0, []), keys(1, 2, 3)) == 2
    tails.check()


def test_a_node_keeps_as_many_tails_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radixcache.paging.resume, "MAX_TAIL_KEYS", 660)
    tails, node = Tails(), root()
    for value in range(11):
        tails.add(node, keys(value, value))
        tails.check()
    found = [tails.match_length(Match(node, 0, []), keys(value, value)) for value in range(11)]
    assert found == [0] + [2] * 10, "the oldest went, at 64 keys a node"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=6)), max_size=30))
def test_within_bounds_tails_are_all_prefixes_of_what_was_added(drawn: list[tuple[str, list[int]]]) -> None:
    tails = Tails()
    for name, tail in drawn:
        tails.add(root(name), keys(*tail))
        tails.check()
    for name, prompt in drawn:
        asked = [*prompt, 1, 0]
        wanted = max((common_length(keys(*tail), keys(*asked)) for other, tail in drawn if other == name), default=0)
        assert tails.match_length(Match(root(name), 0, []), keys(*asked)) == wanted


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=6)), max_size=30))
def test_beyond_bounds_the_tail_added_last_is_still_there(drawn: list[tuple[str, list[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radixcache.paging.resume, "MAX_TAIL_KEYS", 7)
        patch.setattr(radixcache.paging.resume, "NODE_KEYS", 1)
        tails = Tails()
        for name, tail in drawn:
            tails.add(root(name), keys(*tail))
            tails.check()
            assert tails.match_length(Match(root(name), 0, []), keys(*tail)) == len(tail)
