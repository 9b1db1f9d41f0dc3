"""Admission: where a row of a group begins, and what of it is read in place.

offer     what open rows have evaluated of its prompt, and the tree does not have yet, becomes part of the tree
plan      over the tree, as for a session
stand     on the path of the tree: it stays until the row closes
place     before the first forward pass: long spans are read where they are, short ones are copied into the row's tail

Storing: what rows have evaluated becomes part of the tree.

offer     while a row goes on: as much as another prompt has in common with it
close     all that is known, clean and not quarantined, copied out of the tails

segment_bytes: from how many bytes per layer on a span is worth a segment of its own in every decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import Checkpoint, Spans
from radixcache.adapters.span import segment_bounds
from radixcache.groups.attention import Pair
from radixcache.groups.batch import Batch
from radixcache.groups.room import Room
from radixcache.groups.row import Row
from radixcache.groups.tails import Columns
from radixcache.layers.layout import NATIVE_ERRORS, LiveStateError
from radixcache.paging.resume import ResumePlan, deepest_whole
from radixcache.tokens import Keys, common_length
from radixcache.tree.entries import StateNode


class RowStoring:
    """Moving rows' state into the tree, for one group; the lock is held."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._core, self._states, self._evictor, self._pager = room.core, room.states, room.evictor, room.pager
        self._layout = room.layout

    def reach(self, row: Row, keys: Keys) -> int:
        """How many tokens of a prompt with these keys a row has, and what takes them up needs."""
        common = row.common(keys)
        if not self._layout.has_points or common == 0:
            return common
        return self._end(row, common)

    def _end(self, row: Row, limit: int) -> int:
        """The deepest offset at or below `limit` at which the row has the state of all point layers."""
        is_there = row.lost is None and row.batch.rows[row.at] is row
        if is_there and row.position == limit:
            return limit
        own = max((each.offset for each in row.own.checkpoints if each.offset <= limit), default=0)
        if self._layout.has_states:
            return own
        stored = [*self._states.windows.stored(row.path()), *row.own.windows]
        held = self._layout.held(self._points(row)) if is_there else {}
        return max(own, deepest_whole(self._layout, stored, limit, held))

    def _points(self, row: Row) -> list[Any]:
        return row.batch.points(row.at, self._layout.fresh())

    def offer(self, row: Row, keys: Keys, is_long: Callable[[int], bool]) -> None:
        """Store what a row has of these keys, if there is room; where it is long, the row reads it in place as well."""
        end = self._end(row, len(keys)) if self._layout.has_points else len(keys)
        known = row.clean_keys()[:end]
        # What others have no use for yet stays the row's, which can give it up; of windows alone it takes nothing.
        wanted = [
            each
            for each in row.own.checkpoints
            if each.offset in ((end,) if self._layout.has_states else range(end + 1))
        ]
        if len(known) < end or not self._put(row, known, wanted, self._evictor.find_room, "branch"):
            return
        given = set(map(id, wanted))
        row.own.drop(lambda each: id(each) in given)
        row.own.cut(end, row.position)
        start, before = row.path_end, row.node
        if end <= start:
            return
        row.node = self._states.match(known, row.request.namespace).node
        self._states.read(row.node, 1)
        if before is not None:
            self._states.read(before, -1)
        if row.in_segments and is_long(row.path_end - start) and not row.orphans:
            self._leave_in_place(row, start, row.path_end)

    def close(self, rows: Sequence[Row], is_intact: bool) -> None:
        """Store what these rows evaluated, each whatever becomes of the others, and let go of their state.

        Args:
            is_intact: False: their state was lost.
        """
        with ExitStack() as stack:
            for row in reversed(rows):
                stack.callback(self._close, row, is_intact)

    def _close(self, row: Row, is_intact: bool) -> None:
        node = row.node
        try:
            if is_intact:
                self._store(row)
        finally:
            row.batch.rows[row.at] = None
            del row.batch
            row.is_closed = True
            row.node, row.orphans = None, []
            row.own.clear()
            if node is not None and node.payload is not None:
                self._states.read(node, -1)
                self._evictor.tidy(node)
            self._core.write_trace(row.request, max(0, row.known_tokens - len(row.prompt)))

    def take_checkpoint(self, row: Row, offset: int, kind: str) -> None:
        """Take a row's checkpoint where it stands, or where its windows still have what is needed."""
        self._core.take_checkpoint(row.own, row.path(), self._points(row), offset, kind)

    def _store(self, row: Row) -> None:
        """Copy what a row evaluated, and the tree lacks, out of its tails into the tree."""
        keys = self._core.unquarantined(row.clean_keys(), row.request.namespace)
        if self._layout.has_points:
            if row.lost is None and row.position == len(keys) <= row.cached_tokens:
                return
            keys = keys[: self._end(row, len(keys))]
        self._put(row, keys, row.own.checkpoints, self._evictor.make_room, "end", closing=True)
        self._core.write_store(keys, row.request, row.cached_tokens)

    def _put(
        self,
        row: Row,
        keys: Keys,
        checkpoints: Sequence[Checkpoint],
        fits: Callable[[int], bool],
        kind: str,
        *,
        closing: bool = False,
    ) -> bool:
        """Give the tree what it lacks of these keys, which are a row's first; False: there is nothing, or no room.

        Args:
            checkpoints: of the row's own, those that go along.
            kind: of the checkpoint at their end, where point layers want one.
            closing: the row's own state goes, and what it takes is free.
        """
        core, layout, batch = self._core, self._layout, row.batch
        match = self._states.match(keys, row.request.namespace)
        start, end = match.offset, len(keys)
        in_place = any(start < high for _, high in row.in_place)  # of that nothing is in the tails
        if not layout.has_points if start == end else in_place:
            return False
        takes = layout.has_points and row.lost is None and (row.position == end or not layout.has_states)
        is_alone = closing and all(each is None or each is row for each in batch.rows)
        held = batch.nbytes
        # Of a batch with others in it nothing is free before they have moved to another one.
        freed_bytes = held if is_alone else 0
        with self._states.guarded(match.node):
            need = (end - start) * layout.token_bytes - freed_bytes
            need += self._room.point_bytes(end) if takes else 0
            if need > 0 and not fits(need):
                if layout.has_points:
                    return False
                end = max(start, end - -(-self._evictor.over_bytes(need) // max(1, layout.token_bytes)))
                if start == end:
                    return False
            kept = [*checkpoints]
            if takes:
                core.capture(row.own, match.path, self._points(row), end)
                leaves = batch.copied_points(row.at, end, self._pager.allocating, emptying=is_alone)
                kept.append(layout.checkpoint_of(leaves, end, kind))
            bounds = segment_bounds(start, end)
            spans = batch.copied(row.at, bounds, self._pager.allocating, emptying=is_alone)
            if is_alone:
                self._room.booking.book_live(self._room.booking.live_bytes - held + batch.nbytes)
            found = layout.spans_of(spans, start, end) if start < end else None
            windows = row.own.windows
            if closing:
                row.own.clear()  # what is in the tree is booked there
            self._pager.put(keys[:end], row.request.namespace, found, None, row.request.use, windows, kept)
        return True

    def _leave_in_place(self, row: Row, start: int, end: int) -> None:
        """A row's tokens [start, end), which the tree has now, leave its tails: they are read there."""
        if len(row.batch.rows) > 1:
            Batch.gathered([(row.batch, row.at)]).take_over()
        batch, away = row.batch, row.batch.columns.in_place[0]
        length = batch.columns.lengths[0]
        first, last = start - away, end - away
        columns = Columns([length - (last - first)], [away + last - first], batch.columns.capacity - (last - first))

        def pieces(leaf: int) -> list[Pair]:
            tail = batch.leaves[leaf]
            return [] if tail.empty() else [tail.columns_of(0, 0, first), tail.columns_of(0, last, length)]

        for node in row.node.path() if row.node is not None else []:
            if start <= node.start and node.payload.spans is not None:
                join(node.payload.spans)
        row.batch = batch.refilled(columns, pieces)
        row.in_place.append((start, end))


def join(spans: Spans) -> None:
    """Make one segment of each leaf's, one leaf at a time so that at most one is held twice."""
    for snapshot in spans.leaves:
        if snapshot is not None:
            snapshot.join()


#: On a CPU where two who share save about what the segment costs (benchmarks.bench_decode). Of a GPU it is an estimate:
#: what it reads while it starts the kernels more that a segment takes, at some 5 us each and 1 TB/s.
CPU_BYTES = 400 << 10
GPU_BYTES = 4 << 20


def segment_bytes() -> int:
    """The threshold for MLX's default device."""
    return CPU_BYTES if mx.default_device() == mx.cpu else GPU_BYTES


class Admission:
    """Restoring rows, for one group; the lock is held.

    Args:
        segment_bytes: spans of so many bytes per layer, or more, are read in place.
    """

    def __init__(self, room: Room, storing: RowStoring, segment_bytes: int) -> None:
        self._room = room
        self._core, self._states, self._evictor, self._pager = room.core, room.states, room.evictor, room.pager
        self._layout = room.layout
        self._storing = storing
        self._segment_bytes = segment_bytes

    def restore(self, row: Row) -> None:
        """Let a new row stand as far as tree and rows have its prompt.

        Raises:
            CacheFullError, BudgetFullError: there is no room for it.
        """
        core, request = self._core, row.request
        core.read_store(request)
        self._offer(row)
        plan = self._stand(row)
        path = [] if row.node is None else row.node.path()
        self._states.touch(path, plan.source, request.use)
        core.count_request(request, plan, "begin_many")
        core.tidy_unpinned()
        if self._layout.has_points:
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
            self._core.count_more_hits(row.position - before)

    def sharable_tokens(self, keys: Keys, namespace: str) -> int:
        """How many tokens of a prompt would share what the rows hold, were it admitted now; changes nothing."""
        allowed = self._core.unquarantined(keys, namespace)
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
        path = row.node.path()
        kept = [node for node in path if in_segments and self.is_long(node.end - node.start)]
        away = sum(node.end - node.start for node in kept)
        columns = Columns([row.position - away], [away])
        token_bytes = self._layout.token_bytes
        spare = row.prompt_left
        columns.capacity = columns.end + 1 + self._room.ask(lambda more: (columns.end + 1 + more) * token_bytes, spare)
        pieces = [spans for node in path if node not in kept and (spans := node.payload.spans) is not None]
        for node in kept:
            self._pager.allocating(lambda spans=node.payload.spans: join(spans))  # type: ignore[misc]
        row.batch = self._restoring(lambda: row.batch.refilled(columns, lambda leaf: _pieces(pieces, leaf)))
        row.in_place = [(node.start, node.end) for node in kept]
        self._states.paged_in_bytes += columns.end * token_bytes
        for node in path:
            if node not in kept:
                self._states.events.paged_in(node, node.start, node.end, token_bytes)

    def is_long(self, tokens: int) -> bool:
        """Whether so many tokens are worth a segment."""
        layout = self._layout
        layers = sum(1 for _, adapter in layout.leaves(layout.fresh()) if not adapter.is_point)
        return layers > 0 and tokens * layout.token_bytes >= self._segment_bytes * layers

    def _offer(self, row: Row) -> None:
        """Store what open rows have of a prompt beyond the tree, so that it can be taken up from there."""
        allowed = self._core.unquarantined(row.prompt_keys, row.request.namespace)
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
        stored = self._states.windows.stored(plan.path)
        before, row.node = (row.node, vars(row).get("batch")), self._pager.allocating(lambda: self._cut(plan))
        node = row.node
        if node is not None:
            self._states.read(node, 1)
        try:
            row.batch = Batch.of_one(self._layout.fresh(), row, plan.resume)
            if row.id in self._room.rows:
                self._room.require_tokens(0)
            else:
                self._room.require_tokens(self._room.used_tokens(row) - self._room.used_tokens())
            if node is not None:
                self._page_out(node)
            if self._layout.has_points and node is not None:
                self._room.ask(lambda _: self._room.point_bytes(plan.resume), 0)
                points = row.batch.points(0, self._layout.fresh())
                copy = partial(self._layout.restore_points, points, plan.checkpoint, plan.resume, stored)
                self._restoring(copy)
                if node.payload.checkpoint is None:
                    self._pager.add_checkpoint(node, points, "branch", request.use)
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
            self._states.read(row.node, 1)
        if before is not None:
            self._states.read(before, -1)

    def _release(self, node: StateNode | None) -> None:
        if node is not None and node.payload is not None:
            self._states.read(node, -1)
            self._evictor.tidy(node)

    def _cut(self, plan: ResumePlan) -> StateNode | None:
        """The node that ends where a plan resumes, which is cut there if need be; None: it resumes at 0."""
        for node in plan.path:
            if node.start < plan.resume < node.end:
                return self._states.split(node, plan.resume)
            if node.end == plan.resume:
                return node
        return None

    def _page_out(self, node: StateNode) -> None:
        """See to it that the tree has the state of a path: what is in live buffers alone is copied there."""
        for each in node.path():
            if each.payload.spans is None:
                self._pager.page_out_live(each)

    def _restoring(self, make: Callable[[], Any]) -> Any:
        try:
            return self._pager.allocating(make)
        except NATIVE_ERRORS as error:
            raise LiveStateError(f"restoring a row failed: {error}") from error


def _pieces(spans: Sequence[Spans], leaf: int) -> list[Pair]:
    """One layer's arrays of these, in order."""
    snapshots = [each.leaves[leaf] for each in spans]
    return [segment for snapshot in snapshots if snapshot is not None for segment in snapshot.segments]
