"""The list of mutants fits the code as it is: see tests/mutants."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants.mutants import Code, read_mutants

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
