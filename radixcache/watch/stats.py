"""CacheStats: a frozen picture of what a PrefixCache has done and holds. Each field has a kind, a unit and a help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _counter(unit: str, help: str, **more: str) -> Any:
    return field(metadata={"kind": "counter", "unit": unit, "help": help, **more})


def _gauge(unit: str, help: str) -> Any:
    return field(metadata={"kind": "gauge", "unit": unit, "help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters since the cache was made, and gauges: what it holds now. `dataclasses.fields` has the help of each."""

    requests: int = _counter("requests", "begin() and fetch() calls, and rows of begin_many().")
    hit_tokens: int = _counter(
        "tokens", "Prompt tokens that were restored. Hits that turned out wrong when they were verified stay hits."
    )
    miss_tokens: int = _counter("tokens", "Prompt tokens that were left to prefill.")
    off_grid_tokens: int = _counter(
        "tokens",
        "Exact mode: prompt tokens that an earlier request had evaluated and that were prefilled again because they "
        "lie behind the last multiple of step_size that is stored, summed over requests.",
    )
    short_reasons: dict[str, int] = _counter(  # noqa: RUF009
        "requests", "How often a request resumed short of its match, by reason.", label="reason"
    )
    evictions: int = _counter("evictions", "Entries given up under pressure.")
    evicted_bytes: int = _counter("bytes", "What evictions freed.")
    copied_bytes: int = _counter(
        "bytes", "Copied: spans paged in and out, tokens out of windows, and what was cut or joined."
    )
    paged_in_bytes: int = _counter("bytes", "The part of copied_bytes that went in.")
    paged_out_bytes: int = _counter("bytes", "The part of copied_bytes that went out.")
    brought_tokens: int = _counter("tokens", "Tokens that were read from the store and need not be prefilled.")
    kept_blocks: int = _counter("blocks", "Blocks and checkpoints that were given to the store.")
    brought_bytes: dict[str, int] = _counter(  # noqa: RUF009
        "bytes", "What was read from stores for requests, by the store.", label="tier"
    )
    store_decisions: dict[str, int] = _counter(  # noqa: RUF009
        "decisions", "What became of asking the store for more of a prompt than memory had.", label="decision"
    )
    live_bytes: int = _gauge(
        "bytes", "Buffers of the live caches and of the rows of open groups, spare capacity included."
    )
    paged_bytes: int = _gauge("bytes", "Snapshot arrays, checkpoints included.")
    checkpoint_bytes: int = _gauge("bytes", "The part of paged_bytes that is point state, windows included.")
    window_bytes: int = _gauge("bytes", "The part of it that is keys and values of sliding windows, in the tree.")
    duplicate_bytes: int = _gauge("bytes", "The part of paged_bytes whose spans are live as well.")
    spare_bytes: int = _gauge("bytes", "The part of the live caches' bytes beyond what the live state needs.")
    pinned_bytes: int = _gauge("bytes", "What pins keep.")
    nodes: int = _gauge("nodes", "Tree nodes.")
    tokens: int = _gauge("tokens", "Distinct tokens on the edges of the tree.")
    budget_bytes: int = _gauge("bytes", "The budget.")
    budget_source: str = _gauge("", "Where the budget came from.")
    peak_bytes: int = _gauge(
        "bytes", "The most that live, paged and verify bytes came to, over all caches that share the budget."
    )
    verified_requests: int = _counter(
        "requests", "Resumed requests whose restored state was compared with a cold prefill."
    )
    verify_skipped: int = _counter(
        "requests",
        "Requests that were drawn for it and not compared: the second state did not fit the budget, the caller's own "
        "loop had moved on, the tokens do not say all that the model was given, or the cold run broke off; counted at "
        "close. And those of fetch(), which hands its caches over before a model has run, and rows of begin_many(), "
        "whose state lies among that of others; counted at once.",
    )
    verify_mismatches: int = _counter("requests", "Verified requests whose state, or the logits after it, were wrong.")
    verify_largest_error: float = _gauge(
        "", "The largest error of all comparisons, relative to the largest magnitude in the same array."
    )
    verify_bytes: int = _gauge(
        "bytes", "The second states of checks that are under way; counts against the budget beside live and paged."
    )
    quarantined: int = _gauge("prefixes", "Prefixes in quarantine.")
    event_failures: int = _counter("calls", "Calls of on_event that raised.")
    dropped_events: int = _counter("events", "Events that nobody was told of, because too many waited.")
