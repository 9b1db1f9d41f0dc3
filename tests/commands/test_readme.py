"""What the README shows of commands is what they print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
#: A command behind a dollar sign, and the indented lines below it.
SHOWN = re.compile(r"^    \$ radixcache (.+)\n((?:    .+\n|\n(?=    ))+)", re.MULTILINE)


@pytest.mark.parametrize(("line", "printed"), SHOWN.findall(README), ids=[line for line, _ in SHOWN.findall(README)])
def test_a_command_prints_what_the_readme_shows(
    line: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    talks = README.partition("as `talks.jsonl`:\n\n")[2].partition("\n\n")[0]
    (tmp_path / "talks.jsonl").write_text(talks, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code, out, _ = command(*line.split())
    assert code == 0
    assert out.split() == printed.split()  # long lines are broken


def test_both_commands_about_prefixes_are_shown() -> None:
    assert {line.split()[0] for line, _ in SHOWN.findall(README)} >= {"tree", "explain"}
