"""A cache that is closed while other threads call it: their calls end with an error, and no byte stays booked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import DiskStore, Ledger, PrefixCache
from radixcache.errors import CacheClosedError, SessionClosedError
from runner.models.tiny import tiny_model
from tests import inside
from tests.prompts import tokens

PROMPT = tokens(1, 200)


def stored(model: Any) -> list[Any]:
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([PROMPT]), cache=caches))
    return caches


CALLS: dict[str, Any] = {
    "begin": lambda cache, model: cache.begin(PROMPT),
    "begin_many": lambda cache, model: cache.begin_many([PROMPT], capacity=1000),
    "fetch": lambda cache, model: cache.fetch(PROMPT),
    "insert": lambda cache, model: cache.insert(PROMPT, stored(model)),
    "warm": lambda cache, model: cache.warm(model, PROMPT, name="system"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_waits_for_the_lock_while_the_cache_is_closed_is_refused(llama: Any, call: str) -> None:
    ledger = Ledger(8_000_000)
    cache, other = (PrefixCache(llama, budget_bytes=ledger) for _ in range(2))
    with ThreadPoolExecutor(1) as thread:
        with inside.core(cache).lock:
            asked = thread.submit(CALLS[call], cache, llama)
            wait([asked], 0.3)  # it waits for the lock by now; if not, it finds the cache closed
            cache.close()
        assert type(asked.exception()) is CacheClosedError
    assert ledger.total_bytes == 0
    other.check()


def test_a_request_whose_store_is_asked_while_the_cache_is_closed_is_refused(llama: Any, tmp_path: Path) -> None:
    is_asked, is_closed = threading.Event(), threading.Event()

    class Slow(DiskStore):
        def match(self, *arguments: Any, **more: Any) -> Any:
            is_asked.set()
            assert is_closed.wait(60)
            return super().match(*arguments, **more)

    ledger = Ledger(8_000_000)
    with Slow(tmp_path, budget_bytes=1 << 30, write_on="close", min_free_bytes=0) as store:
        cache, other = PrefixCache(llama, budget_bytes=ledger, store=store), PrefixCache(llama, budget_bytes=ledger)
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(cache.begin, PROMPT)
            assert is_asked.wait(60)
            cache.close()
            is_closed.set()
            assert type(asked.exception()) is CacheClosedError
    assert ledger.total_bytes == 0
    other.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "llama4", "nemotron_h"])
def test_a_cache_that_is_closed_in_mid_prefill_leaves_no_byte_on_a_shared_ledger(kind: str) -> None:
    model, ledger = tiny_model(kind), Ledger(8_000_000)
    cache, other = (PrefixCache(model, budget_bytes=ledger, step_size=32) for _ in range(2))
    session = cache.begin(PROMPT, marks=[40, 100])
    with pytest.raises(SessionClosedError, match="closed during"):
        session.prefill(model, on_progress=lambda done, total: cache.close() if done >= 32 else None)
    session.close()
    assert ledger.total_bytes == 0
    other.check()
