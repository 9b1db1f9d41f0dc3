"""text: a description as lines, one a node, an only child straight under its parent."""

from __future__ import annotations

from radixcache.view.choice import Row, choose
from radixcache.view.description import TreeView
from radixcache.view.words import (
    about_words,
    bytes_words,
    mark_words,
    more_words,
    place_words,
    text_words,
    tokens_words,
    total_words,
    visible,
)

#: Characters of a node's text.
TEXT_CHARACTERS = 60


def text(view: TreeView, max_nodes: int) -> str:
    """The tree as lines that end without a newline."""
    rows = choose(view, max_nodes)
    has_names = len(view.namespaces) > 1 or any(view.namespaces)
    lines = [total_words(view)]
    if view.about:
        lines.append(about_words(view))
    before: dict[int, str] = {}  # what stands before the children of a row
    namespace = -1
    for number, row in enumerate(rows):
        if has_names and row.namespace != namespace:
            lines.append(f"namespace {visible(view.namespaces[row.namespace])!r}")
        namespace = row.namespace
        indent = before.get(row.parent, "")
        branch = ""
        if row.parent >= 0 and row.depth > rows[row.parent].depth:
            branch = "\u2514\u2500 " if row.is_last else "\u251c\u2500 "
        after = "" if not branch else "   " if row.is_last else "\u2502  "
        before[number] = indent + after
        lines.append(indent + branch + _line(row, view.slot_count))
    return "\n".join(lines)


def _line(row: Row, slot_count: int) -> str:
    node = row.node
    if node is None:
        return f"\u2026 {more_words(row.left_out)}"
    parts = [
        f"[{node.start:,}, {node.end:,})",
        tokens_words(node.tokens),
        bytes_words(node.span_bytes),
        place_words(node, slot_count),
        *mark_words(node),
    ]
    shown = text_words(node, TEXT_CHARACTERS)
    return "  ".join([*parts, f'"{shown}"'] if shown else parts)
