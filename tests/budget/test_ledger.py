"""Ledger: one budget, the accounts that share it, and the only code that changes a total."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from radixcache import Ledger


def no_reclaim(amount_bytes: int) -> int:
    raise AssertionError(f"nobody should be asked for {amount_bytes} bytes here")


class Owner:
    """Holds span bytes and gives them back when asked, at most `gives` of them."""

    def __init__(self, ledger: Ledger, held: int, gives: int | None = None) -> None:
        self.asked: list[int] = []
        self.gives = held if gives is None else gives
        self.account = ledger.open_account(self.reclaim)
        self.account.add("span_bytes", held)

    def reclaim(self, amount_bytes: int) -> int:
        self.asked.append(amount_bytes)
        given = min(amount_bytes, self.gives)
        self.account.add("span_bytes", -given)
        return given


@pytest.mark.parametrize("budget_bytes", [0, -1, 1.5, "1", None, True, float("inf")])
def test_a_budget_that_is_not_a_positive_whole_number_is_refused(budget_bytes: Any) -> None:
    with pytest.raises(ValueError, match=r"^budget_bytes is .*; wanted a whole number of bytes, 1 or more\.$"):
        Ledger(budget_bytes)


def test_the_peak_is_the_most_that_was_ever_held_at_once() -> None:
    ledger = Ledger(1000)
    first, second = ledger.open_account(no_reclaim), ledger.open_account(no_reclaim)
    first.add("span_bytes", 300)
    first.add("span_bytes", -300)
    second.add("live_bytes", 200)
    assert ledger.peak_bytes == 300
    first.add("checkpoint_bytes", 150)
    assert ledger.peak_bytes == 350
    second.add("live_bytes", -200)
    assert (ledger.peak_bytes, ledger.total_bytes) == (350, 150)


def test_over_bytes_says_what_must_go_before_more_fits() -> None:
    ledger = Ledger(100)
    account = ledger.open_account(no_reclaim)
    account.add("span_bytes", 90)
    assert ledger.over_bytes() == 0
    assert ledger.over_bytes(10) == 0
    assert ledger.over_bytes(11) == 1
    account.add("span_bytes", 30)
    assert ledger.over_bytes() == 20
    assert ledger.over_bytes(5) == 25


def test_the_others_are_asked_in_the_order_they_came_until_enough_came_back() -> None:
    ledger = Ledger(100)
    owners = [Owner(ledger, held) for held in (10, 20, 30, 40)]
    ledger.reclaim_elsewhere(owners[1].account, 35)
    assert [owner.asked for owner in owners] == [[35], [], [25], []]
    assert ledger.total_bytes == 65
    ledger.check()


def test_nobody_is_asked_for_nothing_and_the_asker_never() -> None:
    ledger = Ledger(100)
    owners = [Owner(ledger, 10), Owner(ledger, 10)]
    for nothing in (0, -5):
        ledger.reclaim_elsewhere(owners[0].account, nothing)
    assert [owner.asked for owner in owners] == [[], []]
    ledger.reclaim_elsewhere(owners[0].account, 1000)
    assert [owner.asked for owner in owners] == [[], [1000]]


def test_an_account_is_sole_until_another_is_opened() -> None:
    ledger = Ledger(100)
    account = ledger.open_account(no_reclaim)
    assert ledger.is_sole(account)
    ledger.open_account(no_reclaim)
    assert not ledger.is_sole(account)


@pytest.mark.parametrize("purpose", ["live_bytes", "span_bytes", "checkpoint_bytes"])
def test_check_notices_a_negative_amount(purpose: str) -> None:
    ledger = Ledger(100)
    account = ledger.open_account(no_reclaim)
    account.add("live_bytes", 50)
    setattr(account, purpose, -1)
    ledger.total_bytes = account.total_bytes
    with pytest.raises(AssertionError):
        ledger.check()


def test_check_notices_a_total_that_is_not_the_sum() -> None:
    ledger = Ledger(100)
    account = ledger.open_account(no_reclaim)
    account.add("span_bytes", 10)
    ledger.check()
    account.span_bytes += 1
    with pytest.raises(AssertionError, match="10"):
        ledger.check()


def test_the_lock_may_be_taken_again_by_its_holder_and_by_no_other_thread() -> None:
    ledger = Ledger(100)
    order = []

    def other_thread() -> None:
        with ledger.lock:
            order.append("other")

    other = threading.Thread(target=other_thread)
    with ledger.lock, ledger.lock:
        other.start()
        other.join(timeout=0.05)
        order.append("holder")
    other.join()
    assert order == ["holder", "other"]


def test_work_that_waits_for_the_lock_runs_at_the_end_of_the_outermost_turn() -> None:
    lock = Ledger(100).lock
    order: list[str] = []
    with lock:
        with lock:
            lock.when_free(lambda: order.append("deferred"))
        order.append("still inside")
    assert order == ["still inside", "deferred"]
    lock.when_free(lambda: order.append("at once"))
    assert order[-1] == "at once"
