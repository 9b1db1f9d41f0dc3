"""CacheStats: a frozen picture of what a PrefixCache has done and holds. Bytes and tokens, as the names say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was made, and what it holds now.

    Attributes:
        requests: begin() and fetch() calls, and rows of begin_many().
        hit_tokens, miss_tokens: prompt tokens that were restored, and that were left to prefill. Hits that turned out
            wrong when they were verified stay hits.
        off_grid_tokens: exact mode: prompt tokens that an earlier request had evaluated and that were prefilled again
            because they lie behind the last multiple of step_size that is stored, summed over requests.
        short_reasons: how often a request resumed short of its match, by reason.
        evictions, evicted_bytes: entries given up under pressure, and what that freed.
        copied_bytes: spans copied: paged in, paged out, and cut or joined at a split or merge.
        paged_in_bytes, paged_out_bytes: the parts of copied_bytes that went in and out.
        live_bytes: buffers of the live caches and the cells of open groups, spare capacity included.
        paged_bytes: snapshot arrays, checkpoints included.
        checkpoint_bytes: the part of paged_bytes that is point state.
        duplicate_bytes: the part of paged_bytes whose spans are live as well.
        spare_bytes: the part of the live caches' bytes beyond what the live state needs.
        pinned_bytes: what pins keep.
        nodes, tokens: tree nodes, and distinct tokens on their edges.
        budget_bytes, budget_source: the budget and where it came from.
        verified_requests: resumed requests whose restored state was compared with a cold prefill.
        verify_skipped: requests that were drawn for it and not compared: the second state did not fit the budget, the
            caller's own loop had moved on, the tokens do not say all that the model was given, or the cold run broke
            off; counted at close. And those of fetch(), which hands its caches over before a model has run, and rows
            of begin_many(), whose state lies in cells among that of others; counted at once.
        verify_mismatches: verified requests whose state, or the logits after it, were wrong.
        verify_largest_error: the largest error of all comparisons, relative to the largest magnitude in the same array.
        verify_bytes: the second states of checks that are under way; counts against the budget beside live and paged.
        quarantined: prefixes in quarantine.
        peak_bytes: the most that live, paged and verify bytes came to, over all caches that share the budget.
        event_failures, dropped_events: calls of on_event that raised, and events of which too many waited to be told.
    """

    requests: int
    hit_tokens: int
    miss_tokens: int
    off_grid_tokens: int
    short_reasons: dict[str, int]
    evictions: int
    evicted_bytes: int
    copied_bytes: int
    paged_in_bytes: int
    paged_out_bytes: int
    live_bytes: int
    paged_bytes: int
    checkpoint_bytes: int
    duplicate_bytes: int
    spare_bytes: int
    pinned_bytes: int
    nodes: int
    tokens: int
    budget_bytes: int
    budget_source: str
    peak_bytes: int
    verified_requests: int
    verify_skipped: int
    verify_mismatches: int
    verify_largest_error: float
    verify_bytes: int
    quarantined: int
    event_failures: int = 0
    dropped_events: int = 0
