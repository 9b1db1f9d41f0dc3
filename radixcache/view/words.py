"""Numbers and text as people read them. Text of prompts is hostile: nothing of it may act on what shows it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from radixcache.view.description import NodeView, TreeView

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SHORT = {"\n": "\u21b5", "\t": "\u21e5"}
#: Categories of characters that do something instead of showing: control, format (bidi marks among them), surrogates,
#: private use, unassigned, line and paragraph separators.
_UNSHOWN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def bytes_words(nbytes: int) -> str:
    """1,536 as "1.5 KiB"."""
    if nbytes < 1024:
        return f"{nbytes:,} {'byte' if nbytes == 1 else 'bytes'}"
    value, unit = float(nbytes), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.1f} {_UNITS[unit]}"


def tokens_words(tokens: int) -> str:
    """12,345 as it is, 1,234,567 as "1.23 M"."""
    return "1 token" if tokens == 1 else f"{tokens:,} tokens" if tokens < 1e6 else f"{tokens / 1e6:,.2f} M tokens"


def _held(what: str, nodes: int, tokens: int, nbytes: int) -> str:
    return f"{nodes:,} {what}{'' if nodes == 1 else 's'}, {tokens_words(tokens)}, {bytes_words(nbytes)}"


def more_words(nodes: Sequence[NodeView]) -> str:
    """What is left out below a node: "312 more nodes, 1.2 M tokens, 3.4 GiB"."""
    tokens = sum(node.tokens + node.below_tokens for node in nodes)
    return _held("more node", sum(1 + n.below for n in nodes), tokens, sum(n.nbytes + n.below_bytes for n in nodes))


def total_words(view: TreeView) -> str:
    """Nodes, tokens and bytes of all, the bytes by where they are."""
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
    """A node's span, tokens, bytes and place, then what marks it: checkpoint, pins and sessions."""
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
    """live, paged or live and paged; of several slots, in which. And of which tokens windows are stored."""
    live = "live" if slot_count == 1 or not node.slots else f"live in {', '.join(map(str, node.slots))}"
    place = {"live": live, "paged": "paged", "both": f"{live} and paged"}[node.residency]
    ranges = ", ".join(f"[{start:,}, {end:,})" for start, end in node.windows)
    return f"{place}, windows of {ranges} ({bytes_words(node.window_bytes)})" if ranges else place


def text_words(node: NodeView, columns: int) -> str:
    """The node's text in one line of at most so many columns; "" without any."""
    return "" if node.text is None else fit(whole_text(node), columns)


def whole_text(node: NodeView) -> str:
    """All that is known of the node's text, made visible."""
    text = node.text or ""
    return visible(text if node.text_end is None else f"{text} \u2026 {node.text_end}")


def fit(text: str, columns: int) -> str:
    """Cut a text to so many columns, of which some characters take two."""
    left = columns
    for index, character in enumerate(text):
        left -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if left < 1 and (left < 0 or index + 1 < len(text)):
            return text[:index].rstrip() + "\u2026"
    return text


def visible(text: str) -> str:
    """Text without anything that acts: line ends and tabs as signs, other control and format characters by number."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_SHORT.get(c) or (_number(c) if unicodedata.category(c) in _UNSHOWN else c) for c in text)


def _number(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
