"""A server: what a prompt finds by its tokens, whose it is, and that no failure of it costs more than its limit."""

# ruff: noqa: F811

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import RedisStore, StoreError
from radixcache.stores import redis_store
from radixcache.stores.block import Identity
from radixcache.stores.codec import encode
from radixcache.stores.redis_calls import PAUSE_S, SLOWEST_BYTES_PER_S
from radixcache.stores.redis_store import Names
from tests.stores.made import MODEL, chain, matched, put_all, resumed
from tests.stores.proxy import Proxy
from tests.stores.redis_server import Clock, Server, own_server, program_named, redis, store_at  # noqa: F401

SECRET = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def small_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landmark in front of each token: the sequences of these tests are short."""
    monkeypatch.setattr(redis_store, "MARK_TOKENS", 1)


def stored(redis: Server, *blocks: Any, **options: Any) -> None:
    with store_at(redis.url, **options) as store:
        put_all(store, blocks)


def names_in(redis: Server) -> list[bytes]:
    found: list[bytes] = redis.client.keys("*")
    return found


def place_of(block: Any, secret: bytes | None = None) -> bytes:
    return Names(secret).of_block(block.head.key)


def test_a_value_beyond_the_limit_is_neither_written_nor_read(redis: Server) -> None:
    small, large = chain(range(4))[0], chain(range(100, 600), step=500)[0]
    stored(redis, small, large)
    nbytes = sum(memoryview(part).nbytes for part in encode(large))
    with store_at(redis.url, max_value_mib=(nbytes - 1) / (1 << 20)) as store:
        assert not store.accepts(nbytes)
        assert (resumed(store, range(4)), resumed(store, range(100, 600))) == (4, 0)
        assert store.stats.failed_calls == {"too large": 1}
        put_all(store, [large])
        assert store.stats.dropped == {"it is larger than max_value_mib": 1}


def test_use_keeps_a_chain_from_expiring_with_its_landmarks(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(redis, *chain(range(8)), ttl_s=1000)
    assert all(990 <= redis.client.ttl(key) <= 1000 for key in names_in(redis))
    for key in names_in(redis):
        redis.client.expire(key, 500)
    with store_at(redis.url, ttl_s=1000) as store:
        assert matched(store, range(8))
        assert all(990 <= redis.client.ttl(key) <= 1000 for key in names_in(redis))
        for key in names_in(redis):
            redis.client.expire(key, 900)
        assert matched(store, range(8))  # so soon it is not said again
        assert all(redis.client.ttl(key) <= 900 for key in names_in(redis))
        later_ns = time.time_ns() + 251 * 10**9
        monkeypatch.setattr(redis_store, "time", SimpleNamespace(time_ns=lambda: later_ns, monotonic=time.monotonic))
        assert matched(store, range(8))
        assert all(990 <= redis.client.ttl(key) <= 1000 for key in names_in(redis))
    stored(redis, *chain(range(100, 108)), ttl_s=None)
    assert {redis.client.ttl(place_of(block)) for block in chain(range(100, 108))} == {-1}


def test_what_a_process_knows_is_bounded_and_the_rest_is_asked_for(
    redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "KNOWN_BLOCKS", 3)
    with store_at(redis.url) as store:
        for first in range(0, 300, 100):
            put_all(store, chain(range(first, first + 8)))
            store.check()
        assert [resumed(store, range(first, first + 8)) for first in (0, 100, 200)] == [8, 8, 8]
        store.check()


def test_a_long_prompt_takes_three_round_trips_and_one_once_it_is_known(
    redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MARK_TOKENS", 64)
    # Turns of a conversation: many short blocks, none of which ends where a prompt could guess it.
    prompt = list(range(3000))
    stored(redis, *chain(prompt, step=37))
    with store_at(redis.url) as store:
        asked, ask = list[object](), store._calls.ask
        monkeypatch.setattr(store._calls, "ask", lambda its, **more: asked.append(its) or ask(its, **more))
        assert matched(store, [*prompt, 5])[-1].end == 3000
        assert len(asked) == 3
        assert matched(store, [*prompt, 5])[-1].end == 3000
        assert len(asked) == 4
        assert len(list(store.read([(link.key, "block") for link in matched(store, prompt)]))) == 82


def test_nothing_crosses_namespaces_models_or_grids(redis: Server) -> None:
    stored(redis, *chain(range(8), namespace="a"), *chain(range(8), grid=16, identity=Identity(b"exact")))
    with store_at(redis.url) as store:
        keys = np.arange(8)
        assert store.match(MODEL, "a", keys)[-1].end == 8
        for identity, namespace, grid in (
            (MODEL, "", 0), (MODEL, "b", 0), (Identity(b"digest of another"), "a", 0), (MODEL, "a", 16),
            (Identity(b"exact"), "", 0), (Identity(b"exact"), "", 32),
        ):  # fmt: skip
            assert store.match(identity, namespace, keys, grid=grid) == []
        assert store.match(Identity(b"exact"), "", keys, grid=16)[-1].end == 8


def test_names_have_no_text_in_them_and_with_a_secret_are_nothing_that_tokens_tell(redis: Server) -> None:
    words = np.frombuffer(b"patient has been diagnosed with!" * 8, "<i8").tolist()
    block = chain(words, step=32, namespace="tenant of a name")[0]
    for secret in (None, SECRET):
        redis.client.flushall()
        stored(redis, block, secret=secret)
        names = names_in(redis)
        names += [value for each in names if each[12:13] == b"m" for value in [redis.client.get(each)]]
        assert len(set(names)) == 1 + 32
        text = b"".join(names)
        assert all(each not in text for each in (b"patient", b"tenant", words[0].to_bytes(8, "little")))
        is_told = block.head.key.hex().encode() in text
        assert is_told == (secret is None)
    with store_at(redis.url, secret=SECRET) as store:
        assert store.match(MODEL, "tenant of a name", np.array(words))[-1].end == 32
    for secret in (None, SECRET[::-1]):
        with store_at(redis.url, secret=secret) as store:
            assert store.match(MODEL, "tenant of a name", np.array(words)) == []
    with pytest.raises(ValueError, match="secret has 5 bytes"):
        store_at(redis.url, secret=b"short")


@pytest.mark.parametrize("field", ["way", "tokens"])
def test_a_way_that_is_wrong_is_a_miss(redis: Server, field: str) -> None:
    blocks = chain(range(8))
    stored(redis, *blocks)
    for value in (b"", b"x", b"\0\0", bytes(8), b"\xff" * 64, bytes(1 << 16)):
        for block in blocks:
            redis.client.hset(place_of(block), field, value)
        with store_at(redis.url) as store:
            assert resumed(store, range(8)) in (0, 4)
            put_all(store, blocks)
            assert resumed(store, range(8)) == 8  # who has written it knows it without asking for ways


def test_keys_of_somebody_else_are_left_alone(redis: Server) -> None:
    blocks = chain(range(8))
    stored(redis, *blocks)
    marks = redis.client.keys("radixcache1:m:*")
    for key, plant in zip(marks, [b"radixcache1:b:nowhere", place_of(blocks[0]), b"mine", b"", b"\xff"], strict=False):
        redis.client.set(key, plant)
    redis.client.lpush("mine", b"thesis")
    redis.client.delete(place_of(blocks[1]))
    redis.client.set(place_of(blocks[1]), b"thesis")
    with store_at(redis.url) as store:
        assert resumed(store, range(8)) in (0, 4)
        put_all(store, blocks)
        assert store.stats.dropped["the server refuses it"] == 1
        assert store.stats.failed_calls["refused"] > 0
        assert not store.stats.stopped
    assert redis.client.get(place_of(blocks[1])) == b"thesis"
    assert redis.client.lrange("mine", 0, -1) == [b"thesis"]


def test_what_the_server_has_no_room_for_is_dropped_and_what_it_evicts_is_a_miss(
    redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MARK_TOKENS", 64)
    blocks = [chain(range(first, first + 500), step=500)[0] for first in range(0, 100_000, 1000)]
    nbytes = sum(block.nbytes for block in blocks)
    usual = redis.client.config_get("maxmemory*")
    try:
        with store_at(redis.url) as store:
            redis.client.config_set("maxmemory", redis.client.info("memory")["used_memory"] + nbytes // 2)
            redis.client.config_set("maxmemory-policy", "noeviction")
            put_all(store, blocks)
            assert 0 < store.stats.dropped["the server refuses it"] < len(blocks)
            redis.client.config_set("maxmemory-policy", "allkeys-lru")
            put_all(store, blocks)
            put_all(store, blocks[-1:])
            found = [resumed(store, range(first, first + 500)) for first in range(0, 100_000, 1000)]
            assert set(found) == {0, 500}
            assert not store.stats.damaged_files
            store.check()
    finally:
        for name, value in usual.items():
            redis.client.config_set(name, value)


URLS = ["http://me:geheim@host", "redis://me:geheim@host:port", "redis://me:geheim@host?nonsense=geheim", "geheim", ""]


@given(st.sampled_from(URLS) | st.text().map("redis://me:geheim@{}?x=geheim".format))
@settings(max_examples=30)
def test_a_url_that_is_none_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="wanted redis://, rediss:// or unix://") as raised:
        RedisStore(url)
    assert "geheim" not in str(raised.value)
    assert raised.value.__cause__ is raised.value.__context__ is None


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("redis", "redis.backoff", "redis.retry"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(StoreError, match=r"pip install 'radixcache\[redis\]'"):
        RedisStore("redis://host")


#: Far beyond any limit of these tests: a busy machine takes its time, and what has no limit takes forever.
LONG_S = 60.0


@pytest.fixture
def proxy(redis: Server) -> Iterator[Proxy]:
    proxy = Proxy(redis.socket)
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
    with store_at(proxy.url, timeout_s=0.1, clock=clock) as store:
        assert matched(store, range(8)) == []
        assert store.stats.failed_calls == {"timed out": 1}
        assert store.stats.stopped == "the server does not answer"
        assert not store.accepts(1)
        for _ in range(100):
            assert resumed(store, range(8)) == 0
            assert not store.put(chain(range(4))[0])
        assert store.stats.failed_calls == {"timed out": 1, "not asked": 100}
        assert store.stats.dropped == {"the server does not answer": 100}
        assert connected(proxy, 1)
        clock.now_s += PAUSE_S - 0.1
        assert matched(store, range(8)) == []
        assert store._calls.trial is None
        for connections in (2, 3):
            clock.now_s += PAUSE_S
            assert [matched(store, range(8)) for _ in range(9)] == [[]] * 9  # the first of these has the server tried
            tried(store)
            assert connected(proxy, connections)
    assert time.monotonic() - began < LONG_S


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
        assert store.stats.failed_calls["not reached"] in (1, 2)  # two values are asked for at a time
        clock.now_s += PAUSE_S
        assert matched(store, range(8)) == []
        tried(store)
        own_server.start()
        clock.now_s += PAUSE_S
        assert matched(store, range(8)) == []
        tried(store)
        assert resumed(store, range(8)) == 0  # what it had is gone
        put_all(store, chain(range(8)))
        assert resumed(store, range(8)) == 8
        assert store.stats.stopped == ""
    assert [each.split(".")[0] for each in caplog.messages] == [
        "Redis: not reached", "Redis answers again",
    ]  # fmt: skip


def test_a_reply_that_is_cut_anywhere_is_a_miss(proxy: Proxy, redis: Server) -> None:
    blocks = chain(range(8))
    with store_at(redis.url) as store:
        put_all(store, blocks)
        links = matched(store, range(8))
    for cut_after in (0, 30, 300, 1300):
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
    with store_at(redis.url) as store:
        assert [link[:4] for link in matched(store, range(8))] == [link[:4] for link in links]
        assert resumed(store, range(8)) == 8


def test_reading_has_a_limit_by_its_bytes(proxy: Proxy, redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_at(redis.url) as store:
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


PASSWORD = "geheim-und-lang"


def test_a_password_is_used_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    redis = Server(program_named("redis-server"))
    redis.client.config_set("requirepass", PASSWORD)
    caplog.set_level(logging.DEBUG)
    try:
        shown = []
        for password, found in ((PASSWORD, 8), (PASSWORD[::-1], 0), ("", 0)):
            with store_at(f"unix://:{password}@{redis.socket}") as store:
                put_all(store, chain(range(8)))
                assert resumed(store, range(8)) == found
                kinds = set(store.stats.failed_calls) - {"not asked"}
                assert kinds == (set() if found else {"not allowed"})
                shown += [repr(store), str(store.stats), repr(store._calls)]
        redis.kill()
        with store_at(f"unix://:{PASSWORD}@{redis.socket}") as store:
            assert matched(store, range(4)) == []
            assert store.stats.failed_calls == {"not reached": 1}
            shown += [repr(store), str(store.stats)]
        shown += caplog.messages
        text = "\n".join(shown)
        assert "not allowed" in text
        assert all(each not in text for each in (PASSWORD, PASSWORD[::-1], str(redis.socket)))
    finally:
        redis.end()


def test_a_url_may_name_the_limit_and_cannot_switch_off_what_the_store_needs(redis: Server) -> None:
    with store_at(f"{redis.url}?decode_responses=true&socket_timeout=90&socket_connect_timeout=1e9") as store:
        put_all(store, chain(range(8)))
        assert resumed(store, range(8)) == 8
        connection: Any = store._calls._client.connection_pool.make_connection()
        assert (connection.socket_timeout, connection.socket_connect_timeout) == (90.0, 90.0)
        assert store._calls.limit_s(0) == 90.0
    for none in ("0", "-1", "inf", "nan"):
        with pytest.raises(ValueError, match="wanted redis://"):
            store_at(f"{redis.url}?socket_timeout={none}")
