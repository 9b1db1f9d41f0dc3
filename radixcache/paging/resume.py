"""plan_resume: the deepest offset at which a request can take up stored state, and why it is not deeper.

With span layers alone that is the match itself. Point layers need their state at exactly one offset:

    live         the live caches stand on the request's path and can be rewound to where the paths part
    checkpoint   a checkpoint at a node's end on the path
    cut          a checkpoint further down, on any branch, that has lost nothing yet (an unwrapped window)

In exact mode only multiples of `grid_tokens` count, for span layers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from radixcache.adapters.snapshots import Checkpoint
from radixcache.layers.layout import Layout
from radixcache.paging.live_path import LivePath
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import NodeState, StateNode


class ShortReason(StrEnum):
    """Why a request resumed short of its match."""

    LAST_TOKEN = "last_token"  # all of the prompt is stored; one token must be evaluated to get logits
    NO_CHECKPOINT = "no_checkpoint"  # point layers have no state between the resume offset and the match
    LIVE_ELSEWHERE = "live_elsewhere"  # only in the live buffers of a session that another thread has open
    OFF_GRID = "off_grid"  # exact mode: what is known lies behind the last whole chunk, or ends inside one


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Where a request resumes.

    Attributes:
        matched: stored prefix of the request, in tokens.
        resume: offset it resumes at; at most one token less than the request has.
        path: nodes of the match, root side first; the last may be matched in part.
        common: how far the live path goes along.
        checkpoint: where the point layers' state comes from; None: from the live caches, or there are none.
        source: the node that holds `checkpoint`.
        reason: why resume < matched; None when they are equal.
        off_grid: in exact mode, how many tokens of the match that might be restored lie behind its last grid multiple.
    """

    matched: int
    resume: int
    path: list[StateNode]
    common: int
    checkpoint: Checkpoint | None
    source: StateNode | None
    reason: ShortReason | None
    off_grid: int = 0


def plan_resume(
    layout: Layout,
    match: Match[NodeState],
    limit: int,
    live: LivePath | None,
    hidden: int | None = None,
    *,
    grid_tokens: int = 1,
) -> ResumePlan:
    """Plan for a request of which at most `limit` tokens may be restored, on a live path or (None) on fresh caches.

    Spans from offset `hidden` on cannot be read now (None: all can).
    """
    plan = _plan(layout, match, limit, live, grid_tokens)
    if hidden is None or plan.resume <= hidden:
        return plan
    return replace(_plan(layout, match, hidden, live, grid_tokens), reason=ShortReason.LIVE_ELSEWHERE)


def _plan(layout: Layout, match: Match[NodeState], limit: int, live: LivePath | None, grid: int) -> ResumePlan:
    path = match.path
    limit = min(match.offset, limit)
    off_grid = limit % grid
    limit -= off_grid
    common = live.common(path, limit) if live is not None else 0
    resume, checkpoint, source = limit, None, None
    if layout.has_points:
        resume, checkpoint, source = _deepest_point_state(layout, match, limit, live, common, grid)
    reason = None
    if resume < limit:
        reason = ShortReason.NO_CHECKPOINT
    elif resume < match.offset:
        reason = ShortReason.OFF_GRID if off_grid else ShortReason.LAST_TOKEN
    return ResumePlan(match.offset, resume, path, common, checkpoint, source, reason, off_grid)


def _deepest_point_state(
    layout: Layout, match: Match[NodeState], limit: int, live: LivePath | None, common: int, grid: int
) -> tuple[int, Checkpoint | None, StateNode | None]:
    best: tuple[int, Checkpoint | None, StateNode | None] = (0, None, None)
    common -= common % grid
    if live is not None and layout.can_rewind(live.caches, live.offset, common):
        best = (common, None, None)
    done: StateNode | None = None
    for node in reversed(match.path):
        offset = min(node.end, limit)
        offset -= offset % grid
        if offset <= best[0]:
            break
        for holder in _holders(node, offset, done, layout.cut_reach):
            checkpoint = holder.payload.checkpoint
            if checkpoint is not None and layout.can_cut(checkpoint, offset):
                return offset, checkpoint, holder
        done = node
    return best


def _holders(node: StateNode, offset: int, done: StateNode | None, reach: int) -> Iterator[StateNode]:
    """The node, and what lies below it and not below `done`, as far as a checkpoint may be cut back to `offset`."""
    yield node
    stack = list(node.children.values()) if offset < reach else []
    while stack:
        current = stack.pop()
        if current is not done and current.end <= reach:
            yield current
            stack.extend(current.children.values())
