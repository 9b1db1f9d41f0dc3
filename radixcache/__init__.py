"""radixcache: a token radix-tree prefix cache with snapshot paging for MLX language models.

Names are imported when they are first used, so the parts that need no MLX can be used without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies import POLICIES, CostModel, Entry, EvictionPolicy
    from radixcache.adapters.registry import register_adapter
    from radixcache.budget.ledger import Ledger
    from radixcache.cells.causal import CausalCache
    from radixcache.chat.render import render_chat
    from radixcache.errors import (
        BudgetFullError,
        CacheBusyError,
        CacheFullError,
        RadixCacheError,
        SessionClosedError,
        ShiftError,
        SnapshotError,
        UnsupportedCacheError,
    )
    from radixcache.generate import stream_generate
    from radixcache.groups.group import Group
    from radixcache.groups.row import Row
    from radixcache.paging.pins import NamedPin
    from radixcache.paging.resume import ShortReason
    from radixcache.prefix_cache import PrefixCache
    from radixcache.sessions.session import Session
    from radixcache.tree.events import Event, EventKind
    from radixcache.tree.radix_tree import RadixTree
    from radixcache.verify.verifier import Mismatch
    from radixcache.view.description import TreeView
    from radixcache.watch.explain import Explanation, Gap, Hint, Reason
    from radixcache.watch.metrics import StatsSnapshot
    from radixcache.watch.stats import CacheStats
    from radixcache.watch.trace import TraceWriter

_MODULES = {
    "POLICIES": "policies",
    "BudgetFullError": "radixcache.errors",
    "CacheBusyError": "radixcache.errors",
    "CacheFullError": "radixcache.errors",
    "CacheStats": "radixcache.watch.stats",
    "CausalCache": "radixcache.cells.causal",
    "CostModel": "policies",
    "Entry": "policies",
    "Event": "radixcache.tree.events",
    "EventKind": "radixcache.tree.events",
    "EvictionPolicy": "policies",
    "Explanation": "radixcache.watch.explain",
    "Gap": "radixcache.watch.explain",
    "Group": "radixcache.groups.group",
    "Hint": "radixcache.watch.explain",
    "Ledger": "radixcache.budget.ledger",
    "Mismatch": "radixcache.verify.verifier",
    "NamedPin": "radixcache.paging.pins",
    "PrefixCache": "radixcache.prefix_cache",
    "RadixCacheError": "radixcache.errors",
    "RadixTree": "radixcache.tree.radix_tree",
    "Reason": "radixcache.watch.explain",
    "Row": "radixcache.groups.row",
    "Session": "radixcache.sessions.session",
    "SessionClosedError": "radixcache.errors",
    "ShiftError": "radixcache.errors",
    "ShortReason": "radixcache.paging.resume",
    "SnapshotError": "radixcache.errors",
    "StatsSnapshot": "radixcache.watch.metrics",
    "TraceWriter": "radixcache.watch.trace",
    "TreeView": "radixcache.view.description",
    "UnsupportedCacheError": "radixcache.errors",
    "register_adapter": "radixcache.adapters.registry",
    "render_chat": "radixcache.chat.render",
    "stream_generate": "radixcache.generate",
}

__all__ = [
    "POLICIES",
    "BudgetFullError",
    "CacheBusyError",
    "CacheFullError",
    "CacheStats",
    "CausalCache",
    "CostModel",
    "Entry",
    "Event",
    "EventKind",
    "EvictionPolicy",
    "Explanation",
    "Gap",
    "Group",
    "Hint",
    "Ledger",
    "Mismatch",
    "NamedPin",
    "PrefixCache",
    "RadixCacheError",
    "RadixTree",
    "Reason",
    "Row",
    "Session",
    "SessionClosedError",
    "ShiftError",
    "ShortReason",
    "SnapshotError",
    "StatsSnapshot",
    "TraceWriter",
    "TreeView",
    "UnsupportedCacheError",
    "register_adapter",
    "render_chat",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'radixcache' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
