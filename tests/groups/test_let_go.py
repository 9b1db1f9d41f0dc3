"""What a group held is free once nobody has it any more: nothing waits for Python's collector of cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest

from radixcache import PrefixCache
from tests.groups.cold import shared_model
from tests.prompts import tokens


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("exact_allocations", "uncollected")
@pytest.mark.parametrize("kind", ["llama", "falcon_h1", "baichuan_m1"])
def test_what_rows_held_is_free_once_the_cache_is_empty(kind: str) -> None:
    model = shared_model(kind)
    cache = PrefixCache(model)

    def serve() -> None:
        with cache.begin_many([], capacity=400) as group:
            for seed in range(3):  # one after the other, so that the later ones take up what the first one evaluated
                group.prefill(model, group.admit([*tokens(1, 20), *tokens(seed, 9)]))
            mx.eval(group.step(model, group.rows, [3] * 3))
        cache.clear()
        mx.synchronize()

    serve()  # which way the model decodes is found out once, by a trial
    gc.collect()
    before_bytes = mx.get_active_memory()
    serve()
    assert mx.get_active_memory() == before_bytes
