"""CellBudget: the cells of one group, and what they and its rows' checkpoints have of the byte budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixcache.cells.causal import CausalCache
from radixcache.cells.layers import GROWTH_CELLS, grown
from radixcache.cells.paging import CellPager
from radixcache.errors import BudgetFullError
from radixcache.groups.row import Row
from radixcache.layers.arrays import ArrayLayout
from radixcache.paging.booking import Booking
from radixcache.paging.core import Core


class CellBudget:
    """Room for the rows of one group. The lock is held wherever nothing else is said.

    Attributes:
        causal, pager: the cells, and copies in and out of them.
        booking: what they have on the account.
    """

    def __init__(self, core: Core, capacity: int) -> None:
        assert isinstance(core.layout, ArrayLayout), core.layout
        self.core = core
        self.causal = CausalCache(capacity=capacity, caches=core.layout.fresh)
        self.pager = CellPager(core.layout, self.causal)
        self.booking = Booking(core.states)

    @property
    def is_booked(self) -> bool:
        """Whether what is booked is what there is; takes no lock."""
        return self.booking.live_bytes == self.causal.nbytes

    def measured(self) -> None:
        """The cells may have changed: book them, keep the budget."""
        self.book()
        self.core.evictor.make_room()

    def book(self) -> None:
        """Book what the cells hold now."""
        self.booking.book_live(self.causal.nbytes)

    def make_room(self, rows: Sequence[Row], tokens: int, cells: int = 0, states: int = 0) -> None:
        """Make room for so many more tokens, or for buffers of so many cells, and for the states of more rows.

        Where nothing else can go, the checkpoints do that these rows have taken.

        Raises:
            CacheFullError, BudgetFullError: there is none; nothing but what may go has changed.
        """
        if tokens > 0:
            cells = max(cells, self.causal.room_for(tokens))
        held, evictor = self.pager.cells, self.core.evictor
        wanted = grown(held, cells, self.causal.table.capacity) if cells > held else held
        growth = self._growth_bytes(wanted, states)
        if evictor.over_bytes(growth) and wanted > held:
            wanted = cells if held else min(self.causal.table.capacity, max(cells, GROWTH_CELLS))
            growth = self._growth_bytes(wanted, states)
        if growth > 0 and not evictor.find_room(growth):
            if evictor.could_fit(growth - self.booking.checkpoint_bytes):
                for row in rows:
                    self.drop_checkpoints(row, -1)
            if not evictor.find_room(growth):
                raise BudgetFullError(self.core.ledger.budget_bytes, evictor.fixed_bytes(), growth)
        if wanted > held:
            self.causal.grow(wanted)
            self.book()

    def needs_room(self, tokens: int, cells: int, states: int) -> bool:
        """Whether `make_room` has anything to do; takes no lock."""
        table, held = self.causal.table, self.pager.cells
        is_grown = held == table.capacity and tokens <= held - table.used
        return bool(cells or (states and self.pager.has_states) or not (is_grown or table.has_run(tokens, held)))

    def has_bytes_for(self, cells: int, states: int = 0) -> bool:
        """Whether buffers of so many cells and so many more states fit the budget, all that is evictable gone."""
        return self.core.evictor.could_fit(self._growth_bytes(cells, states))

    def refusal_of(self, tokens: int) -> BudgetFullError | None:
        """Why a row of so many tokens would not fit the budget even alone; None: it would, as far as is known."""
        needed_bytes = self.pager.needed_bytes(tokens) + self.pager.state_bytes
        budget_bytes = self.core.ledger.budget_bytes
        return BudgetFullError(budget_bytes, 0, needed_bytes) if needed_bytes > budget_bytes else None

    def take_checkpoint(self, row: Row, kind: str) -> None:
        """Copy and book the point state of a row where it stands, if that fits the budget."""
        if self.core.evictor.find_room(self.pager.point_bytes(row.id, row.position)):
            row.checkpoints.append(self.core.pager.allocating(lambda: self.pager.checkpoint(row.id, kind)))
            self.core.thin(row.checkpoints, self.booking)

    def drop_checkpoints(self, row: Row, limit: int) -> None:
        """Give up a row's checkpoints beyond an offset."""
        gone = [each for each in row.checkpoints if each.offset > limit]
        row.checkpoints = [each for each in row.checkpoints if each.offset <= limit]
        self.booking.book_checkpoint(-sum(each.nbytes for each in gone))

    def free(self, close_rows: Callable[[], None]) -> None:
        """Close the rows, and let go of the cells."""
        try:
            close_rows()
        finally:
            self.pager.free()
            self.core.end_booking(self.booking)
            self.core.layout.release()
            self.core.keep_budget()

    def _growth_bytes(self, cells: int, states: int) -> int:
        """Bytes that its buffers take more once they have so many cells, and so many more rows their states."""
        return self.pager.needed_bytes(cells) - self.pager.buffer_bytes + states * self.pager.state_bytes
