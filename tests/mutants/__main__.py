"""Break the code in one place after the other and run the tests: `python -m tests.mutants`, `make mutants`.

Each mutant runs in its own copy of the checkout. Three runs of tests try to catch it, until one does: the test that
`caught.json` names, the test files that the mutant and `caught.json` name, and the whole fast suite. A mutant that runs
into a time limit is caught, too, but `--record` writes down tests only. At the end, the tests that caught a mutant run
without any mutant. A test that fails there is left out, and its mutants run again.

stdout has the table, stderr the progress. Exit 0: all mutants were caught. Exit 1: some survived, or do not fit the
code.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tests.mutants.mutants import Code, Mutant, read_mutants

ROOT = Path(__file__).resolve().parents[2]
#: Which test caught each mutant last, by the mutant's name.
CAUGHT = Path(__file__).with_name("caught.json")
#: Time limits of a test, and of a test process for some files and for the whole suite.
TEST_SECONDS, FIRST_SECONDS, SUITE_SECONDS = 120, 600, 2400
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
#: The test of the list fails wherever a mutant is in place.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
PYTEST += ["--hypothesis-profile=mutants", f"--timeout={TEST_SECONDS}", "--ignore-glob=*/mutants/test_list.py"]
#: Exit status of pytest for a test that is gone, and for no tests at all.
TEST_IS_GONE = (4, 5)
FAILED = r"^(?:FAILED|ERROR) (\S+::.+?|\S+)(?: - .*)?$"
#: Mutants that run at a time, unless `--jobs` says otherwise.
JOBS = min(2, os.cpu_count() or 1)
IN_PARALLEL = ["-n", "auto", "--maxprocesses=4", "--dist", "worksteal"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to a mutant.

    Attributes:
        caught_by: the id of the first test that failed, or the time limit that ran out; None: the mutant survived.
    """

    name: str
    breaks: str
    caught_by: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """A mutant to try, and the text of the file that it changes, below the root."""

    mutant: Mutant
    path: Path
    text: str


def run(attempt: Attempt, recorded: Mapping[str, str], only_first: bool, left_out: Sequence[str] = ()) -> Outcome:
    """Put a mutant into a copy of the checkout and find a test that fails, except for those that are left out."""
    started, mutant = time.monotonic(), attempt.mutant
    deselected = [f"--deselect={test}" for test in left_out]
    likely, _, rest = recorded.get(mutant.name, "").partition("::")
    with checkout() as copy:
        (copy / attempt.path).write_text(attempt.text)
        caught_by = None
        if rest and (paths := _paths([likely])):
            caught_by = _first_failure(copy, [f"{paths[0]}::{rest}", *deselected], FIRST_SECONDS, TEST_IS_GONE)
        if caught_by is None and (files := _paths([*mutant.first, *([likely] if rest else [])])):
            caught_by = _first_failure(copy, [*files, *deselected], FIRST_SECONDS)
        if caught_by is None and not only_first:
            caught_by = _first_failure(copy, [*IN_PARALLEL, *deselected], SUITE_SECONDS)
    return Outcome(mutant.name, mutant.breaks, caught_by, round(time.monotonic() - started, 1))


def failing_without(code: Code, tests: Sequence[str]) -> list[str]:
    """Return which of these tests fail without any mutant, in files that are rewritten as with one."""
    if not tests:
        return []
    with checkout() as copy:
        for path, text in code.texts().items():
            (copy / path).write_text(text)
        status, output = _pytest(copy, [*IN_PARALLEL, *tests], SUITE_SECONDS)
    if status not in (0, 1):  # pytest runs nothing if it does not find one of the tests
        raise RuntimeError(f"pytest ended with {status} without any mutant:\n{output[-4000:]}")
    return re.findall(FAILED, output, re.MULTILINE)


@contextmanager
def checkout() -> Iterator[Path]:
    """A copy of the checkout, beside the same shared data."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve() / ROOT.name
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        shared = ROOT.parent / "shared"
        if shared.is_dir():
            (copy.parent / "shared").symlink_to(shared)
        yield copy


def _paths(files: Sequence[str]) -> list[str]:
    """Return the test files that have the names of these, wherever they are below tests/."""
    found = [path for each in files for path in sorted((ROOT / "tests").rglob(Path(each).name))]
    exact = [ROOT / each for each in files if (ROOT / each).is_file()]
    return list(dict.fromkeys(str(path.relative_to(ROOT)) for path in [*exact, *found]))


def _first_failure(copy: Path, arguments: Sequence[str], limit_s: float, passes: Sequence[int] = ()) -> str | None:
    """Run tests in a copy until one fails. Return its id, or the time limit that ran out; None: all passed.

    Args:
        passes: other exit statuses of pytest that count as passed.
    """
    code, output = _pytest(copy, ["-x", *arguments], limit_s)
    if code == 0 or code in passes:
        return None
    if code is None:
        return f"the limit of {limit_s:,.0f} s"
    failed = re.search(FAILED, output, re.MULTILINE)
    if failed is not None:
        return failed[1]
    if "+ Timeout +" in output:
        return "the time limit of a test"
    raise RuntimeError(f"pytest ended with {code}, and no test failed:\n{output[-4000:]}")


def _pytest(copy: Path, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest in a copy; returns its exit status (None: it ran into the limit) and what it wrote."""
    process = subprocess.Popen(
        [*PYTEST, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, output
    return process.returncode, output


def _attempt(code: Code, mutant: Mutant) -> Attempt:
    with code.broken(mutant) as (path, tree):
        return Attempt(mutant, path, ast.unparse(tree))


def _recorded() -> dict[str, str]:
    return json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}


def _record(outcome: Outcome, names: Sequence[str]) -> None:
    """Write down which test caught a mutant; the record has the order of the list, and no names that are gone."""
    found = {**_recorded(), outcome.name: outcome.caught_by or ""}
    CAUGHT.write_text(json.dumps({name: found[name] for name in names if "::" in found.get(name, "")}, indent=2) + "\n")


def _print(outcomes: Sequence[Outcome]) -> None:
    names = max(len(each.name) for each in outcomes)
    tests = max(len(each.caught_by or "SURVIVED") for each in outcomes)
    print(f"{'mutant':{names}}  {'caught by':{tests}}  {'s':>6}  what it breaks")
    for each in outcomes:
        print(f"{each.name:{names}}  {each.caught_by or 'SURVIVED':{tests}}  {each.seconds:6.1f}  {each.breaks}")
    survived = sum(each.caught_by is None for each in outcomes)
    seconds = sum(each.seconds for each in outcomes)
    print(f"{len(outcomes)} mutants, {len(outcomes) - survived} caught, {survived} survived; {seconds:,.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Break the code, run the tests.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants only")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"mutants at a time ({JOBS})")
    parser.add_argument("--only-first", action="store_true", help="do not run the whole suite for a mutant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    parser.add_argument("--record", action="store_true", help=f"write what caught each mutant into {CAUGHT.name}")
    options = parser.parse_args()
    code, known = Code(ROOT), {mutant.name: mutant for mutant in read_mutants()}
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"no mutants are named {', '.join(sorted(unknown))}")
    wanted, misfits = [], []
    for name in options.only or known:
        try:
            wanted.append(_attempt(code, known[name]))
        except LookupError as error:
            misfits.append(str(error))
    if misfits:
        print(*misfits, sep="\n", file=sys.stderr)
        return 1
    outcomes: dict[str, Outcome] = {}
    left_out: list[str] = []
    while wanted:
        one = partial(run, recorded=_recorded(), only_first=options.only_first, left_out=left_out)
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            for outcome in pool.map(one, wanted):
                outcomes[outcome.name] = outcome
                found = f"{outcome.caught_by or 'SURVIVED'} ({outcome.seconds:.0f} s)"
                print(f"{len(outcomes)}: {outcome.name}: {found}", file=sys.stderr, flush=True)
                if options.record:
                    _record(outcome, list(known))
        caught = {outcomes[each.mutant.name].caught_by for each in wanted}
        broken = failing_without(code, sorted(test for test in caught if test is not None and "::" in test))
        if stuck := set(broken) & set(left_out):
            print(f"fails without any mutant and cannot be left out: {', '.join(sorted(stuck))}", file=sys.stderr)
            return 1
        for test in broken:
            print(f"fails without any mutant, left out: {test}", file=sys.stderr, flush=True)
        left_out += broken
        wanted = [each for each in wanted if outcomes[each.mutant.name].caught_by in broken]
    _print(list(outcomes.values()))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes.values()], indent=2) + "\n")
    return int(any(each.caught_by is None for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
