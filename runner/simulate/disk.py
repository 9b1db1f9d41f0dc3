"""DiskPlan and DiskUse: a disk beside the memory of a simulation, and what it did there."""

from __future__ import annotations

from dataclasses import dataclass

from radixcache.stores.store import WriteOn


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """A disk, and how fast it and the model are.

    Attributes:
        write_on: what is written, as in DiskStore.
    """

    budget_bytes: int
    read_bytes_per_s: float
    prefill_tokens_per_s: float
    write_on: WriteOn = "eviction"


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a disk did over a whole trace.

    Attributes:
        hit_tokens, token_hit_ratio: prompt tokens that came back from it, and their share of all prompt tokens.
        decisions: how often a prompt was brought from it, or why not, as in `CacheStats.store_decisions`.
    """

    plan: DiskPlan
    hit_tokens: int
    token_hit_ratio: float
    read_bytes: int
    written_bytes: int
    decisions: dict[str, int]
