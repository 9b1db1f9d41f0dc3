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
