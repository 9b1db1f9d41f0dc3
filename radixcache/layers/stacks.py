"""Stack: layers with equal windows, which always stand alike, and whose state is stored as one.

Their snapshot has arrays (S, H, T, D) for S layers, under the first of them: as many fewer to take out, cut and keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixcache.adapters.contract import Adapter, Windowed
from radixcache.adapters.snapshots import Range, Spans, Window, WindowSnapshot
from radixcache.layers.evaluation import LiveStateError

Leaf = tuple[Any, Adapter]


@dataclass(frozen=True, slots=True)
class Stack:
    """Indices of leaves of one class, with one window, and of the same shapes."""

    window: Window
    adapter: Windowed
    leaves: tuple[int, ...]

    def caches(self, pairs: Sequence[Leaf]) -> list[Any]:
        """Its layers' objects, of all; empty when some were never written."""
        found = [pairs[leaf][0] for leaf in self.leaves]
        return [] if any(map(self.adapter.is_empty, found)) else found

    def held(self, pairs: Sequence[Leaf]) -> list[Range]:
        """What the live layers have, in order."""
        caches = self.caches(pairs)
        return self.adapter.held(caches[0]) if caches else []

    def stored(self, spans: Spans) -> list[Range]:
        """What these spans have of it, in order."""
        snapshot = spans.leaves[self.leaves[0]]
        return [] if snapshot is None else snapshot.ranges

    def restore(self, pairs: Sequence[Leaf], stored: Sequence[Spans], target: int) -> tuple[int, ...]:
        """Make its layers stand at `target`; returns them, or none where nothing of it is stored.

        Raises:
            LiveStateError: not all that they need is stored; nothing was changed.
        """
        snapshots = [found for spans in stored if (found := spans.leaves[self.leaves[0]]) is not None]
        pieces = sorted((piece for each in snapshots for piece in each.pieces), key=lambda piece: piece.start)
        if not pieces:
            return ()
        caches = [pairs[leaf][0] for leaf in self.leaves]
        if not self.adapter.restore_stack(caches, WindowSnapshot(0, target, pieces), target):
            raise LiveStateError(f"{type(caches[0]).__name__}: the state at {target} is not all there.")
        return self.leaves
