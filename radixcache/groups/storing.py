"""Storing: what rows have evaluated becomes part of the tree.

offer     while a row goes on: as much as another prompt has in common with it
close     all that is known, clean and not quarantined, copied out of the tails
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from radixcache.adapters.snapshots import Checkpoint, Spans
from radixcache.adapters.span import segment_bounds
from radixcache.groups.attention import Pair
from radixcache.groups.batch import Batch
from radixcache.groups.room import Room
from radixcache.groups.row import Row
from radixcache.groups.tails import Columns
from radixcache.tokens.keys import Keys


class Storing:
    """Moving rows' state into the tree, for one group; the lock is held."""

    def __init__(self, room: Room, namespace: str) -> None:
        self._room = room
        self._core = room.core
        self._layout = room.layout
        self._namespace = namespace

    def reach(self, row: Row, keys: Keys) -> int:
        """How many tokens of a prompt with these keys a row has, and what takes them up needs."""
        common = row.common(keys)
        if not self._layout.has_points or common == 0:
            return common
        if self._can_stop_at(row, common):
            return common
        return max((min(each.offset, common) for each in self._cuttable(row, common)), default=0)

    def _can_stop_at(self, row: Row, offset: int) -> bool:
        """Whether a checkpoint of where the row stands takes others to `offset`."""
        if row.lost is not None or row.batch.rows[row.at] is not row:
            return False
        return row.position == offset or self._room.keeps_all(row.position)

    def _cuttable(self, row: Row, offset: int) -> list[Checkpoint]:
        """The row's own checkpoints that take others to `offset`, or as near as they stand."""
        return [each for each in row.checkpoints if each.offset <= offset or self._layout.can_cut(each, offset)]

    def offer(self, row: Row, keys: Keys, is_long: Callable[[int], bool]) -> None:
        """Store what a row has of these keys, if there is room; where it is long, the row reads it in place as well."""
        end, checkpoint = len(keys), None
        if self._layout.has_points and not self._can_stop_at(row, end):
            checkpoint = max(self._cuttable(row, end), key=lambda each: min(each.offset, len(keys)))
            end = checkpoint.offset
        elif self._layout.has_points:
            end = row.position
        known = row.clean_keys()[:end]
        if len(known) < end or not self._put(row, known, checkpoint, self._core.evictor.find_room, "branch"):
            return
        self._room.drop_checkpoint(row, checkpoint)
        start, before = row.path_end, row.node
        if end <= start:
            return
        row.node = self._core.states.match(known, self._namespace).node
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
            self._room.drop_checkpoints(row, -1)
            if node is not None and node.payload is not None:
                core.states.read(node, -1)
                core.evictor.tidy(node)
            core.write_trace(row.request, max(0, row.known_tokens - len(row.prompt)))

    def checkpoint(self, row: Row, kind: str) -> Checkpoint:
        """Copy the point state of a row where it stands."""
        _, points = row.batch.copied(row.at, offset=row.position, copying=self._core.pager.allocating)
        return self._layout.checkpoint_of(points, row.position, kind)

    def _store(self, row: Row) -> None:
        """Copy what a row evaluated, and the tree lacks, out of its tails into the tree."""
        keys = self._core.allowed(row.clean_keys(), self._namespace)
        checkpoint = None
        if self._layout.has_points and (row.lost is not None or row.position > len(keys)):
            own = [each for each in row.checkpoints if each.offset <= len(keys)]
            if not own:
                return
            checkpoint = max(own, key=lambda each: each.offset)
            keys = keys[: checkpoint.offset]
        elif self._layout.has_points and len(keys) <= row.cached_tokens:
            return
        others = [each for each in row.checkpoints if each.offset < len(keys)]
        self._put(row, keys, checkpoint, self._core.evictor.make_room, "end", others, closing=True)

    def _put(
        self,
        row: Row,
        keys: Keys,
        checkpoint: Checkpoint | None,
        fits: Callable[[int], bool],
        kind: str,
        others: Sequence[Checkpoint] = (),
        *,
        closing: bool = False,
    ) -> bool:
        """Give the tree what it lacks of these keys, which are a row's first; False: there is nothing, or no room.

        Args:
            checkpoint: at their end; None: of this kind it is taken here, where point layers want one.
            closing: the row's own state goes, and what it takes is free.
        """
        core, layout, batch = self._core, self._layout, row.batch
        match = core.states.match(keys, self._namespace)
        start, end = match.offset, len(keys)
        in_place = any(start < high for _, high in row.in_place)  # of that nothing is in the tails
        if not layout.has_points if start == end else in_place:
            return False
        takes = layout.has_points and checkpoint is None
        point_bytes = self._room.point_bytes(end) if takes else 0 if checkpoint is None else checkpoint.nbytes
        is_alone = closing and all(each is None or each is row for each in batch.rows)
        held = batch.nbytes
        freed_bytes = held if is_alone else held // len(batch.rows) if closing else 0
        with core.states.guarded(match.node):
            need = (end - start) * layout.token_bytes + point_bytes - freed_bytes
            if need > 0 and not fits(need):
                if layout.has_points:
                    return False
                end = max(start, end - -(-core.evictor.over_bytes(need) // max(1, layout.token_bytes)))
                if start == end:
                    return False
            spans, points = batch.copied(
                row.at,
                segment_bounds(start, end),
                end if takes else None,
                copying=core.pager.allocating,
                emptying=is_alone,
            )
            if is_alone:
                self._room.booking.book_live(self._room.booking.live_bytes - held)
            found = layout.spans_of(spans, start, end) if start < end else None
            checkpoint = layout.checkpoint_of(points, end, kind) if takes else checkpoint
            core.recorder.put(keys[:end], self._namespace, found, checkpoint, row.request.use, others)
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
