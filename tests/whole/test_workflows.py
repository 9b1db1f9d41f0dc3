"""The workflows run what a developer runs: every step is a make target, and .ci/run runs it too."""

from __future__ import annotations

import re

from tests.architecture import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
STEPS = [
    step
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    for step in re.findall(r"\brun: *(.*)", path.read_text(encoding="utf-8"))
]


def test_every_step_of_a_workflow_is_a_make_target_that_ci_runs() -> None:
    commands = [re.sub(r' ARGS=".*"', "", step).split() for step in STEPS]
    assert {make for make, *_ in commands} == {"make"}
    ran = {target for _, *targets in commands for target in targets}
    assert ran <= TARGETS
    assert ran == set((ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1].split()) - {"make"}
