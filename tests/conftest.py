"""Shared fixtures. `runner` is imported before anything imports MLX, so that OpenBLAS is loaded first."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import runner  # noqa: F401

SHARED_DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Folder of the public traces and conversations; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("shared/data is not beside the repository")
    return SHARED_DATA


def pytest_configure() -> None:
    """Have Ctrl-C raise KeyboardInterrupt also where whoever started pytest ignores it, as shells do in background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first: several processes are through soonest when none is left alone with one of them."""
    items.sort(key=lambda item: "test_soak" not in item.nodeid)


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    """Let the garbage collector leave alone what was there before a file: tests that measure memory call it often."""
    gc.collect()
    gc.freeze()


#: Set in the process that a test marked `own_process` is run in.
OWN_PROCESS = "RADIXCACHE_TEST_OWN_PROCESS"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `own_process` in a process that runs nothing else.

    An evaluation that fails while it runs leaves MLX's CPU scheduler counting a task that never ends, about once in
    fifty failures. From two such tasks on any later evaluation of the process can wait forever for one of them.
    """
    if pyfuncitem.get_closest_marker("own_process") is None or OWN_PROCESS in os.environ:
        return None
    options = ["-q", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, OWN_PROCESS: "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return True
