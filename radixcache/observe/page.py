"""render_view: a TreeView as text, as an SVG picture, as an HTML page, or as JSON.

The picture has a row for each node. Its bar lies along the axis of tokens; children start where their parent ends.

    0        100       200
    ██████████████                    [0, 140)    the parent
                 ┝━━━━━━━━ ...        [140, 220)  a child starts where its parent ends
                 ┕━━━ ...             [140, 170)

Orange is live, blue is paged, half and half is both. A diamond is a checkpoint, a red pin is a pin. The colours follow
the light or dark scheme of the reader, and colour-blind readers can tell them apart.

The page is one file. It holds the nodes as JSON, and makes the elements of a node when its parent is expanded. So a
large tree loads at once. Text of prompts is hostile: it has no control, format or bidi character, no `<` in the JSON,
and is shown as text, never as markup. The policy of the page allows no other script or style, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from html import escape
from importlib import resources
from typing import Any

from radixcache.observe import words
from radixcache.observe.tree_view import NodeView, TreeView
from radixcache.observe.words import NodeLine

#: The formats, and how many nodes each shows by default.
FORMATS: dict[str, int] = {"text": 200, "svg": 200, "html": 50_000, "json": 1 << 62}

WIDTH, MARGIN, AXIS_WIDTH, HEAD_HEIGHT = 1240, 24, 560, 112
ROW_HEIGHT, BAR_HEIGHT = 24, 14
#: Average width of a character in the small type.
COLUMN_WIDTH = 6.8


def render_view(view: TreeView, format: str = "text", max_nodes: int | None = None, columns: int | None = None) -> str:
    """Show a view.

    Args:
        format: a key of FORMATS.
        max_nodes: how many nodes to show, those with the most tokens first; the rest are counted. JSON has all nodes.
        columns: width of the text format; None: a line per node, however long.

    Raises:
        ValueError: the format is unknown, or max_nodes is below 1.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; wanted one of {', '.join(FORMATS)}.")
    if max_nodes is not None and (isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or max_nodes < 1):
        raise ValueError(f"max_nodes is {max_nodes!r}; wanted a whole number of nodes, 1 or more.")
    most = FORMATS[format] if max_nodes is None else max_nodes
    return words.text(view, most, columns) if format == "text" else _RENDERERS[format](view, most)


def page(view: TreeView, max_nodes: int) -> str:
    # ASCII escapes lone surrogates too; without "<" no text can end the element.
    embedded = json.dumps(tree_data(view, max_nodes), separators=(",", ":")).replace("<", "\\u003c")
    about = f"<p>{escape(words.about_words(view))}</p>" if view.about else ""
    body = f"""{tree_markup(words.total_words(view), about)}
<noscript>Nodes are drawn by a script, which is switched off here.</noscript>
<script type="application/json" id="tree">{embedded}</script>"""
    return document("Prefix tree", body, page_file("page.css"), page_file("page.js"))


def document(title: str, body: str, style: str, script: str, more_policy: str = "") -> str:
    """An HTML document whose policy, with `more_policy` added, allows no other style or script."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(style, script)}{more_policy}">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{title}</title>\n<style>{style}</style></head>\n<body>{body}\n"
        f"<script>{script}</script></body></html>\n"
    )


def content_policy(style: str, script: str) -> str:
    """A Content-Security-Policy that allows this style and this script, and nothing else."""
    style, script = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (style, script))
    return f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'"


def tree_markup(totals: str = "", about: str = "") -> str:
    """The elements that page.js fills: heading, legend, tools, and the place of the rows."""
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


def page_file(name: str, package: str = "radixcache.observe") -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


_LEGEND = {
    "bar live": "live", "bar paged": "paged", "bar both": "both",
    "checkpoint": "checkpoint", "pin": "pinned", "bar open": "in use",
}  # fmt: skip


def tree_data(view: TreeView, max_nodes: int) -> dict[str, Any]:
    """Rows [parent, kind, depth, start, ...] for page.js as JSON values; a named namespace has a row of its own."""
    rows: list[list[Any]] = []
    number_of = {-1: -1}  # row numbers by line number; -1 is the heading
    for number, row in enumerate(words.choose(view, max_nodes)):
        if row.heading is not None:
            number_of[-1] = len(rows)
            rows.append([-1, "namespace", 0, 0, row.heading])
        number_of[number] = len(rows)
        rows.append([number_of[row.parent], *_cells(row, view.slot_count)])
    return {"longest": max((node.end for node in view.nodes), default=1), "rows": rows}


def _cells(row: NodeLine, slot_count: int) -> list[Any]:
    node = row.node
    if node is None:
        return ["more", row.depth, row.start, words.more_words(row.left_out)]
    text = words.whole_text(node) if node.text is not None else None
    state = [node.residency, words.place_words(node, slot_count), node.span_bytes]
    checkpoint = [words.visible(node.checkpoint), node.checkpoint_bytes]
    pins = [words.visible(name) for name in node.pin_names] if node.pin_names or node.is_pinned else None
    counts = [node.is_open, node.uses, node.last_used, node.below, node.below_tokens, node.below_bytes]
    return ["node", row.depth, node.start, text, node.end, *state, *checkpoint, pins, *counts]


def picture(view: TreeView, max_nodes: int) -> str:
    rows = words.choose(view, max_nodes)
    longest = max((node.end for node in view.nodes), default=1)
    scale = AXIS_WIDTH / longest
    lines, body, y = [], [], float(HEAD_HEIGHT)
    y_of: list[float] = []
    for row in rows:
        if row.heading is not None:
            name = escape(repr(words.fit(row.heading, 120)))
            body.append(f'<text x="{MARGIN}" y="{y + 16:g}" class="soft">namespace {name}</text>')
            y += ROW_HEIGHT
        y_of.append(y)
        if row.parent >= 0:
            x, top = MARGIN + row.start * scale, y_of[row.parent] + ROW_HEIGHT / 2 + BAR_HEIGHT / 2
            lines.append(f'<path class="join" d="M{x:.1f} {top:.1f}V{y + ROW_HEIGHT / 2:.1f}"/>')
        body.append(_drawn_node(row.node, y, scale, view.slot_count) if row.node else _more(row, y, scale))
        y += ROW_HEIGHT
    height = y + MARGIN
    drawn = "\n".join([*_head(view, longest, scale, height), *lines, *body])
    style = page_file("picture.css").strip()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img" aria-label="{escape(words.total_words(view))}">\n<style>{style}</style>\n'
        f'<rect class="ground" width="{WIDTH}" height="{height:g}"/>\n{drawn}\n</svg>\n'
    )


def _head(view: TreeView, longest: int, scale: float, height: float) -> list[str]:
    parts = [
        f'<text x="{MARGIN}" y="34" class="title">Prefix tree</text>',
        f'<text x="{MARGIN + 116}" y="34">{escape(words.total_words(view))}</text>',
        f'<text x="{MARGIN}" y="54" class="soft">{escape(words.fit(words.about_words(view), 180))}</text>',
    ]
    x = float(MARGIN)
    for name, sign in _PICTURE_LEGEND:
        parts.append(f'<g transform="translate({x:g} 66)">{sign}<text x="26" y="11" class="soft">{name}</text></g>')
        x += 40 + len(name) * COLUMN_WIDTH
    for tick in range(0, longest + 1, tick_step(longest)) if view.nodes else ():
        at = MARGIN + tick * scale
        anchor, label = ("middle", f"{tick:,}") if tick else ("start", "0 tokens")
        parts.append(f'<path class="line" d="M{at:.1f} {HEAD_HEIGHT - 6}V{height - MARGIN + 4:g}" opacity=".6"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEAD_HEIGHT - 11}" class="soft" text-anchor="{anchor}">{label}</text>')
    return parts


def tick_step(longest: int) -> int:
    """A round number of tokens that gives the axis four to ten ticks."""
    step = 1  # then 2, 5, 10, 20, 50 ...
    while longest > 8 * step:
        step = step // 2 * 5 if str(step)[0] == "2" else step * 2
    return step


def _drawn_node(node: NodeView, y: float, scale: float, slot_count: int) -> str:
    x, width = MARGIN + node.start * scale, max(2.0, node.tokens * scale)
    top = y + (ROW_HEIGHT - BAR_HEIGHT) / 2
    parts = [_bar(x, top, width, node)]
    if node.is_open:
        parts.append(f'<rect class="open" x="{x:.1f}" y="{top:g}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="3"/>')
    at, middle = x + width + 8, y + ROW_HEIGHT / 2
    if node.checkpoint:
        parts.append(f'<path class="mark" d="M{at:.1f} {middle:g}l5 -5 5 5 -5 5z"/>')
        at += 15
    if node.is_pinned:
        parts.append(f'<path class="pin" d="{_pin(at + 4, middle)}"/>')
        at += 14
    span, tokens, nbytes, *facts = words.node_words(node, slot_count)
    label = f"{span}  {tokens}, {words.bytes_words(node.nbytes)}"
    names = words.fit(f" {', '.join(map(words.visible, node.pin_names))}", 40) if node.pin_names else ""
    columns = int((WIDTH - MARGIN - at) / COLUMN_WIDTH)
    shown = words.text_words(node, max(8, columns - len(label) - len(names) - 3))
    label = f'<tspan font-weight="600">{label}</tspan>'
    label += f'<tspan class="pin">{escape(names)}</tspan>' if names else ""
    label += f'<tspan dx="10" class="text">{escape(shown)}</tspan>' if shown else ""
    parts.append(f'<text x="{at:.1f}" y="{middle + 4:g}">{label}</text>')
    facts = [f"{span} {tokens}, {nbytes}", *facts, f"used {node.uses} times, last at tick {node.last_used}"]
    title = escape("\n".join([*facts, *([words.text_words(node, 400)] if node.text else [])]))
    return f"<g><title>{title}</title>{''.join(parts)}</g>"


def _bar(x: float, y: float, width: float, node: NodeView) -> str:
    place = f'x="{x:.1f}" width="{width:.1f}"'
    if node.residency != "both":
        return f'<rect class="{node.residency}" {place} y="{y:g}" height="{BAR_HEIGHT}" rx="{min(3, width / 2):g}"/>'
    half = BAR_HEIGHT / 2
    live = f'<rect class="live" {place} y="{y:g}" height="{half:g}"/>'
    return f'{live}<rect class="paged" {place} y="{y + half:g}" height="{half:g}"/>'


def _more(row: NodeLine, y: float, scale: float) -> str:
    x, middle = MARGIN + row.start * scale, y + ROW_HEIGHT / 2
    label = escape(words.more_words(row.left_out))
    rest = f'<rect class="rest" x="{x + 0.5:.1f}" y="{middle - 5:g}" width="26" height="10" rx="3"/>'
    return f'{rest}<text class="more" x="{x + 36:.1f}" y="{middle + 4:g}">{label}</text>'


def _pin(x: float, y: float) -> str:
    return f"M{x:.1f} {y + 7:g}l-3.6 -7a4 4 0 1 1 7.2 0z"


_PICTURE_LEGEND = (
    ("live", '<rect class="live" width="20" height="14" rx="3"/>'),
    ("paged", '<rect class="paged" width="20" height="14" rx="3"/>'),
    ("both", '<rect class="live" width="20" height="7"/><rect class="paged" y="7" width="20" height="7"/>'),
    ("checkpoint", '<path class="mark" d="M8 7l5 -5 5 5 -5 5z"/>'),
    ("pinned", f'<path class="pin" d="{_pin(13, 6)}"/>'),
    ("in use", '<rect class="open" x="1" y="1" width="18" height="12" rx="3"/>'),
    ("left out", '<rect class="rest" x="0.5" y="2" width="19" height="10" rx="3"/>'),
)


_RENDERERS: dict[str, Callable[[TreeView, int], str]] = {
    "svg": picture,
    "html": page,
    "json": lambda view, _: view.to_json(),
}
