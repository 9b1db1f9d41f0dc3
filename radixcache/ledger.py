"""Ledger: the bytes that caches hold, by purpose. Only this file changes a total. Never imports MLX.

Each PrefixCache has an Account. Accounts on one Ledger share a budget and a lock: bytes for one cache may be
freed in another. An account splits its bytes by purpose:

    live         buffers of the live caches and of groups' rows, spare capacity included
    spans        snapshot arrays of span layers (paged)
    checkpoints  snapshot arrays of point layers (paged)
    second       the state of a cold run that verifies a request, while the cold run lasts

Invariants, asserted by `check`:

  L1  No amount is negative.
  L2  An account's total_bytes is its live + spans + checkpoints + second; the ledger's is the sum over the accounts.

Lock: a reentrant lock. One thread at a time works on a cache, and Ctrl-C does not interrupt it halfway.

A finalizer may run in the middle of an operation, in the thread that has the lock. The reentrant lock would let it in,
so `when_free` defers it. A user's callback may wait for another thread, so it runs in `afterwards`, without the lock.
Every decode step has `uninterrupted` blocks, so these must be fast. They use `_signal`, because `signal` converts its
results to enumerations, which takes several times as long as the rest.

Invariants:

  U1  Deferred work runs under the lock, after every operation that began before it.
  U2  Work in `afterwards` runs in the thread that had the lock, once that thread has released it.
  U3  A signal that comes while the main thread waits for the lock or has it is delivered after the work of U2.
  U4  Entering a lock that was used before a fork raises RuntimeError in the child: the lock may be held forever there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from radixcache.settings import require_count

#: Signals that ask a process to stop, as far as the system has them.
STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

#: Whether the main thread is inside an `uninterrupted` block.
_is_inside = False
#: How many forks lie between the process that imported this module and this process.
_forks = 0
FORKED = (
    "this process was forked after the cache was used, and neither MLX nor threads survive a fork. Make a PrefixCache "
    "in each process, or start processes with spawn."
)


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class uninterrupted:  # noqa: N801  used like a function
    """In the main thread, hold signals back until the block ends; then call the handler of the first one."""

    __slots__ = ("_caught", "_previous")

    def __init__(self) -> None:
        self._caught: list[tuple[Any, ...]] = []
        self._previous: dict[int, Callable[..., object]] = {}

    def __enter__(self) -> None:
        global _is_inside
        if _is_inside or threading.current_thread() is not threading.main_thread():
            return  # An outer block holds signals back already, or this thread gets none.
        try:
            for number in STOPS:
                previous = _signal.getsignal(number)
                if callable(previous):  # Else no Python handler is installed.
                    self._previous[number], _is_inside = previous, True
                    _signal.signal(number, lambda *caught: self._caught.append(caught))
        except BaseException:  # A signal came that was not held back yet.
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _is_inside
        if not self._previous:
            return
        caught = [(self._previous[each[0]], each) for each in self._caught[:1]]
        _is_inside = False
        self._restore()
        for handler, arguments in caught:
            handler(*arguments)

    def _restore(self) -> None:
        try:
            while self._previous:
                _signal.signal(*self._previous.popitem())
        finally:
            if self._previous:  # A signal came, and its own handler was installed again.
                self._restore()


class Lock:
    """A reentrant lock, used as a context manager.

    Attributes:
        afterwards: what to do once the lock is released; only the thread that has the lock adds to it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = self._owner = 0
        self._forks: int | None = None  # None: it was never entered
        self._block = uninterrupted()
        self._waiting: list[Callable[[], object]] = []
        self.afterwards: list[Callable[[], object]] = []

    @property
    def is_foreign(self) -> bool:
        """Whether the lock was used before this process was forked."""
        return self._forks is not None and self._forks != _forks

    def __enter__(self) -> Lock:
        if self._forks != _forks:
            if self._forks is not None:
                raise RuntimeError(FORKED)
            self._forks = _forks
        if self._owner == threading.get_ident():
            self._depth += 1
            return self
        block = uninterrupted()
        block.__enter__()
        try:
            self._lock.acquire()
        except BaseException:
            block.__exit__()
            raise
        self._block, self._depth, self._owner = block, 1, threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        block = self._block
        try:
            try:
                while self._waiting:
                    self._waiting.pop(0)()
            finally:
                after, self.afterwards = self.afterwards, []
                self._depth = self._owner = 0
                self._lock.release()
                if after:
                    _run_all(after)
        finally:
            block.__exit__()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock inside this block, for long work, unless an outer operation of this thread needs it.

        Meanwhile other threads may change what the lock guards. Signals, deferred work and `afterwards` wait as if the
        lock were held.
        """
        assert self._owner == threading.get_ident(), "only the thread that has the lock can give it up"
        if self._depth > 1:
            yield
            return
        block, waiting, after = self._block, self._waiting, self.afterwards
        self._waiting, self.afterwards = [], []
        self._depth = self._owner = 0
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._block, self._depth, self._owner = block, 1, threading.get_ident()
            self._waiting, self.afterwards = waiting, after

    def when_free(self, action: Callable[[], object]) -> None:
        """Call `action` now or, if this thread has the lock, when the lock is released."""
        if self._owner == threading.get_ident():
            self._waiting.append(action)
        else:
            action()


def _run_all(actions: list[Callable[[], object]]) -> None:
    """Run all actions, even after one raises an Exception, and then raise. An interrupt stops at once."""
    for number, action in enumerate(actions, start=1):
        try:
            action()
        except Exception:
            _run_all(actions[number:])
            raise


Reclaim = Callable[[int], int]


@dataclass(slots=True, eq=False)
class Account:
    """The bytes of one PrefixCache; `reclaim(nbytes)` asks its owner to free bytes and returns how many it freed."""

    ledger: Ledger = field(repr=False)
    reclaim: Reclaim = field(repr=False)
    live_bytes: int = 0
    span_bytes: int = 0
    checkpoint_bytes: int = 0
    #: Checkpoints that requests have taken and the tree does not have yet; part of `checkpoint_bytes`.
    booked_checkpoint_bytes: int = field(default=0, repr=False)
    #: What the owner's pins held when the pins last changed; part of the amounts above.
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
        """Remove an account that holds nothing. Bytes that a running call still books there count nowhere."""
        assert account.total_bytes == 0, account
        self._accounts.remove(account)
        account.ledger = Ledger(self.budget_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the pins of all accounts hold."""
        return sum(account.pinned_bytes for account in self._accounts)

    @property
    def held_bytes(self) -> int:
        """Bytes that eviction cannot free. Idle live buffers count too, though eviction can free these."""
        nbytes = 0
        for each in self._accounts:
            nbytes += each.live_bytes + each.second_bytes + each.booked_checkpoint_bytes + each.pinned_bytes
        return nbytes

    def over_bytes(self, need_bytes: int = 0) -> int:
        """Bytes to free before `need_bytes` more fit the budget; 0 if they fit."""
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
    """The bytes outside the tree that one live path or one group has on an account, by purpose."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.live_bytes = self.checkpoint_bytes = self.second_bytes = 0
        self._is_over = False

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
        """Give back everything except the live buffers."""
        if self.checkpoint_bytes or self.second_bytes:
            self.book_checkpoint(-self.checkpoint_bytes)
            self.book_second(0)

    def end(self) -> None:
        """Give back everything; later bookings of live buffers and checkpoints count nothing."""
        self.book_live(0)
        self.end_request()
        self._is_over = True
