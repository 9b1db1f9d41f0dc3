"""Sharing: what the rows of one group take from the tree, and what they give to it. Callers hold the cache's lock.

restore    open rows give the tree what they have of a new row's prompt; then the new row guards the path of its prefix
place      before the first forward pass: long spans are read in place, short ones are copied into the row's tail. A
           quantized span that is read in place also has a plain copy in the tree, until the last reader leaves
close      the tree gets all tokens of a row that are known, clean and not quarantined
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import mlx.core as mx

from radixcache.adapters.contract import Checkpoint, Spans
from radixcache.adapters.span import segment_bounds
from radixcache.groups.attention import Pair
from radixcache.groups.batch import Batch, Columns
from radixcache.groups.row import Room, Row
from radixcache.layers.layout import NATIVE_ERRORS, LiveStateError
from radixcache.paging.resume import ResumePlan
from radixcache.tokens import Keys, common_length
from radixcache.tree.state_tree import StateNode

#: Spans of at least this many bytes per layer are read in place, as segments. On a CPU, two rows that share such a span
#: save about what a segment costs (benchmarks.bench_decode). The value for a GPU is an estimate: what a GPU reads at
#: 1 TB/s while it starts the kernels of one more segment, about 5 us each.
CPU_BYTES = 400 << 10
GPU_BYTES = 4 << 20


class Sharing:
    """What rows of one group share. Spans of at least `segment_bytes` per layer are read in place; None: default."""

    def __init__(self, room: Room, segment_bytes: int | None) -> None:
        self._room = room
        self._core, self._states, self._evictor, self._pager = room.core, room.states, room.evictor, room.pager
        self._layout = room.layout
        default = CPU_BYTES if mx.default_device() == mx.cpu else GPU_BYTES
        self._segment_bytes = default if segment_bytes is None else segment_bytes

    def is_long(self, tokens: int) -> bool:
        """Whether a span of `tokens` tokens is read in place, as a segment."""
        layers = self._room.tail_layers
        return layers > 0 and tokens * self._layout.token_bytes >= self._segment_bytes * layers

    def restore(self, row: Row) -> None:
        """Resume a new row after the prompt tokens that the tree or open rows have; errors as in Group.admit."""
        core, request = self._core, row.request
        self._offer_from_others(row)
        plan = self._stand(row)
        self._states.touch(row.path(), plan.source, request.use)
        core.count_request(request, plan, "begin_many")
        core.evictor.tidy_unpinned()
        if self._layout.has_points:
            for other in self._room.rows_of(request.namespace):
                # Take a checkpoint where two prompts diverge: it cannot be made later.
                common = common_length(other.request.keys, request.keys)
                if other.position < common < len(other.prompt):
                    other.stops.setdefault(common, "branch")

    def restore_more(self, row: Row) -> None:
        """Move a row that has not started to the longest prefix that other rows have computed."""
        self._offer_from_others(row)
        before = row.position
        if self._resume_of(row) > before:
            self._stand(row)
            self._core.count_more_hits(row.position - before)

    def sharable_tokens(self, keys: Keys, namespace: str) -> int:
        """How many tokens of a prompt would be shared with the rows if it were admitted now; changes nothing."""
        rows, limit = self._room.rows_of(namespace), len(keys) - 1
        match, _, plan = self._core.lookup(keys, namespace, limit, evaluate=False)
        offered, other = max(self._reaches(rows, keys, namespace), key=lambda each: each[0], default=(0, None))
        if other is not None and offered > plan.resume:
            start = min(match.offset, offered)
            plain = self._in_place_from(other, keys[:offered]) is not None
            end = self._end_with_room(other, start, offered, self._would_fit, plain=plain)
            if end is not None:
                return min(end, limit)
        # Tokens that others stored after a row began are also in the row's tail, so they count twice.
        guarded = {id(node) for row in rows for node in row.path()}
        return min(plan.resume, max((node.end for node in match.path if id(node) in guarded), default=0))

    def bytes_with(self, ends: Mapping[Row, int], keys: Keys, end: int, namespace: str) -> int:
        """Bytes outside the tree of the open rows at their ends, and of a new row as in Group.has_bytes_for."""
        room, shared = self._room, self.sharable_tokens(keys, namespace)
        match = self._states.match(self._core.before_quarantine(keys, namespace), namespace)
        in_use = max((node.end for node in match.path if node.payload.readers), default=0)
        tails = [stop - row.batch.columns.in_place[row.at] for row, stop in ends.items()]
        tails.append(end - shared if self.is_long(shared) else end)
        furthest, more = max([*ends.values(), end]), max(0, shared - in_use)
        # Count each row alone: rows that do not fit side by side step one by one. `more` tokens go into the tree.
        nbytes = sum(room.bytes_of(1, tail + 1, furthest) for tail in tails)
        nbytes += room.bytes_of(1, more, more) if more else 0
        nbytes += self.plain_bytes_to_come([match.path, *(row.path() for row in room.rows.values())])
        if self._layout.stored_bits:
            nbytes += more * self._layout.stored_token_bytes  # beside the plain copy that rows read
        return nbytes

    def _would_fit(self, nbytes: int) -> bool:
        return self._core.budget.fits(nbytes, who="eviction").is_ok

    def plain_bytes_to_come(self, paths: Sequence[Sequence[StateNode]]) -> int:
        """Bytes of the plain copies that rows will read, of long quantized nodes on these paths."""
        nodes = {id(node): node for path in paths for node in path if node.payload.readers}
        return sum(self._plain_bytes(node) for node in nodes.values() if self.is_long(node.end - node.start))

    def _plain_bytes(self, node: StateNode) -> int:
        """Bytes of the plain copy that the first reader makes of a node's spans; 0: the spans are plain."""
        spans, nbytes = node.payload.spans, (node.end - node.start) * self._layout.token_bytes
        return nbytes if spans is not None and spans.nbytes < nbytes else 0

    def place(self, row: Row, in_segments: bool) -> None:
        """Copy a row's spans into its tails, except (`in_segments`) long ones. RequestTooLargeError: no memory."""
        row.in_segments = in_segments
        if row.node is None:
            return
        path = row.path()
        long = [node for node in path if in_segments and self.is_long(node.end - node.start)]
        short = [node for node in path if node not in long]
        away = sum(node.end - node.start for node in long)
        columns = Columns([row.position - away], [away])
        token_bytes = self._layout.token_bytes
        least = columns.end + 1
        plain_bytes = sum(map(self._plain_bytes, long))
        columns.capacity = least + self._room.ask(
            lambda more: (least + more) * token_bytes + plain_bytes, row.prompt_left
        )
        booking = self._room.booking
        for node in long:
            booking.book_live(booking.live_bytes - self._plain_bytes(node))  # now the copy counts for the tree
            self._pager.allocating(self._open, node)
        pieces = [spans for node in short if (spans := node.payload.spans) is not None]
        row.batch = self._restoring(lambda: row.batch.with_tails(columns, lambda leaf: _pieces(pieces, leaf)))
        row.in_place = [(node.start, node.end) for node in long]
        self._states.paged_in_bytes += columns.end * token_bytes
        for node in short:
            self._states.events.paged_in(node, node.start, node.end, token_bytes)

    def orphan(self, row: Row, start: int) -> None:
        """Let a row keep the spans that it reads in place after an offset, before the tree drops them."""
        gone = [node for node in row.path() if node.end > start]
        reads = {id(spans) for spans in row.reads()}
        row.orphans = [s for node in gone if (s := node.payload.spans) is not None and id(s) in reads] + row.orphans
        row.in_place = [(low, min(high, gone[0].start)) for low, high in row.in_place if low < gone[0].start]
        self._room.retreat(row, start)

    def _resume_of(self, row: Row) -> int:
        """Where a session with the row's prompt would resume; changes nothing."""
        request = row.request
        return self._core.lookup(request.keys, request.namespace, request.limit, evaluate=False).plan.resume

    def _stand(self, row: Row) -> ResumePlan:
        """Move a row to where it resumes, guard that path and restore point layers; or raise and change nothing."""
        request, room = row.request, self._room
        match, _, plan = self._core.lookup(request.keys, request.namespace, request.limit)
        with self._states.guarding(match.node):
            node = next(reversed(self._pager.path_to(plan)), None)
            if node is not None:
                self._states.read(node, 1)
        try:
            batch = Batch.of_one(self._layout.fresh(), row, plan.resume)
            room.require_tokens(room.used_tokens(node) - room.used_tokens())
            for each in [] if node is None else node.path():
                if each.payload.spans is None:
                    self._pager.page_out_live(each)
            if self._layout.has_points and node is not None:
                room.ask(lambda _: room.point_bytes(plan.resume), 0)
                points = batch.points(0, self._layout.fresh())
                self._restoring(lambda: self._layout.restore_points(points, plan.checkpoint, plan.resume, plan.windows))
                if node.payload.checkpoint is None:
                    self._pager.add_checkpoint(node, points, "branch", request.use)
        except BaseException:
            self._release(node)
            raise
        before, row.node, row.batch = row.node, node, batch
        self._release(before)
        row.in_place = [(0, plan.resume)] if plan.resume else []
        row.cached_tokens, row.matched_tokens, row.reason = plan.resume, plan.matched, plan.reason
        row.remaining = row.prompt[plan.resume :].copy()
        return plan

    def _release(self, node: StateNode | None) -> None:
        if node is not None and node.payload is not None:
            self._states.read(node, -1)
            self._evictor.tidy(node)

    def _restoring(self, make: Callable[[], Any]) -> Any:
        try:
            return self._pager.allocating(make)
        except NATIVE_ERRORS as error:
            raise LiveStateError(f"restoring a row failed: {error}") from error

    def close(self, rows: Sequence[Row], is_intact: bool) -> None:
        """Store what these rows evaluated, if it is intact, and release their state. Errors do not stop other rows."""
        with ExitStack() as stack:
            for row in reversed(rows):
                stack.callback(self._close, row, is_intact)

    def _close(self, row: Row, is_intact: bool) -> None:
        try:
            if is_intact:
                self._store(row)
        finally:
            row.batch.rows[row.at] = None
            del row.batch
            row.is_closed = True
            node, row.node, row.orphans = row.node, None, []
            row.own.clear()
            self._release(node)
            self._room.rows.pop(row.id, None)
            if self._core.budget.over_bytes():  # what this row held is room for the next one
                self._room.booking.book_live(self._room.nbytes)
            self._core.write_trace(row.request, max(0, row.known_tokens - len(row.prompt)))

    def _store(self, row: Row) -> None:
        """Copy what a row evaluated, and the tree lacks, out of its tails into the tree."""
        keys = self._core.before_quarantine(row.clean_keys(), row.request.namespace)
        self._core.draft_index.add(row.known, keys, row.matched_tokens, row.request.namespace)
        if self._layout.has_points:
            if row.lost is None and row.position == len(keys) <= row.cached_tokens:
                return
            keys = keys[: self._end(row, len(keys))]
        put = partial(self._put, row, has_room=self._evictor.make_room, kind="end", closing=True)
        own = row.own.checkpoints
        if not put(keys, own) and self._layout.has_points:
            # No room for all of it: up to the last checkpoint that fits.
            ends = sorted({each.offset for each in own if each.offset < len(keys)}, reverse=True)
            any(put(keys[:end], [each for each in own if each.offset <= end]) for end in ends)
        self._core.write_store(keys, row.request, row.cached_tokens)

    def _reaches(self, rows: Sequence[Row], keys: Keys, namespace: str) -> list[tuple[int, Row]]:
        """How many tokens of a prompt's keys each row can give to the tree so that a request can resume there."""
        allowed = self._core.before_quarantine(keys, namespace)
        if not self._layout.has_points:
            return [(row.common(allowed), row) for row in rows]
        # No request resumes after its last token, so a checkpoint there is worth less than an earlier one.
        commons = [(row.common(allowed[: len(keys) - 1]), row) for row in rows]
        return [(common and self._end(row, common), row) for common, row in commons]

    def _end(self, row: Row, limit: int) -> int:
        """The deepest offset at or below `limit` at which the row has the state of all point layers."""
        is_there = row.lost is None and row.batch.rows[row.at] is row
        if is_there and row.position == limit:
            return limit
        held = self._layout.held(self._room.points_of(row)) if is_there else {}
        return self._pager.reach(row.path(), row.own, limit, held)[0]

    def _offer_from_others(self, row: Row) -> None:
        """Give the tree what it lacks of a row's prompt, from the other row that has most of it."""
        request = row.request
        others = [other for other in self._room.rows_of(request.namespace) if other is not row]
        reaches = self._reaches(others, request.keys, request.namespace)
        most, other = max(reaches, key=lambda each: each[0], default=(0, None))
        if other is not None and most > self._resume_of(row):
            self._offer(other, request.keys[:most])

    def _offer(self, row: Row, keys: Keys) -> None:
        """Give the tree what a row has of these keys, if there is room. The row then reads long spans in place."""
        end = self._end(row, len(keys)) if self._layout.has_points else len(keys)
        known = row.clean_keys()[:end]
        # Other checkpoints stay with the row, which can drop them; checkpoints of windows alone cost nothing.
        offsets = (end,) if self._layout.has_states else range(end + 1)
        given = [each for each in row.own.checkpoints if each.offset in offsets]
        first = self._in_place_from(row, known)
        plain = first is not None  # the row keeps exact values, not quantized ones
        if len(known) < end or not self._put(row, known, given, self._evictor.find_room, "branch", plain=plain):
            return
        ids = set(map(id, given))
        row.own.drop(lambda each: id(each) in ids)
        row.own.cut(end, row.position)
        if end <= row.path_end:
            return
        self._room.stand(row, self._states.match(known, row.request.namespace).node)
        if first is not None and self.is_long(row.path_end - first):
            self._leave_in_place(row, first, row.path_end)

    def _in_place_from(self, row: Row, keys: Keys) -> int | None:
        """The offset from which a row can read these keys in place, once the tree has them; None: it keeps its copy.

        The row keeps tokens that the tree has from others only quantized, or live, where they may be overwritten.
        """
        match = self._states.match(keys, row.request.namespace)
        behind = (node for node in match.path if node.end > row.path_end)
        others = (node for node in behind if not self._layout.is_plain(node.payload.spans))
        first = max((min(node.end, match.offset) for node in others), default=row.path_end)
        return first if row.in_segments and self.is_long(len(keys) - first) and not row.orphans else None

    def _put(
        self,
        row: Row,
        keys: Keys,
        checkpoints: Sequence[Checkpoint],
        has_room: Callable[[int], bool],
        kind: str,
        *,
        closing: bool = False,
        plain: bool = False,
    ) -> bool:
        """Give the tree what it lacks of a row's first keys, with checkpoints of the row. False: nothing, or no room.

        `kind`: of the checkpoint at the end, if point layers need one. `closing` releases the row's own state.
        `plain`: the row will read these tokens in place.
        """
        core, layout, batch = self._core, self._layout, row.batch
        match = self._states.match(keys, row.request.namespace)
        start, end = match.offset, len(keys)
        is_alone = closing and all(each is None or each is row for each in batch.rows)
        held = batch.nbytes
        freed_bytes = held if is_alone else 0  # a batch with other rows frees nothing
        with self._states.guarding(match.node):
            fits = self._end_with_room(row, start, end, has_room, plain=plain, freed_bytes=freed_bytes)
            if fits is None:
                return False
            end = fits
            stored = [*checkpoints]
            if self._takes_checkpoint(row, end):
                # A node that ends after the match has the windows of another prompt.
                path = [each for each in match.path if each.end <= start]
                core.pager.capture(row.own, path, self._room.points_of(row), end)
                leaves = batch.copy_points(row.at, end, self._pager.allocating, emptying=is_alone)
                stored.append(layout.checkpoint_of(leaves, end, kind))
            bounds = segment_bounds(start, end)
            form = layout.at_rest_beside if plain else layout.at_rest
            spans = batch.copy_tails(row.at, bounds, self._pager.allocating, form, emptying=is_alone)
            if is_alone:
                self._room.booking.book_live(self._room.booking.live_bytes - held + batch.nbytes)
            found = layout.spans_of(spans, start, end) if start < end else None
            windows = row.own.windows
            if closing:
                row.own.clear()  # what is in the tree is booked there
            self._pager.put(keys[:end], row.request.namespace, found, None, row.request.use, windows, stored)
        return True

    def _takes_checkpoint(self, row: Row, end: int) -> bool:
        """Whether the tree gets a copy of a row's point layers at `end`, where they are now."""
        has_states = self._layout.has_states
        return self._layout.has_points and row.lost is None and (row.position == end or not has_states)

    def _end_with_room(
        self, row: Row, start: int, end: int, has_room: Callable[[int], bool], *, plain: bool, freed_bytes: int = 0
    ) -> int | None:
        """The end of the part of a row's tokens [start, end) that fits in the tree; None: nothing, or no room."""
        layout = self._layout
        in_place = any(start < high for _, high in row.in_place)  # then some tokens are not in the tails
        if not layout.has_points if start == end else in_place:
            return None
        token_bytes = layout.stored_token_bytes + (layout.token_bytes if plain and layout.stored_bits else 0)
        need = (end - start) * token_bytes - freed_bytes
        need += self._room.point_bytes(end) if self._takes_checkpoint(row, end) else 0
        if need <= 0 or has_room(need):
            return end
        if not layout.has_points:
            end -= -(-self._core.budget.over_bytes(need) // max(1, token_bytes))
        return end if not layout.has_points and end > start else None

    def _leave_in_place(self, row: Row, start: int, end: int) -> None:
        """Remove a row's tokens [start, end) from the tails: the tree has them now, and the row reads them in place."""
        row.leave_others()
        batch, away, length = row.batch, row.batch.columns.in_place[0], row.tail_tokens
        first, last = start - away, end - away
        columns = Columns([length - (last - first)], [away + last - first], batch.columns.capacity - (last - first))

        def pieces(leaf: int) -> list[Pair]:
            tail = batch.leaves[leaf]
            return [] if tail.empty() else [tail.columns_of(0, 0, first), tail.columns_of(0, last, length)]

        for node in row.path():
            if start <= node.start:
                self._open(node)
        row.batch = batch.with_tails(columns, pieces)
        row.in_place.append((start, end))

    def _open(self, node: StateNode) -> None:
        """Join the spans of each leaf into one plain segment, leaf by leaf, so that at most one leaf is held twice."""
        if node.payload.spans is not None:
            spans = self._layout.with_plain(node.payload.spans)
            self._states.set_spans(node, spans)
            for snapshot in spans.leaves:
                if snapshot is not None:
                    snapshot.join()


def _pieces(spans: Sequence[Spans], leaf: int) -> list[Pair]:
    """One layer's keys and values of these spans, in order."""
    snapshots = [(each, each.leaves[leaf]) for each in spans]
    return [pair for each, its in snapshots if its is not None for _, _, pair in its.parts(each.start, each.end)]
