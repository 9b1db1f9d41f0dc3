"""Benefit: the entry that saves the least prefill per byte and tick goes first, spans and checkpoints on one scale.

    worth = prefill cost that the entry saves when used / bytes it frees * expected uses per tick

Turn gives the last factor. An entry saves the cost of its edge; a checkpoint, or a leaf with one, saves the cost since
the previous checkpoint. The quotient is rounded to half octaves, and each queue has one quotient. If all bytes cost the
same to compute, the order is Turn's.

Bytes and checkpoints change without a hook, so the policy weighs each victim again, and each entry filed since the last
victim. Complexity as Turn, plus O(depth in nodes) for an entry with a checkpoint.
"""

from __future__ import annotations

import math

from policies.entry import Entry
from policies.turn import Turn


class Benefit(Turn):
    """Least prefill saved per byte and tick goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._newly_filed: dict[int, Entry] = {}

    def victim(self) -> Entry | None:
        for entry in list(self._newly_filed.values()):
            self._weigh(entry)
        self._newly_filed.clear()
        while (victim := super().victim()) is not None and self._weigh(victim):
            pass
        return victim

    def weight_of(self, entry: Entry) -> int:
        saved = _cost_since_checkpoint(entry) if entry.has_checkpoint else entry.cost
        if saved <= 0 or entry.weight_bytes <= 0:
            return 0
        return round(2.0 * math.log2(saved / entry.weight_bytes))

    def _weigh(self, entry: Entry) -> bool:
        """File an entry again if its weight has changed; return whether it has."""
        has_changed = self._filed[entry.entry_id][0][-1] != self.weight_of(entry)
        if has_changed:
            self._refile(entry)
        return has_changed

    def _file(self, entry: Entry) -> None:
        super()._file(entry)
        self._newly_filed[entry.entry_id] = entry

    def _unfile(self, entry: Entry) -> None:
        super()._unfile(entry)
        self._newly_filed.pop(entry.entry_id, None)


def _cost_since_checkpoint(entry: Entry) -> float:
    """Prefill cost from the nearest checkpoint above an entry's end to that end."""
    saved, above = entry.cost, entry.parent
    while above is not None and not above.has_checkpoint:
        saved, above = saved + above.cost, above.parent
    return saved
