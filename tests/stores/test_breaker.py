"""A server that fails is left alone for longer and longer, by a clock of the test's own."""

from __future__ import annotations

from radixcache.stores.redis_calls import MAX_PAUSE_S, Breaker
from tests.stores.redis_server import Clock


def test_one_at_a_time_tries_a_server_and_only_once_its_pause_is_over() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert not breaker.is_open
    assert not breaker.may_try()
    assert breaker.failed()
    assert breaker.is_open
    clock.now_s += 0.9
    assert not breaker.may_try()
    clock.now_s += 0.1
    assert breaker.may_try()
    assert not breaker.may_try()
    breaker.recovered()
    assert not breaker.is_open
    assert not breaker.may_try()


def test_pauses_double_up_to_a_minute_and_begin_anew_once_the_server_was_well_for_as_long() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed()
    pauses = []
    for _ in range(8):
        pauses.append(breaker.pause_s)
        clock.now_s += breaker.pause_s
        assert breaker.may_try()
        breaker.failed()
        assert breaker.is_open
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    for well_s, pause_s in ((MAX_PAUSE_S, MAX_PAUSE_S), (MAX_PAUSE_S + 1, 1.0)):
        clock.now_s += MAX_PAUSE_S
        assert breaker.may_try()
        breaker.recovered()
        clock.now_s += well_s
        assert breaker.failed()
        assert breaker.pause_s == pause_s


def test_several_calls_that_fail_together_are_one_failure() -> None:
    breaker = Breaker(Clock())
    assert [breaker.failed() for _ in range(3)] == [True, False, False]
    assert breaker.pause_s == 1.0
