"""Real servers for tests, of a file or of a test alone: redis-server, and valkey-server where there is one.

`python -m tests.stores.redis_server` prints which would be used, and exits with 1 where there is no redis-server.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.harness.redis_process import Server as Server
from radixcache.stores.redis_store import RedisStore

PROGRAMS = ("redis-server", "valkey-server")


def program_named(name: str) -> str:
    """Where a server's program is; the test is skipped where it is not."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module", params=PROGRAMS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server of a file, of each kind that there is."""
    server = Server(program_named(request.param))
    yield server
    server.end()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The same, empty."""
    shared_server.client.flushall()
    return shared_server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that a test may kill."""
    server = Server(program_named("redis-server"))
    yield server
    server.end()


@pytest.fixture(scope="module")
def redis_of_file() -> Iterator[Server]:
    server = Server(program_named("redis-server"))
    yield server
    server.end()


@pytest.fixture
def redis(redis_of_file: Server) -> Server:
    """The file's redis-server, empty."""
    redis_of_file.client.flushall()
    return redis_of_file


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
