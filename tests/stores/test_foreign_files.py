"""Whatever lies in a store's folder is used without a wrong answer, set aside, or left alone."""

from __future__ import annotations

import os
import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from radixcache import StoreError
from radixcache.stores import files
from radixcache.stores.codec import Damaged
from radixcache.stores.files import Folder, scan
from tests.stores.made import chain, content, file_of, opened, put_all, resumed, stored


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


DAMAGE = {
    "flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "grown": lambda data: data + b"\0",
    "foreign": lambda data: b"GIF89a" * 999,
    "lying": lambda data: (1 << 50).to_bytes(8, "little") + data[8:] + bytes(1 << 16),
}


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opened later"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_set_aside_and_named_once(
    path: Path, damage: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(range(8))
    stored(path, *blocks)
    store = opened(path)
    file_of(path, blocks[1]).write_bytes(DAMAGE[damage](file_of(path, blocks[1]).read_bytes()))
    store = store if is_open else opened(path)
    assert [resumed(store, range(8)) for _ in range(2)] == [4, 4]
    assert store.stats.damaged_files == 1
    assert [each.name for each in (path / "quarantine").iterdir()] == [file_of(path, blocks[1]).name]
    put_all(store, blocks)
    assert resumed(store, range(8)) == 8
    file_of(path, blocks[1]).write_bytes(b"again")
    assert resumed(store, range(8)) == 4
    assert store.stats.damaged_files == 2
    store.close()
    assert len([each for each in caplog.messages if file_of(path, blocks[1]).name in each]) == 1


@pytest.mark.parametrize("secret", [None, bytes(range(16))], ids=["unkeyed", "keyed"])
def test_a_file_that_is_read_in_pieces_is_checked_to_its_last_byte(
    path: Path, secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = chain(range(4))
    stored(path, block, secret=secret)
    place, file, read = block.head.place, file_of(path, block), Folder(path).read
    whole = file.read_bytes()
    for piece_bytes in (100, len(whole) - 16, len(whole)):
        monkeypatch.setattr(files, "PIECE_BYTES", piece_bytes)
        file.write_bytes(whole)
        assert content(read(place, len(whole), secret)) == content(block)
        for at in range(0, len(whole), 5):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(Damaged):
                read(place, len(whole), secret)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opened later"])
def test_two_files_that_were_swapped_are_both_refused(path: Path, is_open: bool) -> None:
    one, other = chain(range(4))[0], chain(range(100, 104))[0]
    stored(path, one, other)
    store = opened(path)
    contents = [file_of(path, block).read_bytes() for block in (one, other)]
    for block, data in zip((other, one), contents, strict=True):
        file_of(path, block).write_bytes(data)
    store = store if is_open else opened(path)
    assert (resumed(store, range(4)), resumed(store, range(100, 104))) == (0, 0)
    assert store.stats.damaged_files == 2


def _planted(target: Path, kind: str, elsewhere: Path) -> None:
    if kind == "symlink":
        target.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind == "sparse":
        with target.open("wb") as file:
            file.truncate(1 << 36)
    else:
        target.mkdir()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "sparse", "directory"])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opened later"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(path: Path, kind: str, is_open: bool) -> None:
    block = chain(range(4))[0]
    stored(path, block)
    store = opened(path)
    file_of(path, block).rename(path.parent / "mine")
    data = (path.parent / "mine").read_bytes()
    _planted(file_of(path, block), kind, path.parent / "mine")
    store = store if is_open else opened(path)
    assert resumed(store, range(4)) == 0
    assert store.stats.damaged_files == (0 if kind == "directory" and not is_open else 1)
    put_all(store, [block])
    # What was found in the place of a known file is set aside, a directory too; no other directory is touched.
    assert resumed(store, range(4)) == (0 if kind == "directory" and not is_open else 4)
    assert store.stats.stopped == ""
    assert (path.parent / "mine").read_bytes() == data
    store.close()


def test_a_shard_that_is_a_symlink_is_left_alone(path: Path, tmp_path: Path) -> None:
    block = chain(range(4))[0]
    stored(path)
    stored(tmp_path / "other", block)
    mine = file_of(tmp_path / "other", block).parent
    file_of(path, block).parent.symlink_to(mine)
    with opened(path) as store:
        assert resumed(store, range(4)) == 0
        put_all(store, [block])
        assert store.stats.dropped == {"something else has its place": 1}
        assert store.stats.stopped == ""
    assert len(list(mine.iterdir())) == 1


def test_the_quarantine_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "QUARANTINE_FILES", 3)
    stored(path, *chain(range(4)))
    shard = next(each for each in path.iterdir() if len(each.name) == 2)
    for number in range(9):
        (shard / f"foreign-{number}").write_bytes(b"foreign")
    with opened(path) as store:
        assert store.stats.damaged_files == 9
        assert resumed(store, range(4)) == 4
    assert len(list((path / "quarantine").iterdir())) == 3
    monkeypatch.setattr(files, "QUARANTINE_BYTES", 10)
    (shard / "large").write_bytes(bytes(99))
    opened(path)
    assert list((path / "quarantine").iterdir()) == []


def test_what_a_writer_that_died_left_goes_and_what_is_being_written_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(path)
    (path / "tmp-dead").write_bytes(b"half")
    store = opened(path)
    assert not (path / "tmp-dead").exists()
    rename, seen = os.rename, list[bool]()

    def opens_before(source: Path, target: Path) -> None:
        opened(path)  # as another process would, half way through the write
        seen.append(Path(source).exists())
        rename(source, target)

    monkeypatch.setattr("radixcache.stores.files.os.rename", opens_before)
    put_all(store, chain(range(4)))
    assert seen == [True]
    assert resumed(store, range(4)) == 4
    store.close()


def test_a_folder_that_is_no_store_is_refused_and_left_as_it_was(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds thesis\.txt, and is no store"):
        opened(path)
    assert [each.name for each in path.iterdir()] == ["thesis.txt"]
    for mark in ('{"format": "radixcache-store", "version": 2}', "[" * 2000, "[]", "\xff"):
        (path / "store.json").write_text(mark)
        with pytest.raises(StoreError, match=r"store\.json says|cannot be used"):
            opened(path)
    with pytest.raises(StoreError, match="cannot be used as a store"):
        opened(path / "thesis.txt")
    with pytest.raises(StoreError, match="cannot be used as a store"):
        list(scan(path / "nowhere"))


NAMES = st.sampled_from(["00", "store.json", "quarantine", "tmp-1", "written-1", "zz", "0", "00/a", "00/b.block"])
BLOCK = chain(range(4))[0]


@given(st.lists(st.tuples(NAMES, st.binary(max_size=20)), max_size=4), st.binary(max_size=40), st.randoms())
@settings(max_examples=60)
def test_whatever_lies_in_a_folder_it_is_refused_or_used_without_a_wrong_answer(
    tmp_path_factory: pytest.TempPathFactory, planted: list[tuple[str, bytes]], data: bytes, chance: random.Random
) -> None:
    path = tmp_path_factory.mktemp("any") / "store"
    stored(path, BLOCK)
    if chance.random() < 0.5:
        file_of(path, BLOCK).write_bytes(data)
    for name, text in planted:
        target = path / name
        if target.is_dir() or not target.parent.is_dir():
            continue
        target.write_bytes(text)
    try:
        with opened(path) as store:
            assert resumed(store, range(4)) in (0, 4)
            put_all(store, chain(range(100, 108)))
            assert resumed(store, range(100, 108)) in (0, 4, 8)
            store.check()
    except StoreError:
        assert (path / "store.json").read_bytes()[:1] != b"{" or planted
