"""Each class of mlx-lm is tried before its first use; a class that has changed is refused by name."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from radixcache import PrefixCache, UnsupportedCacheError, register_adapter
from radixcache.adapters import registry
from radixcache.adapters.point import is_equal
from radixcache.adapters.registry import ADAPTERS, adapter_for, difference_of
from runner.models.tiny import tiny_model
from tests.prompts import tokens


def changed(base: type, **methods: Any) -> type:
    """A class with the name of `base`, of which some methods differ, as in another mlx-lm."""
    return type(base.__name__, (base,), {"__module__": base.__module__, **methods})


def loses_a_token(self: Any, keys: mx.array, values: mx.array) -> Any:
    return [each[:, :, 1:] for each in KVCache.update_and_fetch(self, keys, values)]


def counts_twice(self: Any, keys: mx.array, values: mx.array) -> Any:
    found = KVCache.update_and_fetch(self, keys, values)
    self.offset += keys.shape[2]
    return found


def joins_all(self: Any, keys: mx.array, values: mx.array) -> Any:
    """As if the buffers had no spare room, as ConcatenateKVCache."""
    self.keys = keys if self.keys is None else mx.concatenate([self.keys, keys], axis=2)
    self.values = values if self.values is None else mx.concatenate([self.values, values], axis=2)
    self.offset = self.keys.shape[2]
    return self.keys, self.values


def early(self: Any) -> None:
    """As in mlx-lm 0.31.3: spare room counts, too."""
    if self.keys is not None and self.keys.shape[2] >= self.chunk_size:
        self.start_position += self.keys.shape[2] - self.chunk_size
        self.keys, self.values = (each[..., -self.chunk_size :, :] for each in (self.keys, self.values))


CHANGES = {
    "a token is not returned": (changed(KVCache, update_and_fetch=loses_a_token), "grow: it returns 4 tokens"),
    "tokens are counted twice": (changed(KVCache, update_and_fetch=counts_twice), "grow: it counts 10 tokens after 5"),
    "no spare room": (changed(KVCache, update_and_fetch=joins_all), "restore: a cache restored at 5"),
    "a front that is cut early": (changed(ChunkedKVCache, maybe_trim_front=early), "grow: ValueError"),
    "state without a setter": (changed(ArraysCache, __setitem__=lambda self, index, value: None), "state: "),
    "an argument more": (changed(RotatingKVCache, __init__=lambda self, max_size, dtype: None), "grow: TypeError"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_class_that_has_changed_is_refused_by_name_and_in_one_line(change: str, monkeypatch: Any) -> None:
    kind, what = CHANGES[change]
    monkeypatch.setitem(ADAPTERS, kind, ADAPTERS[kind.__mro__[1]])
    with pytest.raises(UnsupportedCacheError) as raised:
        adapter_for(object.__new__(kind), 3)
    assert f"{raised.value}".startswith(f"layer 3: {kind.__name__} of mlx-lm ")
    assert what in f"{raised.value}"
    assert "\n" not in f"{raised.value}"


def test_a_model_with_such_a_class_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = changed(KVCache, update_and_fetch=loses_a_token)
    monkeypatch.setitem(ADAPTERS, kind, ADAPTERS[KVCache])
    model = tiny_model("llama")
    with pytest.raises(UnsupportedCacheError, match="layer 1: KVCache of mlx-lm"):
        PrefixCache(model, caches=lambda: [KVCache(), kind()])
    cache, prompt = PrefixCache(model), tokens(1, 20)
    for cached in (0, 19):
        with cache.begin(prompt) as session:
            assert session.cached_tokens == cached
            session.step(model, session.remaining)


@pytest.mark.parametrize("kind", sorted((each for each in ADAPTERS if each.__module__ == KVCache.__module__), key=repr))
def test_the_classes_of_this_mlx_lm_fit(kind: type) -> None:
    assert difference_of(kind, ADAPTERS[kind]) is None


@pytest.fixture
def guest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another package's copy of mlx-lm's file of classes, registered."""
    monkeypatch.setattr(registry, "ADAPTERS", dict(ADAPTERS))
    monkeypatch.setattr(registry, "LISTS", set(registry.LISTS))
    module = ModuleType("guest.cache")
    module.__package__ = "mlx_lm.models"  # for relative imports
    monkeypatch.setitem(sys.modules, "guest.cache", module)
    exec(inspect.getsource(mlx_caches), vars(module))
    for kind in (ArraysCache, CacheList, KVCache, RotatingKVCache):
        register_adapter(getattr(module, kind.__name__), kind)
    return module


def test_copies_of_mlx_lms_classes_in_another_package_are_stored_and_restored(guest: Any) -> None:
    def fresh() -> list[Any]:
        return [guest.CacheList(guest.KVCache(), guest.ArraysCache(1)), guest.RotatingKVCache(8)]

    cache, (pair, window) = PrefixCache(caches=fresh), fresh()
    for count in (12, 5):
        keys = mx.random.uniform(shape=(1, 2, count, 8))
        pair.caches[0].update_and_fetch(keys, keys + 1)
        window.update_and_fetch(keys, keys + 1)
    pair.caches[1][0] = keys
    assert cache.insert(tokens(1, 17), [pair, window]) == 17
    (restored, ring), remaining = cache.fetch([*tokens(1, 17), 3])
    assert len(remaining) == 1
    found = [type(each) for each in (restored, *restored.caches, ring)]
    assert found == [guest.CacheList, guest.KVCache, guest.ArraysCache, guest.RotatingKVCache]
    more = mx.random.uniform(shape=(1, 2, 3, 8))
    for ours, theirs in ((restored.caches[0], pair.caches[0]), (ring, window)):
        assert is_equal(ours.update_and_fetch(more, more), theirs.update_and_fetch(more, more))
    assert is_equal(restored.caches[1].cache, [keys])
    cache.check()


def test_a_copy_that_differs_is_refused_with_the_name_of_its_package(guest: Any) -> None:
    kind = type("KVCache", (guest.KVCache,), {"__module__": "guest.cache", "update_and_fetch": loses_a_token})
    register_adapter(kind, KVCache)
    with pytest.raises(UnsupportedCacheError, match=r"layer 1: KVCache of guest\.cache differs .*grow: it returns 4"):
        PrefixCache(caches=lambda: [KVCache(), kind()])
    with pytest.raises(KeyError):
        register_adapter(kind, dict)
