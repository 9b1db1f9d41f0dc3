"""RadixTree against a plain dict of sequences: every operation at random, in several namespaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixcache.tokens import Keys
from radixcache.tree.radix_tree import Node, RadixTree

Sequence = tuple[int, ...]

# Few different keys, so that sequences share prefixes; two of them at the ends of 64 bits.
KEYS = st.sampled_from([0, 1, 0, 1, 2, (1 << 63) - 1, -(1 << 63)])
SEQUENCES = st.lists(KEYS, min_size=1, max_size=12).map(tuple)
NAMESPACES = st.sampled_from(["", "tenant", "adapter"])


def array(sequence: Sequence) -> Keys:
    return np.array(sequence, dtype=np.int64)


class TreeMachine(RuleBasedStateMachine):
    """`stored` says for each namespace which sequences the tree's leaves spell; nodes come and go between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree[int] = RadixTree()
        self.stored: dict[str, set[Sequence]] = {}

    # Steps

    @initialize(sequences=st.lists(SEQUENCES, min_size=2, max_size=6))
    def begin_with(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.store(sequence, "")

    @rule(sequence=SEQUENCES, namespace=NAMESPACES)
    def store(self, sequence: Sequence, namespace: str) -> None:
        match = self.tree.match(array(sequence), namespace)
        node = self.tree.root(namespace) if match.node.is_root else match.node
        rest = sequence[match.offset :]
        if not rest:
            return
        if not node.is_root and match.offset < node.end:
            payload = node.payload
            node = self.tree.split(node, match.offset)
            assert node.payload is None
            assert [child.payload for child in node.children.values()] == [payload]
        leaf = self.tree.append(node, array(rest))
        leaf.payload = hash(sequence)
        held = self.stored.setdefault(namespace, set())
        # A sequence that was a leaf's and is continued is a leaf's no longer.
        held.discard(sequence[: match.offset])
        held.add(sequence)

    @rule(data=st.data(), more=st.lists(KEYS, min_size=1, max_size=5).map(tuple))
    def extend(self, data: Any, more: Sequence) -> None:
        leaf = self.pick(data, leaf=True)
        if leaf is None:
            return
        before = self.spelled(leaf)
        self.tree.extend(leaf, array(more))
        self.stored[leaf.namespace].discard(before)
        self.stored[leaf.namespace].add(before + more)

    @rule(data=st.data())
    def truncate(self, data: Any) -> None:
        leaf = self.pick(data, leaf=True)
        if leaf is not None and leaf.end - leaf.start > 1:
            at = data.draw(st.integers(leaf.start + 1, leaf.end - 1))
            before = self.spelled(leaf)
            self.tree.truncate(leaf, at)
            self.stored[leaf.namespace].discard(before)
            self.stored[leaf.namespace].add(before[:at])

    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        leaf = self.pick(data, leaf=True)
        if leaf is None:
            return
        before, name = self.spelled(leaf), leaf.namespace
        parent = self.tree.remove(leaf)
        self.stored[name].discard(before)
        if parent.is_leaf and not parent.is_root:
            self.stored[name].add(before[: parent.end])
        if not self.stored[name]:
            del self.stored[name]

    @rule(data=st.data())
    def split(self, data: Any) -> None:
        node = self.pick(data)
        if node is not None and node.end - node.start > 1:
            at = data.draw(st.integers(node.start + 1, node.end - 1))
            upper = self.tree.split(node, at)
            assert (upper.end, node.start) == (at, at)

    @rule(data=st.data())
    def merge(self, data: Any) -> None:
        node = self.pick(data)
        if node is not None and len(node.children) == 1:
            (child,) = node.children.values()
            payload, end = child.payload, child.end
            assert self.tree.merge(node) is child
            assert (child.payload, child.end) == (payload, end)

    @rule(probe=st.lists(KEYS, max_size=12).map(tuple), namespace=NAMESPACES)
    def match_finds_what_the_dict_finds_and_changes_nothing(self, probe: Sequence, namespace: str) -> None:
        before = self.tree.dump(self.label)
        match = self.tree.match(array(probe), namespace)
        assert match.offset == max((common(probe, other) for other in self.stored.get(namespace, ())), default=0)
        assert self.spelled(match.node)[: match.offset] == probe[: match.offset]
        assert match.node.is_root if match.offset == 0 else match.node.start < match.offset <= match.node.end
        assert self.tree.dump(self.label) == before

    # What always holds

    @invariant()
    def check_holds(self) -> None:
        self.tree.check()

    @invariant()
    def leaves_spell_the_stored_sequences(self) -> None:
        spelled: dict[str, set[Sequence]] = {}
        for node in self.tree.nodes():
            if node.is_leaf:
                spelled.setdefault(node.namespace, set()).add(self.spelled(node))
        assert spelled == self.stored

    @invariant()
    def every_stored_sequence_is_matched_whole(self) -> None:
        for namespace, sequences in self.stored.items():
            for sequence in sequences:
                assert self.tree.match(array(sequence), namespace).offset == len(sequence)

    @invariant()
    def every_distinct_prefix_is_stored_once(self) -> None:
        prefixes = {(name, s[:n]) for name, each in self.stored.items() for s in each for n in range(1, len(s) + 1)}
        assert self.tree.key_count == len(prefixes)

    # Private

    def pick(self, data: Any, leaf: bool = False) -> Node[int] | None:
        nodes = [node for node in self.tree.nodes() if node.is_leaf or not leaf]
        picked: Node[int] | None = data.draw(st.sampled_from(nodes)) if nodes else None
        return picked

    @staticmethod
    def spelled(node: Node[int]) -> Sequence:
        return tuple(node.prefix().tolist())

    @staticmethod
    def label(node: Node[int]) -> str:
        return f"{node.edge.tolist()} {node.payload}"


def common(left: Iterable[int], right: Iterable[int]) -> int:
    """Length of the common prefix, one key at a time."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
