"""LFUDA: the smallest H = L + uses goes first, where L is the H of what went last.

LFU with dynamic aging: GDSF with a cost equal to the bytes, which is the policy to take when hits count and not the
work they save. Source: Arlitt et al., "Evaluating content management techniques for web proxy caches", 2000.
O(log n) per operation; ties go to the least recently used, then the deepest.
"""

from __future__ import annotations

from policies.entry import Entry
from policies.gdsf import GDSF


class LFUDA(GDSF):
    """Least frequently used with dynamic aging: rarely used first, everything ages."""

    def value(self, entry: Entry) -> float:
        return 1.0
