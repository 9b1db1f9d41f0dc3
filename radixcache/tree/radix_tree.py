"""Radix tree over edges of int64 keys, in Python and NumPy. Never imports MLX.

A node holds one edge, a run of keys; the keys from the root to a node spell a prefix. `match` finds the longest stored
prefix of a sequence. The other methods restructure the tree:

    split(node, at)          [a, c)  ->  [a, at) - [at, c)      the lower part keeps the node's identity
    merge(node)              [a, b) - [b, c)  ->  [a, c)        the child keeps its identity
    append(parent, keys)     a new leaf with a copy of `keys` below `parent`
    extend(leaf, keys)       a leaf's edge grows at its end
    truncate(leaf, at)       a leaf's edge ends at offset `at`
    remove(leaf)             a leaf goes

Each namespace has its own tree; a match never crosses namespaces. A key may stand for a token or for a block of tokens.

Invariants, asserted by `RadixTree.check`:

  T1  A node has an empty edge if and only if it is a root.
  T2  A child is filed under the first key of its edge, so no two siblings share a first key.
  T3  node.start == node.parent.end; node.end == node.start + len(node.edge); a root ends at 0.
  T4  Edges are owned one-dimensional int64 arrays: 8 bytes a key, never a view of a longer one.
  T5  node_count and key_count are the sums over all nodes except the roots.

`match` is O(len(keys)) in NumPy, with a dictionary look-up per node on the path. `split`, `extend` and `truncate` copy
one edge. Not thread-safe: PrefixCache holds the only lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from radixcache.tokens import Keys, common_length

P = TypeVar("P")

_EMPTY: Keys = np.empty(0, dtype=np.int64)
MOST_INDENT = 40


class Node(Generic[P]):
    """The keys [start, end) of a sequence. `payload` belongs to the tree's user; None in a root and a removed node."""

    __slots__ = ("children", "edge", "end", "namespace", "parent", "payload", "start")

    payload: P

    def __init__(self, edge: Keys, start: int, parent: Node[P] | None, namespace: str):
        self.edge = edge
        self.start = start
        self.end = start + len(edge)
        self.parent = parent
        self.namespace = namespace
        self.children: dict[int, Node[P]] = {}
        self.payload = None  # type: ignore[assignment]

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def path(self) -> list[Node[P]]:
        """The nodes from just below the root down to this one; empty for a root."""
        nodes: list[Node[P]] = []
        node: Node[P] = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self) -> Keys:
        """All keys from the start of the sequence to this node's end."""
        return np.concatenate([_EMPTY, *(node.edge for node in self.path())])

    def last_keys(self, count: int) -> Keys:
        """The last `count` keys of `prefix()`, or all of it."""
        edges, node = [_EMPTY], self
        while node.parent is not None and count > 0:
            edges.append(node.edge[-count:])
            count -= len(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1])

    def __repr__(self) -> str:
        return f"Node[{self.start}, {self.end})"


class Match(NamedTuple, Generic[P]):
    """The longest stored prefix of a sequence; valid until the tree changes.

    Attributes:
        node: the deepest node with a matching key; the root if there is none.
        offset: how many keys match; `node.start < offset <= node.end`, or 0 at the root.
        path: the nodes from below the root, or from below the given `start`, down to `node`.
    """

    node: Node[P]
    offset: int
    path: list[Node[P]]


class RadixTree(Generic[P]):
    """Radix trees of int64 keys, one per namespace."""

    def __init__(self) -> None:
        self._roots: dict[str, Node[P]] = {}
        self.node_count = self.key_count = 0

    def root(self, namespace: str = "") -> Node[P]:
        """The root of a namespace; made on first use."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(_EMPTY, 0, None, namespace)
        return root

    def match(self, keys: Keys, namespace: str = "", start: Node[P] | None = None) -> Match[P]:
        """Find the longest stored prefix of `keys`. Changes nothing.

        If `start` is given, `keys` must begin with the path to it. A miss has offset 0.
        """
        node = start or self._roots.get(namespace) or Node(_EMPTY, 0, None, namespace)
        offset, length = node.end, len(keys)
        path: list[Node[P]] = []
        while offset < length:
            child = node.children.get(keys.item(offset))
            if child is None:
                break
            node = child
            path.append(node)
            common = common_length(node.edge, keys[offset : node.end])
            offset += common
            if offset < node.end:
                break
        return Match(node, offset, path)

    def split(self, node: Node[P], at: int) -> Node[P]:
        """Cut a node's edge at offset `at`. Returns the new upper node; `node` becomes its only child."""
        assert node.parent is not None, "a root has no edge to split"
        assert node.start < at < node.end, (node.start, at, node.end)
        length = at - node.start
        upper: Node[P] = Node(node.edge[:length].copy(), node.start, node.parent, node.namespace)
        node.parent.children[int(upper.edge[0])] = upper
        node.edge = node.edge[length:].copy()
        node.start, node.parent = at, upper
        upper.children[int(node.edge[0])] = node
        self.node_count += 1
        return upper

    def merge(self, node: Node[P]) -> Node[P]:
        """Join a node with its only child. Returns the child, which now covers both edges."""
        assert node.parent is not None, "a root cannot be merged"
        assert len(node.children) == 1, len(node.children)
        (child,) = node.children.values()
        child.edge = np.concatenate([node.edge, child.edge])
        child.start, child.parent = node.start, node.parent
        node.parent.children[int(child.edge[0])] = child
        node.parent = None
        node.children = {}
        node.payload = None  # type: ignore[assignment]
        self.node_count -= 1
        return child

    def append(self, parent: Node[P], keys: Keys) -> Node[P]:
        """Add a leaf with a copy of `keys` below `parent`, which may be the temporary root that a miss returned."""
        assert len(keys) > 0, "an edge is never empty"
        if parent.parent is None:
            parent = self.root(parent.namespace)
        edge, first = np.array(keys, np.int64), int(keys[0])
        assert first not in parent.children, (parent, first)
        leaf: Node[P] = Node(edge, parent.end, parent, parent.namespace)
        parent.children[first] = leaf
        self.node_count, self.key_count = self.node_count + 1, self.key_count + len(edge)
        return leaf

    def extend(self, leaf: Node[P], keys: Keys) -> None:
        """Lengthen a leaf's edge by `keys`."""
        assert leaf.is_leaf and not leaf.is_root, leaf
        leaf.edge = np.concatenate([leaf.edge, np.asarray(keys, dtype=np.int64)])
        leaf.end += len(keys)
        self.key_count += len(keys)

    def truncate(self, leaf: Node[P], at: int) -> None:
        """Cut a leaf's edge at offset `at`, inside the edge."""
        assert not leaf.children, leaf
        assert leaf.start < at < leaf.end, (leaf.start, at, leaf.end)
        self.key_count -= leaf.end - at
        leaf.edge = leaf.edge[: at - leaf.start].copy()
        leaf.end = at

    def remove(self, leaf: Node[P]) -> Node[P]:
        """Take a leaf out and return its former parent. The last node of a namespace removes the namespace."""
        parent = leaf.parent
        assert parent is not None and not leaf.children, leaf
        del parent.children[leaf.edge.item(0)]
        leaf.parent = None
        leaf.payload = None  # type: ignore[assignment]
        self.node_count -= 1
        self.key_count -= leaf.end - leaf.start
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.namespace, None)
        return parent

    def nodes(self, namespace: str | None = None) -> Iterator[Node[P]]:
        """All nodes except the roots: parents before children, siblings in the order of insertion."""
        for root in self.roots(namespace):
            yield from below(root)

    def roots(self, namespace: str | None = None) -> list[Node[P]]:
        """The roots of all namespaces that hold nodes, or of one."""
        names = list(self._roots) if namespace is None else [namespace]
        return [self._roots[name] for name in names if name in self._roots]

    def check(self) -> None:
        """Assert T1 to T5."""
        node_count = key_count = 0
        for name, root in self._roots.items():
            assert root.parent is None and len(root.edge) == 0 and root.start == 0, root
            for node in (root, *below(root)):
                node_count += node is not root
                key_count += len(node.edge)
                assert node.namespace == name, (node, node.namespace, name)
                assert node.edge.dtype == np.int64 and node.edge.ndim == 1 and node.edge.base is None, node
                assert node.end == node.start + len(node.edge), node
                for key, child in node.children.items():
                    assert child.parent is node and child.start == node.end, (child, node)
                    assert len(child.edge) > 0 and int(child.edge[0]) == key, (child, key)
        assert (node_count, key_count) == (self.node_count, self.key_count), (node_count, key_count)

    def dump(self, label: Callable[[Node[P]], str] = repr, namespace: str | None = None) -> str:
        """All trees, or that of one namespace, as text: one line per node, indented by depth up to `MOST_INDENT`."""
        lines: list[str] = []
        for root in self.roots(namespace):
            lines.append(f"namespace {root.namespace!r}")
            depth = {id(root): 0}
            for node in below(root):
                depth[id(node)] = depth[id(node.parent)] + 1
                deep = f"depth {depth[id(node)]}: " if depth[id(node)] > MOST_INDENT else ""
                lines.append("  " * min(depth[id(node)], MOST_INDENT) + deep + label(node))
        return "\n".join(lines)


def below(node: Node[Any]) -> Iterator[Node[Any]]:
    """The nodes strictly below `node`, parents before children."""
    stack = list(reversed(node.children.values()))
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children.values()))
