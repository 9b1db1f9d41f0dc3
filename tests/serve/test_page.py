"""The page at /cache: what it is made of, and in a real browser how it follows a server that is at work."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from radixcache.layers.sizes import SizedLayout
from radixcache.sized_cache import sized_cache
from radixcache.stores.block_store import StoreStats
from runner.serve.admin import cache_page, page_state
from runner.serve.http_server import HttpServer, listen, url_of
from runner.serve.metrics import Watch
from runner.serve.request import ModelNames
from tests.observe.browser import Page, find_browser
from tests.serve.jobs import application
from tests.serve.watched import Watched, record

ROWS = "document.querySelectorAll('#rows > .row.node').length"
LABELS = "[...document.querySelectorAll('#rows .label > bdi:last-of-type')].map(label => label.textContent)"
REQUESTS = "document.querySelectorAll('#requests tr').length"
GUARD_S = 120


@contextmanager
def reachable(app: FastAPI) -> Iterator[str]:
    with listen("127.0.0.1", 0) as listening:
        server = HttpServer(app, lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield url_of(listening)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def served(**options: Any) -> Iterator[str]:
    with application(**options) as (app, _), reachable(app) as url:
        yield url


def ask(url: str, text: str, key: str = "", **fields: Any) -> None:
    body = json.dumps({"prompt": text, "max_tokens": 3, **fields}).encode()
    headers = {"Content-Type": "application/json", "x-api-key": key}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=GUARD_S
    ) as answer:
        answer.read()


def test_its_policy_lets_in_its_own_script_and_style_and_no_other_request() -> None:
    content, headers = cache_page()
    policy = headers["Content-Security-Policy"]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (found,) = re.findall(f"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    for directive in ("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
        assert directive in policy
    assert "unsafe" not in policy


def test_the_state_is_json_before_the_first_model_and_with_an_infinite_error() -> None:
    assert page_state(Watched(), Watch(), "", "", show_text=False)["tree"] is None
    cache, watched = sized_cache(SizedLayout(3072), budget_bytes=1 << 40), Watched()
    stats = replace(cache.stats, verify_largest_error=math.inf)
    watched.held.append((ModelNames("sized", None, None), SimpleNamespace(stats=stats, view=cache.view)))
    state = page_state(watched, Watch(), "", "", show_text=False)
    assert json.loads(json.dumps(state, allow_nan=False))["stats"]["sized"]["verify_largest_error"] == "+Inf"


def test_what_went_wrong_is_told_only_with_the_text() -> None:
    watch = Watch()
    watch.on_record(record(done_reason="error", note="cannot render 'marmalade'"))
    watch.on_record(record(done_reason="length", note="the budget is full"))
    notes = {
        shown: [row["note"] for row in page_state(Watched(), watch, "", "", show_text=shown)["requests"]]
        for shown in (False, True)
    }
    assert notes == {False: ["the budget is full", None], True: ["the budget is full", "cannot render 'marmalade'"]}


def test_the_disk_is_told_of_in_words_and_only_where_there_is_one() -> None:
    watched = Watched()
    assert page_state(watched, Watch(), "", "", show_text=False)["disk"] == []
    calm = StoreStats(3, 1, 5 << 20, 1 << 30, 0, "", read_bytes=1 << 20, written_bytes=6 << 20, evicted_bytes=1 << 20)
    watched.stores = {"disk": calm}
    assert page_state(watched, Watch(), "", "", show_text=False)["disk"] == [
        "Disk: 3 blocks and 1 checkpoint, 5.0 MiB of 1.0 GiB.",
        "Since the start: 1.0 MiB read, 6.0 MiB written, 1.0 MiB evicted. To be written: 0 bytes.",
        "Since the start 0 tokens were brought back.",
    ]
    watched.stores = {
        "disk": replace(calm, stopped="No space left", dropped={"the queue is full": 4}, read_errors=2),
        "redis": replace(calm, budget_bytes=0, failed_calls={"timed out": 2, "not asked": 31}),
    }
    assert page_state(watched, Watch(), "", "", show_text=False)["disk"][2:-1] == [
        "Files: 2 could not be read.",
        "Blocks that were not written: 4 because the queue is full.",
        "Nothing is written now: No space left.",
        "Redis: 3 blocks and 1 checkpoint, 5.0 MiB, as far as is known.",
        "Since the start: 1.0 MiB read, 6.0 MiB written, 1.0 MiB evicted. To be written: 0 bytes.",
        "Calls that failed: 31 not asked, 2 timed out.",
    ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium here: install one, or name it in RADIXCACHE_BROWSER")
    with Page(found) as opened:
        yield opened


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    browser.complaints.clear()
    browser.requested.clear()
    yield browser
    browser.open("about:blank")  # it asks no more of a server that is about to end


@pytest.mark.slow
def test_it_changes_while_requests_run_and_shows_the_branch_of_one_that_parts(page: Page) -> None:
    with served(show_text=True) as url:
        page.open(f"{url}/cache")
        page.wait_for("document.getElementById('totals').textContent.startsWith('The tree is empty')")
        ask(url, "What is bread made of?")
        page.wait_for(f"{ROWS} > 0 && {REQUESTS} === 1")
        ask(url, "What is the capital of France?")
        page.wait_for(f"{REQUESTS} === 2 && {LABELS}.some(label => label.startsWith('the ca'))")
        labels = page.run(LABELS)
        assert labels[0] == "What is "
        assert any(label.startswith("bread") for label in labels)
        rows = page.run("[...document.querySelectorAll('#requests tr')].map(row => row.textContent)")
        assert "diverged" in rows[0]
        assert "never stored" in rows[1]
        assert page.run("document.querySelector('#rate path').getAttribute('d').split('L').length") == 2
        heads = page.run("[...document.querySelectorAll('thead th')].map(head => head.textContent)")
        assert "tenant" not in heads
        assert "tiny:llama" in rows[0]  # the request named no model
        percent = page.run("document.querySelector('#requests tr').cells[4].textContent")
        reused, prompt = (page.run(f"document.querySelector('#requests tr').cells[{at}].textContent") for at in (3, 2))
        assert percent == f"{100 * int(reused) / int(prompt):.1f}"
        assert "paged" in page.run("document.getElementById('bytes-words').textContent")
        assert page.complaints == []
        assert all(asked.startswith(f"{url}/cache") for asked in page.requested)


@pytest.mark.slow
def test_a_click_on_a_request_shows_its_fork_and_its_path_in_the_tree(page: Page) -> None:
    with served(show_text=True) as url:
        for text in ("What is bread made of?", "What is the capital of France?"):
            ask(url, text)
        with pytest.raises(urllib.error.HTTPError):
            ask(url, "x", max_tokens="many")
        page.open(f"{url}/cache")
        page.wait_for(f"{REQUESTS} === 2 && {ROWS} > 2")
        page.click("#requests button")
        page.wait_for("document.querySelector('.details')")
        details = page.run("document.querySelector('.details').innerText")
        assert "diverged at 8 of 30, in the text" in details
        assert "stored bread" in details
        assert "asked the cap" in details
        assert page.run("document.querySelector('.prompt .fork').style.left") == f"{100 * 8 / 30:.4f}%"
        way = page.run("[...document.querySelectorAll('.way .label bdi')].map(label => label.textContent)")
        assert way[0] == "What is "
        assert way[1].startswith("the capital of France?")
        for width in (380, 1400):  # nothing is cut off, and nothing has to be moved sideways
            page.resize(width, 900)
            assert page.run("document.documentElement.scrollWidth") <= width
        refused = page.run("document.getElementById('refused').innerText")
        assert "400 /v1/completions" in refused
        page.click("#requests .chosen button")
        page.wait_for("!document.querySelector('.details') && !document.querySelector('.way')")
        assert page.complaints == []


@pytest.mark.slow
def test_the_key_is_asked_for_and_never_in_an_address(page: Page, tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    for file, line in ((keys, "ann ann-key\n"), (admin, "boss admin-key\n")):
        file.touch(0o600)
        file.write_text(line)
    with served(api_keys=keys, admin_key_file=admin, namespace_by="key") as url:
        ask(url, "What is bread made of?", "ann-key")
        page.open(f"{url}/cache")
        page.wait_for("!document.getElementById('ask').hidden")
        assert page.run(ROWS) == 0
        page.type("#key", "ann-key")
        page.click("#ask button")
        page.wait_for("!document.getElementById('ask').hidden && document.getElementById('key').value === ''")
        assert page.run(ROWS) == 0
        page.type("#key", "admin-key")
        page.click("#ask button")
        page.wait_for(f"{ROWS} > 0 && document.getElementById('ask').hidden")
        assert page.run("document.querySelector('#requests tr').cells[2].textContent") == "ann"
        page.open(f"{url}/cache")
        page.wait_for(f"{ROWS} > 0")
        assert not [asked for asked in page.requested if "-key" in asked]
        # Without --show-text it shows where nodes begin and end, and no text.
        assert page.run(LABELS) == ["ann", "[0, 24)"]
        assert "bread" not in page.run("document.documentElement.outerHTML")
