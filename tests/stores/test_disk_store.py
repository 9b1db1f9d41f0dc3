"""A folder: its budgets, its processes, and whatever else lies in it, fails or dies."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixcache import DiskStore, StoreError
from radixcache.stores import files
from radixcache.stores.block import Block, Buffer
from radixcache.stores.codec import Damaged, encode
from radixcache.stores.files import Folder, scan, verify
from tests.stores.apart import BUDGET_BYTES, SEQUENCES
from tests.stores.made import (
    CALLERS,
    GIB,
    chain,
    checkpoint,
    content,
    file_of,
    matched,
    opened,
    put_all,
    resumed,
    stored,
)

SECRET = b"0123456789abcdef"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_what_was_used_longest_ago_goes_first_and_no_chain_loses_its_beginning(path: Path) -> None:
    stored(path, *chain(range(8)))
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
        assert store.stats.dropped == {"the blocks before it fill the budget": 1}
        assert resumed(store, range(200, 208)) == 8


def test_what_another_process_used_later_is_not_evicted_before_it(path: Path) -> None:
    stored(path, *chain(range(4)))
    nbytes = opened(path).stats.stored_bytes
    with opened(path, budget_bytes=2 * nbytes) as one, opened(path) as other:
        put_all(one, chain(range(100, 104)))
        assert resumed(other, range(4)) == 4
        put_all(one, chain(range(200, 204)))
        assert [resumed(one, range(first, first + 4)) for first in (0, 100, 200)] == [4, 0, 4]


def test_a_block_that_is_larger_than_a_budget_or_the_free_disk_is_not_written(path: Path) -> None:
    block = chain(range(8), step=8)[0]
    with opened(path, budget_bytes=100) as store:
        assert not store.accepts(block.nbytes)
        put_all(store, [block])
        assert store.stats.dropped == {"it is larger than the budget": 1}
    with DiskStore(path, budget_bytes=GIB, min_free_bytes=1 << 62) as store:
        put_all(store, [block])
        assert store.stats.dropped == {"the disk is nearly full": 1}
        assert store.stats.stopped == ""


def test_a_disk_that_is_mounted_read_only_is_read_and_is_not_called_full(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(path, *chain(range(4)))
    about = os.statvfs(path)
    read_only = os.statvfs_result((*about[:3], 0, 0, *about[5:8], about.f_flag | os.ST_RDONLY, about.f_namemax))
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    with opened(path) as store:
        put_all(store, chain(range(100, 104)))
        assert set(store.stats.dropped) == {"the disk is mounted read-only"}
        assert resumed(store, range(4)) == 4


@pytest.mark.parametrize(
    ("mode", "who"), [(0o700, ""), (0o755, ""), (0o770, "its group"), (0o777, "its group, everybody")]
)
def test_who_else_may_write_to_the_folder_is_warned_of_unless_there_is_a_secret(
    path: Path, caplog: pytest.LogCaptureFixture, mode: int, who: str
) -> None:
    path.mkdir()
    path.chmod(mode)
    with opened(path):
        warned = [record.getMessage() for record in caplog.records]
    assert [f": {who} may write to it" in each for each in warned] == ([True] if who else [])
    caplog.clear()
    other = path.with_name("other")
    other.mkdir()
    other.chmod(mode)
    with DiskStore(other, budget_bytes=GIB, secret=SECRET):
        assert not caplog.records


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


def test_a_folder_is_listed_again_where_it_may_have_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_secret_refuses_a_folder_and_files_that_were_made_without_it(path: Path, tmp_path: Path) -> None:
    block = chain(range(4))[0]
    stored(path, block, secret=SECRET)
    stored(tmp_path / "plain", block)
    for secret in (None, SECRET[::-1]):
        for use in (lambda: opened(path, secret=secret), lambda: list(verify(path, secret))):  # noqa: B023
            with pytest.raises(StoreError, match="made with another secret"):
                use()
    with pytest.raises(StoreError, match="made with no secret"):
        opened(tmp_path / "plain", secret=SECRET)
    assert resumed(opened(path, secret=SECRET), range(4)) == 4
    file_of(path, block).write_bytes(file_of(tmp_path / "plain", block).read_bytes())
    assert resumed(opened(path, secret=SECRET), range(4)) == 0


def test_a_damaged_file_is_removed_and_named_and_files_with_other_names_are_left_alone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(range(8))
    stored(path, *blocks)
    bad = file_of(path, blocks[1])
    bad.write_bytes(b"damaged")
    mine = bad.with_name("thesis.txt")
    mine.write_bytes(b"mine")
    with opened(path) as store:
        assert (resumed(store, range(8)), bad.exists()) == (4, False)
        put_all(store, blocks)
        assert resumed(store, range(8)) == 8
        assert store.stats.damaged_files == 1
    assert mine.read_bytes() == b"mine"
    assert len([each for each in caplog.messages if bad.name in each]) == 1
    for each in [path, *path.rglob("*")]:  # and nobody else may read what is stored
        assert each == mine or stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unkeyed", "keyed"])
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
        for at in range(0, len(whole), 17):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(Damaged):
                read(place, len(whole), secret)


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
    assert store.stats.damaged_files >= 1
    put_all(store, [block])
    assert resumed(store, range(4)) == (0 if kind == "directory" else 4)  # directories are left alone
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
        assert store.stats.dropped == {"another file has its name": 1}
        assert store.stats.stopped == ""
    assert len(list(mine.iterdir())) == 1


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
    for use in (lambda: opened(path / "thesis.txt"), lambda: list(scan(path / "nowhere"))):
        with pytest.raises(StoreError, match="cannot be used as a store"):
            use()


READING = {"open", "preadv", "scandir", "listdir", "stat", "lstat", "fstat", "statvfs"}
CALLS = READING | {"write", "fsync", "rename", "unlink", "mkdir", "makedirs", "utime"}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EEXIST)


class System:
    """Stands for `os`: counts these calls, and has the one with this number fail. Syncs nothing: no power is cut."""

    def __init__(self, failing: int = -1, number: int = errno.EIO) -> None:
        self.called: list[str] = []
        self._failing, self._number = failing, number

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in CALLS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.called.append(name)
            if len(self.called) - 1 == self._failing:
                raise OSError(self._number, os.strerror(self._number))
            return None if name == "fsync" else real(*given, **named)

        return call


def _use(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in CALLERS:
        monkeypatch.setattr(module, "os", system)


def _lived(path: Path) -> None:
    """A store's life: made, filled beyond its budget, read, damaged, opened again; every answer is right or a miss."""
    blocks, others = chain(range(6)), chain(range(100, 108))
    budget_bytes = 3 * sum(memoryview(part).nbytes for part in encode(blocks[0]))
    for _ in range(2):
        try:
            store = opened(path, budget_bytes)
        except StoreError:
            continue
        with store:
            put_all(store, [*blocks, checkpoint(blocks[0])])
            resumed(store, range(6))
            put_all(store, others)
            resumed(store, range(100, 108))
            for file in sorted(path.glob("??/*"))[:1]:
                file.write_bytes(file.read_bytes()[:-1] + b"?")
            resumed(store, range(6))
            resumed(store, range(100, 108))
            store.check()


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_no_failure_of_the_system_costs_more_than_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    system = System()
    _use(system, monkeypatch)
    _lived(tmp_path / "whole")
    assert set(system.called) == CALLS
    for failing in range(0, len(system.called), step):
        path = tmp_path / str(failing)
        _use(System(failing, ERRORS[failing % len(ERRORS)]), monkeypatch)
        _lived(path)
        _use(System(), monkeypatch)
        wrong = [name for name, wrong in verify(path) if wrong] if (path / "store.json").exists() else []
        assert len(wrong) <= 1, failing  # the one that was damaged on purpose
        with opened(path) as store:
            resumed(store, range(6))
            put_all(store, chain(range(6)))
            assert resumed(store, range(6)) == 6, failing
            store.check()


@pytest.mark.parametrize("name", ["ENOSPC", "EROFS"])
def test_a_disk_that_fails_stops_the_writing_and_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with opened(path) as store:
        put_all(store, chain(range(8)))
        may_fail, tried = threading.Event(), list[object]()

        def write(*given: object) -> int:
            tried.append(given)
            assert may_fail.wait(60)
            raise OSError(getattr(errno, name), "the disk says")

        monkeypatch.setattr(CALLERS[0].os, "write", write)
        assert all(map(store.put, [*chain(range(100, 104)), *chain(range(200, 208))]))
        may_fail.set()
        assert store.flush(60)
        put_all(store, chain(range(300, 304)))
        monkeypatch.undo()
        assert len(tried) == 1
        assert store.stats.dropped == {"writing has stopped": 4}
        assert "the disk says" in store.stats.stopped
        assert not store.accepts(1)
        assert resumed(store, range(8)) == 8
    assert len([each for each in caplog.messages if "Nothing more is written" in each]) == 1
    assert not list(path.glob("tmp-*"))


def test_calls_that_do_a_part_only_are_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sparing(System):
        def preadv(self, handle: int, buffers: list[memoryview], offset: int) -> int:
            return os.preadv(handle, [buffers[0][:100]], offset)

        def write(self, handle: int, data: memoryview) -> int:
            return os.write(handle, memoryview(data).cast("B")[:7])

    _use(Sparing(), monkeypatch)
    stored(path, *chain(range(8)))
    with opened(path) as store:
        assert resumed(store, range(8)) == 8
        assert store.stats.damaged_files == 0


def test_what_was_put_is_written_also_at_the_end_of_a_process_that_closes_nothing(path: Path) -> None:
    code = (
        "import atexit, sys; from pathlib import Path; from tests.stores.made import chain, opened;"
        "store = opened(Path(sys.argv[1])); blocks = chain(range(12)); [*map(store.put, blocks[:2])];"
        "atexit.register(lambda: store.put(blocks[2]))"
    )
    subprocess.run([sys.executable, "-P", "-c", code, path], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert resumed(opened(path), range(12)) == 12


@pytest.mark.parametrize("turns", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_processes_share_a_folder_and_one_that_is_killed_leaves_nothing_wrong(path: Path, turns: int) -> None:
    for turn in range(turns):
        pair = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.stores.apart", str(path), "20", str(2 * turn + number)],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
            )
            for number in range(2)
        ]  # fmt: skip
        for process, code in zip(pair, (0, -signal.SIGKILL), strict=True):
            _, errors = process.communicate(timeout=280)
            assert process.returncode == code, errors
        with opened(path, BUDGET_BYTES) as store:
            assert [found for found in verify(path) if found[1]] == []
            assert not list(path.glob("tmp-*"))
            assert sum(each.nbytes for each in scan(path)) == store.stats.stored_bytes <= BUDGET_BYTES
            assert store.stats.damaged_files == 0
            assert sum(resumed(store, tokens) for tokens in SEQUENCES) > 0
            store.check()
