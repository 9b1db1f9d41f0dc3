"""BlindLeaves: what leaves without an offset held when a session last knew where they stood.

Recurrent caches do not say how many tokens they have seen. A forward pass gives them new arrays, so the array objects
tell at least whether somebody else ran the model. Layers run in the order of their caches: a pass that went through
gave both the first and the last of these leaves new arrays, a pass that broke off behind the first not the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from radixcache.layers.layout import Layout


class Moved(Enum):
    """Which of the leaves have other arrays than were noted."""

    NONE = 0
    SOME = 1
    ALL = 2


class BlindLeaves:
    """The first and the last leaf without an offset of one live cache. Holds their arrays, never a span buffer."""

    def __init__(self, layout: Layout, caches: Sequence[Any]) -> None:
        self._layout = layout
        self.note(caches)

    def note(self, caches: Sequence[Any]) -> None:
        """Take what the leaves hold now as known."""
        self._noted = self._layout.identities(caches)

    def forget(self) -> None:
        """Hold nothing any more."""
        self._noted = []

    def moved(self, caches: Sequence[Any]) -> Moved:
        """Which of the leaves have other arrays than when they were noted."""
        now = self._layout.identities(caches)
        if len(now) != len(self._noted):
            return Moved.SOME
        same = [list(map(id, old)) == list(map(id, new)) for old, new in zip(self._noted, now, strict=True)]
        if all(same):
            return Moved.NONE
        return Moved.SOME if any(same) else Moved.ALL

    def __bool__(self) -> bool:
        return bool(self._noted)
