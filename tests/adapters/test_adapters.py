"""The adapter contract, sentence by sentence, over every cache class in every situation of the table.

A1 to A6 are the sentences of radixcache/adapters/contract.py. What they say about memory is in test_adapter_memory.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import cycle
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from radixcache import SnapshotError, UnsupportedCacheError, register_adapter
from radixcache.adapters.contract import NEVER
from radixcache.adapters.registry import ADAPTERS, adapter_for
from radixcache.adapters.span import SpanAdapter
from tests.adapters.cases import (
    CASES,
    CONTINUATIONS,
    DIGEST,
    KINDS,
    POINT_CASES,
    SPAN_CASES,
    WINDOW_CASES,
    Case,
    Kind,
    picture,
    spelled_pieces,
    state_bits,
    temporal_buffers,
    token_ids,
)

all_cases = pytest.mark.parametrize("case", CASES, ids=str)
span_cases = pytest.mark.parametrize("case", SPAN_CASES, ids=str)
window_cases = pytest.mark.parametrize("case", WINDOW_CASES, ids=str)
token_cases = pytest.mark.parametrize("case", SPAN_CASES + WINDOW_CASES, ids=str)
cut_cases = pytest.mark.parametrize("case", [case for case in CASES if case.can_cut], ids=str)
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
CUTS = (1, 2, 255, 256, 257, 511, 512, 513, 800, 1024, 1299)
SHORT_CONTINUATIONS = ((1, 1, 7, 1), (3, 40, 1))


# What every case is


@all_cases
def test_a_cache_holds_the_tokens_it_was_fed(case: Case) -> None:
    cache = case.cache()
    adapter = adapter_for(cache)
    assert case.kind.spelled(cache) == case.kind.expected(case.ids, case.lengths)
    assert (adapter.is_point, adapter.is_window) == (case.kind.is_point, case.kind.is_window)
    assert not adapter.is_empty(cache)
    assert adapter.offset(cache) in (case.length, None)


@all_cases
def test_buffers_are_all_the_arrays_of_a_cache(case: Case) -> None:
    cache = case.cache()
    held = {id(array) for array in _arrays_in(vars(cache))}
    assert {id(array) for array in adapter_for(cache).buffers(cache)} == held


# A3: restore from a snapshot


@all_cases
def test_a_snapshot_restores_the_state_bit_for_bit(case: Case) -> None:
    cache = case.cache()
    restored = _restored(case, case.length)
    assert state_bits(case.kind, restored) == state_bits(case.kind, cache)
    assert case.kind.spelled(restored) == case.kind.expected(case.ids, case.lengths)
    assert adapter_for(restored).offset(restored) in (case.length, None)


@all_cases
def test_a_restored_cache_goes_on_like_an_undisturbed_one(case: Case) -> None:
    for continuation in CONTINUATIONS:
        _assert_goes_on_alike(case, _restored(case, case.length), case.lengths, continuation)


@all_cases
def test_a_snapshot_is_cut_back_to_any_offset_whose_state_it_has_and_goes_on_from_there(case: Case) -> None:
    snapshot, continuations = _snapshot(case), cycle(SHORT_CONTINUATIONS)
    before = picture(snapshot)
    for target in (*case.cut_targets(), case.length + 1, case.length + 30):
        cache = case.kind.make()
        untouched = picture(cache)
        is_there = target <= case.length and case.can_restore(target)
        assert adapter_for(cache).restore(cache, snapshot, target) == is_there, target
        if is_there:
            assert case.kind.spelled(cache) == case.kind.expected(case.ids[:target], [target]), target
            assert adapter_for(cache).offset(cache) == target
            _assert_goes_on_alike(case, cache, (target,), next(continuations))
        else:
            assert picture(cache) == untouched, target
    assert picture(snapshot) == before


@all_cases
def test_a_snapshot_takes_the_place_of_another_sequence(case: Case) -> None:
    cache = case.kind.fed(token_ids(case.length + 9, seed=1), [case.length, 9])
    adapter = adapter_for(cache)
    assert adapter.is_point or adapter.restore(cache, None, 0)
    assert adapter.restore(cache, _snapshot(case), case.length)
    assert case.kind.spelled(cache) == case.kind.expected(case.ids, case.lengths)
    _assert_goes_on_alike(case, cache, case.lengths, (2, 1, 7, 1))


@all_cases
def test_a_restored_cache_and_its_snapshot_do_not_see_each_other_change(case: Case) -> None:
    snapshot = _snapshot(case)
    before = picture(snapshot)
    for continuation in ((), (1, 1, 1), (5,)):
        cache = _put_back(case.kind, snapshot)
        _feed(case.kind, cache, case.rest, continuation)
        assert picture(snapshot) == before
        _overwrite(cache)
        assert picture(snapshot) == before


@span_cases
def test_a_live_offset_before_the_start_of_a_span_is_refused_and_changes_nothing(case: Case) -> None:
    cache = case.cache()
    adapter = adapter_for(cache)
    for start in (cut for cut in CUTS if cut < case.length):
        piece = adapter.snapshot(cache, start, case.length)
        for offset in (0, start - 1):
            short = _stopped(case, offset)
            before = picture(short)
            for target in (case.length, start + 1, start, offset, offset // 2):
                assert not adapter.restore(short, piece, target), (start, offset, target)
                assert picture(short) == before, (start, offset, target)


@span_cases
def test_a_span_is_paged_in_behind_the_common_prefix_of_two_branches(case: Case) -> None:
    adapter = adapter_for(case.cache())
    for fork in (cut for cut in CUTS if cut < case.length):
        other = [*case.ids[:fork], *token_ids(100, seed=2)]
        cache = case.kind.fed(other, [len(other)])
        assert adapter.restore(cache, None, fork)
        assert adapter.restore(cache, adapter.snapshot(case.cache(), fork, case.length), case.length), fork
        assert state_bits(case.kind, cache) == state_bits(case.kind, case.cache()), fork
        _assert_goes_on_alike(case, cache, case.lengths, (1, 1, 3))


@span_cases
def test_a_span_does_not_write_again_what_is_live(case: Case) -> None:
    adapter = adapter_for(case.cache())
    for offset in case.cut_targets()[1:]:
        # Other ids than the snapshot has, so that it shows who wrote what.
        other = token_ids(offset, seed=6)
        cache = case.kind.fed(other, [offset])
        assert adapter.restore(cache, _snapshot(case), case.length), offset
        assert case.kind.spelled(cache) == list(enumerate([*other, *case.ids[offset:]])), offset


# A2: rewind


@all_cases
def test_rewinding_reaches_any_offset_where_nothing_was_lost_and_changes_nothing_else(case: Case) -> None:
    for target in (*case.cut_targets(), case.length, case.length + 1, case.length + 500):
        cache = case.cache()
        before, adapter = picture(cache), adapter_for(cache)
        # Without an offset of its own a cache cannot tell that it stands there already.
        can_move = adapter.offset(cache) is not None if target == case.length else target < case.length and case.can_cut
        assert adapter.can_rewind(cache, target) == can_move, target
        assert adapter.restore(cache, None, target) == can_move, target
        if target < case.length and can_move:
            assert case.kind.spelled(cache) == case.kind.expected(case.ids[:target], [target]), target
            assert adapter_for(cache).offset(cache) == target
        else:
            assert picture(cache) == before, target


@cut_cases
def test_a_rewound_cache_goes_on_like_one_that_stopped_there(case: Case) -> None:
    for target, continuation in zip(case.cut_targets(), cycle(SHORT_CONTINUATIONS), strict=False):
        cache = case.cache()
        assert adapter_for(cache).restore(cache, None, target), target
        _assert_goes_on_alike(case, cache, (target,), continuation)


@cut_cases
def test_a_cache_that_was_trimmed_by_its_own_method_stands_where_it_says(case: Case) -> None:
    for target in case.cut_targets()[1::2]:
        cache = case.cache()
        adapter = adapter_for(cache)
        assert cache.trim(case.length - target) == case.length - target
        assert adapter.offset(cache) == target
        restored = _put_back(case.kind, adapter.snapshot(cache, 0, target))
        assert case.kind.spelled(restored) == case.kind.expected(case.ids[:target], [target]), target
        if not adapter.is_point:
            assert adapter.restore(cache, _snapshot(case), case.length)
            assert state_bits(case.kind, cache) == state_bits(case.kind, case.cache()), target


# A1: a snapshot owns its arrays


@all_cases
def test_a_snapshot_does_not_change_when_the_live_cache_is_written(case: Case) -> None:
    for continuation in CONTINUATIONS:
        cache = case.cache()
        live = picture(cache)
        snapshot = adapter_for(cache).snapshot(cache, 0, case.length)
        assert picture(cache) == live
        mx.eval(snapshot.arrays())
        before = picture(snapshot)
        _feed(case.kind, cache, case.rest, continuation)
        _overwrite(cache)
        assert picture(snapshot) == before, continuation


@all_cases
def test_a_snapshot_states_its_span_and_its_bytes(case: Case) -> None:
    snapshot = _snapshot(case)
    assert (snapshot.start, snapshot.end) == (0, case.length)
    assert snapshot.nbytes == sum(array.nbytes for array in snapshot.arrays())
    assert {id(a) for a in snapshot.arrays()} == {id(a) for a in _arrays_in(snapshot)}


@all_kinds
def test_a_cache_that_was_never_written_has_no_snapshot(kind: Kind) -> None:
    cache = kind.make()
    adapter = adapter_for(cache)
    before = picture(cache)
    assert adapter.is_empty(cache)
    assert adapter.snapshot(cache, 0, 0) is None
    assert not adapter.offset(cache)
    assert not adapter.restore(cache, None, 5)
    adapter.reserve(cache, 100)
    assert picture(cache) == before


@span_cases
def test_a_span_that_is_not_live_has_no_snapshot(case: Case) -> None:
    cache = case.cache()
    for start, end in ((0, case.length + 1), (case.length, case.length), (-1, 1), (1, 0)):
        with pytest.raises(SnapshotError, match=rf"span \[{start}, {end}\) .*\[0, {case.length}\)"):
            adapter_for(cache).snapshot(cache, start, end)


# A4 and A5: split and merge


@all_cases
def test_splitting_at_or_outside_an_edge_keeps_the_whole_on_one_side(case: Case) -> None:
    adapter = adapter_for(case.cache())
    before = picture(_snapshot(case))
    for at in (-3, 0):
        upper, lower = adapter.split(_snapshot(case), at)
        assert upper is None
        assert picture(lower) == before
    for at in (case.length, case.length + 7):
        upper, lower = adapter.split(_snapshot(case), at)
        whole, none = (upper, lower) if case in SPAN_CASES + WINDOW_CASES else (lower, upper)
        assert none is None
        assert picture(whole) == before


@span_cases
def test_a_span_splits_into_the_state_before_and_after_the_cut(case: Case) -> None:
    adapter = adapter_for(case.cache())
    for at in case.cut_targets()[1:]:
        upper, lower = adapter.split(_snapshot(case), at)
        assert [(s.start, s.end) for s in (upper, lower)] == [(0, at), (at, case.length)]
        cache = _put_back(case.kind, upper)
        assert case.kind.spelled(cache) == case.kind.expected(case.ids[:at], [at])
        assert adapter.restore(cache, lower, case.length)
        assert state_bits(case.kind, cache) == state_bits(case.kind, case.cache())


@window_cases
def test_a_window_splits_into_its_tokens_before_and_after_the_cut(case: Case) -> None:
    adapter = adapter_for(case.cache())
    tokens = [(position, case.ids[position]) for position in case.held()]
    for at in range(1, case.length):
        upper, lower = adapter.split(_snapshot(case), at)
        assert [(s.start, s.end) for s in (upper, lower)] == [(0, at), (at, case.length)]
        assert spelled_pieces(upper) == [token for token in tokens if token[0] < at], at
        assert spelled_pieces(lower) == [token for token in tokens if token[0] >= at], at


@token_cases
def test_many_splits_then_merges_in_any_order_are_the_identity(case: Case) -> None:
    adapter = adapter_for(case.cache())
    before = picture(_snapshot(case))
    cuts = [cut for cut in CUTS if cut < case.length] if case in SPAN_CASES else case.cut_targets()[1:]
    for from_the_left in (True, False):
        pieces = []
        rest = _snapshot(case)
        for at in cuts:
            upper, rest = adapter.split(rest, at)
            pieces.append(upper)
        pieces.append(rest)
        while len(pieces) > 1:
            at = 0 if from_the_left else len(pieces) - 2
            pieces[at : at + 2] = [adapter.merge(*pieces[at : at + 2])]
        assert picture(pieces[0]) == before, from_the_left


@all_cases
def test_merging_with_nothing_keeps_nothing_of_tokens_and_the_lower_of_checkpoints(case: Case) -> None:
    adapter = adapter_for(case.cache())
    before = picture(_snapshot(case))
    assert adapter.merge(_snapshot(case), None) is None
    lower = adapter.merge(None, _snapshot(case))
    assert picture(lower) == (before if case in POINT_CASES else None)
    assert adapter.merge(None, None) is None


@span_cases
def test_spans_that_do_not_touch_are_not_merged_and_stay_as_they_were(case: Case) -> None:
    live = case.kind.fed(token_ids(1000), [1000])
    adapter = adapter_for(live)
    for first, second in (((0, 500), (501, 1000)), ((0, 500), (499, 1000)), ((500, 1000), (0, 500))):
        upper, lower = adapter.snapshot(live, *first), adapter.snapshot(live, *second)
        before = picture([upper, lower])
        with pytest.raises(SnapshotError, match=rf"\[{first[0]}, {first[1]}\) and \[{second[0]}, {second[1]}\)"):
            adapter.merge(upper, lower)
        assert picture([upper, lower]) == before


def test_spans_of_different_shape_or_dtype_are_not_merged() -> None:
    adapter = adapter_for(KVCache())

    def span(start: int, heads: int = 2, width: int = 4, dtype: mx.Dtype = mx.float32) -> Any:
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, heads, 10, width), dtype), mx.zeros((1, heads, 10, width), dtype))
        return adapter.snapshot(cache, start, start + 5)

    for odd in (span(5, heads=1), span(5, width=8), span(5, dtype=mx.float16)):
        with pytest.raises(SnapshotError, match="spans differ"):
            adapter.merge(span(0), odd)
    assert adapter.merge(span(0), span(5)).end == 10


# A6: free


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not DIGEST], ids=lambda kind: kind.name)
def test_a_freed_cache_holds_no_array_and_starts_over(kind: Kind) -> None:
    for lengths in ((5,), (40, 1)):
        cache = kind.fed(token_ids(sum(lengths)), lengths)
        adapter_for(cache).free(cache)
        assert adapter_for(cache).is_empty(cache)
        assert not adapter_for(cache).offset(cache)
        assert _arrays_in(vars(cache)) == []
        plain = Case(kind, "", (), True)
        if kind.name != "ArraysCache-padded":  # its padding belongs to the request that is gone
            _assert_goes_on_alike(plain, cache, (), (3, 1, 30, 1))


# Room


@all_cases
def test_owning_the_arrays_changes_no_state(case: Case) -> None:
    cache = case.cache()
    mx.eval(adapter_for(cache).own(cache))
    assert state_bits(case.kind, cache) == state_bits(case.kind, case.cache())
    _assert_goes_on_alike(case, cache, case.lengths, (1, 1, 5, 1))


@all_cases
@pytest.mark.parametrize("capacity_tokens", [0, 2000])
def test_reserving_room_or_giving_it_up_changes_no_state(case: Case, capacity_tokens: int) -> None:
    cache = case.cache()
    room_tokens = adapter_for(cache).capacity(cache)
    adapter_for(cache).reserve(cache, capacity_tokens)
    assert adapter_for(cache).capacity(cache) >= (room_tokens if capacity_tokens else case.length)
    assert state_bits(case.kind, cache) == state_bits(case.kind, case.cache())
    _assert_goes_on_alike(case, cache, case.lengths, (1, 1, 5, 1))


@span_cases
def test_reserved_room_is_there_and_no_update_reallocates_before_it_is_full(case: Case) -> None:
    cache = case.cache()
    adapter = adapter_for(cache)
    adapter.reserve(cache, case.length + 20)
    if adapter.capacity(cache) == NEVER:
        return
    assert adapter.capacity(cache) == case.length + 20
    _feed(case.kind, cache, case.rest, (1, 19))
    assert adapter.capacity(cache) == case.length + 20
    _feed(case.kind, cache, case.rest[20:], (1,))
    assert adapter.capacity(cache) > case.length + 20


@all_cases
def test_capacity_is_where_the_class_allocates_again(case: Case) -> None:
    cache = case.cache()
    adapter = adapter_for(cache)
    room = adapter.capacity(cache) - case.length
    assert room >= 0
    shapes = [b.shape for b in adapter.buffers(cache)]
    for token in case.rest[: min(room, 40)]:
        _feed(case.kind, cache, [token], (1,))
    if adapter.capacity(cache) < NEVER or case.kind.name.startswith("Rotating"):
        assert [b.shape for b in adapter.buffers(cache)] == shapes


@all_cases
def test_spare_bytes_are_what_the_buffers_hold_beyond_the_state(case: Case) -> None:
    cache = case.cache()
    adapter = adapter_for(cache)
    held = sum(b.nbytes for b in adapter.buffers(cache))
    # A window may hold tokens that it reads no more, and a span may be stored in fewer bits.
    is_cut = case.kind.is_window or not case.kind.is_point
    state = temporal_buffers(cache) if is_cut else _snapshot(case).arrays()
    assert adapter.spare_nbytes(cache) == held - sum(array.nbytes for array in state)


# A forward pass that broke off


@all_cases
@pytest.mark.parametrize("reached", ["not-yet", "half", "done"])
def test_a_forward_pass_that_broke_off_is_undone(case: Case, reached: str) -> None:
    for count in (1, 7, 40):
        cache = case.cache()
        adapter = adapter_for(cache)
        held = adapter.hold(cache, count)
        if reached != "not-yet":
            (case.kind.break_off if reached == "half" else case.kind.feed)(cache, case.rest[:count])
        if adapter.roll_back(cache, held):
            assert state_bits(case.kind, cache) == state_bits(case.kind, case.cache()), count
            _assert_goes_on_alike(case, cache, case.lengths, (1, 5, 1, 1))
        else:
            assert count == 1
            assert not case.undoes_one


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not DIGEST], ids=lambda kind: kind.name)
@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_first_forward_pass_that_broke_off_leaves_an_empty_cache(kind: Kind, count: int) -> None:
    cache = kind.make()
    adapter = adapter_for(cache)
    held = adapter.hold(cache, count)
    kind.break_off(cache, token_ids(count))
    assert adapter.roll_back(cache, held)
    assert adapter.is_empty(cache)
    _assert_goes_on_alike(Case(kind, "", (), True), cache, (), (3, 1, 30))


# The registry


@pytest.fixture
def registry() -> Iterator[dict[type, Any]]:
    before = dict(ADAPTERS)
    yield ADAPTERS
    ADAPTERS.clear()
    ADAPTERS.update(before)


class RoundedKVCache(KVCache):  # type: ignore[misc]
    """A user's own class, near enough to KVCache for its adapter."""


def test_a_subclass_of_a_known_class_has_no_adapter_until_one_is_registered(registry: dict[type, Any]) -> None:
    wanted = r"no adapter for layer 7 \(RoundedKVCache\).*register_adapter"
    with pytest.raises(UnsupportedCacheError, match=wanted) as caught:
        adapter_for(RoundedKVCache(), 7)
    names = {*(known.__name__ for known in ADAPTERS), "CacheList"}
    assert names <= set(str(caught.value).replace(",", " ").replace(".", " ").split())
    assert "\n" not in str(caught.value)
    adapter = SpanAdapter()
    register_adapter(RoundedKVCache, adapter)
    assert adapter_for(RoundedKVCache()) is adapter
    assert adapter_for(KVCache()) is not adapter


# Driving a case


def _snapshot(case: Case) -> Any:
    return deepcopy(_taken(case))


@functools.cache
def _taken(case: Case) -> Any:
    cache = case.cache()
    snapshot = adapter_for(cache).snapshot(cache, 0, case.length)
    mx.eval(snapshot.arrays())
    return snapshot


def _put_back(kind: Kind, snapshot: Any) -> Any:
    cache = kind.make()
    assert adapter_for(cache).restore(cache, snapshot, snapshot.end)
    return cache


def _restored(case: Case, target: int) -> Any:
    cache = case.kind.make()
    assert adapter_for(cache).restore(cache, _snapshot(case), target), target
    return cache


def _stopped(case: Case, target: int) -> Any:
    """A cache that was fed the first `target` tokens of the case in one forward pass, and no more."""
    return case.kind.fed(case.ids[:target], [target] if target else [])


def _overwrite(cache: Any) -> None:
    """Write into every live array in place."""
    for buffer in adapter_for(cache).buffers(cache):
        buffer[...] = 1


def _feed(kind: Kind, cache: Any, ids: Sequence[int], lengths: Sequence[int]) -> list[Any]:
    seen, start = [], 0
    for length in lengths:
        seen.append(kind.feed(cache, ids[start : start + length]))
        start += length
    return seen


def _assert_goes_on_alike(case: Case, cache: Any, fed: Sequence[int], lengths: Sequence[int]) -> None:
    """Feed it as one that was fed passes of `fed`: they see the same at every step, and hold the same afterwards."""
    assert _outcome(case, cache, lengths) == _undisturbed(case, tuple(fed), tuple(lengths)), (fed, lengths)


@functools.lru_cache(maxsize=256)
def _undisturbed(case: Case, fed: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
    return _outcome(case, case.kind.fed(case.ids[: sum(fed)], [length for length in fed if length]), lengths)


def _outcome(case: Case, cache: Any, lengths: Sequence[int]) -> Any:
    """What each step sees, and what the cache holds in the end."""
    seen = _feed(case.kind, cache, case.rest, lengths)
    return seen, state_bits(case.kind, cache), case.kind.spelled(cache)


def _arrays_in(thing: Any) -> list[mx.array]:
    if isinstance(thing, mx.array):
        return [thing]
    if isinstance(thing, dict):
        thing = list(thing.values())
    elif dataclasses.is_dataclass(thing):
        thing = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    return [a for item in thing for a in _arrays_in(item)] if isinstance(thing, list | tuple) else []
