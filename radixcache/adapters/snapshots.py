"""Spans and Checkpoint: the state of a whole model over an edge, and at an offset; Window, and WindowSnapshot.

The leaves inside are the adapters' snapshots, one per leaf of the layout; None where a leaf has no such state. Knows no
arrays: never imports MLX.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Tokens [start, end).
Range = tuple[int, int]

#: Span snapshots are cut into segments on a grid of this many tokens, so that splits and trims copy one segment.
SEGMENT_TOKENS = 512


@dataclass(slots=True, eq=False)
class Spans:
    """Snapshots of the tokens [start, end) of all span layers, or of all layers with windows."""

    start: int
    end: int
    leaves: list[Any]
    nbytes: int

    @property
    def pieces(self) -> int:
        """Segments of each leaf that has any."""
        return next((len(leaf.segments) for leaf in self.leaves if leaf is not None), 0)


class Window(NamedTuple):
    """What a layer with a sliding window reads.

    Attributes:
        size: tokens at most, `keep` included.
        keep: tokens at the beginning of the sequence that it never loses.
    """

    size: int
    keep: int = 0

    def needs(self, offset: int) -> list[Range]:
        """The tokens without which the state at an offset is not whole, in order."""
        if offset <= self.size:
            return [(0, offset)] if offset else []
        first = offset - self.size + self.keep
        return [(0, self.keep), (first, offset)] if self.keep else [(first, offset)]


@dataclass(slots=True, eq=False)
class WindowSnapshot:
    """Some of the tokens [start, end) of one layer with a window, with gaps between them.

    Attributes:
        pieces: span snapshots in order, never changed; two of them may touch.
    """

    start: int
    end: int
    pieces: list[Any]
    _ranges: list[Range] | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def arrays(self) -> list[Any]:
        return [array for piece in self.pieces for array in piece.arrays()]

    @property
    def ranges(self) -> list[Range]:
        """The tokens that are there, in order."""
        if self._ranges is None:
            self._ranges = union((piece.start, piece.end) for piece in self.pieces)
        return self._ranges

    def within(self, ranges: Sequence[Range]) -> WindowSnapshot:
        """What of it lies in these ranges, in order."""
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
        """What is in front of an offset, and what is behind it."""
        if at <= self.start:
            return None, self
        if at >= self.end:
            return self, None
        halves = zip(*(piece.split(at) for piece in self.pieces), strict=True) if self.pieces else ((), ())
        upper, lower = ([piece for piece in half if piece is not None] for half in halves)
        return WindowSnapshot(self.start, at, upper), WindowSnapshot(at, self.end, lower)

    def merged(self, lower: WindowSnapshot) -> WindowSnapshot:
        """One of this and what begins where it ends; pieces that touch at the seam become one."""
        ours, theirs = self.pieces, lower.pieces
        if ours and theirs and ours[-1].end == theirs[0].start:
            ours, theirs = [*ours[:-1], ours[-1].merged(theirs[0])], theirs[1:]
        return WindowSnapshot(self.start, lower.end, [*ours, *theirs])

    def with_more(self, pieces: Sequence[Any]) -> WindowSnapshot:
        """As well with these, which are of tokens that are not there."""
        return WindowSnapshot(self.start, self.end, sorted([*self.pieces, *pieces], key=lambda piece: piece.start))


def union(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order of their starts, with those that touch or overlap made one."""
    found: list[Range] = []
    for low, high in ranges:
        if found and found[-1][1] >= low:
            if high > found[-1][1]:
                found[-1] = found[-1][0], high
        else:
            found.append((low, high))
    return found


def common(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """What two lists of ranges in order have in common."""
    pairs = [(max(a, c), min(b, d)) for a, b in left for c, d in right]
    return [(low, high) for low, high in pairs if low < high]


def missing(ranges: Sequence[Range], held: Sequence[Range]) -> list[Range]:
    """What of some ranges is not in others, all in order."""
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
    """How many tokens these ranges have."""
    return sum(end - start for start, end in ranges)


def widened(spans: Spans, start: int, end: int) -> Spans:
    """The same of layers with windows, as some of the tokens of a longer edge."""
    leaves = [None if leaf is None else WindowSnapshot(start, end, leaf.pieces) for leaf in spans.leaves]
    return Spans(start, end, leaves, spans.nbytes)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """An offset to resume at, with snapshots there of all point layers that are no windows.

    Attributes:
        kind: why it was taken: "branch", "mark", "interval", "tail" or "end".
    """

    offset: int
    leaves: list[Any]
    nbytes: int
    kind: str
