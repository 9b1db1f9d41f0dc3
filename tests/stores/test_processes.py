"""Processes that share a folder, and processes that die while they write into it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from radixcache import DiskStore
from radixcache.stores.files import scan, verify
from tests.stores.apart import BUDGET_BYTES, SEQUENCES
from tests.stores.made import resumed

ROOT = Path(__file__).resolve().parents[2]


def _started(what: str, path: Path, count: int, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.stores.apart", what, str(path), str(count), str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _died_in(path: Path, count: int, seed: int) -> dict[str, int]:
    process = _started("kills", path, count, seed)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return {call: int(times) for call, _, times in (word.partition("=") for word in output.split())}


def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    assert sum(_died_in(tmp_path / "store", 6, 1).values()) == 6


# RADIXCACHE_KILLS=500 for the long one.
@pytest.mark.slow
def test_writers_that_are_killed_at_any_moment_leave_nothing_wrong(tmp_path: Path) -> None:
    wanted = int(os.environ.get("RADIXCACHE_KILLS", "40"))
    died = _died_in(tmp_path / "store", wanted, 2)
    assert sum(died.values()) == wanted
    assert min(died.values()) > wanted // 10, died


def _shared(path: Path, operations: int) -> None:
    """Two processes at a time use one folder; some die, and others come in their place."""
    codes = []
    for turn in range(4):
        pair = [_started("share", path, operations // 8, 2 * turn + number) for number in range(2)]
        for process in pair:
            _, errors = process.communicate(timeout=280)
            assert process.returncode in (0, -signal.SIGKILL), errors
            codes.append(process.returncode)
    assert set(codes) == {0, -signal.SIGKILL}
    with DiskStore(path, budget_bytes=BUDGET_BYTES, min_free_bytes=0) as store:
        assert [found for found in verify(path) if found[2]] == []
        assert sum(each.nbytes for each in scan(path)) == store.stats.stored_bytes <= BUDGET_BYTES
        assert sum(resumed(store, tokens) for tokens in SEQUENCES) > 0
        assert not list(path.glob("tmp-*"))


# RADIXCACHE_SHARED=2000 for the long one.
@pytest.mark.slow
def test_two_processes_share_a_folder_and_some_of_them_die(tmp_path: Path) -> None:
    _shared(tmp_path / "store", int(os.environ.get("RADIXCACHE_SHARED", "320")))
