"""The border to mlx-lm: what the adapters rely on and the contract does not show.

If a new release of mlx-lm changes any of it, a test here fails and names it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    _BaseCache,
)

from benchmarks.architectures.temporal import LayerCache
from radixcache.adapters.registry import ADAPTERS
from tests.adapters.cases import (
    CHUNKED,
    CONCATENATE,
    attention_rows,
    token_ids,
)

#: Made by batched generation out of caches for one sequence; they are refused.
BATCH_CLASSES = {"BatchKVCache", "BatchRotatingKVCache"}


def test_mlx_lm_has_no_cache_class_that_the_adapters_do_not_know() -> None:
    classes = {
        name for name, each in vars(mlx_lm_cache).items() if isinstance(each, type) and issubclass(each, _BaseCache)
    }
    theirs = [each for each in ADAPTERS if each.__module__ == mlx_lm_cache.__name__]
    known = {each.__name__ for each in theirs} | {"CacheList", "_BaseCache"}
    assert classes == known | BATCH_CLASSES


def test_no_model_brings_a_cache_class_that_the_adapters_do_not_know() -> None:
    found = set()
    for path in Path(mlx_lm.models.__path__[0]).glob("*.py"):
        if path.name != "cache.py":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found |= {(path.stem, n.name) for n in nodes if isinstance(n, ast.ClassDef) and n.name.endswith("Cache")}
    assert found == {("deepseek_v41", "LayerCache")}


@pytest.mark.parametrize(
    ("cache", "fields"),
    [
        (KVCache(), {"keys", "values", "offset"}),
        (ConcatenateKVCache(), {"keys", "values", "offset"}),
        (QuantizedKVCache(32, 8), {"keys", "values", "offset", "group_size", "bits"}),
        (RotatingKVCache(8, keep=2), {"keys", "values", "offset", "keep", "max_size", "_idx"}),
        (ArraysCache(2), {"cache", "left_padding", "lengths"}),
        (ChunkedKVCache(8), {"keys", "values", "offset", "chunk_size", "start_position"}),
        (CacheList(KVCache()), {"caches"}),
        (LayerCache(8), {"window_size", "offset", "window", "compress_kv", "index_k", "pending_kv", "pending_gate"}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, set) else "",
)
def test_a_cache_holds_the_fields_that_the_adapters_read_and_no_others(cache: Any, fields: set[str]) -> None:
    assert set(vars(cache)) == fields


def test_a_concatenating_cache_takes_its_offset_from_its_arrays() -> None:
    cache = CONCATENATE.fed(token_ids(10), [10])
    assert cache.keys.shape[2] == cache.offset == 10
    cache.offset = 4
    cache.update_and_fetch(*attention_rows([1], 4, mx.float32))
    assert cache.offset == 11, "a smaller offset alone brings the cut tokens back"


def test_advancing_an_arrays_cache_changes_its_lengths_in_place_but_no_second_handle() -> None:
    cache = ArraysCache(1, left_padding=[3])
    cache.prepare(lengths=[50])
    handles = [mx.array(cache.left_padding), mx.array(cache.lengths)]
    same = [cache.left_padding, cache.lengths]
    cache.advance(10)
    assert [a.tolist() for a in (cache.left_padding, cache.lengths)] == [[-7], [40]]
    assert [a.tolist() for a in same] == [[-7], [40]]
    assert [a.tolist() for a in handles] == [[3], [50]]


def test_a_chunked_cache_calls_itself_trimmable_after_its_front_is_gone_and_clips() -> None:
    cache = CHUNKED.fed(token_ids(41), [40, 1])
    assert cache.start_position == 24
    assert cache.is_trimmable()
    assert cache.trim(30) == 17, "it cuts less than it was asked to"


def test_a_second_handle_on_an_array_keeps_its_value_when_the_first_is_written() -> None:
    array = mx.zeros((1, 8))
    handle = mx.array(array)
    array[0, :4] = 1
    array += 1
    assert handle.tolist() == [[0.0] * 8]
    assert array.tolist() == [[2.0] * 4 + [1.0] * 4]
