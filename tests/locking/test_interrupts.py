"""uninterrupted: a real Ctrl-C, sent to this process in the middle of a block, arrives when the block is through."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from radixcache.ledger import uninterrupted


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler while a test runs, and whatever was there before afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    """Send SIGINT and give Python the chance to run the handler, which it does between two instructions."""
    os.kill(os.getpid(), signal.SIGINT)
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        pass


def test_an_interrupt_arrives_when_the_block_is_through() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            done.append("first half")
            press_ctrl_c()
            done.append("second half")
        done.append("after the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first half", "second half"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_many_interrupts_in_a_block_become_one() -> None:
    arrived = _listen()
    with uninterrupted():
        with uninterrupted():
            for _ in range(3):
                press_ctrl_c()
        assert arrived() == 0
    assert arrived() == 1


def test_the_handler_that_was_installed_before_gets_the_signal_and_the_frame() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame is not None)))
    with uninterrupted():
        press_ctrl_c()
    assert seen == [(signal.SIGINT, True)]


def test_an_interrupt_beside_an_error_arrives_and_the_error_is_its_context() -> None:
    def work() -> None:
        with uninterrupted():
            press_ctrl_c()
            raise ValueError("the error of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_to_stop_wait_as_well_where_somebody_listens(number: signal.Signals) -> None:
    seen = []
    before = signal.signal(number, lambda caught, _: seen.append(caught))
    try:
        with uninterrupted():
            os.kill(os.getpid(), number)
            in_the_block = list(seen)
        assert in_the_block == []
        assert seen == [number]
        with uninterrupted():
            assert signal.getsignal(number) is not before
    finally:
        signal.signal(number, before)
    with uninterrupted():
        assert signal.getsignal(number) == before, "nobody listens in Python: it ends the process, as it would"


def test_the_first_of_two_signals_is_delivered_and_both_handlers_are_back() -> None:
    def ended(*_: object) -> None:
        raise SystemExit(143)

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            press_ctrl_c()

    before = signal.signal(signal.SIGTERM, ended)
    try:
        with pytest.raises(SystemExit):
            work()
        assert signal.getsignal(signal.SIGTERM) is ended
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_may_use_a_block_and_leaves_the_signal_alone() -> None:
    arrived = _listen()
    handler = signal.getsignal(signal.SIGINT)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with uninterrupted():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    press_ctrl_c()
    assert arrived() == 1
    assert signal.getsignal(signal.SIGINT) is handler
    leave.set()
    thread.join()


def _listen() -> Callable[[], int]:
    """Count interrupts instead of raising."""
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    return lambda: len(seen)
