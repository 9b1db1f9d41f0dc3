"""Real servers for tests: one of each kind for the process, or one that a test may kill.

`python -m tests.stores.redis_server` prints which would be used, and exits with 1 where there is no redis-server.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from benchmarks.harness.redis_process import Server as Server
from radixcache.stores.redis_store import RedisStore

PROGRAMS = ("redis-server", "valkey-server")


def program_named(name: str) -> str:
    """The path of a server; the test is skipped where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@cache
def running(program: str) -> Server:
    """The one of this process."""
    server = Server(program)
    atexit.register(server.end)
    return server


def emptied(name: str) -> Server:
    server = running(program_named(name))
    server.client.flushall()
    return server


@pytest.fixture
def redis() -> Server:
    """An empty redis-server."""
    return emptied("redis-server")


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that a test may kill."""
    server = Server(program_named("redis-server"))
    yield server
    server.end()


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store_at(url: str, **options: Any) -> RedisStore:
    """A store that waits long for a server on a busy machine, unless a test says otherwise."""
    return RedisStore(url, **{"timeout_s": 60.0, **options})


if __name__ == "__main__":
    found = [path for path in map(shutil.which, PROGRAMS) if path is not None]
    print(*found, sep="\n")
    sys.exit(os.path.basename(found[0]) != "redis-server" if found else 1)
