"""Events: told in order when the lock is free, to a listener that may call back, raise, or be slow; bounded."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from radixcache.ledger import Lock
from radixcache.tree.history import MAX_WAITING, Event, EventKind, Events


def emit(events: Events, *starts: int) -> None:
    """What one call of the cache causes."""
    with events._lock:
        for start in starts:
            events.emit(EventKind.STORED, "", start, 0, 0, {})


def offsets(events: list[Event]) -> list[int]:
    return [event.start for event in events]


def test_a_listener_runs_without_the_lock() -> None:
    lock, reached = Lock(), []

    def listen(_: Event) -> None:
        def take() -> None:
            with lock:
                reached.append(True)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()

    events = Events(listen, lock)
    with lock:
        events.emit(EventKind.STORED, "", 0, 1, 0, {})
    assert reached == [True]
    assert events.failures == 0


def test_what_a_listener_causes_follows_in_its_turn() -> None:
    lock, told = Lock(), []

    def listen(event: Event) -> None:
        if event.start < 10:
            with lock:
                events.emit(EventKind.STORED, "", event.start + 10, 0, 0, {})
            assert event.start + 10 not in offsets(told), "told before the listener was through"
        told.append(event)

    events = Events(listen, lock)
    emit(events, 0, 1, 2)
    assert offsets(told) == [0, 1, 2, 10, 11, 12]
    assert events.failures == 0


def test_more_events_than_may_wait_are_counted_as_dropped() -> None:
    lock, told = Lock(), []
    events = Events(told.append, lock)
    with lock:
        for start in range(MAX_WAITING + 3):
            events.emit(EventKind.STORED, "", start, 0, 0, {})
        assert len(lock.afterwards) == 1
    assert offsets(told) == list(range(MAX_WAITING))
    assert events.dropped == 3


def test_what_a_listener_raises_is_counted_and_warned_of_once() -> None:
    lock = Lock()

    def listen(_: Event) -> None:
        raise LookupError("no such metric")

    events = Events(listen, lock)

    with pytest.warns(RuntimeWarning, match=r"on_event raised LookupError\('no such metric'\) for stored") as caught:
        emit(events, 0, 1)
    assert events.failures == 2
    assert len(caught) == 1
    events = Events(listen, lock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emit(events, 0)  # a warning that is an error does not reach the caller either
    assert events.failures == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_listener_passes_and_the_rest_is_told_later(kind: type[BaseException]) -> None:
    lock, told = Lock(), []

    def listen(event: Event) -> None:
        told.append(event)
        if event.start == 0:
            raise kind

    events = Events(listen, lock)
    with pytest.raises(kind):
        emit(events, 0, 1)
    assert offsets(told) == [0]
    emit(events, 2)
    assert offsets(told) == [0, 1, 2]


def test_without_a_listener_no_event_is_made(monkeypatch: Any) -> None:
    monkeypatch.setattr("radixcache.tree.history.Event", None)
    events = Events()
    events.emit(EventKind.STORED, "", 0, 1, 0, {})
    assert not events.is_on


def test_a_listener_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="on_event is a list; wanted a callable"):
        Events([])  # type: ignore[arg-type]
