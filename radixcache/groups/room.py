"""Room: what the rows of one group have of the byte budget, and are going to have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixcache.core import Core
from radixcache.errors import BudgetFullError, CacheFullError
from radixcache.groups.batch import Batch
from radixcache.groups.row import Row
from radixcache.layers.layout import Layout
from radixcache.ledger import Booking
from radixcache.paging.evictor import Evictor
from radixcache.paging.pager import Pager
from radixcache.tree.state_tree import StateTree


class Room:
    """Tokens and bytes of one group. The lock is held wherever nothing else is said.

    Attributes:
        capacity: tokens of all rows together, one that several share counted once.
        booking: what the rows have on the account.
    """

    def __init__(
        self,
        core: Core,
        states: StateTree,
        evictor: Evictor,
        pager: Pager,
        layout: Layout,
        booking: Booking,
        capacity: int,
    ) -> None:
        self.core, self.states, self.evictor, self.pager = core, states, evictor, pager
        self.layout = layout
        self.capacity = capacity
        self.booking = booking
        #: The open rows, by id, in order of admission.
        self.rows: dict[int, Row] = {}
        #: The most tokens that a leaf's state depends on: a window's; 0: it does not grow; None: it is no point state.
        self._windows = [
            getattr(leaf, "max_size", 0) if adapter.is_point else None
            for leaf, adapter in layout.leaves(layout.fresh())
        ]

    def used_tokens(self, *more: Row) -> int:
        """Tokens that the rows, and some more, hold, one that several share counted once; takes no lock."""
        rows = [*self.rows.values(), *more]
        ends = {id(row.node): row.node for row in rows if row.node is not None}
        nodes = {id(node): node for end in ends.values() for node in end.path()}
        return sum(node.end - node.start for node in nodes.values()) + sum(row.position - row.path_end for row in rows)

    def require_tokens(self, wanted: int) -> None:
        """Raise CacheFullError where so many tokens more are beyond the capacity; takes no lock."""
        used = self.used_tokens()
        if used + wanted > self.capacity:
            raise CacheFullError(self.capacity, used, None, wanted)

    def rows_of(self, namespace: str) -> list[Row]:
        """The open rows that may share with each other; takes no lock."""
        return [row for row in self.rows.values() if row.request.namespace == namespace]

    def coming(self, rows: Sequence[Row], columns: int) -> int:
        """How many rows besides these will have no more columns than so many once their prompts are through."""
        others = [row for row in self.rows.values() if row not in rows and row.lost is None]
        return sum(row.batch.columns.lengths[row.at] + row.prompt_left <= columns for row in others)

    # Bytes

    def point_bytes(self, position: int) -> int:
        """Bytes that the layers without tails hold of a row that stands at `position`; 0 before the first pass."""
        nbytes = 0
        for leaf, window in enumerate(self._windows):
            if window is not None:
                nbytes += self.layout.leaf_bytes(leaf) * (min(window, position) if window else 1)
        return nbytes

    def grows_at(self, position: int) -> bool:
        """Whether the layers without tails take more bytes behind this position."""
        return position == 0 or any(window is not None and position < window for window in self._windows)

    def bytes_of(self, rows: int, columns: int, position: int) -> int:
        """Bytes of a batch of so many rows whose tails have room for so many columns, the furthest at `position`."""
        return rows * (columns * self.layout.token_bytes + self.point_bytes(position))

    def has_bytes_for(self, tails: Sequence[int], position: int, shared: int) -> bool:
        """Whether rows with so many tokens in their tails, the furthest at `position`, fit the budget.

        Each for itself: where they do not fit side by side, padded to the longest, they step one by one.

        Args:
            shared: tokens that will be in the tree for them, and are not kept there yet.
        """
        nbytes = sum(self.bytes_of(1, tail + 1, position) for tail in tails)
        if shared:
            nbytes += self.bytes_of(1, shared, shared)
        return self.evictor.could_fit(nbytes - self.booking.live_bytes)

    def refusal_of(self, tokens: int) -> BudgetFullError | None:
        """Why a row of so many tokens would not fit the budget even alone; None: it would, as far as is known."""
        needed_bytes, budget_bytes = self.bytes_of(1, tokens, tokens), self.booking.budget_bytes
        return BudgetFullError(budget_bytes, 0, needed_bytes) if needed_bytes > budget_bytes else None

    def ask(self, nbytes: Callable[[int], int], spare: int, freed_bytes: int = 0) -> int:
        """Make room for what takes `nbytes(columns)` with so many columns to spare; returns how many there are to be.

        With none to spare, and without the checkpoints that rows have taken, where nothing else can go. What it takes
        is booked; `book` says later what it came to.

        Raises:
            BudgetFullError: there is no room; nothing but what may go has changed.
        """
        evictor = self.evictor
        generous = nbytes(spare) - freed_bytes
        if not evictor.over_bytes(generous):
            self.booking.book_live(self.booking.live_bytes + max(0, generous))
            return spare
        need = nbytes(0) - freed_bytes
        if need > 0 and not evictor.find_room(need):
            if evictor.could_fit(need - self.booking.checkpoint_bytes):
                for row in self.rows.values():
                    row.own.clear()
            if not evictor.find_room(need):
                raise BudgetFullError(self.booking.budget_bytes, evictor.fixed_bytes(), need)
        self.booking.book_live(self.booking.live_bytes + max(0, need))
        return 0

    def batches(self) -> list[Batch]:
        """The batches that rows are in."""
        return list({id(row.batch): row.batch for row in self.rows.values()}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tails and of the rows' own states; what rows read in place is the tree's, but for orphans."""
        orphans = {id(spans): spans for row in self.rows.values() for spans in row.orphans}
        return sum(batch.nbytes for batch in self.batches()) + sum(spans.nbytes for spans in orphans.values())

    def book(self) -> None:
        """Book what the rows hold now, keep the budget."""
        self.booking.book_live(self.nbytes)
        self.evictor.make_room()

    def measure(self) -> None:
        """Book what the rows have come to hold, if that is not what they held; takes the lock only then."""
        if self.booking.live_bytes != self.nbytes:
            with self.core.lock:
                self.book()
