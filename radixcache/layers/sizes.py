"""SizedLayout: a layout that holds sizes instead of arrays, so that a PrefixCache can be driven by a trace.

Everything above the layout is the deployed code: tree, slots, paging, budget, policy. Only what copies arrays is
replaced by what adds up their bytes. A key may stand for one token or for a block of them; sizes are given per key.
Spans can be cut anywhere, windows be cut back while none of them has wrapped.

Live buffers have no spare capacity, so that the bytes held are those of the distinct keys; or, with `grow_keys`, they
grow as mlx-lm's KVCache does, and a live cache and this one make the same evictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixcache.adapters.contract import NEVER
from radixcache.adapters.snapshots import Checkpoint, Spans


@dataclass(slots=True, eq=False)
class SizedCache:
    """Where the span layers and the point layers of a live cache stand.

    Span buffers grow in steps of `grow_keys` and have room for `capacity` keys; 0: they hold exactly what is in them.
    """

    grow_keys: int = 0
    spans: int = 0
    points: int = 0
    capacity: int = 0

    def advance(self, keys: int) -> None:
        """A forward pass over that many keys."""
        if self.grow_keys and self.spans + keys > self.capacity:
            # As KVCache: what is filled is kept to the key, and whole steps come behind it.
            kept = self.spans if self.spans % self.grow_keys else self.capacity
            self.capacity = kept + -(-keys // self.grow_keys) * self.grow_keys
        self.spans += keys
        self.points += keys

    def reserve(self, capacity: int) -> None:
        """Give the span buffers room for so many keys, never less than one more than they hold."""
        if self.grow_keys:
            self.capacity = max(capacity, self.spans + 1)


class SizedModel:
    """Callable like a model whose caches are sized: moves them on by as many keys as it is given."""

    def __call__(self, keys: Any, cache: Sequence[SizedCache]) -> None:
        cache[0].advance(int(keys.shape[-1]))


class SizedLayout:
    """Sizes of a live cache.

    Args:
        token_bytes: bytes of a key over all span layers.
        checkpoint_bytes: bytes of point state that do not depend on the offset.
        windows: the sliding windows, as (keys, bytes per key).
        grow_keys: step in which live span buffers grow; 0: they hold exactly what is in them.
    """

    def __init__(
        self,
        token_bytes: int,
        checkpoint_bytes: int = 0,
        windows: Sequence[tuple[int, int]] = (),
        grow_keys: int = 0,
    ) -> None:
        if min(token_bytes, checkpoint_bytes, *(min(window) for window in windows), 0) < 0:
            raise ValueError(f"sizes are {token_bytes}, {checkpoint_bytes} and {list(windows)}; wanted 0 or more.")
        points = checkpoint_bytes + sum(keys * nbytes for keys, nbytes in windows)
        if token_bytes + points == 0:
            raise ValueError("all sizes are 0; wanted bytes per token or per checkpoint.")
        self.token_bytes = token_bytes
        self.has_points = points > 0
        self.cut_reach = 0
        self._checkpoint_bytes = checkpoint_bytes
        self._windows = [(keys, nbytes) for keys, nbytes in windows if keys and nbytes]
        self._grow_keys = grow_keys if token_bytes else 0

    def fresh(self) -> list[Any]:
        return [SizedCache(self._grow_keys)]

    def offsets(self, caches: Sequence[Any], trusted: bool = False) -> tuple[int, int] | None:
        first: int = self.first_offset(caches)
        last: int = caches[0].points if self.has_points else first
        return min(first, last), max(first, last)

    def first_offset(self, caches: Sequence[Any]) -> int:
        return int(caches[0].spans if self.token_bytes else caches[0].points)

    def is_empty(self, caches: Sequence[Any]) -> bool:
        return bool(caches[0].capacity == caches[0].spans == caches[0].points == 0)

    def arrays(self, caches: Sequence[Any]) -> list[Any]:
        return []

    def identities(self, caches: Sequence[Any]) -> list[list[Any]]:
        return []

    def live_nbytes(self, caches: Sequence[Any]) -> int:
        keys = sum(cache.capacity if self._grow_keys else cache.spans for cache in caches)
        return int(keys * self.token_bytes + sum(self._point_nbytes(cache.points) for cache in caches))

    def spare_nbytes(self, caches: Sequence[Any]) -> int:
        spare: int = sum(cache.capacity - cache.spans for cache in caches) * self.token_bytes
        return spare if self._grow_keys else 0

    def capacity(self, caches: Sequence[Any]) -> int:
        return self.span_capacity(caches)

    def span_capacity(self, caches: Sequence[Any]) -> int:
        capacity: int = caches[0].capacity
        return capacity if self._grow_keys and capacity else NEVER

    def span_offset(self, caches: Sequence[Any]) -> int:
        return int(caches[0].spans)

    def uses_points(self, caches: Sequence[Any]) -> bool:
        return self.has_points and bool(caches[0].points)

    def can_rewind(self, caches: Sequence[Any], offset: int, target: int) -> bool:
        if target >= offset:
            return target == offset
        return not self.has_points or self._is_whole(caches[0].points)

    def can_cut(self, checkpoint: Checkpoint, target: int) -> bool:
        return target == checkpoint.offset or self._is_whole(checkpoint.offset)

    def rewind(self, caches: Sequence[Any], offset: int, target: int) -> None:
        if target < offset:
            caches[0].spans = caches[0].points = target

    def rewind_spans(self, caches: Sequence[Any], target: int) -> None:
        caches[0].spans = target

    def page_out(self, caches: Sequence[Any], start: int, end: int) -> Spans:
        return self._spans(start, end)

    def take_out(self, caches: Sequence[Any], cuts: Sequence[tuple[int, int]]) -> list[Spans]:
        return [self._spans(start, end) for start, end in cuts]

    def page_in(self, caches: Sequence[Any], spans: Spans, target: int) -> int:
        begin = max(spans.start, caches[0].spans)
        if caches[0].capacity <= target:
            caches[0].reserve(target + 1)
        caches[0].spans = target
        return int(max(0, target - begin) * self.token_bytes)

    def split(self, spans: Spans, at: int) -> tuple[Spans, Spans, int]:
        return self._spans(spans.start, at), self._spans(at, spans.end), 0

    def merge(self, upper: Spans, lower: Spans) -> tuple[Spans, int]:
        return self._spans(upper.start, lower.end), 0

    def checkpoint(self, caches: Sequence[Any], offset: int, kind: str) -> Checkpoint:
        if self._is_whole(offset):
            self.cut_reach = max(self.cut_reach, offset)
        return Checkpoint(offset, [], self._point_nbytes(offset), kind)

    def restore_points(self, caches: Sequence[Any], checkpoint: Checkpoint | None, target: int) -> None:
        caches[0].points = target

    def hold(self, caches: Sequence[Any], tokens: int) -> list[Any]:
        return [(caches[0].spans, caches[0].points)]

    def roll_back(self, caches: Sequence[Any], held: list[Any]) -> bool:
        caches[0].spans, caches[0].points = held[0]
        return True

    def own(self, caches: Sequence[Any]) -> None:
        if caches[0].spans == caches[0].capacity:
            caches[0].reserve(caches[0].spans + 1)

    def own_lazily(self, caches: Sequence[Any]) -> None:
        self.own(caches)

    def reserve(self, caches: Sequence[Any], capacity_tokens: int, like: Spans | None = None) -> None:
        if caches[0].capacity or like is not None:
            caches[0].reserve(capacity_tokens)

    def grow(self, caches: Sequence[Any], capacity_tokens: int) -> None:
        self.reserve(caches, capacity_tokens)

    def empty(self, caches: Sequence[Any]) -> None:
        caches[0].spans = caches[0].points = caches[0].capacity = 0

    # What there is no more to know of, and nothing to do for, without arrays

    is_quantized = False
    is_known = True

    def leaves(self, caches: Sequence[Any]) -> list[Any]:
        return []

    def leaf_bytes(self, leaf: int) -> int:
        return self.token_bytes

    def learn(self, caches: Sequence[Any]) -> None: ...
    def evaluate(self, caches: Sequence[Any]) -> None: ...
    def compare(self, caches: Sequence[Any]) -> None: ...
    def release(self) -> None: ...

    def _spans(self, start: int, end: int) -> Spans:
        nbytes = (end - start) * self.token_bytes
        return Spans(start, end, [Spans(start, end, [], nbytes)], nbytes)

    def _point_nbytes(self, offset: int) -> int:
        if offset == 0:
            return 0
        return self._checkpoint_bytes + sum(min(offset, keys) * nbytes for keys, nbytes in self._windows)

    def _is_whole(self, offset: int) -> bool:
        """Whether point state at `offset` has lost nothing yet."""
        return self._checkpoint_bytes == 0 and all(offset <= keys for keys, _ in self._windows)
