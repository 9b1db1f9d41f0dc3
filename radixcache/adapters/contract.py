"""Adapter: what the cache layer may do with one mlx-lm cache object (a leaf), and nothing else.

An adapter has no state: each method gets the live object it works on, because generators replace objects and models
reassign arrays between forward passes. There are three kinds:

    span    the state can be cut at any token; a snapshot covers [start, end)
    point   the state is valid at one offset; a snapshot is the whole state there
    window  point state that is stored token by token. A snapshot covers tokens that the live state has at that time;
            the state at an offset is made of the tokens that `Window.needs` names

A snapshot has `start` (0 for a point), `end`, `nbytes` and `arrays()`. Spans and Checkpoint hold the snapshots of all
leaves of a model: one per leaf, None where a leaf has no such state.

Rules for every adapter; `tests/adapters/` runs one suite over all of them:

  A1  A snapshot owns its arrays: compact, never a view of a live buffer. It is not evaluated yet.
  A2  restore(cache, None, target) rewinds the live state to `target`, or returns False and changes nothing.
  A3  restore(cache, snapshot, target) moves the live state to `target`. A window takes several snapshots, in order.
      It returns False and changes nothing if the target is beyond the snapshot, the live offset before its start, or
      the window would be incomplete. The snapshot does not change and shares nothing with the live state.
  A4  split(snapshot, at) consumes the snapshot and returns (upper, lower). At or beyond its start or end, one side is
      None and the other is the whole snapshot. A point snapshot splits into (None, whole).
  A5  merge(upper, lower) consumes both. With one side None, the result is None for spans, and `lower` for points.
      Split then merge is the identity.
  A6  After free(cache), the cache holds no array and is at offset 0.

Threading: as MLX; the arrays belong to the calling thread until they are evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

#: Tokens [start, end).
Range = tuple[int, int]
#: An offset that no sequence reaches: "never".
NEVER = 1 << 62
#: Span snapshots are cut into segments on a grid of this many tokens, so that splits and trims copy one segment.
SEGMENT_TOKENS = 512


class Adapter(Protocol):
    """Operations on a leaf of one class."""

    is_point: bool  # point state or a window; False: span state
    is_window: bool  # a window, whose adapter is a `WindowAdapter`

    # Whether the cache was never written.
    def is_empty(self, cache: Any) -> bool: ...
    # How many tokens the state covers; None: the class does not know.
    def offset(self, cache: Any) -> int | None: ...
    # The live arrays, until the next forward pass.
    def buffers(self, cache: Any) -> list[mx.array]: ...
    # Bytes of the buffers that the state does not need.
    def spare_nbytes(self, cache: Any) -> int: ...
    # For each buffer, the shape without the time axis, and the dtype; equal for all caches of one layer.
    def shapes(self, cache: Any) -> tuple[tuple[Any, ...], ...]: ...
    # Copy the state of [start, end) (span, window), or the whole state, which is at `end` (point).
    def snapshot(self, cache: Any, start: int, end: int) -> Any: ...
    # Move the live state to `target`, with the snapshot or, if it is None, by rewinding.
    def restore(self, cache: Any, snapshot: Any, target: int) -> bool: ...
    # Whether restore(cache, None, target) would succeed.
    def can_rewind(self, cache: Any, target: int) -> bool: ...
    # Cut a snapshot at offset `at` into (upper, lower).
    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]: ...
    # Join two snapshots that touch.
    def merge(self, upper: Any, lower: Any) -> Any: ...
    # Drop all arrays and return to offset 0.
    def free(self, cache: Any) -> None: ...
    # Grow or shrink to `capacity_tokens` in all; no effect on classes without spare room. An empty cache gets its
    # shapes from the snapshot `like`. With `wait`, the new buffers are evaluated before they replace the old ones, so a
    # failed allocation changes nothing.
    def reserve(self, cache: Any, capacity_tokens: int, like: Any = None, wait: bool = True) -> None: ...
    # Tokens that fit before the class allocates again; NEVER when it does not grow with tokens.
    def capacity(self, cache: Any) -> int: ...
    # Replace arrays that may be views of activations by owned, unevaluated copies, and return these.
    def own(self, cache: Any) -> list[mx.array]: ...
    # What roll_back needs to undo the next forward pass, of `tokens` tokens.
    def hold(self, cache: Any, tokens: int) -> Any: ...
    # Undo the forward pass; False: that is not possible, and the state must not be used.
    def roll_back(self, cache: Any, held: Any) -> bool: ...


@dataclass(slots=True, eq=False)
class Spans:
    """Snapshots of the tokens [start, end) of all span layers, or of all layers with windows."""

    start: int
    end: int
    leaves: list[Any]
    nbytes: int

    @property
    def pieces(self) -> int:
        """How many segments of a leaf rows read in place, the same for each leaf with state; 0 if none has."""
        return next((len(leaf.readable) for leaf in self.leaves if leaf is not None), 0)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """An offset to resume at, with the snapshots at this offset of all point layers except windows."""

    offset: int
    leaves: list[Any]
    nbytes: int
    kind: str  # why it was taken: "branch", "mark", "interval", "tail" or "end"


class Window(NamedTuple):
    """The `size` tokens that a sliding layer reads: the first `keep` of the sequence, and the last `size - keep`."""

    size: int
    keep: int = 0

    def needs(self, offset: int) -> list[Range]:
        """The tokens that the state at an offset consists of, in order."""
        if offset <= self.size:
            return [(0, offset)] if offset else []
        first = offset - self.size + self.keep
        return [(0, self.keep), (first, offset)] if self.keep else [(first, offset)]

    def count(self, offset: int) -> int:
        """How many tokens `needs` names."""
        return offset if offset < self.size else self.size


@dataclass(slots=True, eq=False)
class WindowSnapshot:
    """Some of the tokens [start, end) of one sliding layer; there may be gaps between them."""

    start: int
    end: int
    pieces: list[Any]  # span snapshots in order, never changed; two of them may touch
    _ranges: list[Range] | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def arrays(self) -> list[Any]:
        return [array for piece in self.pieces for array in piece.arrays()]

    @property
    def ranges(self) -> list[Range]:
        """The tokens that the pieces hold, in order."""
        if self._ranges is None:
            self._ranges = union((piece.start, piece.end) for piece in self.pieces)
        return self._ranges

    def quantized(self, bits: int | None) -> WindowSnapshot:
        """The same tokens with `bits` bits per value (None: plain), unevaluated."""
        return WindowSnapshot(self.start, self.end, [piece.quantized(bits) for piece in self.pieces])

    def within(self, ranges: Sequence[Range]) -> WindowSnapshot:
        """The part that lies in these ranges, which are in order."""
        found = []
        for piece in self.pieces:
            start, end = piece.start, piece.end
            for low, high in ranges:
                if low <= start and end <= high:
                    found.append(piece)
                elif low < end and start < high:
                    found.append(piece.split(max(low, start))[1].split(min(high, end))[0])
        return WindowSnapshot(self.start, self.end, found)

    def split(self, at: int) -> tuple[WindowSnapshot | None, WindowSnapshot | None]:
        if at <= self.start:
            return None, self
        if at >= self.end:
            return self, None
        halves = zip(*(piece.split(at) for piece in self.pieces), strict=True) if self.pieces else ((), ())
        upper, lower = ([piece for piece in half if piece is not None] for half in halves)
        return WindowSnapshot(self.start, at, upper), WindowSnapshot(at, self.end, lower)

    def merged(self, lower: WindowSnapshot) -> WindowSnapshot:
        """Join with a snapshot that begins at `end`. Pieces that touch at the seam become one."""
        ours, theirs = self.pieces, lower.pieces
        if ours and theirs and ours[-1].end == theirs[0].start:
            ours, theirs = [*ours[:-1], ours[-1].merged(theirs[0])], theirs[1:]
        return WindowSnapshot(self.start, lower.end, [*ours, *theirs])

    def with_more(self, pieces: Sequence[Any]) -> WindowSnapshot:
        """Add pieces of other tokens of [start, end)."""
        return WindowSnapshot(self.start, self.end, sorted([*self.pieces, *pieces], key=lambda piece: piece.start))


def widen(spans: Spans, start: int, end: int) -> Spans:
    """The same window tokens as state of the longer edge [start, end)."""
    leaves = [None if leaf is None else WindowSnapshot(start, end, leaf.pieces) for leaf in spans.leaves]
    return Spans(start, end, leaves, spans.nbytes)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Join ranges that touch or overlap. The ranges are in order of their starts."""
    found: list[Range] = []
    for low, high in ranges:
        if found and found[-1][1] >= low:
            if high > found[-1][1]:
                found[-1] = found[-1][0], high
        else:
            found.append((low, high))
    return found


def common(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """The tokens that are in both; all ranges are in order."""
    # Called some thirty times per request; takes less than half the time of max() and min().
    return [(low, high) for a, b in left for c, d in right if (low := a if a > c else c) < (high := b if b < d else d)]


def missing(ranges: Sequence[Range], held: Sequence[Range]) -> list[Range]:
    """The tokens of some ranges that are not held; all ranges are in order."""
    found = []
    for low, high in ranges:
        for first, last in held:
            if first < high and last > low:
                if first > low:
                    found.append((low, first))
                low = last
        if low < high:
            found.append((low, high))
    return found


def tokens_in(ranges: Sequence[Range]) -> int:
    return sum(end - start for start, end in ranges)
