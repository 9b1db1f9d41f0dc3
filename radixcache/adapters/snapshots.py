"""Spans and Checkpoint: the state of a whole model over an edge, and at an offset. Knows no arrays: never imports MLX.

The leaves inside are the adapters' snapshots, one per leaf of the layout; None where a leaf has no such state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Span snapshots are cut into segments on a grid of this many tokens, so that splits and trims copy one segment.
SEGMENT_TOKENS = 512


@dataclass(slots=True, eq=False)
class Spans:
    """Snapshots of the tokens [start, end) of all span layers."""

    start: int
    end: int
    leaves: list[Any]
    nbytes: int

    @property
    def pieces(self) -> int:
        """Segments of each leaf that has any."""
        return next((len(leaf.segments) for leaf in self.leaves if leaf is not None), 0)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Snapshots of all point layers at one offset.

    Attributes:
        kind: why it was taken: "branch", "mark", "interval", "tail" or "end".
    """

    offset: int
    leaves: list[Any]
    nbytes: int
    kind: str
