"""`radixcache serve --disk` and `--redis`: what a server knew is known to the next one, however the first one ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from radixcache.stores.files import scan
from runner.serve.request import NOT_KEPT
from tests.serve.jobs import Waiting, running, wait_until
from tests.serve.serving import GUARD_S, serving
from tests.stores.redis_server import own_server  # noqa: F401

PASSWORD = "geheim-und-lang"


def ask(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    reply: dict[str, Any] = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=GUARD_S).json()
    return reply


def cached_tokens(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def answer(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


@pytest.mark.parametrize("ends", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_turn_after_a_restart_resumes_where_the_first_one_ended(tmp_path: Path, ends: signal.Signals) -> None:
    first = [{"role": "user", "content": "Tell me of a river. " * 30}]
    with serving("--disk", tmp_path) as served:
        reply = ask(served.url, first)
        assert cached_tokens(reply) == 0
        if ends is signal.SIGKILL:
            # Blocks are written in order: the first 512 tokens are there.
            wait_until(lambda: any(True for _ in scan(tmp_path)))
        none = 'radixcache_store_written_files_total{tier="disk"} 0.0'
        wait_until(lambda: none not in httpx2.get(f"{served.url}/metrics").text)
        assert httpx2.get(f"{served.url}/cache/state").json()["disk"][0].startswith("Disk: ")
        served.process.send_signal(ends)
        served.wait()
    second = [*first, {"role": "assistant", "content": answer(reply)}, {"role": "user", "content": "And another?"}]
    with running(disk=tmp_path) as thread:
        assert Waiting(thread, messages=second).record.cached_tokens >= 512


def test_nothing_of_a_request_that_is_not_to_be_kept_is_written(tmp_path: Path) -> None:
    namespaces = {True: "", False: f"one{NOT_KEPT}"}
    for is_kept, namespace in namespaces.items():
        with running(disk=tmp_path / str(is_kept), prefill_step_size=64) as thread:
            assert Waiting(thread, prompt="Tell me of a river. " * 30, namespace=namespace).record.outcome == "length"
        assert any(True for _ in scan(tmp_path / str(is_kept))) == is_kept


@pytest.mark.slow
def test_a_second_turn_on_another_server_resumes_where_the_first_one_ended(own_server, monkeypatch):  # noqa: F811
    own_server.client.config_set("requirepass", PASSWORD)
    url = f"unix://:{PASSWORD}@{own_server.socket}?socket_timeout=60"  # a busy machine takes its time
    first = [{"role": "user", "content": "Tell me of a river. " * 30}]
    with serving("--redis", url) as served:
        reply = ask(served.url, first)
        assert cached_tokens(reply) == 0
        none = 'radixcache_store_written_files_total{tier="redis"} 0.0'
        # Blocks are written in order: the first 512 tokens are there.
        wait_until(lambda: none not in httpx2.get(f"{served.url}/metrics").text)
        logs = [served.log]
    second = [*first, {"role": "assistant", "content": answer(reply)}, {"role": "user", "content": "And another?"}]
    monkeypatch.setenv("RADIXCACHE_REDIS", url)  # where `ps` does not show it
    with serving() as served:
        assert cached_tokens(ask(served.url, second)) >= 512
        assert 'radixcache_store_read_files_total{tier="redis"}' in httpx2.get(f"{served.url}/metrics").text
        state = httpx2.get(f"{served.url}/cache/state").json()
        assert state["disk"][0].startswith("Redis: ")
        own_server.kill()
        assert answer(ask(served.url, [{"role": "user", "content": "Tell me of a lake. " * 30}]))
        logs += [served.log, str(state)]
    assert all(PASSWORD not in each and os.fspath(own_server.socket) not in each for each in logs)
    assert "Redis: not reached" in logs[1]
