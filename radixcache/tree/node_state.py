"""NodeState: what hangs on a node of the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies import Entry
from radixcache.adapters.contract import NEVER
from radixcache.adapters.snapshots import Checkpoint, Spans
from radixcache.tree.radix_tree import Node


@dataclass(slots=True, eq=False)
class NodeState:
    """What hangs on a tree node."""

    entry: Entry
    checkpoint_entry: Entry | None = None
    spans: Spans | None = None
    checkpoint: Checkpoint | None = None
    windows: Spans | None = None
    nearest: int = NEVER  # where the first checkpoint at its end or below it stands
    live_mask: int = 0  # bit i: live in slot i
    leaving_bytes: int = 0
    leaving_from: Any = None  # the live caches that still have its spans, while it is LEAVING
    pins: int = 0
    guards: int = 0
    readers: int = 0  # rows of groups that stand on it, and may read its spans in place

    @property
    def live(self) -> bool:
        return self.live_mask != 0

    @property
    def is_kept(self) -> bool:
        """Whether a session or a row stands on it or a pin keeps it."""
        return self.pins > 0 or self.guards > 0 or self.readers > 0


StateNode = Node[NodeState]
