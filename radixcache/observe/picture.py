"""picture: a description as SVG. A row per node, its bar along the axis of tokens, children below where it ends.

    0        100       200
    ██████████████                    [0, 140)    the parent
                 ┝━━━━━━━━ ...        [140, 220)  a child begins where it ends
                 ┕━━━ ...             [140, 170)

Orange is live, blue is paged, half and half is both; a diamond is a checkpoint, a red pin a pin. The colours follow the
reader's light or dark scheme, and differ for colour-blind eyes too.
"""

from __future__ import annotations

from html import escape

from radixcache.observe import words
from radixcache.observe.tree_view import NodeView, TreeView
from radixcache.observe.words import NodeLine, choose

WIDTH = 1240
MARGIN = 24
AXIS_WIDTH = 560
ROW_HEIGHT = 24
BAR_HEIGHT = 14
HEAD_HEIGHT = 112
#: Width of a column of text in the small type, on average.
COLUMN_WIDTH = 6.8

STYLE = """
svg{--ground:#fff;--ink:#1c2128;--soft:#656d76;--line:#d5dae0;--live:#e08a00;--paged:#2f6fd0;--mark:#8250df;--pin:#cf222e;
background:var(--ground);font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
@media (prefers-color-scheme:dark){svg{--ground:#0f1319;--ink:#e6e9ed;--soft:#98a2ad;--line:#30363d;--live:#f0a83c;
--paged:#5c9bf5;--mark:#b78af7;--pin:#ff7b72}}
.ground{fill:var(--ground)}text{fill:var(--ink)}.soft{fill:var(--soft)}.text{fill:var(--soft);unicode-bidi:isolate}
.title{font-size:17px;font-weight:600}.live{fill:var(--live)}.paged{fill:var(--paged)}.mark{fill:var(--mark)}
.pin{fill:var(--pin)}.line{stroke:var(--line);fill:none}.join{stroke:var(--soft);fill:none}
.open{stroke:var(--ink);stroke-width:1.5;fill:none}
.rest{fill:none;stroke:var(--soft);stroke-dasharray:3 3}.more{fill:var(--soft);font-style:italic}
""".strip()


def picture(view: TreeView, max_nodes: int) -> str:
    """The tree as an SVG document."""
    rows = choose(view, max_nodes)
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
        body.append(_node(row.node, y, scale, view.slot_count) if row.node else _more(row, y, scale))
        y += ROW_HEIGHT
    height = y + MARGIN
    drawn = "\n".join([*_head(view, longest, scale, height), *lines, *body])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img" aria-label="{escape(words.total_words(view))}">\n<style>{STYLE}</style>\n'
        f'<rect class="ground" width="{WIDTH}" height="{height:g}"/>\n{drawn}\n</svg>\n'
    )


def _head(view: TreeView, longest: int, scale: float, height: float) -> list[str]:
    parts = [
        f'<text x="{MARGIN}" y="34" class="title">Prefix tree</text>',
        f'<text x="{MARGIN + 116}" y="34">{escape(words.total_words(view))}</text>',
        f'<text x="{MARGIN}" y="54" class="soft">{escape(words.fit(words.about_words(view), 180))}</text>',
    ]
    x = float(MARGIN)
    for name, sign in _LEGEND:
        parts.append(f'<g transform="translate({x:g} 66)">{sign}<text x="26" y="11" class="soft">{name}</text></g>')
        x += 40 + len(name) * COLUMN_WIDTH
    for tick in range(0, longest + 1, tick_step(longest)) if view.nodes else ():
        at = MARGIN + tick * scale
        anchor, label = ("middle", f"{tick:,}") if tick else ("start", "0 tokens")
        parts.append(f'<path class="line" d="M{at:.1f} {HEAD_HEIGHT - 6}V{height - MARGIN + 4:g}" opacity=".6"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEAD_HEIGHT - 11}" class="soft" text-anchor="{anchor}">{label}</text>')
    return parts


def tick_step(longest: int) -> int:
    """A round number of tokens of which the axis has four to ten."""
    step = 1  # then 2, 5, 10, 20, 50 ...
    while longest > 8 * step:
        step = step // 2 * 5 if str(step)[0] == "2" else step * 2
    return step


def _node(node: NodeView, y: float, scale: float, slot_count: int) -> str:
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
    names = words.fit(f" {', '.join(words.visible(name) for name in node.pin_names)}", 40) if node.pin_names else ""
    columns = int((WIDTH - MARGIN - at) / COLUMN_WIDTH)
    shown = words.text_words(node, max(8, columns - len(label) - len(names) - 3))
    label = f'<tspan font-weight="600">{label}</tspan>'
    if names:
        label += f'<tspan class="pin">{escape(names)}</tspan>'
    if shown:
        label += f'<tspan dx="10" class="text">{escape(shown)}</tspan>'
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
    rest = f'<rect class="rest" x="{x + 0.5:.1f}" y="{middle - 5:g}" width="26" height="10" rx="3"/>'
    return (
        f'{rest}<text class="more" x="{x + 36:.1f}" y="{middle + 4:g}">{escape(words.more_words(row.left_out))}</text>'
    )


def _pin(x: float, y: float) -> str:
    """A round head and a point below it."""
    return f"M{x:.1f} {y + 7:g}l-3.6 -7a4 4 0 1 1 7.2 0z"


_LEGEND = (
    ("live", '<rect class="live" width="20" height="14" rx="3"/>'),
    ("paged", '<rect class="paged" width="20" height="14" rx="3"/>'),
    ("both", '<rect class="live" width="20" height="7"/><rect class="paged" y="7" width="20" height="7"/>'),
    ("checkpoint", '<path class="mark" d="M8 7l5 -5 5 5 -5 5z"/>'),
    ("pinned", f'<path class="pin" d="{_pin(13, 6)}"/>'),
    ("in use", '<rect class="open" x="1" y="1" width="18" height="12" rx="3"/>'),
    ("left out", '<rect class="rest" x="0.5" y="2" width="19" height="10" rx="3"/>'),
)
