"""GroupRequests: what a Group asks of its PrefixCache: rows are opened like requests, and closed into the tree.

    opening   match -> plan over tree and open rows -> make room in cells and budget -> share -> restore -> Row
    closing   what is evaluated, known, clean and not quarantined -> copied out of the cells, layer by layer -> tree

Invariants, asserted by `check`:

  R1  The account's live bytes are those of the slots and of the bookings, one per open group; the checkpoints that
      sessions and rows hold are what the tree says they are.

A group that vanished without closing leaves its booking behind, which the next request takes back. The lock is held
wherever nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixcache.adapters.snapshots import Checkpoint
from radixcache.cells.causal import CausalCache
from radixcache.cells.layers import GROWTH_CELLS, grown
from radixcache.cells.paging import Piece
from radixcache.errors import BudgetFullError
from radixcache.groups.group import Booking, Group
from radixcache.groups.row import Row
from radixcache.groups.row_plan import RowPlan, among_rows, longest, plan_row
from radixcache.layers.evaluation import NATIVE_ERRORS, LiveStateError
from radixcache.paging.resume import ResumePlan
from radixcache.sessions.requests import Requests
from radixcache.sessions.session import Session
from radixcache.tokens.ids import TokenIds
from radixcache.tree.events import PAGED_IN
from radixcache.tree.radix_tree import Keys, common_length
from radixcache.tree.state_tree import StateNode


@dataclass(slots=True)
class Stored:
    """What of a row is to be stored: the tokens [start, end), and the checkpoint at `end`."""

    row: Row
    keys: Keys
    start: int
    end: int
    with_points: bool
    checkpoint: Checkpoint | None = None
    guarded: StateNode | None = field(default=None, repr=False)


class GroupRequests(Requests):
    """Requests that share one buffer of cells."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._bookings: list[Booking] = []

    def check(self) -> None:
        """Assert R1."""
        held = sum(each.checkpoint_bytes for each in self._slots.paths)
        held += sum(each.checkpoint_bytes for each in self._bookings)
        assert held == self._states.session_checkpoint_bytes, (held, self._states.session_checkpoint_bytes)
        live = sum(each.nbytes for each in self._slots.paths) + sum(each.nbytes for each in self._bookings)
        assert live == self._account.live_bytes, (live, self._account.live_bytes)

    # Groups

    def _open_group(self, capacity: int, namespace: str, priority: int) -> Group:
        group = Group(self, CausalCache(capacity=capacity, caches=self.layout.fresh), namespace, priority)
        self._bookings.append(group.booking)
        return group

    def _abandon_groups(self) -> None:
        """Take back what is booked for groups that vanished without closing, their finalizer interrupted."""
        for booking in [each for each in self._bookings if each.group() is None]:
            self._unbook(booking)

    def _groups(self, namespace: str) -> list[Group]:
        groups = [booking.group() for booking in self._bookings]
        return [group for group in groups if group is not None and group.namespace == namespace]

    def group_measured(self, group: Group) -> None:
        """The cells may have changed: book them, keep the budget."""
        self._book(group)
        self._evictor.make_room()

    def room_in_cells(self, group: Group, tokens: int, cells: int = 0, states: int = 0) -> None:
        """Make room for so many more tokens, or for buffers of so many cells, and for the states of more rows.

        Where nothing else can go, the checkpoints do that the group's rows have taken.

        Raises:
            CacheFullError, BudgetFullError: there is none; nothing but what may go has changed.
        """
        if tokens > 0:
            cells = max(cells, group.causal.room_for(tokens))
        held = group.pager.cells
        wanted = grown(held, cells, group.causal.table.capacity) if cells > held else held
        growth = _growth_bytes(group, wanted, states)
        if self._evictor.over_bytes(growth) and wanted > held:
            wanted = cells if held else min(group.causal.table.capacity, max(cells, GROWTH_CELLS))
            growth = _growth_bytes(group, wanted, states)
        if growth > 0 and not self._has_room(growth):
            if self._evictor.could_fit(growth - group.booking.checkpoint_bytes):
                for row in group.rows:
                    self.drop_checkpoints(group, row, -1)
            if not self._has_room(growth):
                raise BudgetFullError(self._ledger.budget_bytes, self._evictor.fixed_bytes(), growth)
        if wanted > held:
            group.causal.grow(wanted)
            self._book(group)

    def has_bytes_for(self, group: Group, cells: int, states: int = 0) -> bool:
        """Whether buffers of so many cells and so many more states fit the budget, all that is evictable gone."""
        return self._evictor.could_fit(_growth_bytes(group, cells, states))

    def refusal_of(self, group: Group, tokens: int) -> BudgetFullError | None:
        """Why a row of so many tokens would not fit the budget even alone; None: it would, as far as is known."""
        needed_bytes = group.pager.needed_bytes(tokens) + group.pager.state_bytes
        budget_bytes = self._ledger.budget_bytes
        return BudgetFullError(budget_bytes, 0, needed_bytes) if needed_bytes > budget_bytes else None

    def _has_room(self, nbytes: int) -> bool:
        """Evict for so many bytes, but nothing for what cannot fit."""
        return self._evictor.could_fit(nbytes) and self._evictor.make_room(nbytes)

    def finish_group(self, group: Group) -> None:
        """Close all rows of a group, and let go of its cells."""
        try:
            self.finish_rows(group, group.rows, freeing=True)
        finally:
            group.pager.free()
            self._unbook(group.booking)
            self.layout.release()
            self._keep_budget()

    # Rows

    def admit_row(self, group: Group, row_id: int, prompt: TokenIds, keys: Keys, marks: Sequence[int]) -> Row:
        """Open a row: share and restore as much of the prompt as there is."""
        self._abandon_groups()
        use = self._next_use(group.priority)
        try:
            plan, counted = self._plan_with_room(group, keys, len(prompt) - 1)
            try:
                self._restore_row(group, row_id, plan)
            finally:
                self._guard(plan, -1)
        except BaseException as error:
            if isinstance(error, (LiveStateError, *NATIVE_ERRORS)):
                group.is_lost = True
            if row_id in group.causal.sequences:
                group.causal.free(row_id)
            self._book(group)
            raise
        self._states.touch(plan.nodes, counted.source, use)
        if plan.nodes:
            self._evictor.let_go(plan.nodes[-1])
        self._count(counted, len(prompt))
        self._note_request(keys, group.namespace, counted, "begin_many")
        self.group_measured(group)
        return Row(group, row_id, prompt, keys, use, marks, counted, plan.windows_from(group.pager.windows))

    def share_more(self, group: Group, row: Row) -> None:
        """Let a row for which nothing was evaluated yet stand where other rows take its prompt by now."""
        allowed = self._allowed(row.prompt_keys, group.namespace)
        shares = [(other.common(allowed), other) for other in group.rows if other is not row]
        plan = among_rows(self.layout, shares, len(row.prompt) - 1)
        gained = plan.resume - row.position
        if gained <= 0:
            return
        self.room_in_cells(group, 0, states=int(row.position == 0))
        group.causal.free(row.id)
        self._restore_row(group, row.id, plan)
        row.share_up_to(plan.resume, plan.windows_from(group.pager.windows))
        self._hit_tokens += gained
        self._miss_tokens -= gained
        self.group_measured(group)

    def sharable_tokens(self, group: Group, keys: Keys) -> int:
        """How many cells of open rows a prompt would share, were it admitted now; changes nothing."""
        plan, _ = self._plan_row(group, keys, len(keys) - 1, evaluate=False)
        return plan.shared

    def sharable_later(self, group: Group, keys: Keys, row: Row, chunk_tokens: int) -> int:
        """How many it would share at most with one row, at some moment of that one's prefill in such chunks."""
        return row.common_later(self._allowed(keys, group.namespace)[: len(keys) - 1], chunk_tokens)

    def row_checkpoint(self, group: Group, row: Row, kind: str) -> None:
        """Copy and book the point state of a row where it stands, if that fits the budget."""
        if not self._has_room(group.pager.point_bytes(row.id, row.position)):
            return
        row.checkpoints.append(self._pager.allocating(lambda: group.pager.checkpoint(row.id, kind)))
        self._hold(group, row.checkpoints[-1].nbytes)
        self._thin(row.checkpoints, lambda nbytes: self._hold(group, nbytes))

    def drop_checkpoints(self, group: Group, row: Row, limit: int) -> None:
        """Give up a row's checkpoints beyond an offset: the tokens there are others now."""
        gone = [each for each in row.checkpoints if each.offset > limit]
        row.checkpoints = [each for each in row.checkpoints if each.offset <= limit]
        self._hold(group, -sum(each.nbytes for each in gone))

    def finish_rows(self, group: Group, rows: Sequence[Row], freeing: bool = False) -> None:
        """Close rows: store what they evaluated, free their cells; `freeing`: and those of all others."""
        try:
            if rows and not group.is_lost and group.settle():
                self._store(group, rows, freeing)
        finally:
            for row in rows:
                row.is_closed = True
                self._hold(group, -sum(each.nbytes for each in row.checkpoints))
                row.checkpoints.clear()
                group.causal.free(row.id)
                self._record(row.prompt_keys, max(0, row.known_tokens - len(row.prompt)), group.namespace, row.use)
            self._book(group)
            self._keep_budget()

    # What sessions ask

    def quarantine(self, session: Session, length: int, start: int | None) -> int:
        """Also for the rows that were admitted on what is quarantined: none of it is stored or shared again."""
        start = super().quarantine(session, length, start)
        keys = session.prompt_keys[:length]
        for group in self._groups(session.namespace):
            for row in group.rows:
                if min(row.cached_tokens, common_length(row.prompt_keys, keys)) > start:
                    row.distrust_from(start)
        return start

    # Opening

    def _plan_with_room(self, group: Group, keys: Keys, limit: int) -> tuple[RowPlan, ResumePlan]:
        """Plan a row and make room for it. The nodes that it uses are held; the caller lets them go."""
        plan, counted = self._plan_row(group, keys, limit)
        self._guard(plan, 1)
        try:
            self._room_to_restore(group, plan)
        except BudgetFullError:
            # The tree's copy and the one in cells do not fit together: what is in the way of the request goes.
            self._guard(plan, -1)
            self._room_to_restore(group, plan)
            plan, counted = self._plan_row(group, keys, limit)
            self._guard(plan, 1)
        except BaseException:
            self._guard(plan, -1)
            raise
        return plan, counted

    def _room_to_restore(self, group: Group, plan: RowPlan) -> None:
        self.room_in_cells(group, plan.resume - plan.shared, states=int(plan.resume > 0))

    def _plan_row(self, group: Group, keys: Keys, limit: int, *, evaluate: bool = True) -> tuple[RowPlan, ResumePlan]:
        allowed = self._allowed(keys, group.namespace)
        match = self._states.match(allowed, group.namespace)
        shares = [(row.common(allowed), row) for row in group.rows]
        common, _ = longest(shares)
        behind = [node for node in match.node.path() if node.end > common]
        return plan_row(self.layout, match, self._slots.hidden(behind, None, evaluate=evaluate), shares, limit)

    def _guard(self, plan: RowPlan, change: int) -> None:
        """Hold (+1) or let go (-1) the nodes that a plan uses."""
        if plan.nodes:
            self._states.guard(plan.nodes[-1], change)

    def _restore_row(self, group: Group, row_id: int, plan: RowPlan) -> None:
        """Make the row a sequence that stands at `plan.resume`."""
        causal, pager = group.causal, group.pager
        causal.add(row_id)
        if plan.source is not None and pager.has_states and plan.checkpoint is None:
            causal.copy_prefix(plan.source.id, row_id, plan.shared)
            pager.own_states(row_id)
        elif plan.source is not None:
            causal.share_cells(plan.source.id, row_id, plan.shared)
        for node in plan.nodes:
            start, end = max(node.start, plan.shared), min(node.end, plan.resume)
            if start < end:
                self._page_in_cells(group, row_id, node, start, end)
        if plan.checkpoint is not None:
            pager.restore_points(row_id, plan.checkpoint, plan.resume)

    def _page_in_cells(self, group: Group, row_id: int, node: StateNode, start: int, end: int) -> None:
        """Write the tokens [start, end) of a node into cells of their own."""
        cell = group.causal.take_cells(row_id, end - start)
        offset = start
        while offset < end and self.layout.token_bytes:
            spans = self._pager.allocating(lambda at=offset: self._pager.spans_at(node, at, end))  # type: ignore[misc]
            stop = min(spans.end, end)
            self._states.paged_in_bytes += group.pager.write(spans, offset, stop, cell + offset - start)
            offset = stop
        if self._states.events.is_on:
            nbytes = self.layout.token_bytes * (end - start)
            self._states.events.emit(PAGED_IN, node.namespace, start, end, nbytes, {})

    # Closing

    def _store(self, group: Group, rows: Sequence[Row], freeing: bool) -> None:
        """Copy what these rows evaluated, and the tree lacks, out of the cells into the tree."""
        wanted = [each for row in rows if (each := self._storable(group, row)) is not None]
        try:
            for each in wanted:
                node = self._states.match(each.keys, group.namespace).node
                if not node.is_root:
                    self._states.guard(node, 1)
                    each.guarded = node
            kept = self._fitting(group, wanted, freeing)
            pieces = [Piece(each.row.id, each.start, each.end, each.with_points) for each in kept]
            found = group.pager.read(pieces, self._pager.allocating, freeing)
            self._book(group)
            for each, (spans, checkpoint) in zip(kept, found, strict=True):
                self._recorder.put(
                    each.keys[: each.end],
                    group.namespace,
                    spans if each.start < each.end else None,
                    checkpoint or each.checkpoint,
                    each.row.use,
                    [other for other in each.row.checkpoints if other.offset < each.end],
                )
        finally:
            for each in wanted:
                if each.guarded is not None:
                    self._states.guard(each.guarded, -1)
            for each in wanted:
                if each.guarded is not None and each.guarded.payload is not None:
                    self._evictor.let_go(each.guarded)

    def _storable(self, group: Group, row: Row) -> Stored | None:
        """What of a row may become a stored prefix; None: nothing that the tree does not hold."""
        keys = self._allowed(row.clean_keys(), group.namespace)
        end, checkpoint, with_points = len(keys), None, False
        if self.layout.has_points:
            with_points = row.has_state_at(end)
            if not with_points:
                held = [each for each in row.checkpoints if each.offset <= end]
                if not held:
                    return None
                checkpoint = max(held, key=lambda each: each.offset)
                end = checkpoint.offset
        start = self._states.match(keys[:end], group.namespace).offset
        if end == 0 or (start == end and (end <= row.cached_tokens or not self.layout.has_points)):
            return None
        return Stored(row, keys[:end], start, end, with_points, checkpoint)

    def _fitting(self, group: Group, wanted: list[Stored], freeing: bool) -> list[Stored]:
        """Make room for what is wanted; where it does not fit, for as much of it as does."""
        kept = list(wanted)
        while kept:
            self._start_behind_each_other(kept, group.namespace)
            kept = [each for each in kept if each.start < each.end or self.layout.has_points]
            need = sum((each.end - each.start) * self.layout.token_bytes for each in kept)
            need += sum(group.pager.point_bytes(each.row.id, each.end) for each in kept if each.with_points)
            need -= group.nbytes if freeing else 0
            if need <= 0 or self._evictor.make_room(need):
                break
            if self.layout.has_points:
                kept.pop()
                continue
            last = kept[-1]
            tokens = -(-self._evictor.over_bytes(need) // max(1, self.layout.token_bytes))
            last.end = max(last.start, last.end - tokens)
        return kept

    def _start_behind_each_other(self, kept: list[Stored], namespace: str) -> None:
        """Let each begin where the tree will end once those before it are stored."""
        for index, each in enumerate(kept):
            keys = each.keys[: each.end]
            each.start = self._states.match(keys, namespace).offset
            for other in kept[:index]:
                each.start = max(each.start, common_length(other.keys[: other.end], keys))

    # Booking

    def _book(self, group: Group) -> None:
        if group.booking in self._bookings:
            held = group.nbytes
            self._account.add_live(held - group.booking.nbytes)
            group.booking.nbytes = held

    def _hold(self, group: Group, change_bytes: int) -> None:
        """Book checkpoints that a row holds and the tree does not have yet."""
        if group.booking in self._bookings:
            self._states.hold_checkpoint(change_bytes)
            group.booking.checkpoint_bytes += change_bytes

    def _unbook(self, booking: Booking) -> None:
        if booking in self._bookings:
            self._account.add_live(-booking.nbytes)
            self._states.hold_checkpoint(-booking.checkpoint_bytes)
            self._bookings.remove(booking)


def _growth_bytes(group: Group, cells: int, states: int) -> int:
    """Bytes that its buffers take more once they have so many cells, and so many more rows their states."""
    pager = group.pager
    return pager.needed_bytes(cells) - pager.buffer_bytes + states * pager.state_bytes
