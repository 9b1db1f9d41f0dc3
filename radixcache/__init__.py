"""radixcache: a token radix-tree prefix cache with snapshot paging for MLX language models.

Names are imported when they are first used, so the parts that need no MLX can be used without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from policies import POLICIES as POLICIES
    from policies import CostModel as CostModel
    from policies import Entry as Entry
    from policies import EvictionPolicy as EvictionPolicy
    from radixcache.adapters.registry import register_adapter as register_adapter
    from radixcache.cells.causal import CausalCache as CausalCache
    from radixcache.chat import find_marks as find_marks
    from radixcache.chat import render_chat as render_chat
    from radixcache.chat_parts import Change as Change
    from radixcache.chat_parts import Chat as Chat
    from radixcache.errors import CacheBusyError as CacheBusyError
    from radixcache.errors import CacheClosedError as CacheClosedError
    from radixcache.errors import CacheFullError as CacheFullError
    from radixcache.errors import PolicyError as PolicyError
    from radixcache.errors import RadixCacheError as RadixCacheError
    from radixcache.errors import RequestTooLargeError as RequestTooLargeError
    from radixcache.errors import SessionClosedError as SessionClosedError
    from radixcache.errors import ShiftError as ShiftError
    from radixcache.errors import SnapshotError as SnapshotError
    from radixcache.errors import StoreError as StoreError
    from radixcache.errors import UnsupportedCacheError as UnsupportedCacheError
    from radixcache.generate import stream_generate as stream_generate
    from radixcache.groups.group import Group as Group
    from radixcache.groups.row import Row as Row
    from radixcache.ledger import Ledger as Ledger
    from radixcache.observe.explain import Explanation as Explanation
    from radixcache.observe.explain import Gap as Gap
    from radixcache.observe.hints import Hint as Hint
    from radixcache.observe.stats import CacheStats as CacheStats
    from radixcache.observe.stats import StatsSnapshot as StatsSnapshot
    from radixcache.observe.trace import TraceWriter as TraceWriter
    from radixcache.observe.tree_view import TreeView as TreeView
    from radixcache.paging.pins import NamedPin as NamedPin
    from radixcache.paging.resume import Reason as Reason
    from radixcache.paging.resume import ShortReason as ShortReason
    from radixcache.prefix_cache import PrefixCache as PrefixCache
    from radixcache.sessions.session import Session as Session
    from radixcache.stores.disk_store import DiskStore as DiskStore
    from radixcache.stores.redis_store import RedisStore as RedisStore
    from radixcache.tree.history import Event as Event
    from radixcache.tree.history import EventKind as EventKind
    from radixcache.tree.radix_tree import RadixTree as RadixTree
    from radixcache.verify import Mismatch as Mismatch

_MODULES = {
    "policies": "POLICIES CostModel Entry EvictionPolicy",
    "radixcache.adapters.registry": "register_adapter",
    "radixcache.ledger": "Ledger",
    "radixcache.cells.causal": "CausalCache",
    "radixcache.chat": "find_marks render_chat",
    "radixcache.chat_parts": "Change Chat",
    "radixcache.errors": "CacheBusyError CacheClosedError CacheFullError PolicyError RadixCacheError"
    " RequestTooLargeError SessionClosedError ShiftError SnapshotError StoreError UnsupportedCacheError",
    "radixcache.generate": "stream_generate",
    "radixcache.groups.group": "Group",
    "radixcache.groups.row": "Row",
    "radixcache.paging.pins": "NamedPin",
    "radixcache.paging.resume": "Reason ShortReason",
    "radixcache.prefix_cache": "PrefixCache",
    "radixcache.sessions.session": "Session",
    "radixcache.stores.disk_store": "DiskStore",
    "radixcache.stores.redis_store": "RedisStore",
    "radixcache.tree.history": "Event EventKind",
    "radixcache.tree.radix_tree": "RadixTree",
    "radixcache.verify": "Mismatch",
    "radixcache.observe.tree_view": "TreeView",
    "radixcache.observe.explain": "Explanation Gap",
    "radixcache.observe.hints": "Hint",
    "radixcache.observe.stats": "CacheStats StatsSnapshot",
    "radixcache.observe.trace": "TraceWriter",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

# Constants, then classes, then functions.
__all__ = sorted(_MODULE_OF, key=lambda name: (name.islower(), not name.isupper(), name))


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'radixcache' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
