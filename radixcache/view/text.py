"""text: a description as lines, one a node, an only child straight under its parent."""

from __future__ import annotations

from radixcache.view.choice import Line, choose
from radixcache.view.description import TreeView
from radixcache.view.words import about_words, more_words, node_words, text_words, total_words

#: Characters of a node's text.
TEXT_CHARACTERS = 60


def text(view: TreeView, max_nodes: int) -> str:
    """The tree as lines that end without a newline."""
    rows = choose(view, max_nodes)
    lines = [total_words(view), *([about_words(view)] if view.about else [])]
    before: dict[int, str] = {}  # what stands before the children of a row
    for number, row in enumerate(rows):
        if row.heading is not None:
            lines.append(f"namespace {row.heading!r}")
        indent = before.get(row.parent, "")
        branch = after = ""
        if row.parent >= 0 and row.depth > rows[row.parent].depth:
            branch, after = ("\u2514\u2500 ", "   ") if row.is_last else ("\u251c\u2500 ", "\u2502  ")
        before[number] = indent + after
        lines.append(indent + branch + _line(row, view.slot_count))
    return "\n".join(lines)


def _line(row: Line, slot_count: int) -> str:
    if row.node is None:
        return f"\u2026 {more_words(row.left_out)}"
    shown = text_words(row.node, TEXT_CHARACTERS)
    return "  ".join([*node_words(row.node, slot_count), *([f'"{shown}"'] if shown else [])])
