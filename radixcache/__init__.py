"""radixcache: a token radix-tree prefix cache with snapshot paging for MLX language models.

Names are imported when they are first used, so the parts that need no MLX can be used without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies import POLICIES, CostModel, Entry, EvictionPolicy
    from radixcache.adapters import register_adapter
    from radixcache.cells.causal import CausalCache
    from radixcache.chat import render_chat
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
    from radixcache.events import Event, EventKind
    from radixcache.explain import Explanation, Gap, Hint, Reason
    from radixcache.generate import stream_generate
    from radixcache.group import Group
    from radixcache.ledger import Ledger
    from radixcache.monitor import StatsSnapshot
    from radixcache.pins import NamedPin
    from radixcache.prefix_cache import PrefixCache
    from radixcache.resume import ShortReason
    from radixcache.row import Row
    from radixcache.session import Session
    from radixcache.stats import CacheStats
    from radixcache.trace import TraceWriter
    from radixcache.tree import RadixTree
    from radixcache.verifier import Mismatch
    from radixcache.view import TreeView

_MODULES = {
    "POLICIES": "policies",
    "BudgetFullError": "radixcache.errors",
    "CacheBusyError": "radixcache.errors",
    "CacheFullError": "radixcache.errors",
    "CacheStats": "radixcache.stats",
    "CausalCache": "radixcache.cells.causal",
    "CostModel": "policies",
    "Entry": "policies",
    "Event": "radixcache.events",
    "EventKind": "radixcache.events",
    "EvictionPolicy": "policies",
    "Explanation": "radixcache.explain",
    "Gap": "radixcache.explain",
    "Group": "radixcache.group",
    "Hint": "radixcache.explain",
    "Ledger": "radixcache.ledger",
    "Mismatch": "radixcache.verifier",
    "NamedPin": "radixcache.pins",
    "PrefixCache": "radixcache.prefix_cache",
    "RadixCacheError": "radixcache.errors",
    "RadixTree": "radixcache.tree",
    "Reason": "radixcache.explain",
    "Row": "radixcache.row",
    "Session": "radixcache.session",
    "SessionClosedError": "radixcache.errors",
    "ShiftError": "radixcache.errors",
    "ShortReason": "radixcache.resume",
    "SnapshotError": "radixcache.errors",
    "StatsSnapshot": "radixcache.monitor",
    "TraceWriter": "radixcache.trace",
    "TreeView": "radixcache.view",
    "UnsupportedCacheError": "radixcache.errors",
    "register_adapter": "radixcache.adapters",
    "render_chat": "radixcache.chat",
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
