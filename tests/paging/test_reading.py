"""A store that takes its time to read: other requests go on, and what they change meanwhile is taken into account."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixcache import CacheBusyError, DiskStore, PrefixCache
from radixcache.stores.block import Block, Kind
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens
from tests.restarts import cold, is_close, serve

LENGTH = 1300
WAIT_S = 60


class Held(DiskStore):
    """Reads only after `go` was called, as soon as `is_slow` is set; answers only then while `is_deaf` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, budget_bytes=1 << 30, write_on="close", min_free_bytes=0)
        self.is_slow = self.is_deaf = False
        self._is_asked, self._goes_on = threading.Event(), threading.Event()

    def read(self, wanted: Sequence[tuple[bytes, Kind]]) -> Iterator[Block | None]:
        if self.is_slow:
            self._is_asked.set()
            assert self._goes_on.wait(WAIT_S)
        yield from super().read(wanted)

    def match(self, *prompt: Any, **more: Any) -> Any:
        if self.is_deaf:
            self._is_asked.set()
            assert self._goes_on.wait(WAIT_S)
        return super().match(*prompt, **more)

    def wait(self) -> None:
        assert self._is_asked.wait(WAIT_S)

    def go(self) -> None:
        self._goes_on.set()


def fetched(cache: PrefixCache, model: Any, prompt: list[int]) -> int:
    _, remaining = cache.fetch(prompt)
    return len(prompt) - len(remaining)


def admitted(cache: PrefixCache, model: Any, prompt: list[int]) -> int:
    with cache.begin_many([prompt], capacity=2 * LENGTH) as group:
        (row,) = group.rows
        return int(row.cached_tokens)


def served(cache: PrefixCache, model: Any, prompt: list[int]) -> int:
    cached, logits = serve(cache, model, prompt)
    assert is_close(logits, cold(model, prompt))
    return cached


@contextmanager
def held(tmp_path: Path, model: Any, prompt: list[int], **settings: Any) -> Iterator[tuple[Held, PrefixCache]]:
    """A cache that has nothing in memory, and a store that has the prompt and is slow."""
    with Held(tmp_path) as store, PrefixCache(model, store=store) as cache:
        serve(cache, model, prompt)
    with Held(tmp_path) as store, PrefixCache(model, store=store, **settings) as cache:
        store.is_slow = True
        yield store, cache


@contextmanager
def while_reading(
    store: Held, ask: Callable[..., int], cache: PrefixCache, model: Any, prompt: list[int]
) -> Iterator[Future[int]]:
    """In the block, a request of another thread waits for the store; then it goes on to its end."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(ask, cache, model, prompt)
        try:
            store.wait()
            store.is_slow = False
            yield found
        finally:
            store.go()
        found.exception(WAIT_S)


@pytest.mark.parametrize("ask", [served, fetched, admitted])
@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_other_requests_go_on_while_a_store_is_read(tmp_path: Path, kind: str, ask: Any) -> None:
    model, prompt, other = tiny_model(kind), [*tokens(1, LENGTH), 1], tokens(2, 40)
    with held(tmp_path, model, prompt, live_slots=2) as (store, cache):
        with while_reading(store, ask, cache, model, prompt) as found:
            assert served(cache, model, other) == 0
            assert served(cache, model, [*other, 5, 6, 7]) > 0
            cache.check()
            assert not found.done()
        assert found.result() >= LENGTH - 16  # recurrent layers resume where the tail began
        assert cache.stats.store_decisions["brought"] == 1
        cache.check()


def test_other_requests_go_on_while_explain_asks_a_store(llama: Any, tmp_path: Path) -> None:
    prompt, other = [*tokens(1, LENGTH), 1], tokens(2, 40)
    with held(tmp_path, llama, prompt) as (store, cache), ThreadPoolExecutor(1) as pool:
        store.is_slow, store.is_deaf = False, True
        found = pool.submit(cache.explain, prompt)
        try:
            store.wait()
            store.is_deaf = False
            assert served(cache, llama, other) == 0
            assert not found.done()
        finally:
            store.go()
        assert found.result(WAIT_S).disk_tokens >= LENGTH - 256
        cache.check()


def test_who_waits_for_a_store_finds_the_slot_taken_or_free_as_it_is_then(llama: Any, tmp_path: Path) -> None:
    prompt = [*tokens(1, LENGTH), 1]
    with held(tmp_path, llama, prompt) as (store, cache):
        with while_reading(store, served, cache, llama, prompt) as found, cache.begin(tokens(2, 40)):
            store.go()
            with pytest.raises(CacheBusyError):
                found.result(WAIT_S)
        assert served(cache, llama, prompt) == LENGTH


def test_what_was_read_beyond_state_that_is_gone_meanwhile_is_read_again(llama: Any, tmp_path: Path) -> None:
    prompt = [*tokens(1, LENGTH), 1]
    with held(tmp_path, llama, prompt) as (store, cache):
        store.is_slow = False
        assert serve(cache, llama, prompt[:600])[0] == 599
        store.is_slow = True
        with while_reading(store, served, cache, llama, prompt) as found:
            cache.clear()
        assert found.result() == LENGTH
        assert cache.stats.store_decisions["changed"] == 1
        cache.check()


def test_two_requests_that_read_the_same_store_it_once(llama: Any, tmp_path: Path) -> None:
    prompt = [*tokens(1, LENGTH), 1]
    with held(tmp_path, llama, prompt, live_slots=2) as (store, cache):
        with while_reading(store, fetched, cache, llama, prompt) as found:
            assert fetched(cache, llama, prompt) == LENGTH
            held_bytes = cache.stats.paged_bytes
        assert found.result() == LENGTH
        assert cache.stats.paged_bytes == held_bytes
        assert cache.stats.store_decisions["brought"] == 1
        cache.check()


def test_what_turns_out_wrong_while_it_is_read_is_not_stored(llama: Any, tmp_path: Path) -> None:
    prompt = [*tokens(1, LENGTH), 1]
    with held(tmp_path, llama, prompt) as (store, cache):
        with while_reading(store, fetched, cache, llama, prompt) as found:
            inside.quarantine(cache, prompt[:700], 512)
        assert found.result() == 512
        assert inside.stored_tokens(cache, prompt) == 512
        cache.check()


def test_the_lock_is_given_up_only_by_the_outermost_operation() -> None:
    from radixcache.ledger import Lock

    lock = Lock()
    with lock, lock, lock.released(), ThreadPoolExecutor(1) as pool:
        entered = pool.submit(lambda: lock._lock.acquire(blocking=False))
        assert not entered.result(WAIT_S)
    done: list[str] = []
    with lock:
        lock.afterwards.append(lambda: done.append("ours"))
        with lock.released(), ThreadPoolExecutor(1) as pool:

            def other() -> None:
                with lock:
                    lock.afterwards.append(lambda: done.append("theirs"))

            pool.submit(other).result(WAIT_S)
            assert done == ["theirs"]
    assert done == ["theirs", "ours"]
