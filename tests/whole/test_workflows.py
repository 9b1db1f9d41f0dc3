"""The workflows run what a developer runs: every step is a make target of .ci/run, or one that .ci/run leaves out."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.architecture import ROOT


@pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="the workflows are not beside these tests")
def test_the_workflows_run_what_ci_runs_and_what_it_leaves_to_them() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    steps = [
        re.sub(r' ARGS=".*"| MLX_LM=.*', "", step).split()
        for text in texts
        for step in re.findall(r"\brun: *(.*)", text)
    ]
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    in_ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1].split()[1:]
    assert {make for make, *_ in steps} == {"make"}
    left = {"package-test", "test-nightly"}
    assert {target for _, *named in steps for target in named} == {*in_ci, *left} <= {*targets}
    assert left.isdisjoint(in_ci)


@pytest.mark.slow
def test_a_nightly_test_is_slow_and_the_make_targets_run_each_test_once() -> None:
    makefile, files = (ROOT / "Makefile").read_text(encoding="utf-8"), ["tests/whole/test_soak.py", __file__]
    chosen = ["not slow", *re.findall(r'-m "?([a-z ]+?)"? \$\(ARGS\)', makefile)]
    assert chosen[1:] == ["slow and not nightly", "nightly"]
    found = [_collected("-m", each, *files) for each in chosen]
    assert sorted(test for each in found for test in each) == _collected("-m", "slow or not slow", *files)
    assert all(found)


def _collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return sorted(line for line in lines if "::" in line)
