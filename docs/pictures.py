"""Make the pictures of the docs from real runs: `make docs-pictures`. It needs Chromium and the demo model.

serve-page.png, serve-page-dark.png, serve-page-narrow.png   /cache of a server that three users have asked
tree-page.png                                                the page of `radixcache tree` for the built-in talks
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.observe.browser import Page, find_browser  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
LIBRARY = (
    "You are the clerk of a small town library. Be brief and friendly. The library is open from nine to five on "
    "weekdays and from ten to two on Saturdays. Readers may borrow six books for four weeks."
)
QUESTIONS = (
    ("When do you open on Saturdays?", "And on Sundays?", "How many books may I take?"),
    ("Do you have maps of the region?", "May I borrow them?", "For how long?"),
    ("Can I renew a book online?", "How often?"),
)
SERVE = ("serve", "--model", "demo", "--port", "0", "--show-text", "--max-tokens", "24")


def main() -> None:
    browser = find_browser()
    if browser is None:
        sys.exit("error: no Chromium here: install one, or name it in RADIXCACHE_BROWSER.")
    PICTURES.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "radixcache", *SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            _ask_all(url)
            for name, width, height, dark in (
                ("serve-page", 1180, 890, False),
                ("serve-page-dark", 1180, 890, True),
                ("serve-page-narrow", 480, 900, False),
            ):
                _picture(browser, f"{url}/cache", name, width, height, dark)
        finally:
            server.terminate()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "tree.html"
        subprocess.run([sys.executable, "-m", "radixcache", "tree", "--out", str(page)], check=True, cwd=ROOT)
        _picture(browser, page.as_uri(), "tree-page", 1180, 800, False)
        _picture(browser, page.as_uri(), "tree-page-dark", 1180, 800, True)


def _ask_all(url: str) -> None:
    """Ask all questions, the users in turns."""
    talks = [[{"role": "system", "content": LIBRARY}] for _ in QUESTIONS]
    for turn in range(max(map(len, QUESTIONS))):
        for talk, questions in zip(talks, QUESTIONS, strict=True):
            if turn < len(questions):
                talk.append({"role": "user", "content": questions[turn]})
                body = json.dumps({"messages": talk}).encode()
                request = Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
                with urlopen(request, timeout=600) as response:
                    talk.append(json.load(response)["choices"][0]["message"])


def _picture(browser: str, url: str, name: str, width: int, height: int, dark: bool) -> None:
    with Page(browser) as page:
        page.resize(width, height, is_dark=dark)
        page.open(url)
        page.run("document.documentElement.style.scrollbarWidth = 'none'")
        time.sleep(2)  # the page asks for what it shows
        page.run("document.querySelectorAll('#requests button')[6]?.click()")
        time.sleep(1)
        (PICTURES / f"{name}.png").write_bytes(page.screenshot())
    print(f"docs/pictures/{name}.png")


if __name__ == "__main__":
    main()
