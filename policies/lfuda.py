"""LFUDA: the smallest H = L + uses goes first, where L is the H of the last victim. LFU with dynamic aging.

GDSF with a cost equal to the bytes: for hits, not for the work they save. Source: Arlitt et al., "Evaluating content
management techniques for web proxy caches", 2000. O(log n) per operation; ties as in GDSF.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.gdsf import GDSF


class LFUDA(GDSF):
    """Least frequently used with dynamic aging."""

    def value(self, entry: Entry) -> float:
        return 1.0
