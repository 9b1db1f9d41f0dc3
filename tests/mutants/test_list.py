"""The list of mutants fits the code as it is: see tests/mutants."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.__main__ import CAUGHT, failing_without
from tests.mutants.mutants import Code, definitions, read_mutants

ROOT = Path(__file__).resolve().parents[2]


def test_each_mutant_has_a_name_of_its_own_and_breaks_one_place() -> None:
    code, mutants, wrong = Code(ROOT), read_mutants(), []
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        try:
            with code.broken(mutant) as (path, tree):
                compile(ast.fix_missing_locations(tree), path, "exec")
        except (LookupError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
        if ast.dump(ast.parse(mutant.old)) == ast.dump(ast.parse(mutant.new)):
            wrong.append(f"{mutant.name}: old and new code are the same.")
        if missing := [name for name in mutant.first if not any((ROOT / "tests").rglob(name))]:
            wrong.append(f"{mutant.name}: no test file {', '.join(missing)}.")
    assert not wrong, "\n".join(wrong)


def test_each_mutant_has_a_recorded_catch_by_a_test_that_exists() -> None:
    caught, names = json.loads(CAUGHT.read_text()), [mutant.name for mutant in read_mutants()]
    wrong = [f"{name}: no catch is recorded." for name in names if name not in caught]
    wrong += [f"{name}: a catch is recorded, but no mutant has this name." for name in caught if name not in names]
    for name, test in caught.items():
        file, _, rest = test.partition("::")
        if rest.partition("::")[0].partition("[")[0] not in defined(ROOT / file):
            wrong.append(f"{name}: no such test: {test}")
    wanted = "Find a catch: python -m tests.mutants --record --only NAME"
    assert not wrong, "\n".join([*wrong, wanted])


@pytest.mark.slow
def test_a_run_without_mutants_that_does_not_find_its_test_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"pytest ended with [45] without any mutant"):
        failing_without(Code(ROOT), ["tests/policies/test_policies.py::test_that_is_not_here"])


@cache
def defined(path: Path) -> frozenset[str]:
    """The names of the functions, classes and constants of a file; none if the file is gone."""
    return frozenset(name for name, _ in definitions(ast.parse(path.read_text()))) if path.is_file() else frozenset()
