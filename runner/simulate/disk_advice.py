"""DiskAdvice: what a disk besides would bring LRU, from a simulation with one, or from the curve of a long trace.

Memory and disk together hold no more than an LRU cache of their size would, and each block that is found in neither is
written once it has left memory. So the curve bounds what is found and what is written, for models without checkpoints:
what is on disk may be in memory as well, and a prompt may find no room in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixcache.paging.rates import SURE
from radixcache.stores.sized_store import HEAD_BYTES
from runner.files.units import GIB, MIB
from runner.simulate.disk import DiskPlan
from runner.simulate.mrc import Curve
from runner.simulate.row import SimulationRow


@dataclass(frozen=True, slots=True)
class DiskAdvice:
    """What comes of a disk over a whole trace.

    Attributes:
        plan: the disk.
        alone, token_hit_ratio: prompt tokens that need no prefill without it and with it, as shares.
        written_bytes: what is written to it.
        is_estimate: they are bounds, by the curve: no more is found, no less is written. Else it was simulated.
    """

    plan: DiskPlan
    alone: float
    token_hit_ratio: float
    written_bytes: int
    is_estimate: bool

    @classmethod
    def simulated(cls, row: SimulationRow, alone: float) -> DiskAdvice:
        """What a simulation with a disk came to, and without one the token hit ratio."""
        assert row.disk is not None, row
        return cls(row.disk.plan, alone, row.token_hit_ratio, row.disk.written_bytes, is_estimate=False)

    @classmethod
    def estimated(
        cls, curve: Curve, plan: DiskPlan, capacity_blocks: int, block_tokens: int, block_bytes: int
    ) -> DiskAdvice:
        """What a disk beside memory for so many blocks comes to at best; where it is too slow it is not read."""
        file_bytes = block_bytes + HEAD_BYTES
        is_read = file_bytes / plan.read_bytes_per_s <= SURE * block_tokens / plan.prefill_tokens_per_s
        together = capacity_blocks + plan.budget_bytes // file_bytes
        missed = round((1 - curve.block_hit_ratio_at(together)) * curve.block_refs)
        return cls(
            plan,
            curve.token_hit_ratio_at(capacity_blocks),
            curve.token_hit_ratio_at(together if is_read else capacity_blocks),
            max(0, missed - capacity_blocks) * file_bytes,
            is_estimate=True,
        )

    @property
    def note(self) -> str:
        """That in a sentence."""
        plan, most, more = self.plan, "up to " if self.is_estimate else "", " or more" if self.is_estimate else ""
        return (
            f"With a disk of {plan.budget_bytes / GIB:,.2f} GiB besides, lru saves {most}{self.token_hit_ratio:.1%} of"
            f" prefill instead of {self.alone:.1%}, and writes {self.written_bytes / GIB:,.2f} GiB{more} to it, if"
            f" that reads {plan.read_bytes_per_s / MIB:,.0f} MiB/s and the model prefills"
            f" {plan.prefill_tokens_per_s:,.0f} tokens/s."
        )
