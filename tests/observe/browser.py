"""Drives a Chromium of the system without a window, through its DevTools pipe: no package, no port, no driver.

Messages of the DevTools protocol go both ways as JSON that ends in a NUL, over the descriptors 3 and 4 of the browser.
`python -m tests.observe.browser` prints which browser would be used, and exits with 1 where there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from base64 import b64decode
from collections import deque
from pathlib import Path
from typing import Any

#: By name, and where macOS keeps them. RADIXCACHE_BROWSER names another one.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MAC_PATHS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
)
#: How long an answer may take. A browser that starts on two busy cores takes its time.
PATIENCE_S = 120.0


def find_browser() -> str | None:
    """The browser to use, or None."""
    named = os.environ.get("RADIXCACHE_BROWSER")
    found = [named] if named else [*map(shutil.which, NAMES), *(path for path in MAC_PATHS if Path(path).exists())]
    return next((path for path in found if path), None)


class Page:
    """A page of a browser of its own.

    Attributes:
        complaints: what the console, the page's scripts and its policy complained about.
        requested: URLs that the page asked for, its own among them.
    """

    def __init__(self, path: str) -> None:
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="radixcache-browser-")
        self._events: deque[dict[str, Any]] = deque()
        self._buffer = b""
        self._last_id = 0
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = "--headless --remote-debugging-pipe --disable-gpu --disable-dev-shm-usage --no-first-run"
        arguments = [path, *flags.split(), "--no-default-browser-check", "--window-size=1280,900"]
        arguments += [f"--user-data-dir={self._profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        silent = os.open(os.devnull, os.O_WRONLY)
        # Above 4 first, so that neither duplicate overwrites the other's source.
        sources = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (to_browser, from_browser)]
        actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in zip(sources, (3, 4), strict=True)]
        actions += [(os.POSIX_SPAWN_DUP2, silent, 1), (os.POSIX_SPAWN_DUP2, silent, 2)]
        self._process = os.posix_spawn(path, arguments, os.environ, file_actions=actions, setpgroup=0)
        for descriptor in (to_browser, from_browser, silent, *sources):
            os.close(descriptor)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        # Without its pipe the browser ends by itself; what is left of it after that is ended with its group.
        deadline_s = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG)[0] == 0 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, page: Path | str) -> None:
        """Load a file or a URL and wait until it and its scripts are through."""
        self._events.clear()
        self._call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while True:
            event = self._events.popleft() if self._events else self._receive()
            if event.get("method") == "Page.loadEventFired":
                return

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse on the first element that the selector finds."""
        found = f"document.querySelector({json.dumps(selector)})"
        box = self.run(
            f"{found}.scrollIntoView({{block: 'center'}}), (r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Put the cursor into a field and type."""
        self.click(selector)
        self._call("Input.insertText", text=text)

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true; its value."""
        return self.run(
            "new Promise((done) => { const look = () => { const value = (() => (" + script + "))();"
            " value ? done(value) : setTimeout(look, 20); }; look(); })"
        )

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Give the window a size in pixels, and a scheme of colours."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """What is in the window, as PNG."""
        return b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            chunk = os.read(self._read, 1 << 16) if ready else b""
            if not chunk:
                raise RuntimeError("the browser ended, or did not answer in time.")
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(about["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {about['message']}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(about["request"]["url"])


if __name__ == "__main__":
    browser = find_browser()
    print(browser or "no Chromium found")
    sys.exit(browser is None)
