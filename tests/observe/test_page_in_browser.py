"""The page of a tree in a browser: it loads, expands, finds, and shows the branch that a divergent request made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixcache import PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.observe.page import render_view
from radixcache.observe.tree_view import NodeView, TreeView
from radixcache.sized_cache import sized_cache
from tests.observe.browser import Page, find_browser

pytestmark = pytest.mark.slow

SYSTEM = "You are kind and brief. "
ROWS = "document.querySelectorAll('#rows > .row').length"
TEXTS = "[...document.querySelectorAll('#rows .label')].map(label => label.textContent)"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip(
            "no Chromium here: install one (Debian: apt-get install chromium), or name it in RADIXCACHE_BROWSER"
        )
    with Page(browser) as opened:
        yield opened


@pytest.fixture(autouse=True)
def is_quiet(page: Page) -> Iterator[None]:
    page.complaints.clear()
    page.requested.clear()
    yield
    assert page.complaints == []
    assert all(url.startswith("file://") for url in page.requested), page.requested
    assert len(page.requested) == 1, "the page asks for nothing but itself"


def written(tmp_path: Path, content: str, name: str = "tree.html") -> Path:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return path


def serve(cache: PrefixCache, model: Any, prompt: list[int]) -> None:
    with cache.begin(prompt) as session:
        session.prefill(model)
        session.step(model, prompt[-1:])


def test_rows_collapse_and_expand_with_a_click_and_tell_more_with_another(page: Page, tmp_path: Path) -> None:
    texts = ["root", "left", "left end", "right"]
    places = [(-1, 0, 10, 3), (0, 10, 30, 1), (1, 30, 35, 0), (0, 10, 15, 0)]
    nodes = [
        NodeView(parent, 0, start, end, 1536, True, False, below=below, text=text, uses=3)
        for text, (parent, start, end, below) in zip(texts, places, strict=True)
    ]
    page.open(written(tmp_path, render_view(TreeView(("",), tuple(nodes)), "html")))
    assert page.run(TEXTS) == texts
    page.click("#rows .row[data-index='1'] .twist")
    assert page.run(TEXTS) == ["root", "left", "right"]
    assert page.run("document.querySelector('.row[data-index=\"1\"] .twist').getAttribute('aria-expanded')") == "false"
    page.click("#close")
    assert page.run(TEXTS) == ["root"]
    page.click("#rows .row[data-index='0'] .twist")
    assert page.run(TEXTS) == ["root", "left", "right"]
    page.click("#open")
    assert page.run(TEXTS) == texts
    page.click("#rows .row[data-index='1'] .label")
    told = page.run("document.querySelector('.row[data-index=\"1\"] .info').textContent")
    assert told == "[10, 30) 20 tokens · 1.5 KiB live · used 3 times, last at tick 0 · below: 1 node, 0 tokens, 0 bytes"
    page.click("#rows .row[data-index='1'] .label bdi")
    assert page.run("document.querySelectorAll('.info').length") == 0
    widths = page.run("[...document.querySelectorAll('#rows .bar')].map(bar => bar.getBoundingClientRect().width)")
    assert [round(width / widths[0] * 10) for width in widths] == [10, 20, 5, 5]


def test_hostile_text_is_shown_and_does_nothing(page: Page, tmp_path: Path) -> None:
    hostile = [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg onload=alert(1)>",
        "\u202e\u2066right to left\x00\x1b[31m \ud800",
        "${alert(1)} `'\"\\",
    ]
    tops = [
        NodeView(-1, 0, 0, 10, 10, False, True, text=text, is_pinned=True, pin_names=(text,), checkpoint=text)
        for text in hostile
    ]
    view = TreeView(("<b onclick=alert(1)>name",), tuple(tops), (("policy", "<script>alert(2)</script>"),))
    page.open(written(tmp_path, render_view(view, "html")))
    shown = page.run(TEXTS)
    assert shown[0] == "namespace <b onclick=alert(1)>name"
    assert shown[1] == hostile[0] * 2
    assert shown[4] == r"\u202e\u2066right to left\x00\x1b[31m \ud800" * 2
    assert page.run("document.querySelectorAll('img, svg, b[onclick]').length") == 0
    assert page.run("document.scripts.length") == 2
    for row in range(1, 6):
        page.click(f"#rows .row[data-index='{row}'] .label bdi:last-of-type")
    assert page.run("document.querySelectorAll('.info').length") == 5


def test_its_policy_lets_no_other_script_run_and_no_request_out(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path, render_view(TreeView((), ()), "html")))
    page.run("window.ran = 0")
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})),"
        "document.body.insertAdjacentHTML('beforeend',"
        '\'<img src="https://example.invalid/x" onerror="window.ran = 2">\')'
    )
    assert page.run("new Promise(done => setTimeout(() => done(window.ran), 200))") == 0
    refused = [text for text in page.complaints if "violates the following Content Security Policy" in text]
    assert len(refused) == len(page.complaints) >= 2
    page.complaints.clear()
    del page.requested[1:]  # what was asked for and refused


def test_a_tree_of_10_000_nodes_draws_little_at_first_and_finds_what_is_deep(page: Page, tmp_path: Path) -> None:
    cache = sized_cache(SizedLayout(3072), budget_bytes=1 << 40)
    model = SizedModel()
    for system in range(10):
        for user in range(500):
            prompt = [100 + system] * 20 + [1000 + user] * 4
            serve(cache, model, prompt)
            if user % 2:
                serve(cache, model, prompt + [7] * 4)
                serve(cache, model, prompt + [8] * 4)
    assert cache.stats.nodes >= 10_000

    class Words:
        def decode(self, ids: list[int]) -> str:
            return " ".join(f"w{token}" for token in ids)

    page.open(written(tmp_path, cache.render("html", tokenizer=Words())))
    assert 10 <= page.run(ROWS) <= 400
    page.click("#rows .row[data-index='0'] .twist")
    assert page.run(ROWS) >= 10
    assert "Show 300 more branches" in page.run("document.querySelector('#rows').textContent")
    page.click("#rows button:not(.twist)")
    assert page.run("document.querySelectorAll('#rows > .row.node').length") >= 410
    page.type("#search", "w109 w109 w109")
    page.wait_for("document.getElementById('found').textContent === '1 match'")
    assert page.run("document.querySelectorAll('.row.found').length") == 1
    page.run("document.getElementById('search').value = ''")
    page.type("#search", "w8 w8")
    page.wait_for("document.getElementById('found').textContent.startsWith('2,500 matches')")
    assert page.run("document.querySelectorAll('.row.found').length") >= 100
