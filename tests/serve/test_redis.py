"""`radixcache serve --redis`: what one server knows another one knows, and what the URL says nobody is told."""

# ruff: noqa: F811

from __future__ import annotations

import os

import httpx2
import pytest

from tests.commands.conftest import command  # noqa: F401
from tests.serve.serving import serving
from tests.serve.test_disk import answer, ask, cached_tokens, wait_until
from tests.stores.redis_server import Server, own_server  # noqa: F401

PASSWORD = "geheim-und-lang"


@pytest.mark.slow
def test_a_second_turn_on_another_server_resumes_where_the_first_one_ended(own_server, monkeypatch):
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
