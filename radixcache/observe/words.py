"""Words: numbers, nodes and text of prompts for people, and a TreeView as lines of text.

Text of prompts is hostile: `visible` removes what acts on a terminal or a page. `choose` picks the nodes that are shown
of a large tree. `text` writes a line for each node, an only child straight under its parent; below `MOST_DEPTH`
branchings it writes their number instead of a wider indent, so that its length is O(nodes).
"""

from __future__ import annotations

import heapq
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from radixcache.observe.tree_view import NodeView, TreeView

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SHORT = {"\n": "\u21b5", "\t": "\u21e5"}
#: Categories of invisible characters: control, format (with bidi marks), surrogates, private use, unassigned, line and
#: paragraph separators.
_UNSHOWN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
#: Characters of a node's text in a line.
TEXT_CHARACTERS = 60
#: With fewer columns left in a line, the text gets a line of its own.
LEAST_TEXT = 16
MOST_DEPTH = 40


def bytes_words(nbytes: int) -> str:
    """1,536 as "1.5 KiB"."""
    if nbytes < 1024:
        return f"{nbytes:,} {'byte' if nbytes == 1 else 'bytes'}"
    value, unit = float(nbytes), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.1f} {_UNITS[unit]}"


def tokens_words(tokens: int) -> str:
    """1,234,567 as "1.23 M tokens"."""
    return "1 token" if tokens == 1 else f"{tokens:,} tokens" if tokens < 1e6 else f"{tokens / 1e6:,.2f} M tokens"


def _held(what: str, nodes: int, tokens: int, nbytes: int) -> str:
    return f"{nodes:,} {what}{'' if nodes == 1 else 's'}, {tokens_words(tokens)}, {bytes_words(nbytes)}"


def more_words(nodes: Sequence[NodeView]) -> str:
    """Nodes that are not shown: "312 more nodes, 1.2 M tokens, 3.4 GiB"."""
    counts = ((1 + n.below, n.tokens + n.below_tokens, n.nbytes + n.below_bytes) for n in nodes)
    return _held("more node", *map(sum, zip(*counts, strict=True)))


def total_words(view: TreeView) -> str:
    """Nodes, tokens and bytes of a tree, with the bytes of each place."""
    if not view.nodes:
        return "The tree is empty."
    by_place = {"live": 0, "live and paged": 0, "paged": 0}
    for node in view.nodes:
        by_place["live and paged" if node.residency == "both" else node.residency] += node.span_bytes
    by_place["windows"] = sum(node.window_bytes for node in view.nodes)
    by_place["checkpoints"] = sum(node.checkpoint_bytes for node in view.nodes)
    places = ", ".join(f"{bytes_words(nbytes)} {place}" for place, nbytes in by_place.items() if nbytes)
    held = _held("node", len(view.nodes), view.tokens, view.nbytes)
    return f"{held} ({places})" if places else held


def about_words(view: TreeView) -> str:
    return ", ".join(f"{name} {visible(value)}" for name, value in view.about)


def node_words(node: NodeView, slot_count: int) -> list[str]:
    """Span, tokens, bytes and place of a node, then its checkpoint, pins and sessions."""
    words = [f"[{node.start:,}, {node.end:,})", tokens_words(node.tokens), bytes_words(node.span_bytes)]
    words.append(place_words(node, slot_count))
    if node.checkpoint:
        words.append(f"checkpoint ({visible(node.checkpoint)}, {bytes_words(node.checkpoint_bytes)})")
    if node.pin_names:
        words.append("pinned as " + ", ".join(visible(name) for name in node.pin_names))
    elif node.is_pinned:
        words.append("pinned")
    if node.is_open:
        words.append("in use")
    return words


def place_words(node: NodeView, slot_count: int) -> str:
    """Live (and in which slots), paged, or both; and the tokens with stored windows."""
    live = "live" if slot_count == 1 or not node.slots else f"live in {', '.join(map(str, node.slots))}"
    place = {"live": live, "paged": "paged", "both": f"{live} and paged"}[node.residency]
    ranges = ", ".join(f"[{start:,}, {end:,})" for start, end in node.windows)
    return f"{place}, windows of {ranges} ({bytes_words(node.window_bytes)})" if ranges else place


def text_words(node: NodeView, columns: int) -> str:
    """The text of a node in at most so many columns, or ""."""
    return "" if node.text is None else fit(whole_text(node), columns)


def whole_text(node: NodeView) -> str:
    text = node.text or ""
    return visible(text if node.text_end is None else f"{text} \u2026 {node.text_end}")


def fit(text: str, columns: int) -> str:
    """Cut a text to so many columns; wide characters take two."""
    left = columns
    for index, character in enumerate(text):
        left -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if left < 1 and (left < 0 or index + 1 < len(text)):
            return text[:index].rstrip() + "\u2026"
    return text


def visible(text: str) -> str:
    """Text with line ends and tabs as signs, and other invisible characters as numbers."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_SHORT.get(c) or (_number(c) if unicodedata.category(c) in _UNSHOWN else c) for c in text)


def _number(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A line: a node, or the nodes that are left out below one.

    Attributes:
        node: None: this line is for nodes that are left out.
        left_out: the topmost of those nodes.
        parent: row of the parent, -1 at the top.
        heading: visible name of the namespace that starts here; None: none starts, or it has no name.
        depth: number of branchings above.
        start: offset of its first token.
    """

    node: NodeView | None
    left_out: tuple[NodeView, ...]
    parent: int
    heading: str | None
    depth: int
    start: int
    is_last: bool


def choose(view: TreeView, max_nodes: int) -> list[NodeLine]:
    """Lines for so many nodes, parents before children; the nodes left out below a node make its last line.

    Pinned nodes and nodes in use are chosen first, then those with the most tokens, each only below its parent. A
    single leaf is not left out, as that would take a line too.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(view.nodes):
        children[node.parent].append(index)
    chosen = _chosen(view.nodes, children, max_nodes)
    rows: list[NodeLine] = []
    stack: list[tuple[int, NodeLine]] = []

    def push(above: int, depth: int, siblings: list[int], heading: str | None) -> None:
        shown = [index for index in siblings if index in chosen]
        rest = [index for index in siblings if index not in chosen]
        if len(rest) == 1 and not view.nodes[rest[0]].below:
            shown, rest = shown + rest, []
        lines: list[tuple[int, NodeView | None, tuple[NodeView, ...]]]
        lines = [(index, view.nodes[index], ()) for index in shown]
        lines += [(-1, None, tuple(view.nodes[index] for index in rest))] if rest else []
        start, row = (view.nodes[above].end, len(rows) - 1) if above >= 0 else (0, -1)
        depth += above >= 0 and len(lines) > 1
        for place, (index, node, left_out) in reversed(list(enumerate(lines))):
            name = None if place else heading
            stack.append((index, NodeLine(node, left_out, row, name, depth, start, place == len(lines) - 1)))

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


def text(view: TreeView, max_nodes: int, columns: int | None = None) -> str:
    """The tree as lines, without a final newline; longer nodes take more lines if there are so many columns."""
    rows = choose(view, max_nodes)
    heads = [total_words(view), *([about_words(view)] if view.about else [])]
    lines = [line for head in heads for line in _filled(head.split(", "), ", ", "", "  ", columns)]
    before: dict[int, str] = {}  # the indent of the children of a row
    for number, row in enumerate(rows):
        if row.heading is not None:
            lines.append(f"namespace {row.heading!r}")
        indent = before.get(row.parent, "")
        branch = after = ""
        if row.parent >= 0 and row.depth > rows[row.parent].depth:
            branch, after = ("\u2514\u2500 ", "   ") if row.is_last else ("\u251c\u2500 ", "\u2502  ")
            if row.depth > MOST_DEPTH:
                branch, after = f"{branch}depth {row.depth:,}: ", ""
        before[number] = indent + after
        lines += _node_lines(row, view.slot_count, indent + branch, indent + after, columns)
    return "\n".join(lines)


def _node_lines(row: NodeLine, slot_count: int, before: str, after: str, columns: int | None) -> list[str]:
    if row.node is None:
        return _filled([f"\u2026 {more_words(row.left_out)}"], "", before, after, columns)
    lines = _filled(node_words(row.node, slot_count), "  ", before, after + "  ", columns)
    if not row.node.text:
        return lines
    if columns is not None and columns - len(lines[-1]) < LEAST_TEXT:
        lines.append(after)
    left = TEXT_CHARACTERS if columns is None else max(LEAST_TEXT, columns - len(lines[-1])) - len('  ""')
    lines[-1] += f'  "{text_words(row.node, min(left, TEXT_CHARACTERS))}"'
    return lines


def _filled(parts: Sequence[str], between: str, before: str, after: str, columns: int | None) -> list[str]:
    """Join parts into lines of so many columns. The first line begins with `before`, the others with `after`."""
    lines = [before + parts[0]]
    for part in parts[1:]:
        if columns is None or len(lines[-1] + between + part) <= columns:
            lines[-1] += between + part
        else:
            lines[-1] += between.rstrip()
            lines.append(after + part)
    return lines
