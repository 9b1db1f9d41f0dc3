"""Ledger: the bytes that caches hold, by purpose. Only this file changes a total. Never imports MLX.

Each PrefixCache has an Account. Accounts on one Ledger share a budget and a lock: a byte freed for one cache may come
out of another. An account splits its bytes by purpose:

    live         buffers of the live caches and of groups' rows, spare capacity included
    spans        snapshot arrays of span layers (paged)
    checkpoints  snapshot arrays of point layers (paged)
    second       the state of a cold run that verifies a request, while it lasts

Invariants, asserted by `check`:

  L1  No amount is negative.
  L2  An account's total_bytes is its live + spans + checkpoints + second; the ledger's is the sum over the accounts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from radixcache.lock import Lock
from radixcache.settings import require_count

Reclaim = Callable[[int], int]


@dataclass(slots=True, eq=False)
class Account:
    """The bytes of one PrefixCache; `reclaim(nbytes)` asks its owner to free so many and returns how many it freed."""

    ledger: Ledger = field(repr=False)
    reclaim: Reclaim = field(repr=False)
    live_bytes: int = 0
    span_bytes: int = 0
    checkpoint_bytes: int = 0
    #: Checkpoints that requests have taken and the tree does not have yet; part of `checkpoint_bytes`.
    booked_checkpoint_bytes: int = field(default=0, repr=False)
    #: What the owner's pins held when they last changed; part of the above.
    pinned_bytes: int = field(default=0, repr=False)
    second_bytes: int = 0
    #: live + spans + checkpoints + second.
    total_bytes: int = 0

    def add(self, purpose: str, change_bytes: int) -> None:
        """Book a change of live_bytes, span_bytes, checkpoint_bytes or second_bytes."""
        if purpose == "span_bytes":  # These three are by far the most frequent ones.
            self.span_bytes += change_bytes
        elif purpose == "live_bytes":
            self.live_bytes += change_bytes
        elif purpose == "checkpoint_bytes":
            self.checkpoint_bytes += change_bytes
        else:
            setattr(self, purpose, getattr(self, purpose) + change_bytes)
        self.total_bytes += change_bytes
        ledger = self.ledger
        ledger.total_bytes += change_bytes
        if ledger.total_bytes > ledger.peak_bytes:
            ledger.peak_bytes = ledger.total_bytes


class Ledger:
    """A byte budget and the accounts that share it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = require_count("budget_bytes", budget_bytes, "bytes")
        self.total_bytes = self.peak_bytes = 0
        self.lock = Lock()
        self._accounts: list[Account] = []

    def open_account(self, reclaim: Reclaim) -> Account:
        """Add an account. If its owner needs bytes, `reclaim` of the other accounts is called."""
        account = Account(self, reclaim)
        self._accounts.append(account)
        return account

    def close_account(self, account: Account) -> None:
        """Remove an account that holds nothing. What a call that was under way still books counts nowhere."""
        assert account.total_bytes == 0, account
        self._accounts.remove(account)
        account.ledger = Ledger(self.budget_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the pins of all accounts hold."""
        return sum(account.pinned_bytes for account in self._accounts)

    @property
    def held_bytes(self) -> int:
        """Bytes that eviction cannot free, or a little more: idle live buffers, which it can, are among them."""
        nbytes = 0
        for each in self._accounts:
            nbytes += each.live_bytes + each.second_bytes + each.booked_checkpoint_bytes + each.pinned_bytes
        return nbytes

    def over_bytes(self, need_bytes: int = 0) -> int:
        """Bytes that must go before `need_bytes` more fit the budget; 0 when they fit."""
        return max(0, self.total_bytes + need_bytes - self.budget_bytes)

    def reclaim_elsewhere(self, account: Account, amount_bytes: int) -> None:
        """Reclaim from the other accounts, in the order they were opened, until `amount_bytes` are freed."""
        for other in self._accounts:
            if amount_bytes <= 0:
                return
            if other is not account:
                amount_bytes -= other.reclaim(amount_bytes)

    def is_sole(self, account: Account) -> bool:
        """Whether no other account shares the budget."""
        return self._accounts == [account]

    def check(self) -> None:
        """Assert L1 and L2."""
        for account in self._accounts:
            amounts = (account.live_bytes, account.span_bytes, account.checkpoint_bytes, account.second_bytes)
            assert min(amounts) >= 0 and account.total_bytes == sum(amounts), account
        assert self.total_bytes == sum(a.total_bytes for a in self._accounts), self.total_bytes


class Booking:
    """The bytes that one live path or one group has on an account beside the tree, by purpose."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.live_bytes = self.checkpoint_bytes = self.second_bytes = 0
        self._is_over = False

    @property
    def budget_bytes(self) -> int:
        return self._account.ledger.budget_bytes

    @property
    def amounts(self) -> tuple[int, int, int]:
        return self.live_bytes, self.checkpoint_bytes, self.second_bytes

    def book_live(self, nbytes: int) -> None:
        nbytes = 0 if self._is_over else nbytes
        if nbytes != self.live_bytes:
            self._account.add("live_bytes", nbytes - self.live_bytes)
            self.live_bytes = nbytes

    def book_checkpoint(self, change_bytes: int) -> None:
        if change_bytes and not self._is_over:
            self.checkpoint_bytes += change_bytes
            self._account.booked_checkpoint_bytes += change_bytes
            self._account.add("checkpoint_bytes", change_bytes)

    def book_second(self, nbytes: int) -> None:
        if nbytes != self.second_bytes:
            self._account.add("second_bytes", nbytes - self.second_bytes)
            self.second_bytes = nbytes

    def end_request(self) -> None:
        """Give back everything but the buffers."""
        if self.checkpoint_bytes or self.second_bytes:
            self.book_checkpoint(-self.checkpoint_bytes)
            self.book_second(0)

    def end(self) -> None:
        """Give back everything; later bookings count nothing."""
        self.book_live(0)
        self.end_request()
        self._is_over = True
