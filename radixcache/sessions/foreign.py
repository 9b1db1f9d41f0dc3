"""fetch and insert: state for caches that are somebody else's, and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixcache.paging.core import Core
from radixcache.paging.request import Request
from radixcache.tokens.ids import TokenIds


def fetch(core: Core, request: Request) -> tuple[list[Any], TokenIds]:
    """Restore the longest usable prefix into fresh caches; returns them and the ids left. The lock is held."""
    core.bring(request)
    found = core.lookup(request.keys, request.namespace, request.limit)
    plan, node = found.plan, found.match.node
    nodes = [each for each in plan.path if each.start < plan.resume]
    stored = core.states.windows.stored(nodes)
    with core.states.guarded(node):
        caches = core.pager.allocating(lambda: core.pager.restored(nodes, plan, stored))
    core.states.touch(nodes, plan.source, request.use)
    core.evictor.tidy(node)
    core.counted(request, plan, "fetch")
    core.keep(request.keys[: plan.resume], request, plan.resume)
    core.tidy_unpinned()
    core.write_trace(request)
    return caches, request.prompt[plan.resume :].copy()


def insert(core: Core, request: Request, caches: Sequence[Any]) -> int:
    """Store what the tree lacks of foreign caches; returns how many tokens it has then. The lock is held.

    Raises:
        SnapshotError, ValueError: the caches do not fit, or the cache is exact; nothing was changed.
    """
    if core.settings.exact:
        raise ValueError(
            "insert() into an exact cache: nobody knows whether these caches were prefilled in whole chunks of "
            f"{core.settings.step_size} tokens from offset 0. Use begin() and session.prefill(), or exact=False."
        )
    allowed = core.allowed(request.keys, request.namespace)
    if len(allowed) < len(request.keys) and core.layout.has_points:
        core.layout.compare(caches)  # point state cannot be cut back to where the quarantine begins
        end = len(allowed)
    else:
        end = core.recorder.record_foreign(caches, allowed, request.namespace, request.use)
    core.keep(request.keys[:end], request, 0)
    core.keep_budget()
    return core.states.match(request.keys[:end], request.namespace).offset
