"""choose: which nodes of a large tree are shown, and what the others come to."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from radixcache.view.description import NodeView, TreeView


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a drawing: a node, or what is left out below one.

    Attributes:
        node: the node; None for what is left out.
        left_out: the topmost nodes of what is left out here; empty for a node.
        parent: row of the parent, -1 at the top.
        namespace: index of the namespace.
        depth: branchings above: an only child stands under its parent.
        start: offset at which it begins.
        is_last: no sibling comes after it.
    """

    node: NodeView | None
    left_out: tuple[NodeView, ...]
    parent: int
    namespace: int
    depth: int
    start: int
    is_last: bool


def choose(view: TreeView, max_nodes: int) -> list[Row]:
    """Rows for so many nodes, parents before children, each with what is left out below it as its last child.

    A node is shown only below its parent. Pinned ones and those in use come first, then those with the most tokens. A
    single leaf that would be left out is shown all the same, in the row that would say so.
    """
    children = _children(view)
    chosen = _chosen(view, children, max_nodes)
    rows: list[Row] = []
    stack: list[tuple[int | tuple[int, ...], int, int, int, bool]] = []

    def push(parent: int, row: int, depth: int, siblings: list[int]) -> None:
        shown = [index for index in siblings if index in chosen]
        rest = tuple(index for index in siblings if index not in chosen)
        if len(rest) == 1 and not view.nodes[rest[0]].below:
            shown, rest = [*shown, *rest], ()  # it takes the line that would say that it is left out
        entries: list[int | tuple[int, ...]] = [*shown, *([rest] if rest else [])]
        below = depth + 1 if parent >= 0 and len(entries) > 1 else depth
        start = view.nodes[parent].end if parent >= 0 else 0
        for place in reversed(range(len(entries))):
            stack.append((entries[place], row, below, start, place == len(entries) - 1))

    by_namespace: dict[int, list[int]] = {}
    for top in children.get(-1, ()):
        by_namespace.setdefault(view.nodes[top].namespace, []).append(top)
    for tops in reversed(by_namespace.values()):
        push(-1, -1, 0, tops)
    while stack:
        entry, parent_row, depth, start, is_last = stack.pop()
        if isinstance(entry, tuple):
            left_out = tuple(view.nodes[index] for index in entry)
            rows.append(Row(None, left_out, parent_row, left_out[0].namespace, depth, start, is_last))
            continue
        node = view.nodes[entry]
        rows.append(Row(node, (), parent_row, node.namespace, depth, start, is_last))
        push(entry, len(rows) - 1, depth, children.get(entry, []))
    return rows


def _children(view: TreeView) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for index, node in enumerate(view.nodes):
        children.setdefault(node.parent, []).append(index)
    return children


def _chosen(view: TreeView, children: dict[int, list[int]], max_nodes: int) -> set[int]:
    if len(view.nodes) <= max_nodes:
        return set(range(len(view.nodes)))
    wanted: set[int] = set()
    for index, node in enumerate(view.nodes):
        if node.is_pinned or node.is_open:
            while index >= 0 and index not in wanted:
                wanted.add(index)
                index = view.nodes[index].parent

    def rank(index: int) -> tuple[bool, int, int]:
        node = view.nodes[index]
        return index not in wanted, -(node.tokens + node.below_tokens), index

    heap = [rank(index) for index in children.get(-1, ())]
    heapq.heapify(heap)
    chosen: set[int] = set()
    while heap and len(chosen) < max_nodes:
        *_, index = heapq.heappop(heap)
        chosen.add(index)
        for child in children.get(index, ()):
            heapq.heappush(heap, rank(child))
    return chosen
