"""Where no bar can be drawn, a line now and then says how far it is."""

from __future__ import annotations

import sys

import pytest

from runner import text
from runner.text import FIRST_AFTER_S, INTERVAL_S, ProgressLines


def test_lines_are_rare_or_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = [100.0]
    monkeypatch.setattr(text.time, "monotonic", lambda: now_s[0])
    lines = ProgressLines()
    for passed_s in (0, FIRST_AFTER_S / 2, FIRST_AFTER_S, FIRST_AFTER_S + 1, FIRST_AFTER_S + INTERVAL_S):
        now_s[0] = 100.0 + passed_s
        lines.tell(lambda at=passed_s: f"at {at:g} s")  # type: ignore[misc]
    assert capsys.readouterr().err == f"at {FIRST_AFTER_S:g} s\nat {FIRST_AFTER_S + INTERVAL_S:g} s\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    ProgressLines().tell(lambda: pytest.fail("a bar is drawn there"))
    lines = ProgressLines(has_bar=False)
    now_s[0] += FIRST_AFTER_S
    lines.tell(lambda: "no bar is drawn here")
    assert capsys.readouterr().err == "no bar is drawn here\n"
