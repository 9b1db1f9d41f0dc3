"""Admission: where a row of a group begins.

    plan          over tree and open rows -> make room in cells and budget -> share -> restore

The nodes that a plan uses are guarded while it is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from radixcache.errors import BudgetFullError
from radixcache.groups.cell_budget import CellBudget
from radixcache.groups.row import Row
from radixcache.groups.row_plan import RowPlan, among_rows, longest, plan_row
from radixcache.paging.request import Request
from radixcache.paging.resume import ResumePlan
from radixcache.tokens.keys import Keys
from radixcache.tree.state_tree import StateNode


class Admission:
    """Restoring rows, for one group; the lock is held."""

    def __init__(self, budget: CellBudget) -> None:
        self._budget = budget
        self._core = budget.core

    def restore(self, row_id: int, request: Request, rows: Sequence[Row]) -> tuple[RowPlan, ResumePlan]:
        """Make a row a sequence of the cells that has what there is of its prompt; also what is counted of it.

        Raises:
            CacheFullError, BudgetFullError: there is no room for it.
        """
        core, keys, namespace, limit = self._core, request.keys, request.namespace, request.limit
        plan, counted = self._plan(keys, namespace, rows, limit)
        try:
            with self._guarded(plan):
                self._make_room(plan, rows)
                self._restore(row_id, plan)
        except BudgetFullError:
            # The tree's copy and the one in cells do not fit together: what is in the way of the request goes.
            self._make_room(plan, rows)
            plan, counted = self._plan(keys, namespace, rows, limit)
            with self._guarded(plan):
                self._restore(row_id, plan)
        core.states.touch(plan.nodes, counted.source, request.use)
        if plan.nodes:
            core.evictor.tidy(plan.nodes[-1])
        core.counted(request, counted, "begin_many")
        core.tidy_unpinned()
        return plan, counted

    def share_more(self, row: Row, namespace: str, rows: Sequence[Row]) -> None:
        """Let a row stand where other rows have its prompt by now; nothing of it was evaluated yet."""
        allowed = self._core.allowed(row.prompt_keys, namespace)
        shares = [(other.common(allowed), other) for other in rows if other is not row]
        plan = among_rows(self._core.layout, shares, len(row.prompt) - 1)
        gained = plan.resume - row.position
        if gained > 0:
            self._budget.make_room(rows, 0, states=int(row.position == 0))
            self._budget.causal.free(row.id)
            self._restore(row.id, plan)
            row.share_up_to(plan.resume, plan.windows_from(self._budget.pager.windows))
            self._core.tally.found_more(gained)
            self._budget.measured()

    def sharable_tokens(self, keys: Keys, namespace: str, rows: Sequence[Row]) -> int:
        """How many tokens of a prompt would share cells of these rows, were it admitted now; changes nothing."""
        plan, _ = self._plan(keys, namespace, rows, len(keys) - 1, evaluate=False)
        return plan.shared

    def _plan(
        self, keys: Keys, namespace: str, rows: Sequence[Row], limit: int, *, evaluate: bool = True
    ) -> tuple[RowPlan, ResumePlan]:
        allowed = self._core.allowed(keys, namespace)
        shares = [(row.common(allowed), row) for row in rows]
        common, _ = longest(shares)
        found = self._core.lookup(keys, namespace, limit, behind=common, evaluate=evaluate)
        return plan_row(self._core.layout, found.plan, shares, limit)

    def _make_room(self, plan: RowPlan, rows: Sequence[Row]) -> None:
        self._budget.make_room(rows, plan.resume - plan.shared, states=int(plan.resume > 0))

    def _guarded(self, plan: RowPlan) -> AbstractContextManager[None]:
        return self._core.states.guarded(plan.nodes[-1]) if plan.nodes else nullcontext()

    def _restore(self, row_id: int, plan: RowPlan) -> None:
        """Make the row a sequence that stands at `plan.resume`."""
        causal, pager = self._budget.causal, self._budget.pager
        causal.add(row_id)
        if plan.source is not None and pager.has_states and plan.checkpoint is None:
            causal.copy_prefix(plan.source.id, row_id, plan.shared)
            pager.own_states(row_id)
        elif plan.source is not None:
            causal.share_cells(plan.source.id, row_id, plan.shared)
        for node in plan.nodes:
            start, end = max(node.start, plan.shared), min(node.end, plan.resume)
            if start < end:
                self._page_in(row_id, node, start, end)
        if plan.checkpoint is not None:
            pager.restore_points(row_id, plan.checkpoint, plan.resume)

    def _page_in(self, row_id: int, node: StateNode, start: int, end: int) -> None:
        """Write the tokens [start, end) of a node into cells of their own."""
        core = self._core
        cell = self._budget.causal.take_cells(row_id, end - start)
        offset = start
        while offset < end and core.layout.token_bytes:
            spans = core.pager.allocating(lambda at=offset: core.pager.spans_at(node, at, end))  # type: ignore[misc]
            stop = min(spans.end, end)
            core.states.paged_in_bytes += self._budget.pager.write(spans, offset, stop, cell + offset - start)
            offset = stop
        core.events.paged_in(node, start, end, core.layout.token_bytes)
