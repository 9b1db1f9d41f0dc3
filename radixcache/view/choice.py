"""choose: which nodes of a large tree are shown, and what the others come to."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from radixcache.view.description import NodeView, TreeView
from radixcache.view.words import visible


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a drawing: a node, or what is left out below one.

    Attributes:
        node: the node; None for what is left out.
        left_out: the topmost nodes of what is left out here; empty for a node.
        parent: row of the parent, -1 at the top.
        heading: name of the namespace that begins here, made visible; None: none begins, or there is one without name.
        depth: branchings above: an only child stands under its parent.
        start: offset at which it begins.
        is_last: no sibling comes after it.
    """

    node: NodeView | None
    left_out: tuple[NodeView, ...]
    parent: int
    heading: str | None
    depth: int
    start: int
    is_last: bool


def choose(view: TreeView, max_nodes: int) -> list[Line]:
    """Rows for so many nodes, parents before children, each with what is left out below it as its last child.

    A node is shown only below its parent. Pinned ones and those in use come first, then those with the most tokens. A
    single leaf that would be left out is shown all the same, in the row that would say so.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(view.nodes):
        children[node.parent].append(index)
    chosen = _chosen(view.nodes, children, max_nodes)
    rows: list[Line] = []
    stack: list[tuple[int, Line]] = []

    def push(above: int, depth: int, siblings: list[int], heading: str | None) -> None:
        shown = [index for index in siblings if index in chosen]
        rest = [index for index in siblings if index not in chosen]
        if len(rest) == 1 and not view.nodes[rest[0]].below:
            shown, rest = shown + rest, []  # it takes the line that would say that it is left out
        found = [(index, view.nodes[index], ()) for index in shown]
        lines = [*found, *([(-1, None, tuple(view.nodes[index] for index in rest))] if rest else [])]
        start, row = (view.nodes[above].end, len(rows) - 1) if above >= 0 else (0, -1)
        depth += above >= 0 and len(lines) > 1
        for place, (index, node, left_out) in reversed(list(enumerate(lines))):
            name = None if place else heading
            stack.append((index, Line(node, left_out, row, name, depth, start, place == len(lines) - 1)))

    has_names = len(view.namespaces) > 1 or any(view.namespaces)
    tops: defaultdict[int, list[int]] = defaultdict(list)
    for index in children[-1]:
        tops[view.nodes[index].namespace].append(index)
    for namespace in reversed(tops):
        push(-1, 0, tops[namespace], visible(view.namespaces[namespace]) if has_names else None)
    while stack:
        index, line = stack.pop()
        rows.append(line)
        if index >= 0:
            push(index, line.depth, children[index], None)
    return rows


def _chosen(nodes: Sequence[NodeView], children: defaultdict[int, list[int]], max_nodes: int) -> set[int]:
    if len(nodes) <= max_nodes:
        return set(range(len(nodes)))
    wanted: set[int] = set()
    for index, node in enumerate(nodes):
        if node.is_pinned or node.is_open:
            while index >= 0 and index not in wanted:
                wanted.add(index)
                index = nodes[index].parent

    def rank(index: int) -> tuple[bool, int, int]:
        return index not in wanted, -(nodes[index].tokens + nodes[index].below_tokens), index

    heap = [rank(index) for index in children[-1]]
    heapq.heapify(heap)
    chosen: set[int] = set()
    while heap and len(chosen) < max_nodes:
        *_, index = heapq.heappop(heap)
        chosen.add(index)
        for child in children[index]:
            heapq.heappush(heap, rank(child))
    return chosen
