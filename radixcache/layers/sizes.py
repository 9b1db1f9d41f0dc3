"""SizedLayout: a layout of sizes instead of arrays, for simulators.

Tree, slots, paging, budget and policy are those of any PrefixCache. Only the code that copies arrays is replaced by
code that counts their bytes. A key may stand for a token or for a block of tokens; sizes are per key. Spans can be cut
anywhere. Windows can be rewound until one of them has wrapped.

Without `grow_keys`, live buffers have no spare capacity, so a cache holds the bytes of its distinct keys. With
`grow_keys`, live buffers grow as in mlx-lm's KVCache, and the cache evicts as a real one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixcache.adapters.contract import NEVER, Checkpoint, Range, Spans, Window, WindowSnapshot, common
from radixcache.layers.layout import Layout, Shape


class SizedLayout(Shape):
    """The shape of a model, whose state is sizes in one SizedCache. It has the operations of `Layout`.

    Args:
        token_bytes: bytes of a key over all span layers.
        checkpoint_bytes: bytes of point state without windows; the same at every offset.
        windows: the sliding windows, as (keys, bytes per key).
        grow_keys: step in which live span buffers grow; 0: they have no spare capacity.
        stored_token_bytes: bytes of a key in the snapshots of all span layers; None: `token_bytes`. Windows have the
            same size, live and stored.
    """

    is_known = True

    def __init__(
        self,
        token_bytes: int,
        checkpoint_bytes: int = 0,
        windows: Sequence[tuple[int, int]] = (),
        grow_keys: int = 0,
        stored_token_bytes: int | None = None,
    ) -> None:
        if min(token_bytes, checkpoint_bytes, *(min(window) for window in windows), stored_token_bytes or 0) < 0:
            raise ValueError(f"sizes are {token_bytes}, {checkpoint_bytes} and {list(windows)}; wanted 0 or more.")
        points = checkpoint_bytes + sum(keys * nbytes for keys, nbytes in windows)
        if token_bytes + points == 0:
            raise ValueError("all sizes are 0; wanted bytes per token or per checkpoint.")
        self._grow_keys = grow_keys if token_bytes else 0
        super().__init__()
        self.leaf_count = 1
        self.token_bytes = token_bytes
        self.stored_token_bytes = token_bytes if stored_token_bytes is None else stored_token_bytes
        self.has_points = points > 0
        self.has_states = checkpoint_bytes > 0
        self._checkpoint_bytes = self.state_bytes = checkpoint_bytes
        for keys, nbytes in windows:
            if keys and nbytes:
                self._window_bytes[Window(keys)] = self.window_bytes(Window(keys)) + nbytes
        self._stored_window_bytes = self._window_bytes
        self.windows = tuple(self._window_bytes)
        self._first_leaf = {window: leaf for leaf, window in enumerate(self.windows)}
        self._layers_of = dict.fromkeys(self.windows, 1)

    def fresh(self) -> list[Any]:
        return [SizedCache(self._grow_keys)]

    def learn(self, caches: Sequence[Any]) -> None: ...
    def take_over(self, shapes: Sequence[Any]) -> None: ...
    def compare(self, caches: Sequence[Any]) -> None: ...
    def evaluate(self, caches: Sequence[Any]) -> None: ...
    def release(self) -> None: ...

    def device_bytes(self) -> int:
        return NEVER

    def offsets(self, caches: Sequence[Any], trusted: bool = False) -> tuple[int, int]:
        first = self.first_offset(caches)
        last: int = caches[0].points if self.has_points else first
        return min(first, last), max(first, last)

    def first_offset(self, caches: Sequence[Any]) -> int:
        return int(caches[0].spans if self.token_bytes else caches[0].points)

    def identities(self, caches: Sequence[Any]) -> list[Any]:
        return []

    def is_empty(self, caches: Sequence[Any]) -> bool:
        return bool(caches[0].capacity == caches[0].spans == caches[0].points == 0)

    def live_nbytes(self, caches: Sequence[Any]) -> int:
        cache: SizedCache = caches[0]
        nbytes = (cache.capacity if self._grow_keys else cache.spans) * self.token_bytes
        if cache.points and self.has_points:
            windows = self._window_bytes.items()
            nbytes += sum(window.count(cache.points) * each for window, each in windows)
            nbytes += self._checkpoint_bytes
        return nbytes

    def spare_nbytes(self, caches: Sequence[Any]) -> int:
        spare: int = sum(cache.capacity - cache.spans for cache in caches) * self.token_bytes
        return spare if self._grow_keys else 0

    def capacity(self, caches: Sequence[Any]) -> int:
        return self.span_capacity(caches)

    def span_capacity(self, caches: Sequence[Any]) -> int:
        capacity: int = caches[0].capacity
        return capacity if self._grow_keys and capacity else NEVER

    def uses_points(self, caches: Sequence[Any]) -> bool:
        return self.has_points and bool(caches[0].points)

    def own(self, caches: Sequence[Any], *, was_empty: bool = True, wait: bool = True) -> None:
        if caches[0].spans == caches[0].capacity:
            caches[0].reserve(caches[0].spans + 1)

    def hold(self, caches: Sequence[Any], tokens: int) -> list[Any]:
        return [(caches[0].spans, caches[0].points)]

    def roll_back(self, caches: Sequence[Any], held: list[Any]) -> bool:
        caches[0].spans, caches[0].points = held[0]
        return True

    def can_rewind(self, caches: Sequence[Any], offset: int, target: int) -> bool:
        if target >= offset:
            return target == offset
        is_whole = not self.has_states and all(caches[0].points <= window.size for window in self.windows)
        return is_whole or not self.has_points

    def rewind(self, caches: Sequence[Any], offset: int, target: int) -> None:
        if target < offset:
            caches[0].spans = caches[0].points = target

    def rewind_spans(self, caches: Sequence[Any], target: int) -> None:
        caches[0].spans = target

    def reserve(
        self, caches: Sequence[Any], capacity_tokens: int, like: Spans | None = None, *, wait: bool = True
    ) -> None:
        if caches[0].capacity or like is not None:
            caches[0].reserve(capacity_tokens)

    def empty(self, caches: Sequence[Any]) -> None:
        caches[0].spans = caches[0].points = caches[0].capacity = 0

    def copy(self, caches: Sequence[Any], start: int, end: int) -> Spans:
        nbytes = (end - start) * self.token_bytes
        return Spans(start, end, [SizedPiece(start, end, nbytes)], nbytes)

    def page_out(self, caches: Sequence[Any], start: int, end: int) -> Spans:
        nbytes = (end - start) * self.stored_token_bytes
        return Spans(start, end, [SizedPiece(start, end, nbytes)], nbytes)

    def take_out(self, caches: Sequence[Any], cuts: Sequence[tuple[int, int]]) -> list[Spans]:
        return [self.page_out(caches, start, end) for start, end in cuts]

    def spans_of(self, snapshots: list[Any], start: int, end: int) -> Spans:
        return Spans(start, end, snapshots, sum(leaf.nbytes for leaf in snapshots))

    def page_in(self, caches: Sequence[Any], spans: Spans, target: int, *, wait: bool = True) -> int:
        begin = max(spans.start, caches[0].spans)
        if caches[0].capacity <= target:
            caches[0].reserve(target + 1)
        caches[0].spans = target
        return int(max(0, target - begin) * self.token_bytes)

    def without_plain(self, spans: Spans) -> Spans:
        return spans

    def split(self, spans: Spans, at: int) -> tuple[Spans, Spans, int]:
        upper, lower = Spans(spans.start, at, [], 0), Spans(at, spans.end, [], spans.nbytes)
        for leaf in spans.leaves:
            first, second = leaf.split(at)
            upper.leaves.append(first)
            lower.leaves.append(second)
            upper.nbytes += first.nbytes
        lower.nbytes -= upper.nbytes
        return upper, lower, 0

    def merge(self, upper: Spans, lower: Spans) -> tuple[Spans, int]:
        joined = [ours.merged(theirs) for ours, theirs in zip(upper.leaves, lower.leaves, strict=True)]
        return self.spans_of(joined, upper.start, lower.end), 0

    def held(self, caches: Sequence[Any]) -> dict[Window, list[Range]]:
        points, passed = caches[0].points, max(caches[0].passed, 1)
        return {window: [(max(0, points - window.size - passed + 1), points)] for window in self.windows}

    def capture(self, caches: Sequence[Any], start: int, end: int, wanted: Mapping[Window, Sequence[Range]]) -> Spans:
        leaves, held = [], self.held(caches)
        for window, nbytes in self._window_bytes.items():
            found = common(wanted.get(window, ()), held[window])
            pieces = [SizedPiece(low, high, (high - low) * nbytes) for low, high in found]
            leaves.append(WindowSnapshot(start, end, pieces))
        return self.spans_of(leaves, start, end)

    def within(self, spans: Spans, wanted: Mapping[Window, Sequence[Range]]) -> tuple[Spans, int]:
        cut = [leaf.within(wanted[window]) for window, leaf in zip(self.windows, spans.leaves, strict=True)]
        return self.spans_of(cut, spans.start, spans.end), 0

    def checkpoint(self, caches: Sequence[Any], offset: int, kind: str) -> Checkpoint:
        return Checkpoint(offset, [], self._checkpoint_bytes, kind)

    def checkpoint_of(self, snapshots: list[Any], offset: int, kind: str) -> Checkpoint:
        return self.checkpoint([], offset, kind)

    def restore_points(
        self, caches: Sequence[Any], checkpoint: Checkpoint | None, target: int, stored: Sequence[Spans] = ()
    ) -> None:
        caches[0].points, caches[0].passed = target, 0

    def block_buffers(self, spans: Sequence[Spans], windows: Sequence[Spans], start: int, end: int) -> dict[str, Any]:
        buffers: dict[str, Any] = {"span": SizedPiece(start, end, (end - start) * self.stored_token_bytes)}
        for leaf in range(len(self.windows)):
            found = (piece for its in windows for piece in its.leaves[leaf].within([(start, end)]).pieces)
            buffers[f"window.{leaf}"] = WindowSnapshot(start, end, [*found])
        return buffers

    def point_buffers(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {"point": SizedPiece(0, checkpoint.offset, checkpoint.nbytes)}

    def spans_in(self, buffers: Mapping[str, Any], start: int, end: int) -> list[Any]:
        return [buffers["span"]]

    def windows_in(self, buffers: Mapping[str, Any], start: int, end: int) -> list[Any]:
        return [buffers[f"window.{leaf}"] for leaf in range(len(self.windows))]

    def points_in(self, buffers: Mapping[str, Any], end: int) -> list[Any]:
        return [buffers["point"]]


#: The layers of a model, with state as arrays or as sizes.
AnyLayout = Layout | SizedLayout


@dataclass(slots=True, eq=False)
class SizedCache:
    """A live cache: the offsets of its span layers and its point layers.

    Span buffers grow in steps of `grow_keys` and have room for `capacity` keys; with 0, they have no spare capacity.
    Windows hold the `passed` keys of the last forward pass, and the keys that these read.
    """

    grow_keys: int = 0
    spans: int = 0
    points: int = 0
    capacity: int = 0
    passed: int = 0

    def advance(self, keys: int) -> None:
        if self.grow_keys and self.spans + keys > self.capacity:
            # As in KVCache: whole steps are added after the present keys.
            filled = self.spans if self.spans % self.grow_keys else self.capacity
            self.capacity = filled + -(-keys // self.grow_keys) * self.grow_keys
        self.spans += keys
        self.points += keys
        self.passed = keys

    def reserve(self, capacity: int) -> None:
        """Give the span buffers room for `capacity` keys, and for at least one more than they hold."""
        if self.grow_keys:
            self.capacity = max(capacity, self.spans + 1)


class SizedModel:
    """Called like a model: advances sized caches by the number of keys."""

    def __call__(self, keys: Any, cache: Sequence[SizedCache]) -> None:
        cache[0].advance(int(keys.shape[-1]))


@dataclass(slots=True, eq=False)
class SizedPiece:
    """The bytes of the keys [start, end)."""

    start: int
    end: int
    nbytes: int

    def split(self, at: int) -> tuple[SizedPiece | None, SizedPiece | None]:
        if at <= self.start:
            return None, self
        if at >= self.end:
            return self, None
        upper_bytes = self.nbytes * (at - self.start) // (self.end - self.start)
        return SizedPiece(self.start, at, upper_bytes), SizedPiece(at, self.end, self.nbytes - upper_bytes)

    def merged(self, lower: SizedPiece) -> SizedPiece:
        return SizedPiece(self.start, lower.end, self.nbytes + lower.nbytes)
