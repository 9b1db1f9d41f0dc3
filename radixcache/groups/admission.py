"""Admission: where a row of a group begins, and what of it is read in place.

offer     what open rows have evaluated of its prompt, and the tree does not have yet, becomes part of the tree
plan      over the tree, as for a session
stand     on the path of the tree: it stays until the row closes
place     before the first forward pass: long spans are read where they are, short ones are copied into the row's tail
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from radixcache.adapters.snapshots import Spans
from radixcache.groups.attention import Pair
from radixcache.groups.batch import Batch
from radixcache.groups.room import Room
from radixcache.groups.row import Row
from radixcache.groups.storing import Storing, join
from radixcache.groups.tails import Columns
from radixcache.layers.evaluation import NATIVE_ERRORS, LiveStateError
from radixcache.paging.resume import ResumePlan
from radixcache.tokens.keys import Keys, common_length
from radixcache.tree.node_state import StateNode


class Admission:
    """Restoring rows, for one group; the lock is held.

    Args:
        segment_bytes: spans of so many bytes per layer, or more, are read in place.
    """

    def __init__(self, room: Room, storing: Storing, segment_bytes: int) -> None:
        self._room = room
        self._core = room.core
        self._storing = storing
        self._segment_bytes = segment_bytes

    def restore(self, row: Row) -> None:
        """Let a new row stand as far as tree and rows have its prompt.

        Raises:
            CacheFullError, BudgetFullError: there is no room for it.
        """
        core, request = self._core, row.request
        core.bring(request)
        self._offer(row)
        plan = self._stand(row)
        path = [] if row.node is None else row.node.path()
        core.states.touch(path, plan.source, request.use)
        core.counted(request, plan, "begin_many")
        core.tidy_unpinned()
        if core.layout.has_points:
            for other in self._room.rows_of(request.namespace):
                # Where the two part: what goes on from there needs a checkpoint, which cannot be made later.
                common = common_length(other.prompt_keys, request.keys)
                if other.position < common < len(other.prompt):
                    other.stops.setdefault(common, "branch")

    def share_more(self, row: Row) -> None:
        """Let a row of which nothing was evaluated stand where other rows have its prompt by now."""
        self._offer(row)
        before = row.position
        found = self._core.lookup(row.prompt_keys, row.request.namespace, row.request.limit, evaluate=False)
        if found.plan.resume > before:
            self._stand(row)
            self._core.tally.found_more(row.position - before)

    def sharable_tokens(self, keys: Keys, namespace: str) -> int:
        """How many tokens of a prompt would share what the rows hold, were it admitted now; changes nothing."""
        allowed = self._core.allowed(keys, namespace)
        rows = self._room.rows_of(namespace)
        common = max((row.common(allowed) for row in rows), default=0)
        limit = len(keys) - 1
        resume = self._core.lookup(keys, namespace, limit, behind=common, evaluate=False).plan.resume
        offers = (self._storing.reach(row, allowed[:limit]) for row in rows)
        return min(common, max(resume, *offers, 0))

    def place(self, row: Row, in_segments: bool) -> None:
        """Bring what of a row is not read in place into its tails; `in_segments`: long spans are.

        Raises:
            BudgetFullError: there is no room for that.
        """
        row.in_segments = in_segments
        if row.node is None:
            return
        core, path = self._core, row.node.path()
        kept = [node for node in path if in_segments and self.is_long(node.end - node.start)]
        away = sum(node.end - node.start for node in kept)
        columns = Columns([row.position - away], [away])
        token_bytes = core.layout.token_bytes
        spare = row.prompt_left
        columns.capacity = columns.end + 1 + self._room.ask(lambda more: (columns.end + 1 + more) * token_bytes, spare)
        pieces = [spans for node in path if node not in kept and (spans := node.payload.spans) is not None]
        for node in kept:
            core.pager.allocating(lambda spans=node.payload.spans: join(spans))  # type: ignore[misc]
        row.batch = self._restoring(lambda: row.batch.refilled(columns, lambda leaf: _pieces(pieces, leaf)))
        row.in_place = [(node.start, node.end) for node in kept]
        core.states.paged_in_bytes += columns.end * token_bytes
        for node in path:
            if node not in kept:
                core.events.paged_in(node, node.start, node.end, token_bytes)

    def is_long(self, tokens: int) -> bool:
        """Whether so many tokens are worth a segment."""
        layout = self._core.layout
        layers = sum(1 for _, adapter in layout.leaves(layout.fresh()) if not adapter.is_point)
        return layers > 0 and tokens * layout.token_bytes >= self._segment_bytes * layers

    def _offer(self, row: Row) -> None:
        """Store what open rows have of a prompt beyond the tree, so that it can be taken up from there."""
        allowed = self._core.allowed(row.prompt_keys, row.request.namespace)
        others = [other for other in self._room.rows_of(row.request.namespace) if other is not row]
        reaches = [(self._storing.reach(other, allowed), other) for other in others]
        most, other = max(reaches, key=lambda each: each[0], default=(0, None))
        held = self._core.lookup(row.prompt_keys, row.request.namespace, row.request.limit, evaluate=False).plan.resume
        if other is not None and most > held:
            self._storing.offer(other, allowed[:most], self.is_long)

    def _stand(self, row: Row) -> ResumePlan:
        """Take a row to where it resumes: the path is kept for it, and its point layers are restored.

        One that stood somewhere before stands there still where this raises.
        """
        core, request = self._core, row.request
        plan = core.lookup(request.keys, request.namespace, request.limit).plan
        stored = core.states.windows.stored(plan.path)
        before, row.node = (row.node, vars(row).get("batch")), core.pager.allocating(lambda: self._cut(plan))
        node = row.node
        if node is not None:
            core.states.read(node, 1)
        try:
            row.batch = Batch.of_one(core.layout.fresh(), row, plan.resume)
            if row.id in self._room.rows:
                self._room.require_tokens(0)
            else:
                self._room.require_tokens(self._room.used_tokens(row) - self._room.used_tokens())
            if node is not None:
                self._page_out(node)
            if core.layout.has_points and node is not None:
                self._room.ask(lambda _: self._room.point_bytes(plan.resume), 0)
                points = row.batch.points(0, core.layout.fresh())
                copy = partial(core.layout.restore_points, points, plan.checkpoint, plan.resume, stored)
                self._restoring(copy)
                if node.payload.checkpoint is None:
                    core.pager.add_checkpoint(node, points, "branch", request.use)
        except BaseException:
            self._release(node)
            row.node, batch = before
            if batch is not None:
                row.batch = batch
            raise
        self._release(before[0])
        row.in_place = [(0, plan.resume)] if plan.resume else []
        row.restored(plan)
        return plan

    def orphan(self, row: Row, start: int) -> None:
        """The tree is about to lose what is behind an offset: what a row reads of that in place becomes its own."""
        path = [] if row.node is None else row.node.path()
        gone = [node for node in path if node.end > start]
        reads = {id(spans) for spans in row.reads()}
        row.orphans = [s for node in gone if (s := node.payload.spans) is not None and id(s) in reads] + row.orphans
        row.in_place = [(low, min(high, gone[0].start)) for low, high in row.in_place if low < gone[0].start]
        left = gone[0].parent
        before, row.node = row.node, None if left is None or left.is_root else left
        if row.node is not None:
            self._core.states.read(row.node, 1)
        if before is not None:
            self._core.states.read(before, -1)

    def _release(self, node: StateNode | None) -> None:
        if node is not None and node.payload is not None:
            self._core.states.read(node, -1)
            self._core.evictor.tidy(node)

    def _cut(self, plan: ResumePlan) -> StateNode | None:
        """The node that ends where a plan resumes, which is cut there if need be; None: it resumes at 0."""
        for node in plan.path:
            if node.start < plan.resume < node.end:
                return self._core.states.split(node, plan.resume)
            if node.end == plan.resume:
                return node
        return None

    def _page_out(self, node: StateNode) -> None:
        """See to it that the tree has the state of a path: what is in live buffers alone is copied there."""
        core = self._core
        for each in node.path():
            if each.payload.spans is not None:
                continue
            source = core.slots.source(each)
            if source.is_open:
                copy = partial(core.layout.page_out, source.caches, each.start, each.end)
                core.states.set_spans(each, core.pager.allocating(copy))
            else:
                core.evictor.empty_slot(source, core.evictor.over_bytes)  # its buffers go, all of it is paged out

    def _restoring(self, make: Callable[[], Any]) -> Any:
        try:
            return self._core.pager.allocating(make)
        except NATIVE_ERRORS as error:
            raise LiveStateError(f"restoring a row failed: {error}") from error


def _pieces(spans: Sequence[Spans], leaf: int) -> list[Pair]:
    """One layer's arrays of these, in order."""
    snapshots = [each.leaves[leaf] for each in spans]
    return [segment for snapshot in snapshots if snapshot is not None for segment in snapshot.segments]
