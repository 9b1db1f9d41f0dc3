"""RadixTree: every operation, every invariant, and what matching costs. test_tree_machine.py walks it at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixcache.tokens import Keys, common_length
from radixcache.tree import radix_tree as tree_module
from radixcache.tree.radix_tree import Node, RadixTree


def keys(*numbers: int) -> Keys:
    return np.array(numbers, dtype=np.int64)


def store(tree: RadixTree[str], *numbers: int, namespace: str = "") -> Node[str]:
    """Store a sequence as the cache layer does: match, split what it leaves in the middle, append the rest."""
    sequence = keys(*numbers)
    match = tree.match(sequence, namespace)
    node = tree.root(namespace) if match.node.is_root else match.node
    if not node.is_root and match.offset < node.end:
        node = tree.split(node, match.offset)
    return tree.append(node, sequence[match.offset :]) if match.offset < len(sequence) else node


@pytest.fixture
def tree() -> RadixTree[str]:
    """[1 2 3] - [4 5] and [6 7 8], and [9 9] apart."""
    tree: RadixTree[str] = RadixTree()
    for sequence in ((1, 2, 3, 4, 5), (1, 2, 3, 6, 7, 8), (9, 9)):
        store(tree, *sequence)
    tree.check()
    return tree


@pytest.mark.parametrize(
    ("sequence", "offset", "span"),
    [
        ((1, 2, 3, 4, 5), 5, (3, 5)),
        ((1, 2, 3, 4, 5, 6), 5, (3, 5)),
        ((1, 2, 3), 3, (0, 3)),
        ((1, 2, 3, 6, 7, 1), 5, (3, 6)),
        ((1, 4, 5), 1, (0, 3)),
        ((9, 9, 9), 2, (0, 2)),
        ((), 0, (0, 0)),
        ((2, 3), 0, (0, 0)),
    ],
)
def test_match_finds_the_longest_stored_prefix_and_the_deepest_node_on_it(
    tree: RadixTree[str], sequence: tuple[int, ...], offset: int, span: tuple[int, int]
) -> None:
    match = tree.match(keys(*sequence))
    assert match.offset == offset
    assert (match.node.start, match.node.end) == span


def test_dump_is_one_indented_line_a_node_and_the_same_for_the_same_operations(tree: RadixTree[str]) -> None:
    store(tree, 5, namespace="tenant")
    assert tree.dump(_spelled) == "\n".join(
        ["namespace ''", "  1 2 3", "    4 5", "    6 7 8", "  9 9", "namespace 'tenant'", "  5"]
    )
    assert "Node[3, 5)" in tree.dump()


BROKEN: dict[str, Callable[[RadixTree[str], Node[str], Node[str]], None]] = {
    "T1 an inner node with an empty edge": lambda tree, inner, leaf: setattr(inner, "edge", keys()),
    "T1 a leaf with an empty edge": lambda tree, inner, leaf: setattr(leaf, "edge", keys()),
    "T1 a root with an edge": lambda tree, inner, leaf: setattr(tree.root(), "edge", keys(1)),
    "T2 another first key": lambda tree, inner, leaf: setattr(leaf, "edge", keys(7)),
    "T2 another parent": lambda tree, inner, leaf: setattr(leaf, "parent", tree.root()),
    "T3 another start": lambda tree, inner, leaf: setattr(leaf, "start", 1),
    "T4 a view of a longer edge": lambda tree, inner, leaf: setattr(inner, "edge", keys(1, 2, 3)[:2]),
    "T4 keys of 32 bits": lambda tree, inner, leaf: setattr(inner, "edge", np.array([1, 2], dtype=np.int32)),
    "T3 another end": lambda tree, inner, leaf: setattr(leaf, "end", 99),
    "T5 one node less": lambda tree, inner, leaf: setattr(tree, "node_count", tree.node_count - 1),
    "T5 one key more": lambda tree, inner, leaf: setattr(tree, "key_count", tree.key_count + 1),
    "a node of another namespace": lambda tree, inner, leaf: setattr(leaf, "namespace", "other"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_notices_each_broken_invariant(name: str) -> None:
    tree: RadixTree[str] = RadixTree()
    leaf = store(tree, 1, 2, 3)
    store(tree, 1, 2, 4)
    tree.check()
    BROKEN[name](tree, tree.match(keys(1, 2)).node, leaf)
    with pytest.raises(AssertionError):
        tree.check()


class _CountingChildren(dict[int, Node[str]]):
    looked_up = 0

    def get(self, *arguments: Any) -> Any:
        _CountingChildren.looked_up += 1
        return super().get(*arguments)


def test_what_a_match_costs_does_not_grow_with_the_stored_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def counting(left: Keys, right: Keys) -> int:
        compared.append(min(len(left), len(right)))
        return common_length(left, right)

    monkeypatch.setattr(tree_module, "common_length", counting)
    costs = set()
    for conversations in (10, 100, 2000):
        tree: RadixTree[str] = RadixTree()
        rng = np.random.default_rng(3)
        wanted = rng.integers(0, 50_000, 400)
        for cut in (100, 200, 300, 400):
            store(tree, *wanted[:cut], 77_000)
        for _ in range(conversations):
            shared = int(rng.choice([0, 100, 200, 300]))
            store(tree, *wanted[:shared], *rng.integers(60_000, 70_000_000, 20))
        for node in (tree.root(), *tree.nodes()):
            node.children = _CountingChildren(node.children)
        compared.clear()
        _CountingChildren.looked_up = 0
        assert tree.match(wanted).offset == 400
        costs.add((len(compared), sum(compared), _CountingChildren.looked_up))
    assert costs == {(4, 400, 4)}


def _spelled(node: Node[str]) -> str:
    return " ".join(map(str, node.edge.tolist()))
