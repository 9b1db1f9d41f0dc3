"""Storing: what rows have evaluated becomes part of the tree.

offer     while a row goes on: as much as another prompt has in common with it
close     all that is known, clean and not quarantined, copied out of the tails
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from radixcache.adapters.snapshots import Checkpoint, Spans
from radixcache.adapters.span import segment_bounds
from radixcache.groups.attention import Pair
from radixcache.groups.batch import Batch
from radixcache.groups.room import Room
from radixcache.groups.row import Row
from radixcache.groups.tails import Columns
from radixcache.paging.resume import deepest_whole
from radixcache.tokens.keys import Keys


class Storing:
    """Moving rows' state into the tree, for one group; the lock is held."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._core = room.core
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
        stored = [*self._core.states.windows.stored(row.path()), *row.own.windows]
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
        if len(known) < end or not self._put(row, known, wanted, self._core.evictor.find_room, "branch"):
            return
        given = set(map(id, wanted))
        row.own.drop(lambda each: id(each) in given)
        row.own.cut(end, row.position)
        start, before = row.path_end, row.node
        if end <= start:
            return
        row.node = self._core.states.match(known, row.request.namespace).node
        self._core.states.read(row.node, 1)
        if before is not None:
            self._core.states.read(before, -1)
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
        core, node = self._core, row.node
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
                core.states.read(node, -1)
                core.evictor.tidy(node)
            core.write_trace(row.request, max(0, row.known_tokens - len(row.prompt)))

    def take_checkpoint(self, row: Row, offset: int, kind: str) -> None:
        """Take a row's checkpoint where it stands, or where its windows still have what is needed."""
        self._core.take_checkpoint(row.own, row.path(), self._points(row), offset, kind)

    def _store(self, row: Row) -> None:
        """Copy what a row evaluated, and the tree lacks, out of its tails into the tree."""
        keys = self._core.allowed(row.clean_keys(), row.request.namespace)
        if self._layout.has_points:
            if row.lost is None and row.position == len(keys) <= row.cached_tokens:
                return
            keys = keys[: self._end(row, len(keys))]
        self._put(row, keys, row.own.checkpoints, self._core.evictor.make_room, "end", closing=True)
        self._core.keep(keys, row.request, row.cached_tokens)

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
        match = core.states.match(keys, row.request.namespace)
        start, end = match.offset, len(keys)
        in_place = any(start < high for _, high in row.in_place)  # of that nothing is in the tails
        if not layout.has_points if start == end else in_place:
            return False
        takes = layout.has_points and row.lost is None and (row.position == end or not layout.has_states)
        is_alone = closing and all(each is None or each is row for each in batch.rows)
        held = batch.nbytes
        # Of a batch with others in it nothing is free before they have moved to another one.
        freed_bytes = held if is_alone else 0
        with core.states.guarded(match.node):
            need = (end - start) * layout.token_bytes - freed_bytes
            need += self._room.point_bytes(end) if takes else 0
            if need > 0 and not fits(need):
                if layout.has_points:
                    return False
                end = max(start, end - -(-core.evictor.over_bytes(need) // max(1, layout.token_bytes)))
                if start == end:
                    return False
            kept = [*checkpoints]
            if takes:
                core.capture(row.own, match.path, self._points(row), end)
                leaves = batch.copied_points(row.at, end, copying=core.pager.allocating, emptying=is_alone)
                kept.append(layout.checkpoint_of(leaves, end, kind))
            bounds = segment_bounds(start, end)
            spans = batch.copied(row.at, bounds, copying=core.pager.allocating, emptying=is_alone)
            if is_alone:
                self._room.booking.book_live(self._room.booking.live_bytes - held + batch.nbytes)
            found = layout.spans_of(spans, start, end) if start < end else None
            windows = row.own.windows
            if closing:
                row.own.clear()  # what is in the tree is booked there
            core.recorder.put(keys[:end], row.request.namespace, found, None, row.request.use, windows, kept)
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
