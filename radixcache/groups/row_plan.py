"""plan_row: where a row of a group takes up a prompt, from the tree and from what open rows have in their cells.

    prompt      shared with a row | restored from the tree | to be evaluated
                0 ........ shared ................. resume

Point layers need their state at exactly `resume`: a row's where it stands, a checkpoint that a row took, or one in the
tree, whichever takes the prompt furthest. The cells in front of it come from the row that has most of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from radixcache.adapters.snapshots import Checkpoint
from radixcache.groups.row import Row
from radixcache.layers.layout import Layout
from radixcache.paging.resume import ResumePlan, ShortReason
from radixcache.tree.state_tree import StateNode

#: How many tokens of a prompt an open row has, and the row.
Share = tuple[int, Row]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where a row resumes, and what it shares.

    Attributes:
        resume: the offset.
        shared: tokens whose cells it shares with `source`; what is behind comes from `nodes`.
        source: an open row, or None.
        checkpoint: where the point layers' state comes from; None: from the source, or there are none.
        nodes: of the tree, root side first, those that the request uses.
    """

    resume: int
    shared: int
    source: Row | None
    checkpoint: Checkpoint | None
    nodes: list[StateNode] = field(default_factory=list)

    def windows_from(self, windows: Sequence[int]) -> int:
        """From where on the row's cells hold all that windows of so many tokens see; 0: all of them do."""
        source = self.source
        if source is not None and self.shared == self.resume >= source.windows_from:
            return source.windows_from
        return self.resume if self.resume > min(windows, default=self.resume) else 0


def plan_row(layout: Layout, tree: ResumePlan, shares: Sequence[Share], limit: int) -> tuple[RowPlan, ResumePlan]:
    """Plan for a prompt of which at most `limit` tokens may be restored; also as a request on the tree is counted.

    Args:
        tree: where a request would resume that has the tree alone.
    """
    common, neighbour = longest(shares)
    best = among_rows(layout, shares, limit)
    resume, source, checkpoint = best.resume, best.source, best.checkpoint
    if resume < tree.resume:
        resume, source, checkpoint = tree.resume, None, tree.checkpoint
    if source is None or checkpoint is not None:
        source = neighbour  # of cells alone, whoever has most
    shared = min(common, resume)
    nodes = [node for node in tree.path if node.start < resume]
    plan = RowPlan(resume, shared, source if shared else None, checkpoint, nodes)
    return plan, _counted(tree, plan, max(tree.matched, common), limit)


def among_rows(layout: Layout, shares: Sequence[Share], limit: int) -> RowPlan:
    """Plan for a prompt that takes up what open rows alone have of it."""
    best = RowPlan(0, 0, None, None)
    for common, row in shares:
        offset = min(common, limit)
        if offset > best.resume and row.has_state_at(offset):
            best = RowPlan(offset, offset, row, None)
        for checkpoint in row.checkpoints:
            reach = min(checkpoint.offset, offset)
            if reach > best.resume and layout.can_cut(checkpoint, reach):
                best = RowPlan(reach, reach, row, checkpoint)
    return best


def longest(shares: Sequence[Share]) -> tuple[int, Row | None]:
    """The most tokens that an open row has, and that row."""
    return max(shares, key=lambda share: share[0], default=(0, None))


def _counted(tree: ResumePlan, plan: RowPlan, matched: int, limit: int) -> ResumePlan:
    """The plan as the request is counted, matches in cells and in the tree taken together."""
    reason = None
    if plan.resume < min(matched, limit):
        reason = tree.reason if plan.resume == tree.resume and tree.reason is not None else ShortReason.NO_CHECKPOINT
    elif plan.resume < matched:
        reason = ShortReason.LAST_TOKEN
    counted = replace(tree, matched=matched, resume=plan.resume, reason=reason)
    return counted if plan.checkpoint is tree.checkpoint else replace(counted, checkpoint=None, source=None)
