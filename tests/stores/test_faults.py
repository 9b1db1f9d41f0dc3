"""Every call of the system fails once, in turn: never a wrong answer, never an exception, and a store that goes on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixcache import DiskStore, StoreError
from radixcache.stores.codec import encoded
from radixcache.stores.files import verify
from tests.stores.made import CALLERS, chain, checkpoint, put_all, resumed

READING = {"open", "preadv", "pread", "scandir", "stat", "lstat", "fstat", "statvfs"}
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
    budget_bytes = 3 * sum(memoryview(part).nbytes for part in encoded(blocks[0]))
    for _ in range(2):
        try:
            store = DiskStore(path, budget_bytes=budget_bytes, write_budget_bytes_per_day=1 << 20, min_free_bytes=0)
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


def _fail_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, shift: int = 0) -> None:
    """Have every step-th call fail, with each of the errors in turn."""
    system = System()
    _use(system, monkeypatch)
    _lived(tmp_path / "whole")
    assert set(system.called) == CALLS
    for failing in range(0, len(system.called), step):
        path = tmp_path / str(failing)
        _use(System(failing, ERRORS[(failing + shift) % len(ERRORS)]), monkeypatch)
        _lived(path)
        _use(System(), monkeypatch)
        wrong = [name for name, _, wrong in verify(path) if wrong] if (path / "store.json").exists() else []
        assert len(wrong) <= 1, failing  # the one that was damaged on purpose
        with DiskStore(path, budget_bytes=1 << 30, min_free_bytes=0) as store:
            resumed(store, range(6))
            put_all(store, chain(range(6)))
            assert resumed(store, range(6)) == 6, failing
            store.check()


def test_no_failure_of_the_system_costs_more_than_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_each_call(tmp_path, monkeypatch, step=11)


# RADIXCACHE_FAULTS=6 has each call fail with each error, about two minutes.
@pytest.mark.slow
@pytest.mark.parametrize("shift", range(int(os.environ.get("RADIXCACHE_FAULTS", "1"))))
def test_no_failure_of_any_call_costs_more_than_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    _fail_each_call(tmp_path, monkeypatch, 1, shift)


@pytest.mark.parametrize("name", ["ENOSPC", "EIO", "EROFS", "EACCES", "EDQUOT"])
def test_a_disk_that_fails_stops_the_writing_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with DiskStore(tmp_path / "store", budget_bytes=1 << 30, min_free_bytes=0) as store:
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
    assert not list((tmp_path / "store").glob("tmp-*"))


def test_a_folder_that_is_removed_is_a_miss_and_stops_the_writing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with DiskStore(path, budget_bytes=1 << 30, min_free_bytes=0) as store:
        put_all(store, chain(range(8)))
        path.rename(tmp_path / "elsewhere")
        assert resumed(store, range(8)) == 0
        put_all(store, chain(range(8)))
        assert store.stats.stopped
        assert store.stats.vanished_files > 0
    assert not path.exists()


def test_calls_that_do_a_part_only_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sparing(System):
        def preadv(self, handle: int, buffers: list[memoryview], offset: int) -> int:
            return os.preadv(handle, [buffers[0][:100]], offset)

        def write(self, handle: int, data: memoryview) -> int:
            return os.write(handle, memoryview(data).cast("B")[:7])

    _use(Sparing(), monkeypatch)
    with DiskStore(tmp_path / "store", budget_bytes=1 << 30, min_free_bytes=0) as store:
        put_all(store, chain(range(8)))
    with DiskStore(tmp_path / "store", budget_bytes=1 << 30, min_free_bytes=0) as store:
        assert resumed(store, range(8)) == 8
        assert store.stats.damaged_files == 0
