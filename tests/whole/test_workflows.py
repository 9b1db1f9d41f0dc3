"""The workflows run what a developer runs: every step is a make target of .ci/run, or package-test."""

from __future__ import annotations

import re

import pytest

from tests.architecture import ROOT


@pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="the workflows are not beside these tests")
def test_every_step_of_a_workflow_is_a_make_target_that_ci_runs() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    steps = [re.sub(r' ARGS=".*"', "", step).split() for text in texts for step in re.findall(r"\brun: *(.*)", text)]
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    in_ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1].split()[1:]
    assert {make for make, *_ in steps} == {"make"}
    assert {target for _, *named in steps for target in named} == {*in_ci, "package-test"} <= {*targets}
