"""What holds of a cache with a store on disk holds of one with Redis: the same tests, on a server."""

# ruff: noqa: F811

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixcache import RedisStore
from tests.restarts import reading  # noqa: F401
from tests.stores.redis_server import Server, redis, store_at  # noqa: F401
from tests.whole.test_store import (  # noqa: F401
    test_a_checkpoint_in_front_of_the_one_that_was_brought_is_found_too,
    test_a_store_whose_calls_fail_changes_no_answer,
    test_an_exact_cache_resumes_on_exact_blocks_alone_and_bit_for_bit,
    test_rows_and_fetch_find_what_sessions_left_and_sessions_what_rows_left,
    test_state_of_other_weights_caches_or_namespaces_is_not_found,
    test_state_that_was_found_wrong_is_taken_off_the_disk,
    test_what_is_evicted_comes_back,
    test_what_is_there_at_the_end_is_written_on_eviction_but_not_what_was_cleared,
    test_what_was_inserted_is_stored_and_caches_without_a_model_find_it,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(redis: Server) -> Iterator[Callable[..., RedisStore]]:
    """Opens a store on the file's server, with what `test_store.py` gives stores on disk."""
    stores: list[RedisStore] = []

    def open_store(**more: Any) -> RedisStore:
        stores.append(store_at(redis.url, **{"write_on": "close", **more}))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()
