"""Breaks the code in one place after the other and has the tests find out: `python -m tests.mutants`, `make mutants`.

Each mutant is put into a copy of the checkout of its own, where its `first` tests run, and then, if none of them fails,
the whole fast suite. A mutant that runs into the time limit is caught as well. In the end the tests that caught one are
run in a copy without any: those that fail there too are left out, and what they caught is tried again.

The table goes to stdout, progress to stderr. Exit 0: all were caught; 1: some survived, or a snippet is not there
exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
#: Which test caught each mutant, by the state of the suite that it was part of.
CAUGHT = Path(__file__).with_name("caught.json")
#: What a test process is given, for `first` and for the whole suite.
FIRST_SECONDS, SUITE_SECONDS = 600, 2400
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
#: The tests of the list itself fail wherever a mutant is in place.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.own_copy"]
PYTEST += ["--ignore-glob=*/mutants/test_list.py"]
FAILED = r"^(?:FAILED|ERROR) (\S+::.+?|\S+)(?: - .*)?$"
IN_PARALLEL = ["-n", "auto", "--maxprocesses=4", "--dist", "worksteal"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        caught_by: the id of the first test that failed, or what else went wrong; None: it survived.
    """

    name: str
    breaks: str
    caught_by: str | None
    seconds: float


def run(mutant: Mutant, only_first: bool, left_out: Sequence[str] = ()) -> Outcome:
    """Put a mutant into a copy of the checkout and see which test fails, of all but those that are left out."""
    started = time.monotonic()
    deselected = [f"--deselect={test}" for test in left_out]
    with checkout() as copy:
        mutant.apply(copy)
        first = _paths(mutant.first)
        caught_by = _first_failure(copy, [*first, *deselected], FIRST_SECONDS) if first else None
        if caught_by is None and not only_first:
            caught_by = _first_failure(copy, [*IN_PARALLEL, *deselected], SUITE_SECONDS)
    return Outcome(mutant.name, mutant.breaks, caught_by, round(time.monotonic() - started, 1))


def failing_without(tests: Sequence[str]) -> list[str]:
    """Which of these tests, given by their ids, fail without any mutant."""
    if not tests:
        return []
    with checkout() as copy:
        _, output = _pytest(copy, [*IN_PARALLEL, *tests], SUITE_SECONDS)
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


def _paths(first: Sequence[str]) -> list[str]:
    """These test files, or those of the same names where they have moved to."""
    found: list[Path] = []
    for each in first:
        moved = sorted((ROOT / "tests").rglob(Path(each).name))
        found += [ROOT / each] if (ROOT / each).exists() else moved
    return list(dict.fromkeys(str(path.relative_to(ROOT)) for path in found))


def _first_failure(copy: Path, arguments: Sequence[str], limit_s: float) -> str | None:
    """Run tests in a copy until one fails; returns its id, or what else went wrong; None: all passed."""
    code, output = _pytest(copy, ["-x", *arguments], limit_s)
    if code == 0:
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


def _misfit(mutant: Mutant) -> str:
    """Why a mutant cannot be put into the code; empty: it can."""
    try:
        mutant.file_in(ROOT)
    except LookupError as error:
        return str(error)
    return ""


def _record(outcome: Outcome, state: str) -> None:
    """Write down what caught a mutant in this state of the suite; all else that was written down stays."""
    known = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}
    found = {**known.get(state, {}), outcome.name: outcome.caught_by}
    known[state] = {mutant.name: found[mutant.name] for mutant in MUTANTS if mutant.name in found}
    CAUGHT.write_text(json.dumps(known, indent=2) + "\n")


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
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (1)")
    parser.add_argument("--only-first", action="store_true", help="leave out the whole suite where `first` passes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    parser.add_argument("--record", metavar="STATE", help=f"write what caught each into {CAUGHT.name} under this name")
    options = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"no mutants are named {', '.join(sorted(unknown))}")
    wanted = [known[name] for name in options.only or known]
    misfits = [message for mutant in wanted if (message := _misfit(mutant))]
    if misfits:
        print(*misfits, sep="\n", file=sys.stderr)
        return 1
    outcomes: dict[str, Outcome] = {}
    left_out: list[str] = []
    while wanted:
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            for outcome in pool.map(partial(run, only_first=options.only_first, left_out=left_out), wanted):
                outcomes[outcome.name] = outcome
                found = f"{outcome.caught_by or 'SURVIVED'} ({outcome.seconds:.0f} s)"
                print(f"{len(outcomes)}: {outcome.name}: {found}", file=sys.stderr, flush=True)
                if options.record is not None:
                    _record(outcome, options.record)
        caught = {outcomes[mutant.name].caught_by for mutant in wanted}
        broken = failing_without(sorted(test for test in caught if test is not None and test.startswith("tests/")))
        if stuck := set(broken) & set(left_out):
            print(f"fails without any mutant and cannot be left out: {', '.join(sorted(stuck))}", file=sys.stderr)
            return 1
        for test in broken:
            print(f"fails without any mutant, left out: {test}", file=sys.stderr, flush=True)
        left_out += broken
        wanted = [mutant for mutant in wanted if outcomes[mutant.name].caught_by in broken]
    _print(list(outcomes.values()))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes.values()], indent=2) + "\n")
    return int(any(each.caught_by is None for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
