"""CellPager: copies between the cells of a CausalCache and the snapshots of a PrefixCache.

    span     a KVCache layer: a token's keys and values are in its cell
    window   a RotatingKVCache layer: in cells too; a checkpoint is the window's last cells before an offset, and goes
             back into the cells of the same positions. Cells before that hold nothing for such a layer
    row      an ArraysCache layer: a state per sequence, valid where the sequence stands

Snapshots are those that the adapters of these classes make, so state goes from cells to live caches and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from radixcache.adapters.point import PointSnapshot, copied
from radixcache.adapters.snapshots import Checkpoint, Spans
from radixcache.adapters.span import SpanSnapshot, segment_bounds
from radixcache.cells.causal import CausalCache
from radixcache.cells.layers import CellLayer
from radixcache.layers.arrays import ArrayLayout
from radixcache.layers.evaluation import NATIVE_ERRORS, LiveStateError


@dataclass(frozen=True, slots=True)
class Piece:
    """State to be copied out: the tokens [start, end) of a sequence, and what its point layers hold at `end`.

    Attributes:
        with_points: False: the point layers' state is there already, or there are none.
    """

    sequence: int
    start: int
    end: int
    with_points: bool


class CellPager:
    """Copies between one CausalCache and snapshots of the same model's state."""

    def __init__(self, layout: ArrayLayout, causal: CausalCache) -> None:
        self._layout = layout
        self._causal = causal
        #: Whether some layer's state is a sequence's own, valid only where the sequence stands.
        self.has_states = any(isinstance(leaf, ArraysCache) for leaf in causal.leaves)
        self.windows = [leaf.window for _, leaf in self._in_cells() if leaf.window is not None]

    @property
    def cells(self) -> int:
        """Cells that the largest buffer holds."""
        return max((buffer.shape[2] for _, leaf in self._in_cells() for buffer in leaf.state), default=0)

    def needed_bytes(self, cells: int) -> int:
        """Bytes that all buffers take with so many cells; of a layer that was never seen 0."""
        of_layout, leaves = self._layout.leaf_bytes, self._in_cells()
        return cells * sum(of_layout(index) if leaf.empty() else leaf.token_bytes for index, leaf in leaves)

    @property
    def state_bytes(self) -> int:
        """Bytes that the layers beside the cells hold of each sequence with a token; 0 before the first pass."""
        leaves = enumerate(self._causal.leaves)
        return sum(self._layout.leaf_bytes(index) for index, leaf in leaves if isinstance(leaf, ArraysCache))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(leaf.nbytes for _, leaf in self._in_cells())

    def point_bytes(self, sequence: int, end: int) -> int:
        """Bytes of a checkpoint of a sequence at `end`."""
        nbytes = 0
        for leaf in self._causal.leaves_of(sequence):
            if isinstance(leaf, ArraysCache):
                nbytes += sum(array.nbytes for array in leaf.cache if array is not None)
            elif leaf.window is not None:
                nbytes += min(leaf.window, end) * leaf.token_bytes
        return nbytes

    def free(self) -> None:
        """Let go of all buffers."""
        for _, leaf in self._in_cells():
            leaf.clear()

    # In

    def write(self, spans: Spans, start: int, end: int, cell: int) -> int:
        """Write the tokens [start, end) of some spans into cells from `cell` on; returns the bytes written."""
        written = 0
        for leaf, snapshot in zip(self._causal.leaves, spans.leaves, strict=True):
            if snapshot is None:
                continue
            for first, _, arrays in snapshot.parts(start, end):
                leaf.write(cell + first - start, *arrays)
                written += sum(array.nbytes for array in arrays)
        self._evaluate_written()
        return written

    def restore_points(self, sequence: int, checkpoint: Checkpoint, target: int) -> None:
        """Give the point layers of a sequence that stands at `target` what a checkpoint says; it can be cut there."""
        for leaf, snapshot in zip(self._causal.leaves_of(sequence), checkpoint.leaves, strict=True):
            if snapshot is None:
                continue
            if isinstance(leaf, ArraysCache):
                leaf.cache = copied(snapshot.state[0])
            else:
                begin = target - snapshot.state[0].shape[2] if target == checkpoint.offset else 0
                for run in self._causal.table.ranges(sequence, begin, target):
                    first = run.position - begin
                    parts = [array[..., first : first + run.length, :] for array in snapshot.state]
                    leaf.write(run.start, *parts)
        self._evaluate_written()

    def own_states(self, sequence: int) -> None:
        """Give a sequence copies of its states in buffers of their own: counted once, and no views of activations."""
        self._causal.compact(sequence)
        self._evaluate_written()

    # Out

    def checkpoint(self, sequence: int, kind: str) -> Checkpoint:
        """Copy the point state of a sequence where it stands."""
        end = self._causal.length(sequence)
        piece = Piece(sequence, end, end, True)
        snapshots = [self._point(leaf, piece) for leaf in self._causal.leaves_of(sequence)]
        return self._layout.checkpoint_of(snapshots, end, kind)

    def read(
        self, pieces: Sequence[Piece], allocating: Callable[[Callable[[], list[Any]]], list[Any]], freeing: bool
    ) -> list[tuple[Spans, Checkpoint | None]]:
        """Copy pieces out of the cells, a layer at a time.

        Args:
            allocating: runs a copy, and may run it again when its allocation fails.
            freeing: let go of each layer's buffers once it is copied, so that no more than one layer is held twice.
        """
        columns = []
        of_pieces = [self._causal.leaves_of(piece.sequence) for piece in pieces]
        for leaf, *its in zip(self._causal.leaves, *of_pieces, strict=True):
            columns.append(allocating(lambda leaves=its: self._column(leaves, pieces)))  # type: ignore[misc]
            if freeing and isinstance(leaf, CellLayer):
                leaf.clear()
        found = []
        for number, piece in enumerate(pieces):
            spans, points = map(list, zip(*(column[number] for column in columns), strict=True))
            checkpoint = self._layout.checkpoint_of(points, piece.end, "end") if piece.with_points else None
            found.append((self._layout.spans_of(spans, piece.start, piece.end), checkpoint))
        return found

    def specimen(self, sequence: int) -> list[Any]:
        """Live caches with one token of every layer in use, for the layout to learn from; to look at only."""
        caches = self._layout.fresh()
        for leaf, (cache, _) in zip(self._causal.leaves_of(sequence), self._layout.leaves(caches), strict=True):
            if isinstance(leaf, ArraysCache):
                cache.cache = list(leaf.cache)
            elif leaf.keys is not None and leaf.values is not None:
                cache.keys, cache.values = leaf.keys[..., :1, :], leaf.values[..., :1, :]
                cache.offset = 1
        return caches

    def _in_cells(self) -> list[tuple[int, CellLayer]]:
        return [(index, leaf) for index, leaf in enumerate(self._causal.leaves) if isinstance(leaf, CellLayer)]

    def _column(self, leaves: Sequence[Any], pieces: Sequence[Piece]) -> list[tuple[Any, Any]]:
        """One layer's part of every piece, as (span, point), from what stands there for each piece's sequence."""
        pairs = zip(leaves, pieces, strict=True)
        column = [(self._span(leaf, piece), self._point(leaf, piece)) for leaf, piece in pairs]
        mx.eval([array for pair in column for snapshot in pair if snapshot is not None for array in snapshot.arrays()])
        return column

    def _span(self, leaf: Any, piece: Piece) -> SpanSnapshot | None:
        if not isinstance(leaf, CellLayer) or leaf.window is not None or leaf.empty() or piece.start == piece.end:
            return None
        cells = self._causal.table.cells(piece.sequence)
        bounds = segment_bounds(piece.start, piece.end)
        return SpanSnapshot(piece.start, piece.end, [leaf.read(mx.array(cells[low:high])) for low, high in bounds])

    def _point(self, leaf: Any, piece: Piece) -> Any:
        if not piece.with_points:
            return None
        if isinstance(leaf, ArraysCache):
            is_empty = all(slot is None for slot in leaf.cache)
            return None if is_empty else PointSnapshot(piece.end, (copied(leaf.cache), None, None))
        if leaf.window is None or leaf.empty():
            return None
        cells = self._causal.table.cells(piece.sequence)[max(0, piece.end - leaf.window) : piece.end]
        return PointSnapshot(piece.end, [*leaf.read(mx.array(cells))])

    def _evaluate_written(self) -> None:
        try:
            mx.eval(self._causal.state)
        except NATIVE_ERRORS as error:
            raise LiveStateError(f"restoring state into cells failed: {error}") from error
