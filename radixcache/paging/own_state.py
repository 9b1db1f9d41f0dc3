"""OwnState: what one request has kept on its way, and the tree does not have yet.

checkpoints     at the offsets where others may want to resume
windows         keys and values of tokens before they leave the windows: those that the checkpoints need, each once, and
                as long as there is room those of all tokens of the prompt

Booking: what one live path, or one group of rows, has on the account beside the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from radixcache.adapters.contract import Checkpoint, Range, Spans, Window, missing, tokens_in, union
from radixcache.layers.layout import Layout
from radixcache.tokens import Keys
from radixcache.tree.entries import is_dear
from radixcache.tree.state_tree import StateTree


class Owner(Protocol):
    """A group, as far as the core has to know it."""

    def distrust(self, keys: Keys, start: int, namespace: str) -> None:
        """What begins with these keys was found wrong from offset `start` on: nothing of that is stored or shared."""

    def abandon(self) -> None:
        """The cache is about to close: give all state back, and store nothing."""


class Booking:
    """Bytes held, as they were last told.

    Attributes:
        live_bytes: buffers.
        checkpoint_bytes: checkpoints that requests took and the tree does not have yet.
        second_bytes: the state of a cold run that verifies a request.
    """

    def __init__(self, states: StateTree) -> None:
        self._states = states
        self.live_bytes = self.checkpoint_bytes = self.second_bytes = 0
        self._is_over = False

    @property
    def budget_bytes(self) -> int:
        """What all that is held may take."""
        return self._states.account.ledger.budget_bytes

    @property
    def amounts(self) -> tuple[int, int, int]:
        """Bytes of buffers, checkpoints and second state."""
        return self.live_bytes, self.checkpoint_bytes, self.second_bytes

    def book_live(self, nbytes: int) -> None:
        """The buffers hold so many bytes now."""
        nbytes = 0 if self._is_over else nbytes
        if nbytes != self.live_bytes:
            self._states.account.add_live(nbytes - self.live_bytes)
            self.live_bytes = nbytes

    def book_checkpoint(self, change_bytes: int) -> None:
        """The request's own checkpoints hold so many bytes more."""
        if change_bytes and not self._is_over:
            self.checkpoint_bytes += change_bytes
            self._states.book_checkpoints(change_bytes)

    def book_second(self, nbytes: int) -> None:
        """The cold run's state holds so many bytes now."""
        if nbytes != self.second_bytes:
            self._states.account.add_second(nbytes - self.second_bytes)
            self.second_bytes = nbytes

    def end_request(self) -> None:
        """Nothing but the buffers is held any more."""
        self.book_checkpoint(-self.checkpoint_bytes)
        self.book_second(0)

    def end(self) -> None:
        """Nothing is held any more, whatever is told later."""
        self.book_live(0)
        self.end_request()
        self._is_over = True


class OwnState:
    """Checkpoints, and tokens of windows, in order of their offsets; booked as long as they are here.

    Attributes:
        start: where it begins: what is in front of it the tree has.
        prompt_tokens: where the request's prompt ends.
        pending: from which token on too few have come by to be kept; None: none are waiting.
    """

    def __init__(self, layout: Layout, booking: Booking) -> None:
        self._layout = layout
        self._booking = booking
        self._booked_bytes = 0
        # Whether there may be tokens that no checkpoint needs.
        self._has_spare = False
        self.start = self.prompt_tokens = 0
        self.checkpoints: list[Checkpoint] = []
        self.windows: list[Spans] = []
        self.pending: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(each.nbytes for each in self.checkpoints) + sum(each.nbytes for each in self.windows)

    def bytes_at(self, offset: int) -> int:
        """Bytes that the checkpoint at an offset keeps, if there is one here."""
        windows = self._layout.windows
        needed = sum(tokens_in(window.needs(offset)) * self._layout.window_bytes(window) for window in windows)
        return sum(each.nbytes + needed for each in self.checkpoints if each.offset == offset)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was taken."""
        self.checkpoints.append(checkpoint)
        self._book()

    def add_windows(self, spans: Spans, *, is_spare: bool = False) -> None:
        """Tokens were copied out of windows, of which none are here; `is_spare`: no checkpoint may need them."""
        if spans.nbytes:
            self.windows.append(spans)
            self._has_spare |= is_spare
            self._book()

    def drop(self, gone: Callable[[Checkpoint], bool]) -> None:
        """Give up some of the checkpoints; what of windows only they needed stays as long as there is room."""
        self.checkpoints = [each for each in self.checkpoints if not gone(each)]
        self._has_spare = bool(self.windows)
        self._book()

    def cut(self, start: int, end: int) -> None:
        """Give up the tokens that are not in [start, end), and the checkpoints behind `end`."""
        self.pending = None
        self._keep({window: [(start, end)] for window in self._layout.windows})
        self.drop(lambda each: each.offset > end)

    def give_up(self, *, only_dear: bool = False) -> bool:
        """Give up what is missed least: tokens that no checkpoint needs, then an interval checkpoint; False: none.

        Args:
            only_dear: no checkpoint that is worth its bytes.
        """
        if not self._has_spare:
            gap, victim = _least_covering(self.start, self.checkpoints, self._last_to_fit())
            if victim is None:
                return False
            if only_dear and not is_dear(gap * self._layout.token_bytes, self.bytes_at(victim.offset)):
                return False
            self.drop(lambda each: each is victim)
        self.trim()
        return True

    def trim(self) -> None:
        """Give up the tokens that no checkpoint needs."""
        self._has_spare = False
        self._keep(
            {
                window: union(sorted(needed for each in self.checkpoints for needed in window.needs(each.offset)))
                for window in self._layout.windows
            }
        )

    def clear(self) -> None:
        """Nothing is kept any more."""
        self.checkpoints, self.windows, self.pending = [], [], None
        self._book()

    def _last_to_fit(self) -> Checkpoint | None:
        """Where a path is to be cut that the budget has no room for: the last checkpoint up to which it has room."""

        def fits(offset: int, checkpoint: Checkpoint) -> bool:
            point_bytes = self.bytes_at(checkpoint.offset)
            return offset * self._layout.token_bytes + 2 * point_bytes <= self._booking.budget_bytes  # it is live, too

        if not self.checkpoints or fits(self.prompt_tokens, self.checkpoints[-1]):
            return None
        return next((each for each in reversed(self.checkpoints) if fits(each.offset, each)), None)

    def _keep(self, kept: Mapping[Window, Sequence[Range]]) -> None:
        for index, spans in enumerate(self.windows):
            if any(missing(self._layout.stored(spans, window), its) for window, its in kept.items()):
                self.windows[index] = self._layout.within(spans, kept)[0]
        self.windows = [each for each in self.windows if each.nbytes]
        self._book()

    def _book(self) -> None:
        nbytes = self.nbytes
        self._booking.book_checkpoint(nbytes - self._booked_bytes)
        self._booked_bytes = nbytes


def _least_covering(
    start: int, checkpoints: list[Checkpoint], spared: Checkpoint | None
) -> tuple[int, Checkpoint | None]:
    """The interval checkpoint whose neighbours are closest together, and how close; never the newest or `spared`."""
    offsets = [start, *(c.offset for c in checkpoints)]
    given = ((i, c) for i, c in enumerate(checkpoints[:-1]) if c.kind == "interval" and c is not spared)
    gaps = [(offsets[i + 2] - offsets[i], i) for i, _ in given]
    gap, index = min(gaps, default=(0, -1))
    return gap, checkpoints[index] if gaps else None
