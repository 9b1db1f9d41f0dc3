"""Classes that nobody registered: kept only if a round trip through their own `state` loses nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, _BaseCache

from radixcache import UnsupportedCacheError
from radixcache.adapters.point import ProbedAdapter
from radixcache.adapters.registry import adapter_for
from radixcache.layers.layout import Layout
from tests.adapters.cases import DIGEST, DigestCache, picture, token_ids


class InheritsState(_BaseCache):  # type: ignore[misc]
    """Only has the empty `state` that mlx-lm gives every cache class."""

    def __init__(self) -> None:
        self.memory = mx.zeros((1, 4))


class InheritsAGoodState(DigestCache):
    """Its parent would qualify; what this class adds, nobody knows."""


class NoSetter(_BaseCache):  # type: ignore[misc]
    @property
    def state(self) -> list[mx.array]:
        return [mx.zeros((1, 4))]


class _Counting(_BaseCache):  # type: ignore[misc]
    """A memory of the tokens beside something else, which subclasses leave out of their state or hide."""

    def __init__(self) -> None:
        self.memory: mx.array | None = None
        self.offset = 0

    def feed(self, count: int) -> None:
        self.memory = mx.ones((1, 4)) if self.memory is None else self.memory + count
        self.offset += count


class Scaled(_Counting):
    """A fresh object that is given the state lacks `scale` altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5


def _whole(cache: Any) -> tuple[Any, int]:
    return cache.memory, cache.offset


def _put(cache: Any, value: Any) -> None:
    cache.memory, cache.offset = value


def _put_rounded(cache: Any, value: Any) -> None:
    cache.memory, cache.offset = value[0] + 1e-3, value[1]


def _refuse(cache: Any, value: Any) -> None:
    raise RuntimeError("this cache is made by its model")


#: Class, what its `state` gives and takes, and the refusal.
REFUSED = [
    (_Counting, lambda cache: cache.memory, lambda cache, value: _put(cache, (value, 0)), "offset"),
    (Scaled, _whole, _put, "scale"),
    (_Counting, _whole, _put_rounded, "memory"),
    (_Counting, _whole, _refuse, "made by its model"),
]


class HidesItsArrays(_BaseCache):  # type: ignore[misc]
    """Holds another cache object and passes its state through."""

    def __init__(self) -> None:
        self.inner = KVCache()

    @property
    def offset(self) -> int:
        return int(self.inner.offset)

    def feed(self, count: int) -> None:
        self.inner.update_and_fetch(mx.ones((1, 1, count, 4)), mx.ones((1, 1, count, 4)))

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value


class NestedState(_Counting):
    """State as tuples, lists and dictionaries in one another."""

    def __init__(self) -> None:
        super().__init__()
        self.nest: dict[str, Any] = {}
        self.positions = np.zeros(4, np.int64)

    def feed(self, count: int) -> None:
        super().feed(count)
        memory = self.memory
        assert memory is not None
        self.nest = {"pair": (memory * 2, memory * 3), "list": [memory, None, "text"], "empty": ()}
        self.positions += count  # outside MLX, and changed in place

    @property
    def state(self) -> tuple[Any, ...]:
        return self.memory, self.offset, self.nest, self.positions

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.memory, self.offset, self.nest, self.positions = value


@pytest.mark.parametrize("unknown", [InheritsState, InheritsAGoodState, NoSetter, object])
def test_a_class_without_a_settable_state_of_its_own_is_refused_by_name(unknown: type) -> None:
    with pytest.raises(UnsupportedCacheError, match=rf"layer 3 \({unknown.__name__}\)"):
        adapter_for(unknown(), 3)
    with pytest.raises(UnsupportedCacheError, match=unknown.__name__):
        Layout(lambda: [KVCache(), unknown()], None, 64)


@pytest.mark.parametrize(("base", "get", "put", "message"), REFUSED)
def test_a_class_whose_round_trip_loses_something_is_refused_at_its_first_use(
    base: type, get: Any, put: Any, message: str
) -> None:
    unknown: Any = type("Lossy", (base,), {"state": property(get, put)})
    for use in ("snapshot", "own"):
        cache = unknown()
        cache.feed(5)
        before = picture(cache)
        adapter = ProbedAdapter()
        with pytest.raises(UnsupportedCacheError, match=f"Lossy: .*{message}") as caught:
            _use(adapter, cache, use)
        assert "\n" not in str(caught.value)
        assert picture(cache) == before


def test_a_class_that_hides_its_arrays_in_another_object_is_not_taken_for_empty() -> None:
    cache = HidesItsArrays()
    cache.feed(5)
    adapter = ProbedAdapter()
    try:
        snapshot = adapter.snapshot(cache, 0, 5)
    except UnsupportedCacheError as error:
        assert "HidesItsArrays" in str(error)  # noqa: PT017 - the other outcome is a snapshot that holds it
        return
    assert snapshot is not None, "its state was left out without a word"
    assert sum(array.nbytes for array in snapshot.arrays()) > 0


def test_a_nested_state_is_stored_whole() -> None:
    cache = NestedState()
    cache.feed(5)
    adapter = ProbedAdapter()

    def everything() -> Any:
        return picture({**vars(cache), "positions": cache.positions.tolist()})

    before = everything()
    snapshot, held = adapter.snapshot(cache, 0, 5), adapter.hold(cache, 3)
    cache.feed(3)
    assert adapter.roll_back(cache, held)
    cache.feed(3)
    assert adapter.restore(cache, snapshot, 5)
    assert everything() == before


def test_the_layout_replaces_what_it_cannot_empty_by_what_a_fresh_object_holds() -> None:
    layout = Layout(lambda: [DigestCache(), KVCache()], None, 64)
    caches = layout.fresh()
    cache = caches[0]
    DIGEST.feed(cache, token_ids(6))
    layout.restore_points(caches, None, 0)
    assert caches[0] is cache
    assert picture(vars(cache)) == picture(vars(DigestCache()))


def _use(adapter: ProbedAdapter, cache: Any, use: str) -> None:
    if use == "own":
        adapter.own(cache)
    else:
        adapter.snapshot(cache, 0, 5)
