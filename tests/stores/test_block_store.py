"""What every store of blocks promises, on disk and in a server."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from radixcache.stores import redis_store
from radixcache.stores.block import Block
from radixcache.stores.codec import encode
from radixcache.stores.redis_store import Names
from tests.stores.made import chain, checkpoint, file_of, is_right, matched, opened, put_all, resumed
from tests.stores.redis_server import PROGRAMS, emptied, store_at

SECRET = b"0123456789abcdef"
Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Site:
    """A place where stores keep blocks. `change` alters what is stored of a block; None: it goes."""

    open: Callable[..., Any]
    change: Callable[[Block, Change | None, bytes | None], object]


def _disk(path: Path) -> Site:
    def change(block: Block, new: Change | None, secret: bytes | None) -> None:
        file = file_of(path, block)
        if new is None:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(new(file.read_bytes()))

    return Site(lambda **options: opened(path, **options), change)


def _server(program: str) -> Site:
    server = emptied(program)

    def change(block: Block, new: Change | None, secret: bytes | None) -> None:
        name, field = Names(secret).of_block(block.head.key), block.head.kind
        if new is None:
            server.client.hdel(name, field)
        else:
            server.client.hset(name, field, new(server.client.hget(name, field)))

    return Site(lambda **options: store_at(server.url, **options), change)


@pytest.fixture(params=["disk", *PROGRAMS])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(redis_store, "MARK_TOKENS", 1)  # a landmark in front of each token
    return _disk(tmp_path / "store") if request.param == "disk" else _server(request.param)


def stored(site: Site, *blocks: Block, **options: Any) -> None:
    with site.open(**options) as store:
        put_all(store, blocks)


def test_another_process_finds_what_was_stored_token_for_token(site: Site) -> None:
    blocks = [*chain(range(10)), *chain(range(300, 303)), *chain([*range(4), 9, 9])]
    stored(site, *blocks, checkpoint(blocks[1]))
    with site.open() as store:
        assert resumed(store, [*range(9), 77]) == 9
        assert resumed(store, [300, 301, 302, 303]) == 3
        assert resumed(store, [99]) == resumed(store, []) == 0
        assert matched(store, range(10), namespace="another") == []
        assert (store.stats.read_files, store.stats.failed_calls) == (4, {})
        links = matched(store, range(10), at_checkpoints=True)
        assert [link.has_checkpoint for link in links] == [False, True]
        (found,) = store.read([(links[1].key, "checkpoint")])
        assert (found.head.kind, is_right(found)) == ("checkpoint", True)
        put_all(store, blocks)
        assert store.stats.written_files == 0
        store.check()


def test_what_nothing_leads_to_is_not_written(site: Site) -> None:
    blocks = chain(range(8))
    with site.open() as store:
        put_all(store, [blocks[1], checkpoint(blocks[0])])
        assert store.stats.dropped == {"the blocks before it are not stored": 2}
        assert resumed(store, range(8)) == 0


def test_what_one_process_writes_another_one_goes_on_from_and_what_goes_is_a_miss(site: Site) -> None:
    blocks = chain(range(12))
    with site.open() as one, site.open() as other:
        put_all(one, blocks[:2])
        assert resumed(other, range(12)) == 8
        put_all(other, blocks[2:])
        assert resumed(one, range(12)) == 12
        links = matched(one, range(12))
        site.change(blocks[1], None, None)
        assert [block is None for block in one.read([(link.key, "block") for link in links])] == [False, True, False]
        assert one.stats.vanished_files == 1
        assert not one.holds(blocks[1].head.key)
        assert resumed(one, range(12)) == 4
        put_all(one, blocks)
        assert [resumed(store, range(12)) for store in (one, other)] == [12, 12]
        other.remove([blocks[1].head.key])
        assert resumed(one, range(12)) == 4
        assert resumed(other, range(12)) == 4


def test_a_full_queue_drops_and_nobody_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(range(12))
    store = site.open(queue_bytes=blocks[0].nbytes + 1)
    may_write, write = threading.Event(), store._write
    monkeypatch.setattr(store, "_write", lambda *its: may_write.wait(60) and write(*its))
    assert [store.put(block) for block in (blocks[0], blocks[0], blocks[1])] == [True, False, False]
    assert store.holds(blocks[0].head.key)
    assert matched(store, range(4)) == []
    assert not store.accepts(blocks[1].nbytes)
    assert not store.flush(0.0)
    may_write.set()
    assert store.flush(60)
    assert store.stats.dropped == {"the queue is full": 1}
    assert all(store.close(60) for _ in range(2))
    assert not store.put(blocks[1])
    assert resumed(store, range(4)) == 4


def test_closing_in_a_hurry_drops_what_was_not_begun_and_an_error_stops_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, begun, store = threading.Event(), threading.Event(), site.open()
    write = store._write

    def slow(head: Any, *more: Any) -> str:
        begun.set()
        assert may_write.wait(60)
        assert head.tokens[0] != 100, "a bug"
        return str(write(head, *more))

    monkeypatch.setattr(store, "_write", slow)
    blocks = [*chain(range(100, 104)), *chain(range(8))]
    assert all(map(store.put, blocks[:2]))
    may_write.set()
    assert store.flush(60)
    assert resumed(store, range(4)) == 4
    may_write.clear()
    begun.clear()
    assert all(map(store.put, [blocks[2], *chain(range(200, 204))]))
    assert begun.wait(60)
    assert not store.close(0.0)
    assert store.stats.waiting_bytes == blocks[2].nbytes
    may_write.set()
    assert store.close(60)
    assert [resumed(store, range(*its)) for its in ((0, 8), (200, 204))] == [8, 0]


DAMAGE: dict[str, Change] = {
    "flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "truncated": lambda data: data[:-1],
    "foreign": lambda data: b"GIF89a" * 99,
    "lying": lambda data: (1 << 50).to_bytes(8, "little") + data[8:] + bytes(1 << 16),
    "another's": lambda data: b"".join(map(bytes, encode(chain(range(50, 54))[0]))),
}


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unkeyed", "keyed"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_a_miss_and_counted_and_can_be_written_again(
    site: Site, damage: str, secret: bytes | None
) -> None:
    blocks = chain(range(8))
    stored(site, *blocks, secret=secret)
    site.change(blocks[1], DAMAGE[damage], secret)
    with site.open(secret=secret) as store:
        assert [resumed(store, range(8)) for _ in range(2)] == [4, 4]
        assert store.stats.damaged_files == 1
        put_all(store, blocks)
        assert resumed(store, range(8)) == 8
        site.change(blocks[1], lambda _: b"", secret)
        assert resumed(store, range(8)) == 4


SEQUENCES = [[first] * 6 + list(range(end)) for first in range(3) for end in (3, 7, 12)]


def test_whatever_several_processes_do_no_answer_is_wrong(site: Site) -> None:
    chance = random.Random(1)
    stores = [site.open() for _ in range(3)]
    for _ in range(60):
        store, tokens = chance.choice(stores), chance.choice(SEQUENCES)
        do = chance.randrange(10)
        if do < 4:
            put_all(store, (each for block in chain(tokens) for each in (block, checkpoint(block))[: 1 + do % 2]))
        elif do < 8:
            assert resumed(store, tokens) in range(len(tokens) + 1)
        else:
            site.change(chance.choice(chain(tokens)), None, None)
        store.check()
    for tokens in SEQUENCES:
        for _ in range(3):  # only by asking and reading a store finds out what has gone
            resumed(stores[0], tokens)
            put_all(stores[0], chain(tokens))
        assert resumed(stores[0], tokens) == len(tokens)
    assert all(not each.stats.damaged_files and each.close() for each in stores)


@pytest.mark.parametrize(
    "wrong",
    [
        {"queue_bytes": 0}, {"write_on": "never"}, {"secret": b"short"}, {"secret": bytes(65)},
        {"budget_bytes": 0},
        {"ttl_s": 0}, {"max_value_mib": 0}, {"timeout_s": 0},
    ],
    ids=repr,
)  # fmt: skip
def test_arguments_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    if name not in ("ttl_s", "max_value_mib", "timeout_s"):
        with pytest.raises(ValueError, match=r"wanted|1 or more"):
            opened(tmp_path / "store", **wrong)
        assert not (tmp_path / "store").exists()
    if "budget" not in name:
        with pytest.raises(ValueError, match="wanted"):
            store_at("unix:///nowhere", **wrong)
