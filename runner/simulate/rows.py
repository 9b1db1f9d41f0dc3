"""SimulationRow: what one simulation came to. Every ratio says what it counts.

DiskPlan and DiskUse: a disk beside the memory of a simulation, and what it did there.

ReplicaRow: what one simulation of several replicas came to.
"""

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


@dataclass(frozen=True, slots=True)
class SharedUse:
    """What the tier behind all replicas did.

    Attributes:
        hit_tokens, token_hit_ratio: prompt tokens that came from it, and their share of all prompt tokens.
        read_bytes, written_bytes: what went over the network.
    """

    plan: DiskPlan
    hit_tokens: int
    token_hit_ratio: float
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One trace through one router and so many replicas.

    Attributes:
        capacity_blocks, capacity_bytes: the budget of each replica, as in SimulationRow.
        block_refs, block_hits, block_hit_ratio, token_hit_ratio, prefill_tokens, evictions: as in SimulationRow, of all
            replicas together.
        infinite_token_hit_ratio: of one cache without any limit, which sees all requests.
        matched_tokens: prompt tokens that the router took to be where it sent them.
        ttft_s_p50, ttft_s_p95, ttft_s_p99: from a request's arrival to the end of its prefill, waiting included.
        busy: seconds of work of all replicas / (replicas x seconds from the first arrival to the last end).
        load_p95, load_max: of the replicas' seconds of work, the 95th percentile (between the nearest two) and the
            most, each divided by the mean; 1 where all work the same.
        shared: the tier behind all replicas; None: there was none.
        seconds: wall time of the simulation.
    """

    trace: str
    router: str
    replicas: int
    policy: str
    capacity_blocks: int | None
    capacity_bytes: int | None
    requests: int
    block_refs: int
    block_hits: int
    block_hit_ratio: float
    token_hit_ratio: float
    infinite_token_hit_ratio: float
    matched_tokens: int
    prefill_tokens: int
    evictions: int
    ttft_s_p50: float
    ttft_s_p95: float
    ttft_s_p99: float
    busy: float
    load_p95: float
    load_max: float
    seconds: float
    is_timing_synthetic: bool
    shared: SharedUse | None = None

    @property
    def share_of_infinite(self) -> float:
        """Hit tokens / those of the cache without any limit; 1 where that has none."""
        infinite = self.infinite_token_hit_ratio
        return self.token_hit_ratio / infinite if infinite else 1.0
