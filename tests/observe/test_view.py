"""The tree as text, picture, page and JSON, from a plain description."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache.observe.page import FORMATS, render_view
from radixcache.observe.tree_view import NodeView, TreeView, ViewError, read_view
from radixcache.observe.words import bytes_words, choose, fit, tokens_words, visible

HOSTILE = (
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "]]>&<!--",
    "\x00\x07\x1b[31m\x7f\x85\ufffe\uffff",
    "\ud800 \udfff",
    "\u202e reversed \u2066\u200f\u061c",
    "\u2028\u2029\r\n\t",
    "'\"`\\",
)


def node(parent: int, start: int, end: int, **more: Any) -> NodeView:
    values: dict[str, Any] = {"span_bytes": 100 * (end - start), "is_live": False, "is_paged": True, "text": None}
    return NodeView(parent=parent, namespace=0, start=start, end=end, **{**values, **more})


def grown(shape: list[tuple[int, int, dict[str, Any]]], names: tuple[str, ...] = ("",)) -> TreeView:
    """A tree of (parent, tokens, attributes), parents first and each directly followed by what is below it."""
    nodes: list[NodeView] = []
    sums = [[0, 0, 0] for _ in shape]
    for index in reversed(range(len(shape))):
        parent, tokens, _ = shape[index]
        if parent >= 0:
            sums[parent][0] += 1 + sums[index][0]
            sums[parent][1] += tokens + sums[index][1]
            sums[parent][2] += 100 * tokens + sums[index][2]
    for (parent, tokens, more), (below, below_tokens, below_bytes) in zip(shape, sums, strict=True):
        start = nodes[parent].end if parent >= 0 else 0
        counts = {"below": below, "below_tokens": below_tokens, "below_bytes": below_bytes}
        nodes.append(node(parent, start, start + tokens, **counts, **more))
    return TreeView(names, tuple(nodes), (("policy", "lru"),))


SMALL = grown(
    [
        (-1, 40, {"is_live": True, "text": "You are kind.", "is_pinned": True, "pin_names": ("support",)}),
        (0, 30, {"is_live": True, "is_paged": False, "text": "Hello", "checkpoint": "mark", "checkpoint_bytes": 3_072}),
        (1, 16, {"text": "world", "is_open": True}),
        (0, 20, {"text": "Good bye", "text_end": "the end"}),
    ]
)


def wide(count: int) -> TreeView:
    """A root with many children, the larger ones first."""
    return grown([(-1, 10, {}), *((0, count - index, {}) for index in range(count))])


def chain(length: int) -> TreeView:
    return grown([(index - 1, 5, {"text": f"turn {index}"}) for index in range(length)])


def test_text_has_a_line_per_node_with_its_span_bytes_place_and_marks() -> None:
    assert render_view(SMALL).splitlines() == [
        "4 nodes, 106 tokens, 13.4 KiB (2.9 KiB live, 3.9 KiB live and paged, 3.5 KiB paged, 3.0 KiB checkpoints)",
        "policy lru",
        '[0, 40)  40 tokens  3.9 KiB  live and paged  pinned as support  "You are kind."',
        '├─ [40, 70)  30 tokens  2.9 KiB  live  checkpoint (mark, 3.0 KiB)  "Hello"',
        '│  [70, 86)  16 tokens  1.6 KiB  paged  in use  "world"',
        '└─ [40, 60)  20 tokens  2.0 KiB  paged  "Good bye … the end"',
    ]


@pytest.mark.parametrize("columns", [60, 80])
def test_text_for_a_terminal_breaks_lines_between_figures(columns: int) -> None:
    lines = render_view(SMALL, columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    whole = " ".join(" ".join(lines).replace("│", "").split())
    for line in render_view(SMALL).splitlines():
        assert " ".join(line.replace("│", "").split()) in whole
    assert lines[-1] == '└─ [40, 60)  20 tokens  2.0 KiB  paged  "Good bye … the end"'


def test_an_empty_tree_says_so_in_every_format() -> None:
    empty = TreeView((), ())
    for name in ("text", "svg", "html"):
        assert "The tree is empty." in render_view(empty, name)
    assert read_view(render_view(empty, "json")) == empty


def test_namespaces_are_headed_by_their_names() -> None:
    view = TreeView(("", "b"), (node(-1, 0, 3), NodeView(-1, 1, 0, 4, 8, True, False)))
    lines = render_view(view).splitlines()
    assert lines[1:] == [
        "namespace ''",
        "[0, 3)  3 tokens  300 bytes  paged",
        "namespace 'b'",
        "[0, 4)  4 tokens  8 bytes  live",
    ]
    assert "namespace" in render_view(view, "svg")
    assert [row[1] for row in page_data(render_view(view, "html"))["rows"]] == ["namespace", "node"] * 2


def test_what_is_left_out_is_counted_where_it_hangs() -> None:
    lines = render_view(wide(313), max_nodes=2).splitlines()
    assert lines[2:] == [
        "[0, 10)  10 tokens  1,000 bytes  paged",
        "├─ [10, 323)  313 tokens  30.6 KiB  paged",
        "└─ … 312 more nodes, 48,828 tokens, 4.7 MiB",
    ]
    # A chain does not move to the right.
    assert {line.index("[") for line in render_view(chain(150)).splitlines()[2:]} == {0}


@st.composite
def trees(draw: st.DrawFn) -> TreeView:
    """Random trees in preorder, with hostile text."""
    shape: list[tuple[int, int, dict[str, Any]]] = []
    path: list[int] = []
    for index in range(draw(st.integers(0, 12))):
        del path[draw(st.integers(0, len(path))) :]
        text = draw(st.none() | st.sampled_from(HOSTILE) | st.text())
        pinned = draw(st.booleans())
        more = {
            "text": text,
            "is_pinned": pinned,
            "pin_names": tuple(draw(st.lists(st.sampled_from(HOSTILE))) if pinned else ()),
        }
        shape.append((path[-1] if path else -1, draw(st.integers(1, 5_000)), more))
        path.append(index)
    return grown(shape, (draw(st.sampled_from(["", *HOSTILE])),))


@settings(max_examples=20)
@given(trees(), st.integers(1, 40))
def test_every_node_is_shown_or_counted_exactly_once(view: TreeView, max_nodes: int) -> None:
    rows = choose(view, max_nodes)
    shown = [row.node for row in rows if row.node is not None]
    left_out = [each for row in rows for each in row.left_out]
    assert len(shown) + sum(1 + each.below for each in left_out) == len(view.nodes)
    tokens = sum(each.tokens for each in shown) + sum(each.tokens + each.below_tokens for each in left_out)
    assert tokens == view.tokens
    for number, row in enumerate(rows):
        assert row.parent < number
        assert row.start == (rows[row.parent].node.end if row.parent >= 0 else 0)  # type: ignore[union-attr]


@settings(max_examples=20)
@given(trees())
def test_hostile_text_acts_in_no_format(view: TreeView) -> None:
    text, svg, page = (render_view(view, name) for name in ("text", "svg", "html"))
    for shown in (text, svg, page):
        shown.encode()  # no lone surrogate
        assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\n"]
    drawing = ElementTree.fromstring(svg)
    tags = {element.tag.rpartition("}")[2] for element in drawing.iter()}
    assert tags <= {"svg", "style", "rect", "text", "tspan", "path", "g", "title"}
    assert not [name for element in drawing.iter() for name in element.attrib if name.startswith("on")]
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert len(page_data(page)["rows"]) >= len(view.nodes)
    assert read_view(render_view(view, "json")) == view


def page_data(page: str) -> Any:
    (embedded,) = re.findall(r'<script type="application/json" id="tree">(.*?)</script>', page, re.DOTALL)
    return json.loads(embedded)


@pytest.mark.parametrize("view", [SMALL, wide(5_000), chain(5_000)], ids=["4", "5,001 wide", "5,000 deep"])
def test_a_picture_is_valid_xml_of_readable_size(view: TreeView) -> None:
    drawing = ElementTree.fromstring(render_view(view, "svg"))
    width, height = float(drawing.attrib["width"]), float(drawing.attrib["height"])
    assert width == 1240
    assert height < 6_000
    for rect in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("class") in ("live", "paged") and "x" in rect.attrib:
            assert float(rect.attrib["width"]) > 0
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) < width / 2


def test_bars_are_as_long_as_their_tokens_and_begin_where_their_parents_end() -> None:
    drawing = ElementTree.fromstring(render_view(SMALL, "svg"))
    namespace = "{http://www.w3.org/2000/svg}"
    bars = [
        (float(rect.attrib["x"]), float(rect.attrib["width"]))
        for group in drawing.iter(f"{namespace}g")
        for rect in group.findall(f"{namespace}rect")
        if "x" in rect.attrib and rect.get("class") in ("live", "paged")
    ]
    root = bars[0]
    assert bars[1] == root, "live and paged: two halves of one bar"
    assert [round(width / root[1] * 40) for _, width in bars[1:]] == [40, 30, 16, 20]
    assert abs(bars[2][0] - (root[0] + root[1])) < 0.2
    assert abs(bars[4][0] - bars[2][0]) < 0.2


def test_a_page_needs_nothing_from_elsewhere_and_lets_nothing_in() -> None:
    page = render_view(SMALL, "html")
    assert "http://" not in page
    assert "https://" not in page
    assert not re.findall(r"""\b(?:src|href)=""", page)
    assert "default-src 'none'; script-src 'sha256-" in page
    assert "unsafe" not in page


def test_numbers_are_short_and_have_their_unit() -> None:
    sizes = [1, 1_023, 1_024, 1_048_524, 1 << 20, 3_650_722_201, 1 << 50]
    words = ["1 byte", "1,023 bytes", "1.0 KiB", "1,023.9 KiB", "1.0 MiB", "3.4 GiB", "1,024.0 TiB"]
    assert [bytes_words(size) for size in sizes] == words
    assert [tokens_words(count) for count in (1, 999_999, 1_230_000)] == ["1 token", "999,999 tokens", "1.23 M tokens"]


def test_what_acts_becomes_visible_and_what_shows_stays() -> None:
    assert visible("a\nb\tc") == "a↵b⇥c"
    assert visible("\x00\x1b\u202e\ud800\U000e0001") == r"\x00\x1b\u202e\ud800\U000e0001"
    for shown in ("żółw 漢字 é العربية 🙂", "plain"):
        assert visible(shown) == shown


def test_a_text_is_cut_by_the_columns_it_takes() -> None:
    assert fit("abcdef", 6) == "abcdef"
    assert fit("abcdefg", 6) == "abcde…"
    assert fit("漢字漢字", 8) == "漢字漢字"
    assert fit("漢字漢字", 7) == "漢字漢…"


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="format is 'png'; wanted one of text, svg, html, json"):
        render_view(SMALL, "png")
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=r"max_nodes is .*; wanted a whole number of nodes"):
            render_view(SMALL, max_nodes=wrong)  # type: ignore[arg-type]


def damaged(**changes: Any) -> str:
    document = json.loads(SMALL.to_json())
    for name, value in changes.items():
        if name in document:
            document[name] = value
        else:
            document["nodes"][1][document["columns"].index(name)] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{", "not JSON"),
        ("[1]", "no saved tree"),
        (damaged(version=2), "version 2; wanted version 1"),
        (damaged(nodes=[[1, 2]]), "damaged"),
        (damaged(nodes=3), "damaged"),
        (damaged(columns=[]), "damaged"),
        (damaged(parent=2), "node 1 does not fit below its parent"),
        (damaged(parent="0"), "parent is '0'; wanted int"),
        (damaged(start=41), "node 1 does not fit below its parent"),
        (damaged(end=40), "node 1 has a wrong length"),
        (damaged(below=3), "node 1 has a wrong length or too much below it"),
        (damaged(below=0), "node 2 does not fit below its parent"),
        (damaged(namespace=1), "node 1 does not fit"),
        (damaged(span_bytes=-1), "node 1 has a negative size"),
        (damaged(text=5), "text is 5; wanted a string or null"),
        (damaged(is_live=1), "is_live is 1; wanted bool"),
    ],
)
def test_a_damaged_description_is_refused_with_what_is_wrong(content: str, found: str) -> None:
    with pytest.raises(ViewError, match=re.escape(found)):
        read_view(content)


def test_every_format_has_a_limit_of_its_own() -> None:
    assert set(FORMATS) == {"text", "svg", "html", "json"}
    assert len(render_view(wide(5_000)).splitlines()) < 210
    assert len(page_data(render_view(wide(5_000), "html"))["rows"]) == 5_001
    assert len(page_data(render_view(wide(5_000), "html", max_nodes=50))["rows"]) == 51


def test_text_and_page_of_a_deep_tree_are_as_long_as_it_has_nodes() -> None:
    depth = 3000
    shape = [(index - 1 if index % 2 else index - 2 if index else -1, 5, {}) for index in range(2 * depth)]
    deep = grown([(max(parent, -1), tokens, more) for parent, tokens, more in shape])
    text = render_view(deep, max_nodes=1 << 62)
    lines = text.splitlines()
    assert len(lines) == 2 + 2 * depth
    assert max(map(len, lines)) < 260
    assert any("depth 2,999: [" in line for line in lines)
    assert lines[2 + 2 * 40].startswith("   " * 39)
