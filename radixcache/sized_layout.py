"""SizedLayout: a layout that holds sizes instead of arrays, so that a PrefixCache can be driven by a trace.

Everything above the layout is the deployed code: tree, slots, paging, budget, policy. Only what copies arrays is
replaced by what adds up their bytes. A key may stand for one token or for a block of them; sizes are given per key.

    spans       `token_bytes` per key, to be cut anywhere
    points      `checkpoint_bytes` whatever the offset (recurrent state), and `window_bytes` per key of a window of
                `window_keys` keys, which can be cut back while it has not wrapped

Live buffers have no spare capacity here, so that the bytes held are those of the distinct keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixcache.adapters.contract import NEVER
from radixcache.layout import Layout
from radixcache.snapshots import Checkpoint, Spans


@dataclass(slots=True, eq=False)
class SizedCache:
    """Stands for the live caches of all layers: where the span layers stand, and the point layers."""

    spans: int = 0
    points: int = 0

    def advance(self, keys: int) -> None:
        """A forward pass over that many keys."""
        self.spans += keys
        self.points += keys


@dataclass(frozen=True, slots=True)
class SizedSpan:
    """Stands for the snapshots of [start, end)."""

    start: int
    end: int
    nbytes: int


class SizedModel:
    """Callable like a model whose caches are sized: moves them on by as many keys as it is given."""

    def __call__(self, keys: Any, cache: Sequence[SizedCache]) -> None:
        cache[0].advance(int(keys.shape[-1]))


class SizedLayout(Layout):
    """Sizes of a live cache.

    Args:
        token_bytes: bytes of a key over all span layers.
        checkpoint_bytes: bytes of point state that do not depend on the offset.
        window_bytes, window_keys: bytes per key, and length, of sliding windows.
    """

    def __init__(
        self, token_bytes: int, checkpoint_bytes: int = 0, window_bytes: int = 0, window_keys: int = 0
    ) -> None:
        if min(token_bytes, checkpoint_bytes, window_bytes, window_keys) < 0:
            raise ValueError(
                f"sizes are {token_bytes}, {checkpoint_bytes}, {window_bytes} and {window_keys}; wanted 0 or more."
            )
        if token_bytes + checkpoint_bytes + window_bytes * window_keys == 0:
            raise ValueError("all sizes are 0; wanted bytes per token or per checkpoint.")
        self.token_bytes = token_bytes
        self.has_points = checkpoint_bytes + window_bytes * window_keys > 0
        self.cut_reach = 0
        self._checkpoint_bytes = checkpoint_bytes
        self._window_bytes = window_bytes
        self._window_keys = window_keys

    def fresh(self) -> list[Any]:
        return [SizedCache()]

    # Looking

    def offsets(self, caches: Sequence[Any], trusted: bool = False) -> tuple[int, int] | None:
        cache = caches[0]
        if not self.has_points:
            return cache.spans, cache.spans
        return min(cache.spans, cache.points), max(cache.spans, cache.points)

    def first_offset(self, caches: Sequence[Any]) -> int | None:
        return int(caches[0].spans)

    def is_empty(self, caches: Sequence[Any]) -> bool:
        return bool(caches[0].spans == caches[0].points == 0)

    def arrays(self, caches: Sequence[Any]) -> list[Any]:
        return []

    def identities(self, caches: Sequence[Any]) -> list[list[Any]]:
        return []

    def live_nbytes(self, caches: Sequence[Any]) -> int:
        return sum(cache.spans * self.token_bytes + self._point_nbytes(cache.points) for cache in caches)

    def spare_nbytes(self, caches: Sequence[Any]) -> int:
        return 0

    def capacity(self, caches: Sequence[Any]) -> int:
        return NEVER

    def span_capacity(self, caches: Sequence[Any]) -> int:
        return NEVER

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

    # Moving

    def rewind(self, caches: Sequence[Any], offset: int, target: int) -> None:
        if target < offset:
            caches[0].spans = caches[0].points = target

    def rewind_spans(self, caches: Sequence[Any], target: int) -> None:
        caches[0].spans = target

    def page_out(self, caches: Sequence[Any], start: int, end: int) -> Spans:
        return self._spans(start, end)

    def page_in(self, caches: Sequence[Any], spans: Spans, target: int) -> int:
        begin = max(spans.start, caches[0].spans)
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

    # Nothing to do without arrays

    def learn(self, caches: Sequence[Any]) -> None: ...

    def evaluate(self, caches: Sequence[Any]) -> None: ...

    def own(self, caches: Sequence[Any]) -> None: ...

    def own_lazily(self, caches: Sequence[Any]) -> None: ...

    def reserve(self, caches: Sequence[Any], capacity_tokens: int, like: Spans | None = None) -> None: ...

    def grow(self, caches: Sequence[Any], capacity_tokens: int) -> None: ...

    def compare(self, caches: Sequence[Any]) -> None: ...

    def release(self) -> None: ...

    # Private

    def _spans(self, start: int, end: int) -> Spans:
        nbytes = (end - start) * self.token_bytes
        return Spans(start, end, [SizedSpan(start, end, nbytes)], nbytes)

    def _point_nbytes(self, offset: int) -> int:
        if offset == 0:
            return 0
        return self._checkpoint_bytes + self._window_bytes * min(offset, self._window_keys)

    def _is_whole(self, offset: int) -> bool:
        """Whether point state at `offset` has lost nothing yet."""
        return self._checkpoint_bytes == 0 and offset <= self._window_keys
