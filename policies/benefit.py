"""Benefit: keeps what saves the most prefill per byte and tick, spans and checkpoints on one scale.

    worth = prefill cost that the entry saves when it is used / bytes it frees * uses per tick to be expected of it

The last factor is Turn's: see there for classes, queues and what is learnt. What an entry saves is its edge's cost; for
a checkpoint, and for a leaf that holds one, the cost since the checkpoint before it, because without it that
is what would be computed again. The quotient is rounded to half octaves so that entries of one queue share it.
Where all bytes cost the same to compute (one kind of layer, no attention term) the order is Turn's.

Complexity as Turn, plus O(depth in nodes) per filing of an entry with a checkpoint. Ours.
"""

from __future__ import annotations

import math

from policies.entry import Entry
from policies.turn import Turn


class Benefit(Turn):
    """Least prefill saved per byte and tick goes first."""

    def weight_of(self, entry: Entry) -> int:
        saved = _cost_since_checkpoint(entry) if entry.has_checkpoint else entry.cost
        if saved <= 0 or entry.weight_bytes <= 0:
            return 0
        return round(2.0 * math.log2(saved / entry.weight_bytes))


def _cost_since_checkpoint(entry: Entry) -> float:
    """Prefill cost from the nearest checkpoint above an entry's end to that end."""
    saved, above = entry.cost, entry.parent
    while above is not None and not above.has_checkpoint:
        saved, above = saved + above.cost, above.parent
    return saved
