"""Booking: what one live path, or one group of rows, has on the account beside the tree."""

from __future__ import annotations

from typing import Protocol

from radixcache.tokens.keys import Keys
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
