"""ReplicaRow: what one simulation of several replicas came to."""

from __future__ import annotations

from dataclasses import dataclass

from runner.simulate.disk import DiskPlan


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
