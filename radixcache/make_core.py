"""make_core: the Core behind a cache, on layers that hold arrays or sizes, and what is told of it."""

from __future__ import annotations

from typing import Any

from policies import CostModel, EvictionPolicy, make_policy
from radixcache.budget.ledger import Ledger
from radixcache.budget.memory import analytic_cost, default_budget_bytes
from radixcache.layers.layout import Layout
from radixcache.paging.core import Core
from radixcache.paging.disk import Disk
from radixcache.settings import Settings
from radixcache.watch.reading import About
from radixcache.watch.trace import Clock, TraceFile, TraceWriter, opened_trace


def make_core(
    layout: Layout,
    budget_bytes: int | Ledger | None,
    policy: str | EvictionPolicy,
    cost: CostModel | None,
    settings: Settings,
    trace: TraceFile | None,
    tokenizer: Any,
    *,
    clock: Clock = "requests",
    disk: Disk | None = None,
) -> tuple[Core, About]:
    """Arguments as PrefixCache takes them. A trace that is given as a path is the core's own, and closed with it."""
    source = "given"
    if budget_bytes is None:
        budget_bytes, source = default_budget_bytes(settings.model)
    core = Core(
        layout,
        budget_bytes if isinstance(budget_bytes, Ledger) else Ledger(budget_bytes),
        make_policy(policy),
        cost or analytic_cost(settings.model),
        settings,
        opened_trace(trace, clock),
        owns_trace=not isinstance(trace, TraceWriter),
        disk=disk,
    )
    return core, About(policy if isinstance(policy, str) else type(policy).__name__, source, tokenizer)
