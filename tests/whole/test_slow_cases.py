"""What `make test` leaves out is known, and of every file something is left in it: see tests/slow_cases.txt."""

from __future__ import annotations

import json

import pytest

from tests.conftest import CAUGHT, IS_SLOW, SLOW_CASES


def test_each_slow_case_exists_and_its_file_has_tests_that_are_not_slow(pytestconfig: pytest.Config) -> None:
    """Of the files that were collected: all of them, if the whole suite runs."""
    is_slow = pytestconfig.stash[IS_SLOW]
    files = {name.partition("::")[0] for name in is_slow}
    fast = {name.partition("::")[0] for name, slow in is_slow.items() if not slow}
    listed = [line for line in SLOW_CASES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert listed == sorted(set(listed))
    for case in listed:
        if (file := case.partition("::")[0]) in files:
            assert case in is_slow, f"{case} is gone: take it out of {SLOW_CASES.name}"
            assert file in fast, f"{case}: no test of this file is left in make test"


def test_what_catches_a_mutant_is_not_listed() -> None:
    listed = set(SLOW_CASES.read_text(encoding="utf-8").splitlines())
    assert listed.isdisjoint(json.loads(CAUGHT.read_text(encoding="utf-8")).values())
