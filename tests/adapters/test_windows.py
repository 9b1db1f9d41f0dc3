"""Windows, token by token: what their buffers hold, what is taken out, and the state that is made of that again.

The keys and values of a token spell out its position, so that every array says which tokens it has, bit for bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from radixcache.adapters.contract import Range, Window, WindowSnapshot, common, missing, tokens_in
from radixcache.adapters.registry import adapter_for
from radixcache.adapters.span import SpanSnapshot, segment_bounds
from radixcache.adapters.window import WindowAdapter, is_windowed
from tests.adapters.cases import chunked_positions, picture, rotating_positions, temporal_buffers

#: Rows of all positions: two heads, keys of one number and values of three.
_TAGS = 4 * np.arange(2000, dtype=np.float32)[None, None, :, None] + np.arange(2, dtype=np.float32)[None, :, None, None]
KEYS, VALUES = _TAGS, -_TAGS + np.array([0, 0.25, 0.5], np.float32)


@dataclass(frozen=True)
class Layer:
    """A cache class with a window.

    Attributes:
        held: positions in the buffers after forward passes of these lengths, of a cache that held others before.
    """

    name: str
    make: Callable[[], Any]
    window: Window
    held: Callable[..., list[int]]

    def passes(self) -> dict[str, tuple[int, ...]]:
        """Forward passes that go past the window at least twice, by name."""
        size = self.window.size
        return {
            "singles": (1,) * (3 * size + 2),
            "above": (size + 1, 2 * size + 3, size + 1),
            "batch-into-a-ring": (*(1,) * (2 * size + 1), size - 1, 1, 1),
            "mixed": (size // 2, 1, 1, size + 1, 1, 1, size - 1, *(1,) * (size + 2), 2, size, 1),
        }


def rotating(size: int, keep: int) -> Layer:
    held = functools.partial(rotating_positions, size=size, keep=keep)
    return Layer(f"rotating-{size}-keep-{keep}", lambda: RotatingKVCache(size, keep=keep), Window(size, keep), held)


def chunked(size: int) -> Layer:
    held = functools.partial(chunked_positions, size=size)
    return Layer(f"chunked-{size}", lambda: ChunkedKVCache(size), Window(size), held)


SIZES = (4, 16)
KEEPING = ((4, 0), (4, 2), (16, 4))
LAYERS = [*(rotating(size, keep) for size, keep in KEEPING), *map(chunked, SIZES)]
SMALL_LAYERS = [layer for layer in LAYERS if layer.window.size == 4]
all_layers = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
small_layers = pytest.mark.parametrize("layer", SMALL_LAYERS, ids=lambda layer: layer.name)
all_passes = pytest.mark.parametrize("name", list(LAYERS[0].passes()))


def test_an_adapter_that_does_not_say_is_not_windowed() -> None:
    silent: Any = SimpleNamespace(is_point=True)
    assert not is_windowed(silent)


@all_layers
def test_an_adapter_reads_the_window_off_the_cache(layer: Layer) -> None:
    cache = layer.make()
    assert adapter_of(cache).window(cache) == layer.window
    assert adapter_of(cache).held(cache) == []


@all_layers
@all_passes
def test_the_tokens_that_are_held_are_those_that_no_forward_pass_dropped(layer: Layer, name: str) -> None:
    cache, lengths = layer.make(), layer.passes()[name]
    adapter = adapter_of(cache)
    for count, length in enumerate(lengths):
        feed(cache, length)
        expected = layer.held(lengths[: count + 1])
        assert adapter.held(cache) == ranges_of(expected)
        assert positions_in(adapter.snapshot(cache, 0, cache.offset)) == expected


@all_layers
@all_passes
@pytest.mark.parametrize("when", ["at-once", "before-it-is-lost"])
def test_a_sequence_taken_out_while_it_is_fed_has_the_state_at_every_offset(layer: Layer, name: str, when: str) -> None:
    snapshot = taken_out(layer, layer.passes()[name], when)
    assert snapshot.ranges == [(0, snapshot.end)]
    assert positions_in(snapshot) == list(range(snapshot.end))
    for offset in range(snapshot.end + 1):
        cache = restored(layer, snapshot, offset)
        assert cache.offset == offset
        assert attended(cache) == needed(layer.window, offset)
        assert ranges_positions(adapter_of(cache).held(cache)) == needed(layer.window, offset)
        assert picture(temporal_buffers(cache)) == fresh_bits(layer, offset)


@all_layers
@pytest.mark.parametrize("singly", [True, False], ids=["singly", "at-once"])
def test_a_cache_restored_at_any_offset_goes_on_like_one_that_was_fed_up_to_there(layer: Layer, singly: bool) -> None:
    snapshot = taken_out(layer, layer.passes()["mixed"], "before-it-is-lost")
    size = layer.window.size
    continuations = ((1, 1, size + 2, 1, 1), (2, 1, 1), (size - 1, 1, 2, 1), (size, 1))
    for offset in range(min(snapshot.end, 2 * size + 5) + 1):
        lengths = continuations[offset % len(continuations)]
        caches = restored(layer, snapshot, offset), deepcopy(fresh(layer, offset, singly))
        for length in lengths:
            seen = [feed(cache, length) for cache in caches]
            assert seen[0] == seen[1], (offset, length)
        assert picture(temporal_buffers(caches[0])) == picture(temporal_buffers(caches[1])), offset


@small_layers
def test_a_state_is_refused_exactly_when_a_token_of_it_is_missing(layer: Layer) -> None:
    whole = taken_out(layer, (3, 1, 1, 5, 1), "at-once")
    everything = [(0, whole.end)]
    for gap in combinations(range(whole.end + 1), 2):
        snapshot = whole.within(missing(everything, [gap]))
        for offset in range(whole.end + 3):
            live = deepcopy(fresh(layer, gap[0]))
            before = picture(live)
            is_there = offset <= whole.end and not set(needed(layer.window, offset)) & set(range(*gap))
            assert adapter_of(live).restore(live, snapshot, offset) == is_there, (gap, offset)
            if is_there:
                assert attended(live) == needed(layer.window, offset), (gap, offset)
            else:
                assert picture(live) == before, (gap, offset)


@small_layers
@given(pieces=st.lists(st.tuples(st.integers(0, 14), st.integers(1, 8)), max_size=6), offset=st.integers(0, 20))
def test_a_state_is_made_of_pieces_that_overlap_if_they_begin_in_order(
    layer: Layer, pieces: list[tuple[int, int]], offset: int
) -> None:
    found = sorted((low, low + length) for low, length in pieces)
    snapshot = WindowSnapshot(0, offset, [_piece(low, high) for low, high in found])
    is_there = set(needed(layer.window, offset)) <= set(ranges_positions(found))
    cache = layer.make()
    assert adapter_of(cache).restore(cache, snapshot, offset) == is_there
    assert attended(cache) == (needed(layer.window, offset) if is_there else [])


@given(st.integers(1, 20), st.integers(0, 19), st.integers(0, 70))
def test_a_window_needs_what_is_left_when_the_oldest_drops_out(size: int, keep: int, offset: int) -> None:
    window = Window(size, min(keep, size - 1))
    ranges = window.needs(offset)
    assert ranges_positions(ranges) == needed(window, offset)
    assert ranges == ranges_of(needed(window, offset))
    assert window.count(offset) == tokens_in(ranges)


def _laid_out(gaps_and_lengths: list[tuple[int, int]]) -> list[Range]:
    ends = list(accumulate(gap + length for gap, length in gaps_and_lengths))
    return [(end - length, end) for end, (_, length) in zip(ends, gaps_and_lengths, strict=True)]


#: Ranges in order; without a gap between them they touch.
some_ranges = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=6).map(_laid_out)


@given(some_ranges, some_ranges)
def test_common_and_missing_divide_ranges_by_whether_they_are_in_others(left: list[Range], right: list[Range]) -> None:
    both, only = common(left, right), missing(left, right)
    others = set(ranges_positions(right))
    assert ranges_positions(both) == [position for position in ranges_positions(left) if position in others]
    assert ranges_positions(only) == [position for position in ranges_positions(left) if position not in others]
    assert all(low < high for low, high in both + only)
    assert common(right, left) == both
    assert tokens_in(both) + tokens_in(only) == tokens_in(left) == len(ranges_positions(left))


# A snapshot, against the set of its positions. They lie around an edge of the segment grid.

START, END = 500, 530
positions = st.sets(st.integers(START, END - 1))
offsets = st.integers(START - 2, END + 2)


@given(positions, positions)
def test_a_snapshot_says_which_tokens_it_has(there: set[int], cuts: set[int]) -> None:
    snapshot = of_positions(there, cuts)
    assert positions_in(snapshot) == sorted(there)
    assert snapshot.ranges == ranges_of(sorted(there))
    assert snapshot.nbytes == sum(array.nbytes for array in snapshot.arrays()) == len(there) * 2 * 4 * 4


@given(positions, positions, st.lists(offsets, unique=True, max_size=8))
def test_what_of_a_snapshot_lies_within_ranges_is_cut_to_them(
    there: set[int], cuts: set[int], edges: list[int]
) -> None:
    snapshot = of_positions(there, cuts)
    asked = list(pairwise(sorted(edges)))[::2]
    found = snapshot.within(asked)
    assert positions_in(found) == sorted(there & set(ranges_positions(asked)))
    assert (found.start, found.end) == (START, END)
    assert positions_in(snapshot) == sorted(there)


@given(positions, positions, offsets)
def test_a_snapshot_splits_by_position_and_merges_again(there: set[int], cuts: set[int], at: int) -> None:
    halves = of_positions(there, cuts).split(at)
    bounds = [(START, min(at, END)), (max(at, START), END)]
    for half, (start, end) in zip(halves, bounds, strict=True):
        assert (half is None) == (start >= end)
        if half is not None:
            assert (half.start, half.end) == (start, end)
            assert positions_in(half) == [position for position in sorted(there) if start <= position < end]
    upper, lower = halves
    if upper is not None and lower is not None:
        merged = upper.merged(lower)
        assert (merged.start, merged.end) == (START, END)
        assert merged.ranges == ranges_of(sorted(there))
        assert positions_in(merged) == sorted(there)


@given(positions, positions, positions, positions)
def test_what_was_missing_is_put_in_its_place(
    there: set[int], others: set[int], cuts: set[int], other_cuts: set[int]
) -> None:
    snapshot = of_positions(there, cuts)
    more = of_positions(others - there, other_cuts).pieces
    random.Random(len(there)).shuffle(more)
    found = snapshot.with_more(more)
    assert positions_in(found) == sorted(there | others)
    assert (found.start, found.end) == (START, END)
    assert positions_in(snapshot) == sorted(there)


def feed(cache: Any, length: int) -> list[int]:
    """One forward pass of this many tokens; returns the positions that attention gets, a single token's in order."""
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    span = slice(cache.offset, cache.offset + length)
    found = spelled(*cache.update_and_fetch(mx.array(KEYS[..., span, :]), mx.array(VALUES[..., span, :])))
    return sorted(found) if length == 1 else found


def spelled(keys: mx.array, values: mx.array) -> list[int]:
    """The positions of these rows, which must be theirs bit for bit."""
    rows = np.array(keys), np.array(values)
    found = rows[0][0, 0, :, 0].astype(int) // 4
    assert all(np.array_equal(row, tags[:, :, found]) for row, tags in zip(rows, (KEYS, VALUES), strict=True))
    return [int(position) for position in found]


def adapter_of(cache: Any) -> WindowAdapter:
    adapter = adapter_for(cache)
    assert is_windowed(adapter)
    return adapter


def attended(cache: Any) -> list[int]:
    """The positions that the next forward pass may read, in order."""
    buffers = temporal_buffers(cache)
    return spelled(*buffers) if buffers else []


def positions_in(snapshot: WindowSnapshot) -> list[int]:
    """The positions of a snapshot's tokens; every piece must have those that it says it has."""
    found: list[int] = []
    for piece in snapshot.pieces:
        assert piece.start < piece.end
        assert [p for segment in piece.segments for p in spelled(*segment)] == list(range(piece.start, piece.end))
        found += range(piece.start, piece.end)
    return found


@functools.cache
def taken_out(layer: Layer, lengths: tuple[int, ...], when: str) -> WindowSnapshot:
    """All tokens of a sequence, each taken out once while it was fed: at once, or when the next pass would drop it."""
    cache = layer.make()
    adapter = adapter_of(cache)
    pieces: list[Any] = []
    taken = 0
    for index, length in enumerate(lengths):
        feed(cache, length)
        held, left = (set(layer.held(lengths[:stop])) for stop in (index + 1, index + 2))
        is_last = index + 1 == len(lengths)
        stop = cache.offset if when == "at-once" or is_last else max(held - left, default=-1) + 1
        if stop > taken:
            pieces += adapter.snapshot(cache, taken, stop).pieces
            taken = stop
    return WindowSnapshot(0, cache.offset, pieces)


def restored(layer: Layer, snapshot: WindowSnapshot, offset: int) -> Any:
    cache = layer.make()
    assert adapter_of(cache).restore(cache, snapshot, offset), offset
    return cache


@functools.cache
def fresh(layer: Layer, offset: int, singly: bool = False) -> Any:
    """A cache that was fed up to an offset, token by token or all at once; not to be changed."""
    if offset == 0:
        return layer.make()
    cache = deepcopy(fresh(layer, offset - 1, True)) if singly else layer.make()
    feed(cache, 1 if singly else offset)
    return cache


@functools.cache
def fresh_bits(layer: Layer, offset: int) -> Any:
    return picture(temporal_buffers(fresh(layer, offset)))


def needed(window: Window, offset: int) -> list[int]:
    """The positions that a window has left, dropping the oldest behind the kept ones when it overflows."""
    left: list[int] = []
    for position in range(offset):
        left.append(position)
        if len(left) > window.size:
            del left[window.keep]
    return left


def ranges_of(ordered: Sequence[int]) -> list[Range]:
    """The fewest ranges that have these positions."""
    found: list[Range] = []
    for position in ordered:
        if found and found[-1][1] == position:
            found[-1] = found[-1][0], position + 1
        else:
            found.append((position, position + 1))
    return found


def ranges_positions(ranges: Sequence[Range]) -> list[int]:
    return [position for low, high in ranges for position in range(low, high)]


def of_positions(there: set[int], cuts: set[int]) -> WindowSnapshot:
    """A snapshot of these positions, in one piece where they follow each other, except at the cuts."""
    found = []
    for low, high in ranges_of(sorted(there)):
        edges = [low, *sorted(cut for cut in cuts if low < cut < high), high]
        found += [_piece(start, end) for start, end in pairwise(edges)]
    return WindowSnapshot(START, END, found)


def _piece(start: int, end: int) -> SpanSnapshot:
    cuts = [slice(low, high) for low, high in segment_bounds(start, end)]
    return SpanSnapshot(start, end, [(mx.array(KEYS[..., cut, :]), mx.array(VALUES[..., cut, :])) for cut in cuts])
