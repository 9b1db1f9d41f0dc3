"""What `make test` leaves out has other cases in it: see tests/slow_cases.txt."""

from __future__ import annotations

import pytest

from tests.conftest import IS_SLOW, SLOW_CASES


def test_each_slow_case_exists_and_its_test_has_a_case_that_is_not_slow(pytestconfig: pytest.Config) -> None:
    """Of the files that were collected: all of them, if the whole suite runs."""
    is_slow = pytestconfig.stash[IS_SLOW]
    files = {name.partition("::")[0] for name in is_slow}
    fast = {name.partition("[")[0] for name, slow in is_slow.items() if not slow}
    listed = [line for line in SLOW_CASES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert listed == sorted(set(listed))
    for case in listed:
        if case.partition("::")[0] in files:
            assert case in is_slow, f"{case} is gone: take it out of {SLOW_CASES.name}"
            assert case.partition("[")[0] in fast, f"{case}: no case of this test is left in make test"
