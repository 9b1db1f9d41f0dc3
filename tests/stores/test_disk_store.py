"""A store gives back what was put, after a restart too, within its budgets."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixcache import DiskStore, StoreError
from radixcache.stores import disk_store, files
from radixcache.stores.block import Block, Buffer
from radixcache.stores.files import remove, scan, verify
from tests.stores.made import GIB, chain, checkpoint, file_of, is_right, matched, opened, put_all, resumed, stored

SECRET = b"0123456789abcdef"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def files_in(path: Path) -> Iterator[Path]:
    return (each for each in path.rglob("*") if each.is_file())


def test_a_restart_finds_what_was_stored_token_for_token(path: Path) -> None:
    stored(path, *chain(range(10)), *chain(range(300, 303)))
    with opened(path) as store:
        assert resumed(store, [*range(9), 77]) == 9
        assert resumed(store, [300, 301, 302, 303]) == 3
        assert resumed(store, [99]) == 0
        assert matched(store, range(10), namespace="another") == []
        assert store.stats.read_files == 4
        store.check()


def test_a_checkpoint_comes_back_beside_its_block(path: Path) -> None:
    blocks = chain(range(8))
    stored(path, *blocks, checkpoint(blocks[1]))
    with opened(path) as store:
        links = matched(store, range(8), at_checkpoints=True)
        assert [link.has_checkpoint for link in links] == [False, True]
        (found,) = store.read([(links[1].key, "checkpoint")])
        assert found is not None
        assert (found.head.kind, is_right(found)) == ("checkpoint", True)


def test_what_is_there_is_not_written_again(path: Path) -> None:
    blocks = [*chain(range(8)), *chain([*range(4), 9, 9])]
    stored(path, *blocks)
    times = {each: each.stat().st_ino for each in files_in(path)}
    with opened(path) as store:
        put_all(store, blocks)
        assert store.stats.written_files == 0
    assert {each: each.stat().st_ino for each in files_in(path)} == times
    assert sum(1 for _ in scan(path)) == 3  # of the four blocks two are the same


def test_nobody_else_may_read_what_is_stored(path: Path) -> None:
    stored(path, *chain(range(4)), write_budget_bytes_per_day=GIB)
    for each in [path, *path.rglob("*")]:
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each


def test_what_was_used_longest_ago_goes_first_and_no_chain_loses_its_beginning(path: Path) -> None:
    blocks = chain(range(8))
    stored(path, *blocks)
    nbytes = opened(path).stats.stored_bytes
    with opened(path, budget_bytes=2 * nbytes) as store:
        put_all(store, chain(range(100, 108)))
        assert resumed(store, range(8)) == 8
        put_all(store, chain(range(200, 208)))
        assert [resumed(store, range(first, first + 8)) for first in (0, 100, 200)] == [8, 0, 8]
        assert store.stats.stored_bytes <= 2 * nbytes
        assert store.stats.evicted_files == 2
    with opened(path, budget_bytes=nbytes) as store:  # 200 was used last, and a restart knows that
        assert [resumed(store, range(first, first + 8)) for first in (0, 200)] == [0, 8]
        put_all(store, chain([*range(200, 208), 1, 2, 3, 4]))
        assert store.stats.dropped == {"the budget is full of what comes before it": 1}
        assert resumed(store, range(200, 208)) == 8


def test_what_a_chain_is_continued_from_is_used_by_that(path: Path) -> None:
    old, new = chain(range(8)), chain(range(100, 108))
    stored(path, *old[:1], *new)
    nbytes = opened(path).stats.stored_bytes
    with opened(path, budget_bytes=nbytes) as store:
        put_all(store, old)
        assert (resumed(store, range(8)), resumed(store, range(100, 108))) == (8, 4)


def test_what_nothing_leads_to_is_not_written(path: Path) -> None:
    blocks = chain(range(8))
    with opened(path) as store:
        put_all(store, [blocks[1], checkpoint(blocks[0])])
        assert store.stats.dropped == {"what comes before it is not stored": 2}
    assert list(scan(path)) == []


def test_a_block_that_is_larger_than_a_budget_is_not_taken(path: Path) -> None:
    block = chain(range(8), step=8)[0]
    with opened(path, budget_bytes=100) as store:
        assert not store.accepts(block.nbytes)
        put_all(store, [block])
        assert store.stats.dropped == {"it is larger than the budget": 1}


def test_the_budget_of_a_day_is_the_folders_and_ends_with_the_day(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(range(12))
    stored(path, blocks[0])
    day_bytes = int(2.5 * file_of(path, blocks[0]).stat().st_size)
    monkeypatch.setattr(disk_store, "_today", lambda: 7)
    with opened(path, write_budget_bytes_per_day=day_bytes) as one:
        with opened(path, write_budget_bytes_per_day=day_bytes) as other:
            put_all(one, [blocks[1]])
            put_all(other, [blocks[2]])
        put_all(one, chain([99] * 4))
        assert one.stats.dropped == {"the budget of the day is spent": 1}
        assert not one.accepts(day_bytes)
        monkeypatch.setattr(disk_store, "_today", lambda: 8)
        assert one.accepts(day_bytes)
        put_all(one, chain([99] * 4))
        assert one.stats.written_files == 2
    assert [each.name for each in path.glob("written-*")] == ["written-8"]


def test_a_disk_that_is_nearly_full_is_left_alone(path: Path) -> None:
    with DiskStore(path, budget_bytes=GIB, min_free_bytes=1 << 62) as store:
        put_all(store, chain(range(4)))
        assert store.stats.dropped == {"the disk is nearly full": 1}
        assert store.stats.stopped == ""


def test_a_full_queue_drops_and_nobody_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(range(12))
    store = opened(path, queue_bytes=blocks[0].nbytes + 1)
    may_write = threading.Event()
    write = store._folder.write
    monkeypatch.setattr(store._folder, "write", lambda *given: may_write.wait(60) and write(*given))
    assert [store.put(block) for block in (blocks[0], blocks[0], blocks[1])] == [True, False, False]
    assert store.holds(blocks[0].head.key)
    assert not store.accepts(blocks[1].nbytes)
    assert not store.flush(0.0)
    may_write.set()
    assert store.flush(60)
    assert store.stats.dropped == {"the queue is full": 1}
    assert store.close(60)
    assert store.close(60)
    assert not store.put(blocks[1])
    assert resumed(store, range(4)) == 4


def test_a_head_of_many_buffers_is_found_by_a_restart(path: Path) -> None:
    block = Block(chain(range(4))[0].head, {f"{layer}.keys": Buffer(b"", "bool", (0,)) for layer in range(999)})
    stored(path, block)
    with opened(path) as store:
        (link,) = matched(store, range(4))
        (found,) = store.read([(link.key, "block")])
        assert found is not None
        assert found.buffers.keys() == block.buffers.keys()


def _aged(path: Path, age_ns: int) -> None:
    """Have the folders say that they changed at this time."""
    for each in [path, *path.glob("??")]:
        os.utime(each, ns=(age_ns, age_ns))


def test_a_folder_is_looked_at_again_where_it_may_have_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(range(12))
    stored(path, blocks[0])
    _aged(path, 10**18)
    store = opened(path)
    stored(path, blocks[1])
    _aged(path, 2 * 10**18 - 1)
    monkeypatch.setattr(files, "RECENT_NS", 10**19)
    assert resumed(store, range(12)) == 8
    stored(path, blocks[2])
    _aged(path, 2 * 10**18 - 1)  # within the same tick of the file system's clock
    assert resumed(store, range(12)) == 12


def test_a_folder_that_could_not_be_listed_is_listed_the_next_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(path)
    store = opened(path)
    stored(path, *chain(range(8)))
    _aged(path, 10**18)

    def scandir(_: object) -> object:
        raise PermissionError

    monkeypatch.setattr("radixcache.stores.files.os.scandir", scandir)
    assert resumed(store, range(8)) == 0
    monkeypatch.undo()
    assert resumed(store, range(8)) == 8
    assert store.stats.read_errors == 1


def test_what_another_process_has_written_meanwhile_is_not_written_again(path: Path) -> None:
    with opened(path) as store:
        stored(path, *chain(range(8)))
        put_all(store, chain(range(8)))
        assert store.stats.written_files == 0


def test_two_stores_in_one_folder_see_what_the_other_wrote_and_evicted(path: Path) -> None:
    with opened(path) as one, opened(path) as other:
        put_all(one, chain(range(8)))
        assert resumed(other, range(8)) == 8
        put_all(other, chain([*range(8), 50, 51]))
        assert resumed(one, [*range(8), 50, 51]) == 10
        assert remove(path, [each.name for each in scan(path)]) == 3
        assert resumed(one, range(8)) == 0
        assert one.stats.vanished_files >= 1
        assert resumed(one, range(8)) == 0
        one.check()


def test_what_another_process_used_later_is_not_evicted_before_it(path: Path) -> None:
    stored(path, *chain(range(4)))
    nbytes = opened(path).stats.stored_bytes
    with opened(path, budget_bytes=2 * nbytes) as one, opened(path) as other:
        put_all(one, chain(range(100, 104)))
        assert resumed(other, range(4)) == 4
        put_all(one, chain(range(200, 204)))
        assert [resumed(one, range(first, first + 4)) for first in (0, 100, 200)] == [4, 0, 4]


def test_a_secret_refuses_a_folder_and_files_that_were_made_without_it(path: Path, tmp_path: Path) -> None:
    block = chain(range(4))[0]
    stored(path, block, secret=SECRET)
    stored(tmp_path / "plain", block)
    for secret in (None, SECRET[::-1]):
        with pytest.raises(StoreError, match="made with a secret that is not this one"):
            opened(path, secret=secret)
        with pytest.raises(StoreError, match="made with a secret that is not this one"):
            list(verify(path, secret))
    with pytest.raises(StoreError, match="made with no secret"):
        opened(tmp_path / "plain", secret=SECRET)
    assert resumed(opened(path, secret=SECRET), range(4)) == 4
    file_of(path, block).write_bytes(file_of(tmp_path / "plain", block).read_bytes())
    assert resumed(opened(path, secret=SECRET), range(4)) == 0


def test_arguments_out_of_range_are_refused_before_a_folder_is_made(path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"budget_bytes": 0}, {"queue_bytes": 0}, {"write_budget_bytes_per_day": -1}]
    for options in [*wrong, {"write_on": "never"}, {"secret": b"short"}, {"secret": bytes(65)}]:
        with pytest.raises(ValueError, match=r"wanted|1 or more"):
            DiskStore(path, **{"budget_bytes": GIB, **options})
    assert not path.exists()


def test_a_survey_lists_what_there_is_and_finds_every_damaged_file(path: Path) -> None:
    blocks = [*chain(range(4), namespace="n"), *chain(range(100, 104))]
    stored(path, *blocks, checkpoint(blocks[1]))
    found = sorted((each.head.namespace, each.head.kind, each.head.identity.model) for each in scan(path))
    assert found == [("", "block", "tiny"), ("", "checkpoint", "tiny"), ("n", "block", "tiny")]
    assert {each.name: each.nbytes for each in scan(path)} == {name: nbytes for name, nbytes, _ in verify(path)}
    assert all(abs(each.used_s - file_of(path, blocks[0]).stat().st_mtime) < 1e6 for each in scan(path))
    bad = file_of(path, blocks[0])
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    assert [name for name, _, wrong in verify(path) if wrong] == [str(bad.relative_to(path))]
    assert sorted(each.name for each in scan(path)) == sorted(name for name, _, _ in verify(path))
    assert remove(path, ["../store/store.json", str(bad.relative_to(path))]) == 1
    assert sum(1 for _ in scan(path)) == 2
