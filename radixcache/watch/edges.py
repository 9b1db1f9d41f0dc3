"""Edges: which prefixes a cache has stored, as the keys of its tree. Never imports MLX.

An edge's keys are the array that the tree has, which is replaced and never written: to be read, not changed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from radixcache.tokens.keys import Keys
from radixcache.tree.radix_tree import RadixTree, below


class Edge(NamedTuple):
    """A run of keys behind another edge.

    Attributes:
        parent: index of the edge before it, which comes earlier; -1: it begins a sequence of `namespace`.
        keys: (T,) int64, one for each token.
    """

    namespace: str
    parent: int
    keys: Keys


def edges_of(lock: AbstractContextManager[Any], tree: RadixTree[Any]) -> list[Edge]:
    """The edges of all namespaces, parents before children. Takes the lock for O(edges), and copies no keys."""
    edges: list[Edge] = []
    with lock:
        for root in tree.roots():
            places = {id(root): -1}
            for node in below(root):
                places[id(node)] = len(edges)
                edges.append(Edge(root.namespace, places[id(node.parent)], node.edge))
    return edges
