"""plan_resume: the deepest offset at which a request can take up stored state, and why it is not deeper.

With span layers alone that is the match itself. Others need their state at exactly one offset:

    live         the live caches stand on the request's path and can be rewound to where the paths part
    windows      any offset in front of which the path has all that the window reads there
    checkpoint   for recurrent layers a checkpoint at a node's end on the path; windows have to be whole there as well

In exact mode only multiples of `grid_tokens` count, for span layers too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from radixcache.adapters.snapshots import Checkpoint, Range, Spans, Window, union
from radixcache.layers.layout import Layout
from radixcache.paging.live_path import LivePath
from radixcache.tree.node_state import NodeState, StateNode
from radixcache.tree.radix_tree import Match


class ShortReason(StrEnum):
    """Why a request resumed short of its match."""

    LAST_TOKEN = "last_token"  # all of the prompt is stored; one token must be evaluated to get logits
    NO_CHECKPOINT = "no_checkpoint"  # recurrent layers have no state between the resume offset and the match
    WINDOW_GAP = "window_gap"  # some of what sliding windows would read at the match is not stored
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
        is_live: whether the state of point layers comes from the live caches.
        checkpoint: where the recurrent layers' state comes from; None: from the live caches, or there are none.
        source: the node at whose end there is a checkpoint, if there is one where the request resumes.
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
    is_live: bool = False


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
    resume, source, is_live = limit, None, False
    if layout.has_points:
        resume, source = _deepest(layout, path, limit, grid)
        rewound = common - common % grid
        if live is not None and rewound >= max(resume, 1) and layout.can_rewind(live.caches, live.offset, rewound):
            resume, source, is_live = rewound, None, True
    reason = None
    if resume < limit:
        reason = ShortReason.NO_CHECKPOINT if layout.has_states else ShortReason.WINDOW_GAP
    elif resume < match.offset:
        reason = ShortReason.OFF_GRID if off_grid else ShortReason.LAST_TOKEN
    checkpoint = None if source is None else source.payload.checkpoint
    return ResumePlan(match.offset, resume, path, common, checkpoint, source, reason, off_grid, is_live)


def _deepest(layout: Layout, path: Sequence[StateNode], limit: int, grid: int) -> tuple[int, StateNode | None]:
    """The deepest offset at which the tree has the state of all point layers, and the node with a checkpoint there."""
    stored = [node.payload.windows for node in path if node.payload.windows is not None]
    if not layout.has_states:
        resume = deepest_whole(layout, stored, limit, grid=grid)
        return resume, next((n for n in path if n.end == resume and n.payload.checkpoint is not None), None)
    windows = _whole(layout, stored, {})
    for node in reversed(path):
        is_checkpoint = node.end <= limit and node.end % grid == 0 and node.payload.checkpoint is not None
        if is_checkpoint and all(any(low <= node.end <= high for low, high in its) for its in windows):
            return node.end, node
    return 0, None


def deepest_whole(
    layout: Layout,
    stored: Sequence[Spans],
    limit: int,
    held: Mapping[Window, Sequence[Range]] | None = None,
    *,
    grid: int = 1,
) -> int:
    """The deepest offset at or below `limit`, a multiple of `grid`, at which all that windows read is there.

    Args:
        stored, held: what is there, of state in order of its tokens, and in live caches.
    """
    return _common_offset(_whole(layout, stored, held or {}), limit, grid)


def stored_from(layout: Layout, plan: ResumePlan, window: Window) -> int:
    """From which token on the tree has, without a gap, what is in front of where a plan resumes."""
    first = plan.resume
    for node in reversed(plan.path):
        for low, high in reversed([] if node.payload.windows is None else layout.stored(node.payload.windows, window)):
            if low < first <= high:
                first = low
    return first


def _whole(layout: Layout, stored: Sequence[Spans], held: Mapping[Window, Sequence[Range]]) -> list[list[Range]]:
    """For each window the offsets at which all that it reads is there, in order: from the first to the last of each.

    Offset 0, at which it reads nothing, is not among them.
    """
    found = []
    for window in layout.windows:
        stored_ranges = (each for spans in stored for each in layout.stored(spans, window))
        ranges = union(sorted([*stored_ranges, *held.get(window, ())]))
        if window.keep and not (ranges and ranges[0][0] == 0 and ranges[0][1] >= window.keep):
            ranges = [each for each in ranges if each[0] == 0]
        firsts = [1 if low == 0 else low + window.size - window.keep for low, _ in ranges]
        found.append([(first, high) for first, (_, high) in zip(firsts, ranges, strict=True) if first <= high])
    return found


def _common_offset(windows: Sequence[Sequence[Range]], limit: int, grid: int) -> int:
    """The largest multiple of `grid` at or below `limit` that is in a range of each; 0: there is none."""
    offset = limit
    while offset > 0:
        offset -= offset % grid
        lower = min(
            (max((min(offset, high) for low, high in ranges if low <= offset), default=0) for ranges in windows),
            default=offset,
        )
        if lower == offset:
            return offset
        offset = lower
    return 0
