"""Shared fixtures. `runner` is imported before anything imports MLX, so that OpenBLAS is loaded first."""

from __future__ import annotations

import gc
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first: several processes are through soonest when none is left alone with one of them."""
    items.sort(key=lambda item: "test_soak" not in item.nodeid)


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what the imports made: tests that measure memory call it all the time."""
    gc.collect()
    gc.freeze()
