"""The list of mutants fits the code as it is: see tests/mutants."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_breaks_one_place_of_its_package_and_still_compiles(mutant: Mutant) -> None:
    path = mutant.file_in(ROOT)
    assert mutant.new != mutant.old
    compile(path.read_text().replace(mutant.old, mutant.new), str(path), "exec")


def test_no_two_mutants_have_one_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
