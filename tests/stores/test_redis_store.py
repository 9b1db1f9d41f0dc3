"""Redis gives back what was put, to every process that asks it with the same tokens, and to nobody else."""

# ruff: noqa: F811

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import RedisStore, StoreError
from radixcache.stores import redis_store
from radixcache.stores.block import Identity
from radixcache.stores.codec import encoded
from radixcache.stores.redis_store import Names
from tests.stores.made import MODEL, chain, checkpoint, is_right, matched, put_all, resumed
from tests.stores.redis_server import Server, server, shared_server, store_at  # noqa: F401

SECRET = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def small_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landmark in front of each token: the sequences of these tests are short."""
    monkeypatch.setattr(redis_store, "MARK_TOKENS", 1)


def stored(server: Server, *blocks: Any, **options: Any) -> None:
    with store_at(server.url, **options) as store:
        put_all(store, blocks)


def names_in(server: Server) -> list[bytes]:
    found: list[bytes] = server.client.keys("*")
    return found


def place_of(block: Any, secret: bytes | None = None) -> bytes:
    return Names(secret).of_block(block.head.key)


def test_another_process_finds_what_was_stored_token_for_token(server: Server) -> None:
    stored(server, *chain(range(10)), *chain(range(300, 303)))
    with store_at(server.url) as store:
        assert resumed(store, [*range(9), 77]) == 9
        assert resumed(store, [300, 301, 302, 303]) == 3
        assert resumed(store, [99]) == 0
        assert resumed(store, []) == 0
        assert matched(store, range(10), namespace="another") == []
        assert store.stats.read_files == 4
        assert store.stats.failed_calls == {}
        store.check()


def test_a_checkpoint_comes_back_beside_its_block(server: Server) -> None:
    blocks = chain(range(8))
    stored(server, *blocks, checkpoint(blocks[0]))
    with store_at(server.url) as store:
        links = matched(store, range(8), at_checkpoints=True)
        assert [link.has_checkpoint for link in links] == [True]
        (found,) = store.read([(links[0].key, "checkpoint")])
        assert found is not None
        assert (found.head.kind, is_right(found)) == ("checkpoint", True)


def test_what_is_there_is_not_written_again(server: Server) -> None:
    blocks = [*chain(range(8)), *chain([*range(4), 9, 9])]
    stored(server, *blocks)
    with store_at(server.url) as store:
        put_all(store, blocks)
        assert store.stats.written_files == 0
        assert store.stats.dropped == {"it is there": 3}
    assert len(server.client.keys("radixcache1:b:*")) == 3  # of the four blocks two are the same


def test_what_one_process_writes_another_one_goes_on_from(server: Server) -> None:
    with store_at(server.url) as one, store_at(server.url) as other:
        put_all(one, chain(range(8)))
        assert resumed(other, range(8)) == 8
        put_all(other, chain([*range(8), 50, 51]))
        assert resumed(one, [*range(8), 50, 51]) == 10
        server.client.flushall()
        assert resumed(one, range(8)) == 0
        assert not one.holds(chain(range(8))[0].head.key)
        put_all(one, chain(range(8)))
        assert resumed(other, range(8)) == 8


def test_what_nothing_leads_to_is_not_written(server: Server) -> None:
    blocks = chain(range(12))
    with store_at(server.url) as store:
        put_all(store, [blocks[1], checkpoint(blocks[0])])
        put_all(store, blocks[:2])
        server.client.delete(place_of(blocks[1]))
        put_all(store, [blocks[2]])
        assert store.stats.dropped == {"what comes before it is not stored": 3}
    assert len(server.client.keys("radixcache1:b:*")) == 1


def test_what_is_evicted_in_between_is_the_end_of_what_is_found_until_it_is_written_again(server: Server) -> None:
    blocks = chain(range(12))
    stored(server, *blocks)
    server.client.delete(place_of(blocks[1]))
    with store_at(server.url) as store:
        assert resumed(store, range(12)) == 4
        put_all(store, blocks)
        assert resumed(store, range(12)) == 12


def test_a_value_that_goes_before_it_is_read_is_a_miss_and_counted(server: Server) -> None:
    blocks = chain(range(8))
    with store_at(server.url) as store:
        put_all(store, blocks)
        links = matched(store, range(8))
        server.client.delete(place_of(blocks[1]))
        first, second = store.read([(link.key, "block") for link in links])
        assert first is not None
        assert second is None
        assert store.stats.vanished_files == 1
        assert not store.holds(blocks[1].head.key)


def test_a_value_beyond_the_limit_is_neither_written_nor_read(server: Server) -> None:
    small, large = chain(range(4))[0], chain(range(100, 600), step=500)[0]
    stored(server, small, large)
    nbytes = sum(memoryview(part).nbytes for part in encoded(large))
    with store_at(server.url, max_value_mib=(nbytes - 1) / (1 << 20)) as store:
        assert not store.accepts(nbytes)
        assert (resumed(store, range(4)), resumed(store, range(100, 600))) == (4, 0)
        assert store.stats.failed_calls == {"too large": 1}
        put_all(store, [large])
        assert store.stats.dropped == {"it is larger than max_value_mib": 1}


def test_a_full_queue_drops_and_nobody_waits(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(range(12))
    may_write, write = threading.Event(), RedisStore._write
    monkeypatch.setattr(RedisStore, "_write", lambda *its: may_write.wait(60) and write(*its))
    with store_at(server.url, queue_bytes=blocks[0].nbytes + 1) as store:
        assert [store.put(block) for block in (blocks[0], blocks[0], blocks[1])] == [True, False, False]
        assert store.holds(blocks[0].head.key)
        assert store.file_bytes(blocks[0].head.key) == 0
        assert not store.accepts(blocks[1].nbytes)
        assert not store.flush(0.0)
        may_write.set()
        assert store.flush(60)
        assert store.stats.dropped == {"the queue is full": 1}
    assert not store.put(blocks[1])
    assert resumed(store, range(4)) == 4


def test_use_keeps_a_chain_from_expiring_with_its_landmarks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(server, *chain(range(8)), ttl_s=1000)
    assert all(990 <= server.client.ttl(key) <= 1000 for key in names_in(server))
    for key in names_in(server):
        server.client.expire(key, 500)
    with store_at(server.url, ttl_s=1000) as store:
        assert matched(store, range(8))
        assert all(990 <= server.client.ttl(key) <= 1000 for key in names_in(server))
        for key in names_in(server):
            server.client.expire(key, 900)
        assert matched(store, range(8))  # so soon it is not said again
        assert all(server.client.ttl(key) <= 900 for key in names_in(server))
        later_ns = time.time_ns() + 251 * 10**9
        monkeypatch.setattr(redis_store, "time", SimpleNamespace(time_ns=lambda: later_ns, monotonic=time.monotonic))
        assert matched(store, range(8))
        assert all(990 <= server.client.ttl(key) <= 1000 for key in names_in(server))
    stored(server, *chain(range(100, 108)), ttl_s=None)
    assert {server.client.ttl(place_of(block)) for block in chain(range(100, 108))} == {-1}


def test_state_that_was_found_wrong_is_removed_for_all(server: Server) -> None:
    blocks = chain(range(8))
    with store_at(server.url) as one, store_at(server.url) as other:
        put_all(one, blocks)
        assert resumed(other, range(8)) == 8
        other.remove([blocks[1].head.key])
        assert (resumed(one, range(8)), resumed(other, range(8))) == (4, 4)


def test_what_a_process_knows_is_bounded_and_the_rest_is_asked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "KNOWN_BLOCKS", 3)
    with store_at(server.url) as store:
        for first in range(0, 300, 100):
            put_all(store, chain(range(first, first + 8)))
            store.check()
        assert [resumed(store, range(first, first + 8)) for first in (0, 100, 200)] == [8, 8, 8]
        store.check()


def test_a_long_prompt_takes_three_round_trips_and_one_once_it_is_known(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MARK_TOKENS", 64)
    # Turns of a conversation: many short blocks, none of which ends where a prompt could guess it.
    prompt = list(range(3000))
    stored(server, *chain(prompt, step=37))
    with store_at(server.url) as store:
        asked, ask = list[object](), store._calls.ask
        monkeypatch.setattr(store._calls, "ask", lambda its, nbytes=0: asked.append(its) or ask(its, nbytes))
        assert matched(store, [*prompt, 5])[-1].end == 3000
        assert len(asked) == 3
        assert matched(store, [*prompt, 5])[-1].end == 3000
        assert len(asked) == 4
        assert len(list(store.read([(link.key, "block") for link in matched(store, prompt)]))) == 82


def test_blocks_are_read_in_batches_and_in_order(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(server, *chain(range(40)))
    with store_at(server.url) as store:
        links = matched(store, range(40))
        nbytes = links[0].block_bytes
        for batch_bytes in (1, 2 * nbytes, 3 * nbytes - 1, 100 * nbytes):
            monkeypatch.setattr(redis_store, "BATCH_BYTES", batch_bytes)
            assert resumed(store, range(40)) == 40
        reading = store.read([(link.key, "block") for link in links])
        assert is_right(next(reading))  # type: ignore[arg-type]
        reading.close()  # the rest is not wanted


# Whose it is


def test_nothing_crosses_namespaces_models_or_grids(server: Server) -> None:
    stored(server, *chain(range(8), namespace="a"), *chain(range(8), grid=16, identity=Identity(b"exact")))
    with store_at(server.url) as store:
        keys = np.arange(8)
        assert store.match(MODEL, "a", keys)[-1].end == 8
        for identity, namespace, grid in (
            (MODEL, "", 0), (MODEL, "b", 0), (Identity(b"digest of another"), "a", 0), (MODEL, "a", 16),
            (Identity(b"exact"), "", 0), (Identity(b"exact"), "", 32),
        ):  # fmt: skip
            assert store.match(identity, namespace, keys, grid=grid) == []
        assert store.match(Identity(b"exact"), "", keys, grid=16)[-1].end == 8


def test_names_have_no_text_in_them_and_with_a_secret_are_nothing_that_tokens_tell(server: Server) -> None:
    words = np.frombuffer(b"patient has been diagnosed with!" * 8, "<i8").tolist()
    block = chain(words, step=32, namespace="tenant of a name")[0]
    for secret in (None, SECRET):
        server.client.flushall()
        stored(server, block, secret=secret)
        names = names_in(server)
        names += [value for each in names if each[12:13] == b"m" for value in [server.client.get(each)]]
        assert len(set(names)) == 1 + 32
        text = b"".join(names)
        assert all(each not in text for each in (b"patient", b"tenant", words[0].to_bytes(8, "little")))
        is_told = block.head.key.hex().encode() in text
        assert is_told == (secret is None)
    with store_at(server.url, secret=SECRET) as store:
        assert store.match(MODEL, "tenant of a name", np.array(words))[-1].end == 32
    for secret in (None, SECRET[::-1]):
        with store_at(server.url, secret=secret) as store:
            assert store.match(MODEL, "tenant of a name", np.array(words)) == []
    with pytest.raises(ValueError, match="secret has 5 bytes"):
        store_at(server.url, secret=b"short")


# What is not ours, or not as it was


DAMAGE = {
    "flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "truncated": lambda data: data[:-1],
    "foreign": lambda data: b"GIF89a" * 99,
    "another's": lambda data: b"".join(map(bytes, encoded(chain(range(50, 54))[0]))),
}


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unkeyed", "keyed"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_value_is_a_miss_and_removed_and_counted(server: Server, damage: str, secret: bytes | None) -> None:
    blocks = chain(range(8))
    stored(server, *blocks, secret=secret)
    place = place_of(blocks[1], secret)
    server.client.hset(place, "block", DAMAGE[damage](server.client.hget(place, "block")))
    with store_at(server.url, secret=secret) as store:
        assert [resumed(store, range(8)) for _ in range(2)] == [4, 4]
        assert store.stats.damaged_files == 1
        put_all(store, blocks)
        assert resumed(store, range(8)) == 8
        server.client.hset(place, "block", b"")
        assert resumed(store, range(8)) == 4


@pytest.mark.parametrize("field", ["way", "tokens"])
# Named by length: a running test's name is in the environment, and so in that of a server that is started for it.
@pytest.mark.parametrize("value", [b"", b"x", b"\0\0", bytes(8), b"\xff" * 64, bytes(1 << 16)], ids=len)
def test_a_way_that_is_wrong_is_a_miss(server: Server, field: str, value: bytes) -> None:
    blocks = chain(range(8))
    stored(server, *blocks)
    for block in blocks:
        server.client.hset(place_of(block), field, value)
    with store_at(server.url) as store:
        assert resumed(store, range(8)) in (0, 4)
        put_all(store, blocks)
        assert resumed(store, range(8)) == 8  # who has written it knows it without asking for ways


def test_keys_of_somebody_else_are_left_alone(server: Server) -> None:
    blocks = chain(range(8))
    stored(server, *blocks)
    marks = server.client.keys("radixcache1:m:*")
    for key, plant in zip(marks, [b"radixcache1:b:nowhere", place_of(blocks[0]), b"mine", b"", b"\xff"], strict=False):
        server.client.set(key, plant)
    server.client.lpush("mine", b"thesis")
    server.client.delete(place_of(blocks[1]))
    server.client.set(place_of(blocks[1]), b"thesis")
    with store_at(server.url) as store:
        assert resumed(store, range(8)) in (0, 4)
        put_all(store, blocks)
        assert store.stats.dropped["the server refuses it"] == 1
        assert store.stats.failed_calls["refused"] > 0
        assert not store.stats.stopped
    assert server.client.get(place_of(blocks[1])) == b"thesis"
    assert server.client.lrange("mine", 0, -1) == [b"thesis"]


def test_what_the_server_has_no_room_for_is_dropped_and_what_it_evicts_is_a_miss(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MARK_TOKENS", 64)
    blocks = [chain(range(first, first + 500), step=500)[0] for first in range(0, 100_000, 1000)]
    nbytes = sum(block.nbytes for block in blocks)
    usual = server.client.config_get("maxmemory*")
    try:
        with store_at(server.url) as store:
            server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + nbytes // 2)
            server.client.config_set("maxmemory-policy", "noeviction")
            put_all(store, blocks)
            assert 0 < store.stats.dropped["the server refuses it"] < len(blocks)
            server.client.config_set("maxmemory-policy", "allkeys-lru")
            put_all(store, blocks)
            put_all(store, blocks[-1:])
            found = [resumed(store, range(first, first + 500)) for first in range(0, 100_000, 1000)]
            assert set(found) == {0, 500}
            assert found[-1] == 500
            assert not store.stats.damaged_files
            store.check()
    finally:
        for name, value in usual.items():
            server.client.config_set(name, value)


SEQUENCES = [[first] * 6 + list(range(end)) for first in range(3) for end in (3, 7, 12)]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_several_processes_and_an_evicting_server_do_no_answer_is_wrong(server: Server, seed: int) -> None:
    chance = random.Random(seed)
    stores = [store_at(server.url) for _ in range(3)]
    for _ in range(60):
        store, tokens = chance.choice(stores), chance.choice(SEQUENCES)
        do = chance.randrange(10)
        if do < 4:
            put_all(store, (each for block in chain(tokens) for each in (block, checkpoint(block))[: 1 + do % 2]))
        elif do < 8:
            assert resumed(store, tokens) in range(len(tokens) + 1)
        else:
            for key in chance.sample(names_in(server), min(3, server.client.dbsize())):
                server.client.delete(key)
        store.check()
    for tokens in SEQUENCES:
        for _ in range(3):  # only by asking and reading it finds out what has gone
            resumed(stores[0], tokens)
            put_all(stores[0], chain(tokens))
        assert resumed(stores[0], tokens) == len(tokens)
    assert all(not each.stats.damaged_files and each.close() for each in stores)


# Arguments


def test_arguments_out_of_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"ttl_s": 0}, {"max_value_mib": 0}, {"timeout_s": 0}, {"queue_bytes": 0}]
    for options in [*wrong, {"write_on": "never"}, {"secret": bytes(65)}]:
        with pytest.raises(ValueError, match="wanted"):
            RedisStore("unix:///nowhere", **options)


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
