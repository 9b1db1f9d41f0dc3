"""Whatever clients send: a real server stays up, says what is wrong, and holds nothing on their behalf afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.serving import GUARD_S, ServedProcess, serving
from tests.serve.storm import ADMIN, CHAT, GOOD, KEY, ODD, Abuse, Attempt, require_refused, status_of, storm

BUDGET_BYTES = 8 << 20
#: What MLX may have in use besides weights and caches: what the last requests were evaluated with.
REST_BYTES = 1 << 20
STORM = 5000


class Abused:
    def __init__(self, served: ServedProcess) -> None:
        self.process, self._served = served.process, served
        self.host, port = served.url.removeprefix("http://").split(":")
        self.port = int(port)
        self._connection = HTTPConnection(self.host, self.port, timeout=GUARD_S)
        self.ask(CHAT, GOOD[CHAT])
        self._least_bytes = self._active_bytes()

    def send(self, method: str, path: str, body: bytes | None = None, key: str = ADMIN) -> tuple[int, bytes]:
        self._connection.request(method, path, body, {"x-api-key": key, "Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        return self.send("POST", path, json.dumps(body).encode())

    def json(self, method: str, path: str) -> Any:
        status, body = self.send(method, path)
        assert status == 200, body
        return json.loads(body)

    def require_sound(self) -> None:
        """Nothing waits or runs, nothing failed, and memory is what the caches say and afterwards what it was."""
        self._connection.close()  # it may have been idle for too long
        while (state := self.json("GET", "/cache/state"))["running"] or state["waiting"]:
            assert self.process.poll() is None, self._served.log
        stats = self.json("GET", "/cache/state")["stats"].values()
        held_bytes = sum(each["live_bytes"] + each["paged_bytes"] for each in stats)
        assert held_bytes <= BUDGET_BYTES
        # MLX's pool hands out buffers that are somewhat larger than what is asked for.
        more_bytes = self.json("POST", "/cache/check")["active_bytes"] - self._least_bytes - held_bytes
        assert -REST_BYTES // 8 <= more_bytes <= REST_BYTES // 2
        assert self._active_bytes() <= self._least_bytes + REST_BYTES
        counts = self.send("GET", "/metrics")[1].decode()
        assert not re.findall(r"^radixcache_serve_http_requests_total.*status=\"5.*", counts, re.MULTILINE)
        assert "Traceback" not in self._served.log
        assert self.send("GET", "/health")[0] == 200

    def usage(self, process: psutil.Process) -> tuple[int, int, int]:
        """Open files, threads and resident bytes of the server."""
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    @property
    def log(self) -> str:
        return self._served.log

    def _active_bytes(self) -> int:
        self.json("DELETE", "/cache")
        active_bytes: int = self.json("POST", "/cache/check")["active_bytes"]
        return active_bytes


@contextmanager
def abusable(folder: Path, model: str) -> Iterator[Abused]:
    """A server with a key, an admin and a small budget."""
    for name, line in (("keys", f"ann {KEY}"), ("admin", f"root {ADMIN}")):
        (folder / name).write_text(line)
        (folder / name).chmod(0o600)
    options: Sequence[Any] = (
        "--api-keys", folder / "keys", "--admin-key-file", folder / "admin", "--max-tokens", 3,
        "--prompt-cache-bytes", BUDGET_BYTES, "--max-body-mib", 1, "--drain-s", 1,
    )  # fmt: skip
    with serving(*options, model=model) as served:
        yield Abused(served)


@pytest.fixture(scope="module")
def abused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    with abusable(tmp_path_factory.mktemp("keys"), "tiny") as abused:
        yield abused


def documented_fields(abused: Abused) -> Iterator[tuple[str, str]]:
    document = abused.json("GET", "/openapi.json")
    for path, operations in document["paths"].items():
        if body := operations.get("post", {}).get("requestBody"):
            schema = body["content"]["application/json"]["schema"]
            if "$ref" in schema:
                schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            yield from ((path, field) for field in schema["properties"])


def test_each_field_of_each_body_refuses_what_it_cannot_be_and_takes_nothing_odd_amiss(abused: Abused) -> None:
    fields = list(documented_fields(abused))
    assert {path for path, _ in fields} == set(GOOD)
    assert len(fields) > 60
    for path, field in fields:
        error = require_refused(path, abused.ask(path, {**GOOD[path], field: [5.5]}))
        assert field in (error.get("param") or error["message"]), (path, field, error)
    draws = random.Random(0)
    for path, field in fields:
        for value in draws.sample(ODD, 2):
            status, body = abused.ask(path, {**GOOD[path], field: value})
            if status != 200:
                require_refused(path, (status, body))
    abused.require_sound()


def rage(abused: Abused, seed: int, count: int) -> None:
    asyncio.run(storm(abused.host, abused.port, Abuse(seed, [*documented_fields(abused)]), count))


def test_a_thousand_idle_connections_keep_nobody_out(abused: Abused) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2000)), hard))
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection((abused.host, abused.port), timeout=GUARD_S))
        abused.require_sound()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "out of system resource" not in abused.log


def test_a_storm_of_requests_leaves_nothing_behind(abused: Abused) -> None:
    rage(abused, 0, 100)
    abused.require_sound()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["tiny:llama", "tiny:gemma3_text", "tiny:mamba2"])
def test_a_long_storm_leaves_a_server_as_it_was_and_a_signal_ends_it(model: str, tmp_path: Path) -> None:
    """On models with full attention, windows and recurrent layers. Each storm has requests of every API and kind."""
    with abusable(tmp_path, model) as abused:
        process = psutil.Process(abused.process.pid)
        rage(abused, 1, STORM // 5)
        abused.require_sound()
        files, threads, resident_bytes = abused.usage(process)
        rage(abused, 2, STORM - STORM // 5)
        abused.require_sound()
        after = abused.usage(process)
        assert after[0] <= files
        assert after[1] <= threads + 4  # a pool of threads, some of which may have ended before
        # What the allocator keeps goes up and down by 100 MB, wherever the large bodies come.
        assert after[2] - resident_bytes < 192 << 20

        def last(attempt: Attempt, answer: bytes) -> None:
            assert status_of(answer) in {*attempt.right, None, 503}, (attempt, answer[:500])

        abuse = Abuse(3, [*documented_fields(abused)])
        raging = threading.Thread(target=lambda: asyncio.run(storm(abused.host, abused.port, abuse, 500, judge=last)))
        raging.start()
        time.sleep(1)
        abused.process.send_signal(signal.SIGTERM)
        assert abused.process.wait(GUARD_S) == 0
        raging.join(GUARD_S)
        assert "Traceback" not in abused.log, abused.log.partition("Traceback")[2][:5000]


#: Found by the server and not in the document: an empty prompt, a tool choice without tools, images for a text model.
NOT_DOCUMENTED = "positive_data_acceptance"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_route_answers_generated_requests_as_its_document_says(tmp_path: Path) -> None:
    """No server error, documented status codes and media types, nothing accepted that the document forbids."""
    tool = [sys.executable, "-m", "uv", "--quiet", "tool", "run", "--from", "schemathesis==4.32.5", "schemathesis"]
    found = subprocess.run([*tool, "--version"], capture_output=True, text=True, timeout=GUARD_S)
    if found.returncode != 0:
        pytest.skip(f"schemathesis cannot be installed: {found.stderr.strip()[-200:]}")
    with serving("--max-tokens", 2, "--request-timeout-s", 10) as served:
        options = (
            "--phases", "coverage,fuzzing", "--max-examples", 5, "--seed", 1, "--request-timeout", GUARD_S,
            "--exclude-checks", NOT_DOCUMENTED, "--warnings", "off", "--continue-on-failure", "--no-color",
        )  # fmt: skip
        run = [*tool, "run", f"{served.url}/openapi.json", *map(str, options)]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, [line[:300] for line in done.stdout.splitlines()]
        assert served.process.poll() is None
        assert "Traceback" not in served.log
