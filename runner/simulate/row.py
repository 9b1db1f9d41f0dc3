"""SimulationRow: what one simulation came to. Every ratio says what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from runner.simulate.disk import DiskUse


@dataclass(frozen=True, slots=True)
class SimulationRow:
    """One trace through one policy at one capacity.

    Attributes:
        capacity_blocks: budget in blocks of span state; None where blocks have no size of their own.
        capacity_bytes: budget in bytes; None where no bytes per token are known.
        block_refs, block_hits: blocks of all prompts, and those of them that were stored when they were asked for, in
            memory or on the disk.
        block_hit_ratio: block_hits / block_refs.
        token_hit_ratio: prompt tokens that need no prefill / prompt tokens; the last token of a prompt always does not
            count as one that does, since a block is stored whole.
        prefill_tokens: prompt tokens that were not stored.
        evictions: entries given up.
        seconds: wall time of the simulation.
        is_timing_synthetic: whether the trace's arrival times were made up.
        has_checkpoints: whether the model has state that is only valid at single offsets.
        disk: what came from a disk and went there; None: there was none.
    """

    trace: str
    policy: str
    capacity_blocks: int | None
    capacity_bytes: int | None
    requests: int
    block_refs: int
    block_hits: int
    block_hit_ratio: float
    token_hit_ratio: float
    prefill_tokens: int
    evictions: int
    seconds: float
    is_timing_synthetic: bool = False
    has_checkpoints: bool = False
    disk: DiskUse | None = None
