"""History: what was evicted is found again by the prompts that begin with it, and only by those; bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixcache.tree.history import History, Loss
from radixcache.tree.radix_tree import Node, RadixTree

Tree = RadixTree[Any]


def keys(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def tree() -> Tree:
    return RadixTree()


@pytest.fixture
def history() -> History:
    return History()


def put(tree: Tree, sequence: Any, namespace: str = "") -> Node[Any]:
    """Store a sequence, cutting a node where it parts from what is there."""
    match = tree.match(sequence, namespace)
    node = match.node
    if 0 < match.offset < node.end:
        node = tree.split(node, match.offset)
    return tree.append(node, sequence[match.offset :]) if match.offset < len(sequence) else node


def test_a_leaf_that_went_step_by_step_and_then_its_parent_are_one_piece(tree: Tree, history: History) -> None:
    put(tree, np.arange(40))
    leaf = put(tree, np.arange(100))
    for start, tick in ((80, 5), (60, 6)):
        history.evicted(leaf, start, tick)
        tree.truncate(leaf, start)
    history.evicted(leaf, 40, 6)
    parent = tree.remove(leaf)
    history.evicted(parent, 0, 7)
    tree.remove(parent)
    history.check()
    assert len(history._pieces) == 1
    assert history.lost_tokens(np.arange(100), "", 0) == [Loss(0, 40, 7), Loss(40, 80, 6), Loss(80, 100, 5)]
    assert history.lost_checkpoint(np.arange(100), "", 0, 100) is None


def test_what_was_found_wrong_is_told_from_what_was_evicted_in_the_same_tick(tree: Tree, history: History) -> None:
    parent = put(tree, np.arange(40))
    leaf = put(tree, np.arange(100))
    history.evicted(leaf, 60, 5, was_wrong=True)
    tree.truncate(leaf, 60)
    history.evicted(leaf, 40, 5, was_wrong=True)
    tree.remove(leaf)
    history.evicted(parent, 0, 5)
    history.check()
    assert history.lost_tokens(np.arange(90), "", 0) == [Loss(0, 40, 5), Loss(40, 90, 5, was_wrong=True)]


def test_parts_are_cut_to_what_the_prompt_has_in_common_and_the_tree_does_not_hold(
    tree: Tree, history: History
) -> None:
    leaf = put(tree, np.arange(100))
    history.evicted(leaf, 0, 3)
    prompt = np.concatenate([np.arange(70), [500]])
    assert history.lost_tokens(prompt, "", 20) == [Loss(20, 70, 3)]
    assert history.lost_tokens(prompt, "", 70) == []
    assert history.lost_tokens(prompt, "other", 20) == []
    assert history.lost_tokens(keys(9, 1, 2), "", 0) == []


def test_pieces_of_different_branches_do_not_join(tree: Tree, history: History) -> None:
    one, two = put(tree, keys(1, 2, 3, 4)), put(tree, keys(1, 2, 5, 6))
    history.evicted(one, 2, 1)
    tree.remove(one)
    history.evicted(two, 2, 2)
    parent = tree.remove(two)
    history.evicted(parent, 0, 3)
    history.check()
    assert history.lost_tokens(keys(1, 2, 5, 6), "", 0) == [Loss(0, 2, 3), Loss(2, 4, 2)]
    assert history.lost_tokens(keys(1, 2, 3, 4), "", 2) == [Loss(2, 4, 1)]


def test_an_evicted_checkpoint_is_found_by_prompts_that_reach_it(tree: Tree, history: History) -> None:
    node = put(tree, np.arange(20))
    put(tree, np.arange(40))
    history.evicted_checkpoint(node, 8)
    history.check()
    assert history.lost_checkpoint(np.arange(30), "", 0, 30) == Loss(20, 20, 8)
    assert history.lost_checkpoint(np.arange(30), "", 20, 30) is None
    assert history.lost_checkpoint(np.arange(30), "", 0, 19) is None
    assert history.lost_checkpoint(np.arange(30), "other", 0, 30) is None
    assert history.lost_checkpoint(np.arange(30)[::-1].copy(), "", 0, 30) is None


def test_of_several_evicted_checkpoints_the_deepest_that_a_prompt_reaches_is_found(
    tree: Tree, history: History
) -> None:
    for tick, end in ((7, 20), (8, 30), (9, 10), (10, 40)):
        history.evicted_checkpoint(put(tree, np.arange(end)), tick)
    assert history.lost_checkpoint(np.arange(35), "", 0, 35) == Loss(30, 30, 8)


@pytest.mark.parametrize(("pieces", "piece_keys"), [(5, 1 << 20), (1 << 10, 90), (3, 3)])
def test_pieces_stay_within_their_bounds_and_the_newest_are_kept(pieces: int, piece_keys: int) -> None:
    history = History(max_pieces=pieces, max_piece_keys=piece_keys)
    tree: Tree = RadixTree()
    for first in range(50):
        leaf = put(tree, keys(first, *range(100, 110)))
        history.evicted(leaf, 0, first)
        tree.remove(leaf)
        history.check()
        newest = history.lost_tokens(keys(first, *range(100, 110)), "", 0)
        assert newest == ([Loss(0, 11, first)] if piece_keys >= 11 else [])
    assert history.lost_tokens(keys(0, *range(100, 110)), "", 0) == []


def test_prompts_stay_within_their_bounds_over_all_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixcache.tree.history.MAX_PROMPTS", 3)
    monkeypatch.setattr("radixcache.tree.history.MAX_PROMPT_KEYS", 100)
    history = History()
    for index in range(200):
        history.asked(f"tenant {index % 7}", np.arange(index % 40 + 1))
        history.check()
    assert [len(prompt) for prompt in history.prompts("tenant 3")] == [40]
    history.asked("", np.arange(101))
    history.check()
    assert history.prompts("") == []


def test_recent_prompts_come_newest_first_and_stay_in_their_namespace() -> None:
    history = History()
    for length in (2, 3):
        history.asked("a", np.arange(length))
    history.asked("b", np.arange(9))
    assert [len(prompt) for prompt in history.prompts("a")] == [3, 2]
    assert history.prompts("c") == []


def test_parts_of_pieces_that_went_in_any_order_are_put_together(tree: Tree, history: History) -> None:
    leaf = put(tree, np.arange(100))
    history.evicted(leaf, 0, 1)
    tree.remove(leaf)
    leaf = put(tree, np.arange(60))
    history.evicted(leaf, 30, 2)
    tree.truncate(leaf, 30)
    other = put(tree, keys(7, 7))
    history.evicted(other, 0, 3)
    tree.remove(other)
    history.evicted(leaf, 10, 4)
    tree.truncate(leaf, 10)
    history.check()
    wanted = [Loss(10, 30, 4), Loss(30, 60, 2), Loss(60, 100, 1)]
    assert history.lost_tokens(np.arange(100), "", 10) == wanted
    assert history.lost_tokens(np.arange(100), "", 20) == [Loss(20, 30, 4), *wanted[1:]]
