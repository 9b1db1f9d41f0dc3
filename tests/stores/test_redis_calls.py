"""Whatever the network or the server does, a call is over within its limit, and a dead server costs one call."""

# ruff: noqa: F811

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from radixcache import RedisStore
from radixcache.stores.redis_calls import SLOWEST_BYTES_PER_S
from tests.stores.made import chain, matched, put_all, resumed
from tests.stores.proxy import Proxy
from tests.stores.redis_server import Clock, Server, own_server, program_named, server, shared_server, store_at  # noqa: F401

#: Far beyond any limit of these tests: a busy machine takes its time, and what has no limit takes forever.
LONG_S = 60.0


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.socket)
    yield proxy
    proxy.close()


def connected(proxy: Proxy, connections: int) -> bool:
    """Whether so many connections were made, and no more; the thread that counts them may be behind."""
    ends_s = time.monotonic() + LONG_S
    while proxy.connections < connections and time.monotonic() < ends_s:
        time.sleep(0.01)
    return proxy.connections == connections


def tried(store: RedisStore) -> None:
    """Wait for the trial that is on."""
    assert store._calls.trial is not None
    store._calls.trial.result(LONG_S)


def test_a_port_that_accepts_and_never_answers_costs_one_limit_and_then_nothing(proxy: Proxy) -> None:
    proxy.is_silent = True
    clock, began = Clock(), time.monotonic()
    with store_at(proxy.url, timeout_s=0.2, clock=clock) as store:
        assert matched(store, range(8)) == []
        assert store.stats.failed_calls == {"timed out": 1}
        assert store.stats.stopped == "the server does not answer"
        assert not store.accepts(1)
        for _ in range(500):
            assert resumed(store, range(8)) == 0
            assert not store.put(chain(range(4))[0])
        assert store.stats.failed_calls == {"timed out": 1, "not asked": 500}
        assert store.stats.dropped == {"the server does not answer": 500}
        assert connected(proxy, 1)
        for pause_s, connections in ((1.0, 2), (2.0, 3), (4.0, 4)):
            clock.now_s += pause_s
            assert [matched(store, range(8)) for _ in range(9)] == [[]] * 9  # one of these has the server tried
            tried(store)
            assert connected(proxy, connections)
    assert time.monotonic() - began < LONG_S


def test_a_server_that_drips_is_cut_off_at_the_limit() -> None:
    listening, is_over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def drip() -> None:
        client, _ = listening.accept()
        try:
            client.sendall(b"$99999999\r\n")
            while not is_over.wait(0.02):
                client.sendall(b"x")
        except OSError:
            is_over.set()

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with store_at(f"redis://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.3) as store:
        assert matched(store, range(8)) == []
        assert store.stats.failed_calls == {"timed out": 1}
    assert is_over.wait(LONG_S)  # its connection is gone
    assert time.monotonic() - began < LONG_S
    dripping.join()
    listening.close()


def test_a_server_that_is_killed_is_a_miss_and_found_again_once_it_is_back(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    caplog.set_level(logging.INFO)
    with store_at(own_server.url, clock=clock) as store:
        put_all(store, chain(range(8)))
        links = matched(store, range(8))
        own_server.kill()
        assert list(store.read([(link.key, "block") for link in links])) == [None, None]
        assert matched(store, range(8)) == []
        assert store.stats.failed_calls["not reached"] == 1
        clock.now_s += 1.0
        assert matched(store, range(8)) == []
        tried(store)
        own_server.start()
        clock.now_s += 2.0
        assert matched(store, range(8)) == []
        tried(store)
        assert resumed(store, range(8)) == 0  # what it had is gone
        put_all(store, chain(range(8)))
        assert resumed(store, range(8)) == 8
        assert store.stats.stopped == ""
    assert [each.split(".")[0] for each in caplog.messages] == [
        "Redis: not reached", "Redis answers again",
    ]  # fmt: skip


def test_a_server_that_comes_later_is_no_error(own_server: Server) -> None:
    own_server.kill()
    clock = Clock()
    with store_at(own_server.url, clock=clock) as store:
        assert matched(store, range(8)) == []
        own_server.start()
        clock.now_s += 1.0
        matched(store, range(8))
        tried(store)
        put_all(store, chain(range(8)))
        assert resumed(store, range(8)) == 8


def test_a_reply_that_is_cut_anywhere_is_a_miss(proxy: Proxy, server: Server) -> None:
    blocks = chain(range(8))
    with store_at(server.url) as store:
        put_all(store, blocks)
        links = matched(store, range(8))
    for cut_after in (0, 1, 30, 60, 100, 300, 1000, 1300):
        proxy.cut_after, clock = cut_after, Clock()
        with store_at(proxy.url, clock=clock) as store:
            for _ in range(3):
                assert resumed(store, range(8)) in (0, 4, 8)
                clock.now_s += 100
                if store._calls.trial is not None:
                    tried(store)
            put_all(store, chain([*range(8), 1]))
            assert store.stats.damaged_files == 0
            store.check()
    with store_at(server.url) as store:
        assert [link[:4] for link in matched(store, range(8))] == [link[:4] for link in links]
        assert resumed(store, range(8)) == 8


def test_reading_has_a_limit_by_its_bytes(proxy: Proxy, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_at(server.url) as store:
        put_all(store, chain(range(512), step=512))
    with store_at(proxy.url) as store:
        assert store._calls.limit_s(SLOWEST_BYTES_PER_S) == 61.0
        links = matched(store, range(512))
        assert links
        proxy.bytes_per_s = 1.0  # hours for all of it
        monkeypatch.setattr(store._calls, "_timeout_s", 0.2)
        began = time.monotonic()
        assert list(store.read([(link.key, "block") for link in links])) == [None]
        assert time.monotonic() - began < LONG_S
        assert store.stats.failed_calls == {"timed out": 1}


def test_writing_has_a_limit_too_and_nobody_waits_for_it(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.is_silent = True
    blocks = chain(range(8))
    with store_at(proxy.url, timeout_s=0.2, clock=Clock()) as store:
        assert [store.put(block) for block in blocks] == [True, True]
        assert store.flush(LONG_S)
        dropped = store.stats.dropped
        assert dropped["the server does not answer"] >= 1
        assert sum(dropped.values()) == 2
        assert not store.holds(blocks[0].head.key)


# User, password and TLS

PASSWORD = "geheim-und-lang"


def test_a_password_is_used_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(program_named("redis-server"))
    server.client.config_set("requirepass", PASSWORD)
    caplog.set_level(logging.DEBUG)
    try:
        shown = []
        for password, found in ((PASSWORD, 8), (PASSWORD[::-1], 0), ("", 0)):
            with store_at(f"unix://:{password}@{server.socket}") as store:
                put_all(store, chain(range(8)))
                assert resumed(store, range(8)) == found
                kinds = set(store.stats.failed_calls) - {"not asked"}
                assert kinds == (set() if found else {"not allowed"})
                shown += [repr(store), str(store.stats), repr(store._calls)]
        shown += caplog.messages
        text = "\n".join(shown)
        assert "not allowed" in text
        assert all(each not in text for each in (PASSWORD, PASSWORD[::-1], str(server.socket)))
    finally:
        server.end()


def test_an_error_of_the_network_shows_no_address(caplog: pytest.LogCaptureFixture) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    listening.close()
    with store_at(f"redis://me:{PASSWORD}@127.0.0.1:{port}") as store:
        assert matched(store, range(4)) == []
        shown = "\n".join([repr(store), str(store.stats), *caplog.messages])
    assert "not reached" in shown
    assert all(each not in shown for each in (PASSWORD, "127.0.0.1", str(port)))


def test_rediss_speaks_tls_from_the_first_byte() -> None:
    listening, got = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def answer() -> None:
        client, _ = listening.accept()
        got.append(client.recv(1 << 16))
        client.close()

    answering = threading.Thread(target=answer)
    answering.start()
    with store_at(f"rediss://me:{PASSWORD}@127.0.0.1:{listening.getsockname()[1]}") as store:
        assert matched(store, range(4)) == []
        assert store.stats.failed_calls["not reached"] == 1
    answering.join(LONG_S)
    listening.close()
    assert got[0][:2] == b"\x16\x03"  # a handshake
    assert PASSWORD.encode() not in got[0]


def test_a_url_may_name_the_limit_and_cannot_switch_off_what_the_store_needs(server: Server) -> None:
    with store_at(f"{server.url}?decode_responses=true&socket_timeout=90&socket_connect_timeout=1e9") as store:
        put_all(store, chain(range(8)))
        assert resumed(store, range(8)) == 8
        connection: Any = store._calls._client.connection_pool.make_connection()
        assert (connection.socket_timeout, connection.socket_connect_timeout) == (90.0, 90.0)
        assert store._calls.limit_s(0) == 90.0
    for none in ("0", "-1", "inf", "nan"):
        with pytest.raises(ValueError, match="wanted redis://"):
            store_at(f"{server.url}?socket_timeout={none}")
