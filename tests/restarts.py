"""Caches with a store, as one process after the other has them.

A restart is a new model made from the same seed, a new store on the same folder and a new cache. Nothing depends on how
fast anything is: what the store has is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from radixcache import DiskStore, PrefixCache, RedisStore
from radixcache.layers.stored import weights_identity
from radixcache.layers.trials import GRID_STEPS, STORED_TOLERANCES, TOLERANCES
from radixcache.paging.rates import StoreRates
from tests.prompts import tokens
from tests.stores.redis_server import emptied, store_at

REPLY = [5, 77, 130]
_cold: dict[Any, NDArray[Any]] = {}

Open = Callable[..., DiskStore]


@pytest.fixture(autouse=True)
def reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have reading always be worth it: how fast disk and model are is not known here."""
    monkeypatch.setattr(StoreRates, "is_worth_reading", lambda *_: True)


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a store on the test's folder, or for the parameter "redis" on a server; all are closed in the end."""
    stores: list[DiskStore | RedisStore] = []
    server = emptied("redis-server") if getattr(request, "param", "disk") == "redis" else None

    def open_store(**more: Any) -> DiskStore | RedisStore:
        if server is not None:
            stores.append(store_at(server.url, **{"write_on": "close", **more}))
        else:
            more = {"budget_bytes": 1 << 30, "min_free_bytes": 0, "write_on": "close", **more}
            stores.append(DiskStore(tmp_path, **more))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


class Failing:
    """A store whose calls fail at random."""

    def __init__(self, store: DiskStore, seed: int) -> None:
        self.store, self.random = store, np.random.default_rng(seed)
        self.share = 0.1

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if name not in ("match", "holds", "accepts", "put", "read"):
            return found

        def call(*arguments: Any, **more: Any) -> Any:
            if self.random.random() < self.share:
                raise OSError("the disk has gone")
            return found(*arguments, **more)

        return call


def quantized(kv_bits: int | None) -> dict[str, Any]:
    return {} if kv_bits is None else {"kv_bits": kv_bits, "kv_group_size": 32}


def serve(cache: PrefixCache, model: Any, prompt: Sequence[int], **begin: Any) -> tuple[int, NDArray[Any]]:
    """Answer a prompt with REPLY: how many tokens were cached, and the logits of its last token and the reply."""
    with cache.begin(prompt, **begin) as session:
        session.prefill(model)
        logits = [session.step(model, [token])[0, -1] for token in (prompt[-1], *REPLY)]
        mx.eval(logits)
        found = session.cached_tokens
    cache.check()
    return found, np.array(mx.stack(logits).astype(mx.float32))


def cold(model: Any, prompt: Sequence[int], kv_bits: int | None = None) -> NDArray[Any]:
    """The same of an empty cache, computed once for all models of the same weights."""
    key = (weights_identity(model), tuple(prompt), kv_bits)
    if key not in _cold:
        _cold[key] = serve(PrefixCache(model, **quantized(kv_bits)), model, prompt)[1]
    return _cold[key]


def is_close(
    logits: NDArray[Any], wanted: NDArray[Any], kv_bits: int | None = None, stored_bits: int | None = None
) -> bool:
    """Whether they differ by no more than rounding, and two steps of the grid where state is quantized."""
    tolerance = TOLERANCES[mx.float16] if mx.cuda.is_available() else 1e-4
    tolerance += 0 if kv_bits is None else GRID_STEPS * 2 / (2**kv_bits - 1)
    tolerance += STORED_TOLERANCES.get(stored_bits or 0, 0.0)
    return float(np.abs(logits - wanted).max()) <= tolerance * float(np.abs(wanted).max())


def conversation() -> list[list[int]]:
    """Three turns, the first longer than a block, and another conversation with the same beginning."""
    first = tokens(1, 600)
    second = [*first, *REPLY, *tokens(2, 150)]
    return [first, second, [*second, *REPLY, *tokens(3, 30)], [*first[:400], *tokens(4, 60)]]
