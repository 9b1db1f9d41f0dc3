"""page: a description as one HTML page that needs nothing from elsewhere.

The nodes are in the page as JSON and become elements when their parent is expanded, so a large tree loads at once.
Text of prompts is made visible here (no control, format or bidi character is left), is JSON without a `<` in the page,
and comes onto it as text, never as markup. The page's own policy lets no other script or style in, and no request out.

render_view: the description of a tree in one of FORMATS.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from html import escape
from importlib import resources
from typing import Any

from radixcache.observe.picture import picture
from radixcache.observe.tree_view import TreeView
from radixcache.observe.words import (
    NodeLine,
    about_words,
    choose,
    more_words,
    place_words,
    text,
    total_words,
    visible,
    whole_text,
)


def page(view: TreeView, max_nodes: int) -> str:
    """The tree as an HTML document."""
    # ASCII, so that lone surrogates too are spelled out; without "<" nothing in it can end the element.
    embedded = json.dumps(tree_data(view, max_nodes), separators=(",", ":")).replace("<", "\\u003c")
    about = f"<p>{escape(about_words(view))}</p>" if view.about else ""
    body = f"""{tree_markup(total_words(view), about)}
<noscript>Nodes are drawn by a script, which is switched off here.</noscript>
<script type="application/json" id="tree">{embedded}</script>"""
    return document("Prefix tree", body, page_file("page.css"), page_file("page.js"))


def document(title: str, body: str, style: str, script: str, more_policy: str = "") -> str:
    """An HTML document whose policy, to which `more_policy` is added, lets in no other style or script."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(style, script)}{more_policy}">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{title}</title>\n<style>{style}</style></head>\n<body>{body}\n"
        f"<script>{script}</script></body></html>\n"
    )


def content_policy(style: str, script: str) -> str:
    """A Content-Security-Policy: this style and this script, and nothing else."""
    return f"default-src 'none'; script-src 'sha256-{_sha256(script)}'; style-src 'sha256-{_sha256(style)}'"


def tree_markup(totals: str = "", about: str = "") -> str:
    """What page.js fills and works on: heading, legend, tools, and the place of the rows."""
    legend = "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name in _LEGEND.items())
    return (
        f'<header><h1>Prefix tree</h1><p id="totals">{escape(totals)}</p>{about}\n'
        f'<p class="legend">{legend}</p>\n'
        '<p class="tools"><input id="search" type="search" placeholder="Search text, names, checkpoints" '
        'aria-label="Search"><button id="next">Next</button><button id="open">Expand all</button>'
        '<button id="close">Collapse all</button><span id="found" role="status"></span></p></header>\n'
        '<div class="row head"><span class="what">node</span><span>from \u2013 to</span><span>tokens</span>'
        '<span>bytes</span><span class="axis" id="axis"></span></div>\n<main id="rows"></main>'
    )


def tree_data(view: TreeView, max_nodes: int) -> dict[str, Any]:
    """What page.js shows, as values that JSON has. Text in it is visible, and yet to be shown as text alone."""
    return {"longest": max((node.end for node in view.nodes), default=1), "rows": _rows(view, max_nodes)}


def page_file(name: str, package: str = "radixcache.observe") -> str:
    """A file that goes into a page."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


_LEGEND = {
    "bar live": "live", "bar paged": "paged", "bar both": "both",
    "checkpoint": "checkpoint", "pin": "pinned", "bar open": "in use",
}  # fmt: skip


def _rows(view: TreeView, max_nodes: int) -> list[list[Any]]:
    """What the script reads: [parent, kind, depth, start, ...]; named namespaces are rows of their own."""
    rows: list[list[Any]] = []
    number_of = {-1: -1}  # by the number among the lines; of what has no parent it is the heading
    for number, row in enumerate(choose(view, max_nodes)):
        if row.heading is not None:
            number_of[-1] = len(rows)
            rows.append([-1, "namespace", 0, 0, row.heading])
        number_of[number] = len(rows)
        rows.append([number_of[row.parent], *_cells(row, view.slot_count)])
    return rows


def _cells(row: NodeLine, slot_count: int) -> list[Any]:
    node = row.node
    if node is None:
        return ["more", row.depth, row.start, more_words(row.left_out)]
    text = whole_text(node) if node.text is not None else None
    state = [node.residency, place_words(node, slot_count), node.span_bytes]
    checkpoint = [visible(node.checkpoint), node.checkpoint_bytes]
    pins = [visible(name) for name in node.pin_names] if node.pin_names or node.is_pinned else None
    counts = [node.is_open, node.uses, node.last_used, node.below, node.below_tokens, node.below_bytes]
    return ["node", row.depth, node.start, text, node.end, *state, *checkpoint, pins, *counts]


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


#: How a description can be shown, and how many nodes each shows unless told otherwise.
FORMATS: dict[str, int] = {"text": 200, "svg": 200, "html": 50_000, "json": 1 << 62}

_RENDERERS: dict[str, Callable[[TreeView, int], str]] = {
    "text": text,
    "svg": picture,
    "html": page,
    "json": lambda view, _: view.to_json(),
}


def render_view(view: TreeView, format: str = "text", max_nodes: int | None = None) -> str:
    """Show a description.

    Args:
        format: a key of FORMATS. A picture is SVG, a page HTML that needs nothing from elsewhere.
        max_nodes: nodes shown; those with the most tokens behind them are, the rest is counted where it hangs. JSON
            has all of them.

    Raises:
        ValueError: a format that is not known, or max_nodes below 1.
    """
    if format not in _RENDERERS:
        raise ValueError(f"format is {format!r}; wanted one of {', '.join(FORMATS)}.")
    if max_nodes is not None and (isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or max_nodes < 1):
        raise ValueError(f"max_nodes is {max_nodes!r}; wanted a whole number of nodes, 1 or more.")
    return _RENDERERS[format](view, FORMATS[format] if max_nodes is None else max_nodes)
